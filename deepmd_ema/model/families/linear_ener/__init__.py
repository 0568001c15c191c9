"""The model linear_ener."""
