"""Text for a terminal: lines that fit its width, and a little color. Files and pipes get lines as they are."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from textwrap import wrap
from typing import TextIO

DEFAULT_WIDTH = 80  # of a terminal that does not know its own: a recording, some containers
_MIN_TEXT = 16  # columns beside the indentation; a narrower terminal gets lines as they are
RED, YELLOW = 31, 33
# what stays together: code in back quotes, a number and %, and a command at the end of a line
_TOGETHER = re.compile(r"`[^`\n]+`|\d %|(?<=: |  )dp-ema [a-z].*$")
_SPACE = "\x1f"  # in place of spaces at which lines must not break
# the time of a line of the log; spaces, and a number of a list or the name of a row of two columns
_START = re.compile(r"(\[\d{4}-\d\d-\d\d [\d:]{8}\] )?( *(?:\d+\. |\S+(?: \S+){0,4} {2,})?)")


def width_of(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream leads to; None if it leads to a file or a pipe."""
    with suppress(OSError, ValueError, AttributeError):
        if not stream.isatty():
            return None
        given = os.environ.get("COLUMNS", "")
        if re.fullmatch(r"[1-9]\d{0,4}", given):
            return int(given)
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
        return DEFAULT_WIDTH
    return None


def fitted(text: str, stream: TextIO) -> str:
    """Return text with lines that fit the terminal of a stream; as it is for a file or a pipe."""
    width = width_of(stream)
    return text if width is None else wrapped(text, width)


def wrapped(text: str, width: int) -> str:
    """Return text whose long lines are continued below the beginning of their text.

    Words, paths and code in back quotes are not broken; rows of tables of several columns stay as they are.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    found = _START.match(line)
    assert found is not None, "it also matches nothing"
    head, start = found[2], found.end()
    indent = len(head) if head.strip() else len(head) + 2  # not the time, which is long
    if re.search(r"\S {2,}\S", line[start:]) or width - max(start, indent) < _MIN_TEXT:
        return [line]
    kept = _TOGETHER.sub(lambda found: found[0].replace(" ", _SPACE), line)
    parts = wrap(
        kept[start:], width, initial_indent=line[:start], subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [part.replace(_SPACE, " ") for part in parts]


def colored(text: str, color: int, stream: TextIO) -> str:
    """Return text in a color, if a stream leads to a terminal that shows colors and NO_COLOR is not set."""
    with suppress(OSError, ValueError, AttributeError):
        if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            return f"\x1b[{color}m{text}\x1b[0m"
    return text
