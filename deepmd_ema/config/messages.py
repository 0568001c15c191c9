"""An input while it is read; its places, values and names in messages; differences of configs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeAlias

from deepmd_ema.findings import Finding, error
from deepmd_ema.utils import __version__

Place = tuple[str | int, ...]
"""Place in a config, e.g. ``("training", "training_data", "systems", 0)``."""

Lines: TypeAlias = dict[Place, int]
"""Lines of keys and items in a file."""

Names: TypeAlias = tuple[str, ...]

Values: TypeAlias = dict[str, Any]
"""A section of an input, or a whole one."""

NOT_AVAILABLE = f"known to DeePMD-kit, not available in dp-ema {__version__}"

# sections by task in an input of several tasks, as patterns, and the same sections in one of one
_OF_TASKS = {
    r"model\.model_dict": "model",
    "loss_dict": "loss",
    r"training\.data_dict": "training",
}
_TASK = re.compile(f"(?:{'|'.join(_OF_TASKS)})\\.([^.]+)")
# shares of steps, which change for all tasks when one comes or goes
_SHARES = ("training.model_prob", "training.num_epoch_dict")

Difference = tuple[str, Any, Any]
"""Path of an option in dots, and its values in two configs."""


@dataclass(frozen=True)
class Source:
    """Origin of an input, so that messages can name its places.

    Attributes:
        name: the file.
        lines: line of each key, by the path that the input spells.
        paths: canonical path of an option -> the path that the input spells, or would.
        given_options: canonical paths of the options that the input names; the others have their
            defaults.
    """

    name: str = "<dict>"
    lines: Mapping[Place, int] = field(default_factory=dict)
    paths: Mapping[Place, Place] = field(default_factory=dict)
    given_options: frozenset[Place] = frozenset()

    def path(self, canonical: str) -> Place:
        """Return the path that the input spells for a canonical one in dots, e.g. by an alias."""
        path = path_of(canonical)
        # only options and entries are in `paths`: what is inside of them, such as an item of a list
        # of numbers, is spelled below the nearest of them
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.paths:
                return (*self.paths[path[:depth]], *path[depth:])
        return path

    def at(self, path: Place, finding: Finding) -> Finding:
        """Return a finding about a path of the input, with its file and line."""
        # the line of the path, or of the nearest section around it that is in the file
        places = (path[:depth] for depth in range(len(path), -1, -1))
        line = next((self.lines[place] for place in places if place in self.lines), 0)
        return replace(finding, place=dotted(path), file=self.name, line=line)

    def locate(self, finding: Finding) -> Finding:
        """Return a finding about a canonical path as one about the path that the input spells."""
        return self.at(self.path(finding.place), finding)


# in place of a part that is missing, which is already reported; no input can have this value
INVALID: Any = object()


@dataclass
class Reading:
    """An input on its way to the sections of a run.

    Attributes:
        name: name of the file, for messages.
        values: a copy of the input without comments, which is brought into the sections of today.
        lines: lines of the keys, moved ones included.
        has_tasks: whether it is an input of several tasks.
        moved: place of a key, after it was moved -> its path in the input.
        paths: canonical path of an option or of an entry -> the path as the input spells it.
        given_options: canonical paths of the options that the input names.
        notes: changes and omissions, one sentence each.
        unused: options that were left out because they do nothing here, with the reason.
        mistakes: findings at paths of the input.
        wrong: sections and keys in them whose values are refused.
    """

    name: str
    values: Any
    lines: Lines
    has_tasks: bool = False
    moved: dict[Place, Place] = field(default_factory=dict)
    paths: dict[Place, Place] = field(default_factory=dict)
    given_options: set[Place] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mistakes: list[Finding] = field(default_factory=list)
    wrong: list[tuple[Values, str]] = field(default_factory=list)

    @property
    def source(self) -> Source:
        """The places of the options, for messages about the sections."""
        return Source(self.name, self.lines, self.paths, frozenset(self.given_options))

    def refuse(self, path: Place, text: str) -> Any:
        """Note a mistake at a path of the input, and return ``INVALID`` to stand in its place."""
        self.mistakes.append(self.source.at(path, error(dotted(path), text)))
        return INVALID

    def spelled(self, path: Place, key: str | int) -> Place:
        """Return the path that the input has for a key of the section at a canonical path."""
        outer = self.paths.get(path, path)
        return self.moved.get((*path, key), (*outer, key))


def is_comment(key: Any) -> bool:
    """Whether a key is no option: it begins with ``_``, or names the JSON Schema for an editor."""
    return isinstance(key, str) and (key.startswith("_") or key == "$schema")


def dotted(path: Place) -> str:
    """Return a path as people write it: ``training.training_data.systems[0]``.

    The path of a whole input is empty.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def section_at(values: Any, *path: str | int) -> Any:
    """Return the section at a path, or an empty one if there is none, or something else."""
    for part in path:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def path_of(text: str) -> Place:
    """Return the path that :func:`dotted` writes as ``text``."""
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", text)
    return tuple(int(number) if number else name for number, name in parts)


def of_one_task(path: str) -> str:
    """Return a path in dots as it is in an input of one task."""
    for pattern, section in _OF_TASKS.items():
        path = re.sub(rf"\A{pattern}\.[^.]+", section, path)
    return path


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return different findings in the order of the file."""
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.line)


def show(value: Any, width: int = 60) -> str:
    """Return a value as JSON, shortened to ``width`` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def as_text(section: Mapping[str, Any]) -> str:
    """Return a section as JSON to be read, with each list of numbers on one line."""
    text = json.dumps(section, indent=4)
    # json writes each number on a line of its own. The pattern cannot match within a text, because
    # JSON has no line break in one.
    return re.sub(
        r'\[\n\s+([^][{}"]*?)\n\s+\]',
        lambda match: f"[{' '.join(match[1].split())}]",
        text,
    )


def close_names(key: str, names: Sequence[str]) -> list[str]:
    """Return up to two ``names`` that look like ``key``, whatever their case."""
    # reversed, so that of names that differ in case only the first counts
    by_lower = {name.lower(): name for name in reversed(names)}
    # the cutoff is a similarity: less similar names are suggested for keys that mean another thing
    return [
        by_lower[k]
        for k in get_close_matches(key.lower(), list(by_lower), n=2, cutoff=0.68)
    ]


def without_tasks(
    differences: Iterable[Difference], tasks: Collection[str]
) -> Iterator[Difference]:
    """Yield the differences that do not follow from ``tasks`` being in one config only."""
    for path, old, new in differences:
        task = _TASK.match(path)
        # shares of all tasks, and parts that only these tasks had
        follows = path.startswith(_SHARES) or (
            path.startswith("model.shared_dict.") and None in (old, new)
        )
        if not (task and task[1] in tasks) and not (tasks and follows):
            yield path, old, new


def differences_of(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """Yield path and values of each option that differs; None in place of a missing section."""
    are_lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(set(old) | set(new)):
            yield from differences_of(
                old.get(key), new.get(key), f"{path}.{key}" if path else key
            )
    elif are_lists and all(isinstance(part, Mapping) for part in (*old, *new)):
        for k, (old_part, new_part) in enumerate(zip(old, new)):
            yield from differences_of(old_part, new_part, f"{path}[{k}]")
    elif old != new:
        yield path, old, new
