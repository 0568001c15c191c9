"""The sections of an input: every option with its type, default, check and manual text."""
