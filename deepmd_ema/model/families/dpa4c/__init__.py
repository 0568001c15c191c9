"""The descriptor dpa4c (DPA4C)."""
