"""Descriptors: what an atom sees within the cutoff, in numbers that do not change under
symmetry.
"""
