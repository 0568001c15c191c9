"""The descriptor dpa4 (DPA-4, SeZM)."""
