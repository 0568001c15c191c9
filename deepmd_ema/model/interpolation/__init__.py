"""Interpolated embedding nets: sums over neighbors whose cost does not grow with the size of a net (doc/decisions.md)."""
