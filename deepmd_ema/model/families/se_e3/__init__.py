"""The descriptor se_e3."""
