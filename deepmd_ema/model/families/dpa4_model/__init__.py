"""The model of type dpa4: the descriptor dpa4 and the fitting network dpa4_ener."""
