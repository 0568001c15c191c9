"""Types of descriptors, fitting networks and models: one folder each, which ``config.registry``
finds by name.
"""
