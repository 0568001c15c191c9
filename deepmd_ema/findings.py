"""Findings about an input and its data: mistakes, warnings, options without effect, and facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

ERROR = "error"  # nothing is trained
WARNING = "warning"  # allowed, but likely a mistake
UNUSED = "unused"  # an option that the input gives has no effect
NOTE = "note"  # a fact that the user should know


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        severity: ``ERROR``, ``WARNING``, ``UNUSED`` or ``NOTE``.
        place: option of an input as a path in dots, or file and frame of data; empty where there is
            none.
        text: rest of the message, which follows the place: `` = 4: expected 0, 1, 2 or 3.``
        file: file of the input; empty for data.
        line: line of the option in that file; 0 if it is not known.
    """

    severity: str
    place: str
    text: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        if not self.file:
            return f"{self.place}{self.text}"
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.place or 'the config'}{self.text}"


Findings: TypeAlias = Iterator[Finding]


def error(place: str, text: str) -> Finding:
    """Return the finding of a mistake."""
    return Finding(ERROR, place, text)


def warning(place: str, text: str) -> Finding:
    """Return the finding of a likely mistake."""
    return Finding(WARNING, place, text)


def unused(place: str, why: str) -> Finding:
    """Return the finding of an option without effect.

    It is dropped where the input does not give the option.

    Args:
        place: path of the option in dots.
        why: the end of a sentence; value and ``no effect`` are written before it.
    """
    return Finding(UNUSED, place, why)


def note(place: str, text: str) -> Finding:
    """Return the finding of a fact."""
    return Finding(NOTE, place, text)


def inside(section: str, findings: Iterable[Finding]) -> Findings:
    """Yield findings of a section with their places as seen from the section around it."""
    for finding in findings:
        path = ".".join(filter(None, (section, finding.place)))
        yield replace(finding, place=path)


def with_task(task: str, findings: Iterable[Finding]) -> Findings:
    """Yield findings with the name of a task before the place, unless it is empty."""
    for finding in findings:
        yield (
            replace(finding, place=f"task {task}: {finding.place}") if task else finding
        )


def with_severity(severity: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a severity."""
    return [finding for finding in findings if finding.severity == severity]


def texts_of(severity: str, findings: Iterable[Finding]) -> list[str]:
    """Return the messages of a severity."""
    return [str(finding) for finding in with_severity(severity, findings)]
