"""The descriptor dpa2."""
