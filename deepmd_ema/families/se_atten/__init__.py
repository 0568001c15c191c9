"""The descriptor se_atten."""
