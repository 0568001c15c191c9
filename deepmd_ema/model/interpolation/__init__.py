"""Interpolated embedding nets: sums over neighbors at a cost that does not depend on their size
(doc/decisions.md).
"""
