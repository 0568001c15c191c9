"""The walk through an input: every key and value is checked, every mistake is noted, and a section object comes out."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from deepmd_ema.config.fields import Option, argument, keys_of, options, section_by_type, type_names
from deepmd_ema.config.messages import (
    NOT_AVAILABLE,
    Path,
    Problem,
    bad_value,
    close_names,
    dotted,
    missing_key,
    show,
    unknown_choice,
    unknown_key,
    wants,
    wrong_type,
)
from deepmd_ema.config.peer import (
    UNAVAILABLE_TYPES,
    is_covered,
    is_harmless,
    is_unavailable_value,
    unavailable_key,
)
from deepmd_ema.config.schema.run import RunConfig

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

_EDITOR_KEY = "$schema"
_LARGEST = 10**18  # whole numbers fit 64 bits wherever they go


@dataclass
class Walk:
    """What a walk has found so far.

    Attributes:
        problems: all mistakes.
        broken: canonical paths whose value could not be used; a default stands in, and no rule judges it.
        given: canonical dotted paths that the input names.
        spelled: canonical path to the path as the input spells it.
        notes: what was left out because it does nothing.
    """

    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    spelled: dict[Path, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, path: Path, text: str, *, broken: Path | None = None) -> None:
        """Note a mistake at ``path`` (as spelled in the file); ``broken`` is the canonical path it spoils."""
        self.problems.append(Problem(path, text))
        if broken is not None:
            self.broken.add(broken)

    def section(self, kind: type, raw: Any, path: Path = (), spelled: Path = ()) -> Any:
        """Return a section object from what the file says; where the file is wrong, defaults stand in."""
        if not isinstance(raw, dict):
            self.note(spelled, bad_value(raw, "a section {...}"), broken=path)
            raw = None
        values: dict[str, Any] = {}
        missed = _misspelled(kind, raw or {}, path)
        found = self._sort_keys(kind, raw or {}, path, spelled, missed)
        for option in options(kind):
            if option.name in found:
                key = found[option.name]
                here, there = (*path, option.name), (*spelled, key)
                self.given.add(dotted(here))
                self.spelled[here] = there
                values[option.name] = self._value(kind, option, (raw or {})[key], here, there)
            elif option.required:
                quiet = raw is None or option.name in missed.values() or is_covered(_name(path), option.name, raw)
                values[option.name] = self._missing(option, path, spelled, quiet=quiet)
        return kind(**values)

    def _sort_keys(
        self, kind: type, raw: dict[Any, Any], path: Path, spelled: Path, missed: dict[str, str]
    ) -> dict[str, str]:
        """Return canonical name to key as spelled; unknown keys, keys given twice and absent features are noted."""
        canonical = {key: o.name for o in options(kind) for key in o.keys}
        found: dict[str, str] = {}
        for key, value in raw.items():
            if not isinstance(key, str):
                self.note((*spelled, str(key)), ": a key must be a text. Put it in quotes.")
            elif key in canonical:
                name = canonical[key]
                if name in found:
                    self.note((*spelled, key), f": the same option as {found[name]}. Remove one of the two.")
                found.setdefault(name, key)
            elif not _is_comment(key, path) and not (key == "type" and hasattr(kind, "type")):
                self._foreign_key(kind, key, value, path, spelled, missed.get(key))
        return found

    def _foreign_key(self, kind: type, key: str, value: Any, path: Path, spelled: Path, missed: str | None) -> None:
        known = unavailable_key(_name(path), key)
        if known is None:
            elsewhere = _other_types(kind, key) or _places(key) or _places_in_lists(kind, key)
            self.note((*spelled, key), unknown_key(key, keys_of(kind), elsewhere, missed))
            meant = (key, *close_names(key, keys_of(kind)))  # no rule says that this option is missing
            self.broken.update((*path, name) for name in (key, *_names_of(kind, meant)))
        elif known.harmless is None and value:
            self.notes.append(f"{dotted((*path, key))} has no effect and was left out: it only informs.")
        elif not is_harmless(known, value):
            instead = f" {known.instead}" if known.instead else " Remove it."
            self.note((*spelled, key), f" = {show(value)}: {NOT_AVAILABLE}.{instead}")

    def _missing(self, option: Option, path: Path, spelled: Path, quiet: bool) -> Any:
        """Note a required key that is not there, and return something that the rules can look past."""
        here = (*path, option.name)
        self.broken.add(here)
        if not quiet:
            self.note((*spelled, option.name), missing_key(option))
        return Walk().section(option.sections[0], {}, here) if option.sections else None

    def _value(self, kind: type, option: Option, value: Any, path: Path, spelled: Path) -> Any:
        if option.sections and not (value is None and option.nullable):
            return self._nested(option, value, path, spelled)
        if value is None and option.nullable:
            return None
        text = _leaf_problem(kind, option, value, path)
        if text is not None:
            self.note(spelled, text, broken=path)
            return None if option.required else option.default
        value = _with_floats(option, value)
        return value if option.convert is None else option.convert(value)

    def _nested(self, option: Option, value: Any, path: Path, spelled: Path) -> Any:
        if not option.many:
            return self._one(option, value, path, spelled)
        if isinstance(value, list):
            return [self._one(option, v, (*path, n), (*spelled, n)) for n, v in enumerate(value)]
        self.note(spelled, wrong_type(option, value), broken=path)
        return []

    def _one(self, option: Option, value: Any, path: Path, spelled: Path) -> Any:
        kind = option.sections[0]
        if option.by_type and isinstance(value, dict):
            name = value.get("type", option.default_type)
            chosen = section_by_type(option.sections, name) if isinstance(name, str) else None
            if chosen is None:
                self._wrong_type_name(option, name, "type" in value, path, spelled)
                self.broken.add(path)
                return Walk().section(kind, {}, path)  # the keys of an unknown type cannot be judged
            kind = chosen
        return self.section(kind, value, path, spelled)

    def _wrong_type_name(self, option: Option, name: Any, given: bool, path: Path, spelled: Path) -> None:
        known, there = type_names(option.sections), (*spelled, "type")
        if not given:
            self.note(there, f": required, but missing. Expected one of {', '.join(known)}.")
        elif name in UNAVAILABLE_TYPES.get(dotted(path), ()):
            self.note(there, f" = {show(name)}: {NOT_AVAILABLE}. Available: {', '.join(known)}.")
        else:
            self.note(there, unknown_choice(name, known))


def _leaf_problem(kind: type, option: Option, value: Any, path: Path) -> str | None:
    """Return what is wrong with a plain value, or None; dargs judges the type and the check of the declaration."""
    from dargs.dargs import ArgumentTypeError, ArgumentValueError

    if is_unavailable_value(dotted(path), value):
        return f" = {show(value)}: {NOT_AVAILABLE}. Use {wants(option)}."
    if any(isinstance(v, int) and abs(v) >= _LARGEST for v in _leaves(value)):
        return bad_value(value, "a number of at most 18 digits")
    if _has_stray_bool(option, value):
        return wrong_type(option, value)
    try:
        argument(kind, option.name).check_value(value)
    except ArgumentTypeError:
        return wrong_type(option, value)
    except ArgumentValueError:
        if option.choices:
            return unknown_choice(value, option.choices)
        return bad_value(value, wants(option))
    if not _is_finite(value):
        return bad_value(value, "a finite number")
    return None


def _has_stray_bool(option: Option, value: Any) -> bool:
    """Whether true or false stands where a number belongs, which Python would take for 1 and 0."""
    allowed = bool in option.types or any(bool in typing.get_args(t) for t in option.types)
    return not allowed and any(isinstance(v, bool) for v in _leaves(value))


def _is_finite(value: Any) -> bool:
    return all(math.isfinite(v) for v in _leaves(value) if isinstance(v, float))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, list):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]


def _with_floats(option: Option, value: Any) -> Any:
    """Return whole numbers as floats where the declaration says float."""
    if float in option.types and int not in option.types and isinstance(value, int) and bool not in option.types:
        return float(value)
    if isinstance(value, list) and any("float" in str(t) for t in option.types):
        return [float(v) if isinstance(v, int) else v for v in value]
    return value


def _is_comment(key: str, path: Path) -> bool:
    return key.startswith("_") or (key == _EDITOR_KEY and not path)


def _misspelled(kind: type, raw: dict[Any, Any], path: Path) -> dict[str, str]:
    """Return unknown keys that look like a required key which is missing, with that key."""
    known = keys_of(kind)
    missing = [o for o in options(kind) if o.required and not any(key in raw for key in o.keys)]
    found: dict[str, str] = {}
    for key in raw:
        if isinstance(key, str) and key not in known and not _is_comment(key, path):
            close = next((o.name for o in missing if close_names(key, o.keys)), None)
            if close is not None and close not in found.values() and not unavailable_key(_name(path), key):
                found[key] = close
    return found


def _names_of(kind: type, keys: tuple[str, ...]) -> list[str]:
    """Return the canonical names of those keys that are options of the section."""
    return [o.name for o in options(kind) if not set(o.keys).isdisjoint(keys)]


def _name(path: Path) -> str:
    return dotted(path) if path else ""


@cache
def _places(key: str) -> tuple[str, ...]:
    """Return where ``key`` is an option, anywhere in the input, when that is one or two places."""
    found = tuple(dict.fromkeys(_find(RunConfig, key, "")))
    return found if len(found) <= 2 else ()


@cache
def _other_types(kind: type, key: str) -> tuple[str, ...]:
    """Return the other types of a section that has several, where ``key`` is an option of one of them."""
    several: tuple[Any, ...] = next((o.sections for o in _all_options(RunConfig) if kind in o.sections), ())
    names = [s.type for s in several if s is not kind and key in keys_of(s)]
    return (f"type {' or '.join(names)}, and this one is of type {getattr(kind, 'type', '')}",) if names else ()


def _places_in_lists(kind: type, key: str) -> tuple[str, ...]:
    """Return the lists of sections in ``kind`` whose entries have the option ``key``."""
    lists = [o for o in options(kind) if o.many]
    return tuple(f"an entry of {o.name}" for o in lists if any(key in keys_of(s) for s in o.sections))


def _all_options(kind: type) -> Iterator[Option]:
    for o in options(kind):
        yield o
        for s in o.sections:
            yield from _all_options(s)


def _find(kind: type, key: str, path: str) -> Iterator[str]:
    for o in options(kind):
        here = f"{path}.{o.name}" if path else o.name
        if key in o.keys:
            yield here
        if o.many:
            continue  # `name`, `device` are too common to be missed anywhere
        having = [s for s in o.sections if key in keys_of(s)]
        if len(having) < len(o.sections):
            for s in having:
                yield f"{here}.{key} of type {getattr(s, 'type', '')}"
        else:
            for s in o.sections:
                yield from _find(s, key, here)
