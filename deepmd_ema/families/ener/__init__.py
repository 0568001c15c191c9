"""The fitting network ener."""
