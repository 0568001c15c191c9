"""The start of a run: its file, its config, its data and its first weights."""
