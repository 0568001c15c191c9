"""Output for people: tables, lcurve.out, val.log, figures, progress bar, log messages,
TensorBoard.
"""
