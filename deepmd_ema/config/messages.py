"""Problems of a config: where in the file, what was found, what is expected, what to do."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from deepmd_ema.config.fields import Option, wants

if typing.TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Place = tuple[str | int, ...]
"""Place in a config, e.g. ``("training", "training_data", "systems", 0)``."""

NOT_AVAILABLE = "known to DeePMD-kit, not available in dp-ema 0.1"


@dataclass(frozen=True)
class Source:
    """Where an input comes from, so that messages can name its places.

    Attributes:
        name: the file.
        lines: line of each key, by the path that the input spells.
        paths: canonical path of an option -> the path that the input spells, or would.
        given: canonical paths of the options that the input names; the others have their defaults.
    """

    name: str = "<dict>"
    lines: Mapping[Place, int] = field(default_factory=dict)
    paths: Mapping[Place, Place] = field(default_factory=dict)
    given: frozenset[Place] = frozenset()

    def path(self, canonical: str) -> Place:
        """Return the path that the input spells for a canonical one, e.g. of an option that it gives by an alias."""
        path = path_of(canonical)
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.paths:
                return (*self.paths[path[:depth]], *path[depth:])
        return path


@dataclass(frozen=True)
class Problem:
    """One mistake: its place in the config and the rest of the message, which begins with `` = value: `` or ``: ``."""

    path: Place
    text: str


def dotted(path: Place) -> str:
    """Return a path as people write it: ``training.training_data.systems[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the config"


def path_of(text: str) -> Place:
    """Return the path that :func:`dotted` writes as ``text``."""
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", text)
    return tuple(int(number) if number else name for number, name in parts)


def render(problems: Iterable[Problem], source: Source) -> list[str]:
    """Return the messages in the order of the file, each beginning with ``source:line: path``."""
    found = list(dict.fromkeys(problems))
    found.sort(key=lambda p: _line_of(p.path, source.lines) or 0)
    messages = []
    for problem in found:
        line = _line_of(problem.path, source.lines)
        place = source.name if line is None else f"{source.name}:{line}"
        messages.append(f"{place}: {dotted(problem.path)}{problem.text}")
    return messages


def bad_value(value: Any, expected: str, hint: str = "") -> str:
    """Return the message of a value that is not what is expected."""
    return f" = {show(value)}: expected {expected}." + (f" {hint}" if hint else "")


def wrong_type(option: Option, value: Any) -> str:
    """Return the message of a value of the wrong type, with the way to mend it when it can be guessed."""
    return bad_value(value, wants(option), _type_hint(option, value))


def unknown_key(key: str, known: Sequence[str], elsewhere: Sequence[str], missed: str | None) -> str:
    """Return the message of a key that its section does not have.

    Args:
        key: the key.
        known: keys of the section, aliases included.
        elsewhere: where the key would be right: paths in other sections, other types of this one.
        missed: a required key that is missing and looks like this one.
    """
    if missed is not None:
        return f": unknown key. Did you mean {missed}, which is required and missing?"
    close = close_names(key, known)
    if elsewhere:
        mean = f" Or did you mean {' or '.join(close)}?" if close else ""
        return f": unknown key here. It belongs to {' or '.join(elsewhere)}.{mean}"
    if close:
        return f": unknown key. Did you mean {' or '.join(close)}?"
    return f": unknown key. Known: {', '.join(known)}."


def missing_key(option: Option) -> str:
    """Return the message of a required key that is not there."""
    expected = f"a section {{...}}: {option.doc.lower()}" if option.sections else f"{wants(option)}."
    return f": required, but missing. Expected {expected}"


def unknown_choice(value: Any, known: Sequence[str]) -> str:
    """Return the message of a text that is not one of the known ones."""
    close = close_names(str(value), known)
    mean = f" Did you mean {close[0]}?" if close else ""
    return f" = {show(value)}: unknown.{mean} Known: {', '.join(known)}."


def show(value: Any, width: int = 60) -> str:
    """Return a value as JSON, shortened to ``width`` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def close_names(key: str, known: Sequence[str]) -> list[str]:
    """Return up to two known names that look like ``key``, whatever their case."""
    by_lower = {name.lower(): name for name in reversed(known)}
    return [by_lower[k] for k in get_close_matches(key.lower(), list(by_lower), n=2, cutoff=0.68)]


def _line_of(path: Place, lines: Mapping[Place, int]) -> int | None:
    """Return the line of the path, or of the nearest thing around it that is in the file."""
    while path not in lines:
        if not path:
            return None
        path = path[:-1]
    return lines[path]


def _type_hint(option: Option, value: Any) -> str:
    plain = {t for t in option.types if typing.get_origin(t) is None}
    if option.many and isinstance(value, dict):
        return "Put [ ] around the section."
    if value is None:
        return "Remove the key to get the default."
    if isinstance(value, str) and bool in plain and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return f"Write {'true' if value.lower() in ('true', 'yes', 'on') else 'false'}, without quotes."
    if isinstance(value, str) and plain & {int, float} and _is_number(value):
        return "Write the number without quotes."
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if bool in plain and value in (0, 1):
        return f"Write {'true' if value else 'false'}."
    if float(value).is_integer() and int in plain:
        return f"{show(value)} is a number with a fraction part; write {int(value)}."
    if any(typing.get_origin(t) is list for t in option.types):
        return f"Write [{show(value)}]."
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
