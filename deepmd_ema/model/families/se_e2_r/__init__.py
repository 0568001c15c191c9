"""The descriptor se_e2_r."""
