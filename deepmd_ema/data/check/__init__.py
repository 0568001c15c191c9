"""Checks of data before training: broken numbers, suspicious frames, a summary."""

from deepmd_ema.data.check.report import MIN_DISTANCE, DataReport, check_systems
from deepmd_ema.data.check.scan import scan_system

__all__ = ["MIN_DISTANCE", "DataReport", "check_systems", "scan_system"]
