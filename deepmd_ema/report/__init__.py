"""Output for people: tables, lcurve.out, val.log, figures, progress bar, log messages, TensorBoard."""

from deepmd_ema.report.logs import open_board, set_up_logging
from deepmd_ema.report.progress import IntervalTimes, Progress
from deepmd_ema.report.tables import LcurveFile, ValidationLog, show_metric

__all__ = [
    "IntervalTimes",
    "LcurveFile",
    "Progress",
    "ValidationLog",
    "open_board",
    "set_up_logging",
    "show_metric",
]
