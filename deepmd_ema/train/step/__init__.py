"""One training step: what changes the weights."""
