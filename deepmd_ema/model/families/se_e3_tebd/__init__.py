"""The descriptor se_e3_tebd."""
