"""Errors whose message is for the user, and messages of the errors of the system."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

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
            Finding(ERROR, "", entry) if isinstance(entry, str) else entry
            for entry in entries
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
        super().__init__(
            f"{path}: cannot be written ({reason_of(cause)}). {remedy}".rstrip()
        )


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
            message
            or f"stopped by {name} outside the training steps; nothing was saved"
        )


_MAX_PATH_CHARACTERS = 300  # characters of a path in a message
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# remedies by the error of the system
_TO_DO = {
    **dict.fromkeys(_NO_SPACE, "Make room on the disk."),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "Change its permissions, or name another place."
    ),
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
        (errno.EMFILE, errno.ENFILE),
        "Too many files are open: raise the limit of `ulimit -n`.",
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
        return (
            "(out of memory). Close other programs, or use a machine with more memory."
        )
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
