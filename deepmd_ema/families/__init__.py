"""Types of descriptors, fitting networks and models: one folder each, which ``deepmd_ema.registry`` finds by name."""
