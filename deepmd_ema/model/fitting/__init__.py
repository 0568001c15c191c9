"""Fitting networks: from the features of an atom to its energy."""
