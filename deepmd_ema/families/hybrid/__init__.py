"""The descriptor hybrid."""
