"""Interpolated embedding nets: sums over neighbors at a cost that does not depend on their size.

The reasons and the limits are in doc/decisions.md.
"""
