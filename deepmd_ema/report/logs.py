"""Handlers of log messages: the terminal (without breaking a bar) and a log file."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from deepmd_ema.errors import reason_of
from deepmd_ema.files import LOG, refuse_to_lose, writing
from deepmd_ema.terminal import RED, YELLOW, colored, fitted


class _TerminalHandler(logging.Handler):
    """Writes to stderr, above a progress bar if there is one; lines fit the width of a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        from tqdm import tqdm

        text = fitted(self.format(record), sys.stderr)
        if record.levelno >= logging.WARNING:
            level = f"{record.levelname}:"
            text = text.replace(
                level, colored(level, RED if record.levelno >= logging.ERROR else YELLOW, sys.stderr), 1
            )
        with suppress(OSError, ValueError):  # the terminal is gone or full
            tqdm.write(text, file=sys.stderr)


class _FileHandler(logging.FileHandler):
    """Appends to the file of ``--log-path``; if that fails it warns once, and the run continues without the file."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        """Leave the file alone from now on."""
        error = sys.exc_info()[1]
        logger = logging.getLogger("deepmd_ema")
        logger.removeHandler(self)
        with suppress(OSError):  # what it could not write is tried again at the end
            self.close()
        reason = reason_of(error) if error is not None else "no reason given"
        logger.warning(
            "--log-path %s: cannot be written any more (%s): the run continues without it", self.baseFilename, reason
        )


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
        refuse_to_lose(log_file, "--log-path", LOG)
        with writing(f"--log-path {log_file}"):
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_FileHandler(log_file, encoding="utf-8", errors="backslashreplace"))
    for handler in handlers:
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
    logger.setLevel(level if is_main else logging.ERROR)
