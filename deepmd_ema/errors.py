"""Errors whose message is for the user, and how messages are shown on a terminal."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from textwrap import wrap
from typing import TextIO

from deepmd_ema.findings import ERROR, Finding


class UserError(Exception):
    """A mistake that the user can mend; the command line prints it and exits with 2.

    Args:
        problems: one message, or all the messages and findings of one input; each has place, value
            found, value expected and remedy.

    Attributes:
        findings: the problems with their places; a message without one is a finding without a
            place.
    """

    def __init__(self, problems: str | Iterable[str | Finding]) -> None:
        entries = [problems] if isinstance(problems, str) else list(problems)
        self.findings = [
            Finding(ERROR, "", entry) if isinstance(entry, str) else entry for entry in entries
        ]
        self.problems = [str(finding) for finding in self.findings]
        super().__init__("\n".join(self.problems))

    @classmethod
    def raise_if_any(cls, problems: Sequence[str | Finding]) -> None:
        """Raise an error with all of ``problems``, if there are any."""
        if problems:
            raise cls(problems)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the message alone, as on the command line."""
        return f"{type(self).__name__}: {self}".splitlines()


class ConfigError(UserError):
    """The config file is wrong."""


class DataError(UserError):
    """The training or validation data are wrong; the message names the file and the frame."""


class CheckpointError(UserError):
    """A checkpoint or model file is missing, damaged or of another model, or cannot be written."""


class WriteError(UserError):
    """The system refuses to write a file.

    Args:
        path: the file.
        cause: the error of the system.
        advice: remedy beside that of the error itself.
    """

    def __init__(self, path: str, cause: BaseException, advice: str = "") -> None:
        remedy = " ".join(filter(None, (_advice(cause), advice)))
        super().__init__(f"{path}: cannot be written ({reason_of(cause)}). {remedy}".rstrip())


class DivergedError(UserError):
    """The loss or a gradient became non-finite; the message names step, task and frames."""


class Interrupted(UserError):  # noqa: N818 - not an error
    """The run received ``signal_number``, saved its state and stopped."""

    def __init__(self, problem: str, signal_number: int = 2) -> None:
        self.signal_number = signal_number
        super().__init__(problem)


class RankLostError(UserError):
    """Another process of the run has ended; nothing is wrong in this one."""


class NotCompiledError(RuntimeError):
    """torch cannot compile a model, which is a mistake of this program."""


class ReportedElsewhere(Exception):  # noqa: N818 - the error is its cause
    """The run ends with the error that is the ``__cause__``, which another rank reports."""


class Terminated(KeyboardInterrupt):
    """A signal that ends a process arrived outside the training loop, so nothing was saved."""

    def __init__(self, message: str = "", signal_number: int = signal.SIGTERM) -> None:
        self.signal_number = signal_number
        name = signal.Signals(signal_number).name
        super().__init__(
            message or f"stopped by {name} outside the training steps; nothing was saved"
        )


_MAX_PATH_CHARACTERS = 300  # characters of a path in a message
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# remedies by the error of the system
_TO_DO = {
    **dict.fromkeys(_NO_SPACE, "Make room on the disk."),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Change its permissions, or name another place."),
    errno.EROFS: "Name another place.",
    errno.ENAMETOOLONG: "A name has at most 255 bytes and a path 4,096: choose a shorter one.",
    errno.ELOOP: (
        "It is a link, which is not followed here, or a link that leads back to itself: remove it."
    ),
    errno.ENOENT: "Make the folder, or correct the name.",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST),
        "There is a file where a folder is expected: correct the name.",
    ),
    errno.EISDIR: "There is a folder where a file is expected: give the name of a file.",
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE), "Too many files are open: raise the limit of `ulimit -n`."
    ),
    errno.EFBIG: "Raise the limit of `ulimit -f`, or choose a file system that takes larger files.",
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE),
        "The disk or the network file system fails: see the system's log.",
    ),
}


def os_error_message(error: OSError) -> str | None:
    """Return the message about an error of the system; None if it is not of the user's making."""
    if error.filename is None and error.errno not in _TO_DO:
        return None
    place = ""
    if isinstance(error.filename, str | bytes):
        name = os.fsdecode(error.filename)
        if len(name) > _MAX_PATH_CHARACTERS:
            name = f"{name[:_MAX_PATH_CHARACTERS]}..."
        place = f"{name}: "
    return f"{place}{reason_of(error)}. {_advice(error)}".rstrip()


def errno_of(error: BaseException | None) -> int | None:
    """Return the number of the error of the system behind ``error``; None without one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        # HDF5 and torch have the number in the text of their errors only
        match = re.search(r"errno = (\d+)|unable to .*\((\d+)\)", str(error))
        if match:
            return int(match[1] or match[2])
        error = error.__cause__ or error.__context__
    return None


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in a few words of the system."""
    number = errno_of(error)
    if number is not None:
        return os.strerror(number)
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether the system had no room left."""
    return errno_of(error) in _NO_SPACE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    # torch's allocator on a CPU and new threads raise a plain RuntimeError, and the import of a
    # library that does not fit an ImportError
    pattern = (
        "(out of|not enough) memory|(can't|Cannot) allocate memory|can't start new thread|"
        "Resource temporarily unavailable|failed to map"
    )
    kinds = (RuntimeError, ImportError)
    return isinstance(error, kinds) and bool(re.search(pattern, str(error)))


def refusal_of(error: BaseException) -> str | None:
    """Return the reason why the system refuses to read a file, with advice.

    None if it does not refuse, and the content is at fault.
    """
    if is_out_of_memory(error):
        return "(out of memory). Close other programs, or use a machine with more memory."
    # EINVAL is what a seek to a negative position raises, to which a changed archive leads
    if errno_of(error) in (None, 0, errno.EINVAL):
        return None
    return f"({reason_of(error)}). {_advice(error)}".rstrip()


def _advice(error: BaseException) -> str:
    return _TO_DO.get(errno_of(error) or 0, "")


@contextmanager
def collect_problems(
    problems: list[str], place: str = "", kind: type[UserError] = UserError
) -> Iterator[None]:
    """Add the problems of an error raised inside to ``problems``, and continue.

    Args:
        problems: list that grows.
        place: text before each of them.
        kind: class of the errors.
    """
    try:
        yield
    except kind as error:
        problems += [place + problem for problem in error.problems]


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return ``Did you mean X? Known: A, B.``, the first sentence if one of ``names`` is close."""
    # reversed, so that of names that differ in case only the first counts
    by_lower = {choice.lower(): choice for choice in reversed(names)}
    close = get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    question = f"Did you mean {by_lower[close[0]]}? " if close else ""
    return f"{question}Known: {', '.join(names)}."


def show_text(text: str, most: int = 60) -> str:
    """Return a text of the user in quotes, shortened to about ``most`` characters."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text):,} characters)"


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
_MIN_TEXT = 16  # columns beside the indentation; a narrower terminal gets lines as they are
RED, YELLOW = 31, 33  # colors of ANSI terminals
# text that is not broken: code in back quotes, a number and %, a command at the end of a line
_TOGETHER = re.compile(r"`[^`\n]+`|\d %|(?<=: |  )dp-ema [a-z].*$")
# control characters but tab and the end of a line, and those that change the direction of text
_CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
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
        if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            return f"\x1b[{color}m{text}\x1b[0m"
    return text
