"""The descriptor dpa3."""
