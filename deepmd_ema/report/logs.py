"""Where messages go: the terminal (without breaking a bar), a log file, and TensorBoard."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from deepmd_ema.errors import UserError


class _TerminalHandler(logging.Handler):
    """Writes to stderr above a progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        from tqdm import tqdm

        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except (OSError, ValueError):
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Time and message; the level only when it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        text = f"[{self.formatTime(record, '%Y-%m-%d %H:%M:%S')}] {level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def set_up_logging(level: str | int = "INFO", log_file: str | Path | None = None, is_main: bool = True) -> None:
    """Send the messages of this package to stderr, and to ``log_file`` if given; may be called again.

    Args:
        level: name or number of the lowest level shown.
        log_file: appended to.
        is_main: processes other than rank 0 show errors only and write no file.

    Raises:
        UserError: if the file cannot be written.
    """
    logger = logging.getLogger("deepmd_ema")
    for handler in [h for h in logger.handlers if isinstance(h.formatter, _Formatter)]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_TerminalHandler()]
    if log_file is not None and is_main:
        try:
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--log-path {log_file}: cannot be written ({error.strerror}).") from error
    for handler in handlers:
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
    logger.setLevel(level if is_main else logging.ERROR)


def open_board(folder: str | Path, step: int = 0) -> Any:
    """Return a TensorBoard writer for ``folder``; points after ``step`` of an earlier run are hidden.

    Raises:
        UserError: if TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "training.tensorboard: TensorBoard is not installed. Install it with `pip install dp-ema[tensorboard]`, or "
            "set training.tensorboard to false."
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
