"""Parts of messages, and how text is fitted to a terminal."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from textwrap import wrap
from typing import TextIO


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return ``Did you mean X? Known: A, B.``, the first sentence if one of ``names`` is close."""
    # reversed, so that of names that differ in case only the first counts
    by_lower = {choice.lower(): choice for choice in reversed(names)}
    close = get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    question = f"Did you mean {by_lower[close[0]]}? " if close else ""
    return f"{question}Known: {', '.join(names)}."


def show_text(text: str, most: int = 60) -> str:
    """Return a text of the user in quotes, shortened to about ``most`` characters."""
    return (
        repr(text)
        if len(text) <= most
        else f"{text[:most]!r}... ({len(text):,} characters)"
    )


def command(*arguments: object) -> str:
    """Return the command line that a shell splits into these arguments."""
    return shlex.join(map(str, arguments))


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun: ``1 frame``, ``2,000 frames``.

    Args:
        number: the number.
        thing: the noun.
        things: its plural, if it is not formed by an s.
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def every_steps(number: int) -> str:
    """Return an interval as text: ``every step``, ``every 2,000 steps``."""
    return "every step" if number == 1 else f"every {number:,} steps"


def first_few(names: Sequence[str], most: int = 10) -> str:
    """Return ``names`` separated by commas; after the first ``most``, ``and N more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# columns of a terminal that does not report its own: a recording, some containers
DEFAULT_WIDTH = 80
_MIN_TEXT = (
    16  # columns beside the indentation; a narrower terminal gets lines as they are
)
RED, YELLOW = 31, 33  # colors of ANSI terminals
# text that is not broken: code in back quotes, a number and %, a command at the end of a line
_TOGETHER = re.compile(r"`[^`\n]+`|\d %|(?<=: |  )dp-ema [a-z].*$")
# control characters but tab and the end of a line, and those that change the direction of text
_CONTROL = re.compile(
    r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_CONTROL_BUT_COLORS = re.compile(rf"(?!\x1b\[(?:{RED}|{YELLOW}|0)m){_CONTROL.pattern}")
_SPACE = "\x1f"  # in place of spaces at which lines must not break
# the time of a line of the log; spaces, and a number of a list or the name of a row of two columns
_START = re.compile(
    r"(\[\d{4}-\d\d-\d\d [\d:]{8}\] |\d\d:\d\d:\d\d )?( *(?:\d+\. |\S+(?: \S+){0,4} {2,})?)"
)


def width_of(stream: TextIO) -> int | None:
    """Return the width of the terminal of a stream; None if it leads to a file or a pipe."""
    # a stream may be closed, or an object of a notebook without these methods
    with suppress(OSError, ValueError, AttributeError):
        if not stream.isatty():
            return None
        columns = os.environ.get("COLUMNS", "")
        if re.fullmatch(r"[1-9]\d{0,4}", columns):
            return int(columns)
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

    Words, paths and code in back quotes are not broken; rows of tables of several columns stay as
    they are.
    """
    lines = list[str]()
    for line in text.split("\n"):
        match = _START.match(line)
        assert match is not None, "it also matches nothing"
        head = match[2]
        start = match.end()
        # below the text of a list or a row, two columns further on below a sentence; never below
        # the time, which would leave little of the width
        indent = len(head) if head.strip() else len(head) + 2
        is_table = re.search(r"\S {2,}\S", line[start:]) is not None
        if len(line) <= width or is_table or width - max(start, indent) < _MIN_TEXT:
            lines.append(line)
            continue
        line = _TOGETHER.sub(lambda match: match[0].replace(" ", _SPACE), line)
        parts = wrap(
            line[start:],
            width,
            initial_indent=line[:start],
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [part.replace(_SPACE, " ") for part in parts]
    return "\n".join(lines)


def printable(text: str, stream: TextIO | None = None) -> str:
    """Return text that cannot steer a terminal: control characters are shown as codes.

    Names in files of others may contain them. The colors of this program remain if ``stream`` shows
    them.
    """
    has_colors = stream is not None and colored("", RED, stream)
    control = _CONTROL_BUT_COLORS if has_colors else _CONTROL
    return control.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def colored(text: str, color: int, stream: TextIO) -> str:
    """Return text in a color, if the stream is a terminal with colors and NO_COLOR is not set."""
    with suppress(OSError, ValueError, AttributeError):
        if (
            stream.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        ):
            return f"\x1b[{color}m{text}\x1b[0m"
    return text
