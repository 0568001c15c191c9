"""Readers of data sets, the order of frames, batches, and checks of the data."""
