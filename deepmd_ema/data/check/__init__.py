"""Checks of data before training: broken numbers, suspicious frames, a summary."""
