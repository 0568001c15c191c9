"""An input while it is read: its values, where each of them is, and what is found about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepmd_ema.config.messages import Place, Source, Values, dotted
from deepmd_ema.findings import Finding, error

INVALID: Any = object()  # in place of a part that is missing, which is already reported


@dataclass
class Reading:
    """An input on its way to the sections of a run.

    Attributes:
        name: of the file, for messages.
        values: a copy of the input without comments, which is brought into the sections of today.
        lines: lines of the keys, moved ones included.
        has_tasks: whether it is an input of several tasks.
        moved: place of a key, after it was moved -> its path in the input.
        paths: canonical path of an option or of an entry -> the path as the input spells it.
        given: canonical paths of the options that the input names.
        notes: what was changed or left out, one sentence each.
        unused: options that were left out because they do nothing here, with the reason.
        mistakes: at paths of the input.
        wrong: sections and keys in them whose values are refused.
    """

    name: str
    values: Any
    lines: dict[Place, int]
    has_tasks: bool = False
    moved: dict[Place, Place] = field(default_factory=dict)
    paths: dict[Place, Place] = field(default_factory=dict)
    given: set[Place] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mistakes: list[Finding] = field(default_factory=list)
    wrong: list[tuple[Values, str]] = field(default_factory=list)

    @property
    def source(self) -> Source:
        """The places of the options, for messages about the sections."""
        return Source(self.name, self.lines, self.paths, frozenset(self.given))

    def refuse(self, path: Place, text: str) -> Any:
        """Note a mistake at a path of the input, and return ``INVALID`` to stand in its place."""
        self.mistakes.append(self.source.at(path, error(dotted(path), text)))
        return INVALID

    def spelled(self, path: Place, key: str | int) -> Place:
        """Return the path that the input has for a key of the section at a canonical path."""
        outer = self.paths.get(path, path)
        return self.moved.get((*path, key), (*outer, key))
