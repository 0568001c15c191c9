"""The ways a run can be wrong: errors of the user's making, shown without a traceback, and helpers for their words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that the user can mend; the command line prints it and exits with 2.

    Args:
        problems: one message, or all the messages of one input; each says where, what was found, what was expected
            and what to do.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(UserError):
    """The config file is wrong."""


class DataError(UserError):
    """The training or validation data are wrong; the message names the file and the frame."""


class CheckpointError(UserError):
    """A checkpoint or model file is missing, damaged or of another model, or cannot be written."""


class DivergedError(UserError):
    """The loss or a gradient became non-finite; the message names the step, the task and the frames."""


class Interrupted(UserError):  # noqa: N818 - not an error
    """The run was asked to stop and has saved its state; ``signal_number`` is the signal that asked."""

    def __init__(self, problem: str, signal_number: int = 2) -> None:
        self.signal_number = signal_number
        super().__init__(problem)


class RankLostError(UserError):
    """Another process of the run has ended; nothing is wrong in this one."""


class ReportedElsewhere(Exception):  # noqa: N818 - the error is its cause
    """The run ends with the error that is the ``__cause__`` of this one, and another rank reports why."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived outside the training loop, so nothing was saved."""

    def __init__(self, message: str = "stopped by SIGTERM outside the training steps; nothing was saved") -> None:
        super().__init__(message)


@contextmanager
def collect_problems(problems: list[str], place: str = "") -> Iterator[None]:
    """Add the problems of a UserError raised inside to ``problems``, each after ``place``, and go on."""
    try:
        yield
    except UserError as error:
        problems += [place + problem for problem in error.problems]


def did_you_mean(found: str, known: Sequence[str]) -> str:
    """Return ``Did you mean X? Known: A, B.`` with the close matches of ``found``, or only the known names."""
    close = get_close_matches(found.lower(), [k.lower() for k in known], n=1, cutoff=0.6)
    names = ", ".join(known)
    if not close:
        return f"Known: {names}."
    match = next(k for k in known if k.lower() == close[0])
    return f"Did you mean {match}? Known: {names}."


def show_text(text: str, most: int = 60) -> str:
    """Return a text of the user in quotes, shortened to about ``most`` characters."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text):,} characters)"


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun: ``1 frame``, ``2,000 frames``; ``things`` is a plural of its own."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def every_steps(number: int) -> str:
    """Return how often something is done: ``every step``, ``every 2,000 steps``."""
    return "every step" if number == 1 else f"every {number:,} steps"


def first_few(names: Sequence[str], most: int = 10) -> str:
    """Return ``names`` separated by commas; of more than ``most`` the first ones and ``and N more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
