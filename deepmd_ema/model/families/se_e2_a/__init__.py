"""The descriptor se_e2_a."""
