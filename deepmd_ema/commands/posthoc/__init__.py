"""Averages of any width, made after training from snapshots of power-profile averages, ranked by
validation error.
"""
