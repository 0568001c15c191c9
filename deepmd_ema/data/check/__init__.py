"""Checks of data before training: broken numbers, suspicious frames, a summary."""

from deepmd_ema.data.check.report import DataReport, check_systems
from deepmd_ema.data.check.scan import scan_system

__all__ = ["DataReport", "check_systems", "scan_system"]
