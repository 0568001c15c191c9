"""Descriptors: the surroundings of an atom, in numbers that do not change under symmetry."""
