"""Averages of any width from snapshots of power averages, ranked by validation error."""
