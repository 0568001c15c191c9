"""Training: one direction from assembled parts to checkpoints."""
