"""How a run starts: its file, its config, its data and its first weights."""
