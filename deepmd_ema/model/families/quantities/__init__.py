"""The fitting networks dipole, polar, property and dos."""
