"""Checks of data before training: invalid numbers, suspicious frames, a summary."""
