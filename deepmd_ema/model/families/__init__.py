"""Types of descriptors, fitting networks and models, found by name by ``config.registry``."""
