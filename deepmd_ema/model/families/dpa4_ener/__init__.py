"""The fitting network dpa4_ener."""
