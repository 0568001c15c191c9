"""Kernels: the environment matrix and sums over neighbors, with their derivatives."""
