"""Inference: predictions, errors on labelled frames, the output bias of a model file, and what a
file holds.
"""
