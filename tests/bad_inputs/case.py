"""One bad input: how it is made, the command that meets it, and what the command must answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REFUSED, ACCEPTED, EITHER = "refused", "accepted", "either"
TINY, RUN = "tiny", "run"  # folders that a case begins with: an input with its data; the same after a run of 4 steps
CHECK = ("check", "input.json")
CHECK_OPTIONS = (*CHECK, "--config-only")
TRAIN = ("train", "input.json", "--device", "cpu", "-v", "WARNING")


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        family: what kind of input is bad.
        name: unique within the family.
        words: of the command line.
        prepare: makes the input bad; called in the folder of the case.
        expected: ``refused`` (exit code 2, one screen), ``accepted`` (0), or ``either``: anything but a fault of ours;
            only where it depends on the machine, or where nothing in the file distinguishes damage from content.
        same: whether, where it is accepted, it must print and write what the same command does with a good input.
        makes: files that must be there where it is accepted.
        says: what must be reported, in a message or where it is accepted.
        begins: the folder that the case begins with.
        env: variables to set, or to remove (None).
        shell: run by bash as a process of its own instead of ``words``, with ``$DP`` for the command.
        memory: bytes that the command may take beside what loading it takes.
        seconds: that it may take.
        code: the exit code of ``refused``.
        leaves: files that the command is meant to change, though it is refused or is no training run.
    """

    family: str
    name: str
    words: Sequence[str] = CHECK_OPTIONS
    prepare: Callable[[], object] = lambda: None
    expected: str = REFUSED
    same: bool = False
    makes: Sequence[str] = ()
    says: Sequence[str] = ()
    begins: str = TINY
    env: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = ""
    memory: int = 1 << 30
    seconds: float = 20.0
    code: int = 2
    leaves: Sequence[str] = ()

    @property
    def title(self) -> str:
        return f"{self.family}: {self.name}"


def sample(cases: Sequence[Case], most: int, seed: int) -> list[Case]:
    """Return ``most`` cases, the same share of every family, in the order of the families."""
    rng, families = random.Random(seed), {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    chosen = []
    for of_family in families.values():
        number = max(2, round(most * len(of_family) / len(cases)))
        chosen += rng.sample(of_family, min(number, len(of_family)))
    return chosen


def write(name: str, content: str | bytes) -> Callable[[], object]:
    """Return a function that writes a file."""
    if isinstance(content, bytes):
        return lambda: Path(name).write_bytes(content)
    return lambda: Path(name).write_text(content, encoding="utf-8", errors="surrogatepass")
