"""Processes of a run: how they were launched, how they meet, exchange tensors and end together."""
