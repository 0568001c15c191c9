"""Safe stdout and stderr: reopened if closed, other characters replaced, failures ignored."""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata
from contextlib import suppress
from typing import TextIO

from deepmd_ema.errors import WriteError
from deepmd_ema.text import RED, colored, fitted, printable


def prepare_streams() -> None:
    """Open streams that the caller has closed, and replace letters that an encoding lacks."""
    # os.open returns the lowest free number: without this a file of the run would get 1 or 2, and
    # printed text would go into it
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    codecs.register_error("dp-ema", _similar)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="dp-ema")


def flush_results() -> None:
    """Write out what was printed.

    Raises:
        WriteError: if standard output takes no more.
        BrokenPipeError: if its reader has left.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(
            "standard output", error, "The results are incomplete."
        ) from error


def settle_streams() -> None:
    """Discard further output to a stream that fails."""
    # Python would flush it at exit, fail, and change the exit code
    _settle(sys.stdout)
    _settle(sys.stderr)


def say(text: str, is_fitted: bool = True) -> None:
    """Print ``text`` to standard output; on a terminal lines fit its width, if this is wanted."""
    text = printable(text, sys.stdout)
    print(fitted(text, sys.stdout) if is_fitted else text)
    flush_results()


def say_error(text: str) -> None:
    """Write ``text`` to standard error, with control characters as codes; failures are ignored.

    On a terminal lines fit its width, and the name of the program at the beginning is red.
    """
    text = fitted(printable(text), sys.stderr)
    if text.startswith("dp-ema"):
        program, *rest = text.split(":", 1)
        text = ":".join([colored(program, RED, sys.stderr), *rest])
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Return plain letters for those that an encoding lacks: A for the angstrom sign."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    plain = [
        unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"
        for letter in text
    ]
    return "".join(plain), error.end


def _settle(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
