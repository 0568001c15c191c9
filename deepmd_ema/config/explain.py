"""All mistakes of an input that dargs refuses, each with its place and what to do about it."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any

from deepmd_ema.config.argcheck import LARGEST_INTEGER, argument, has_stray_bool, is_bounded, leaves
from deepmd_ema.config.build import INVALID
from deepmd_ema.config.fields import Option, input_options, is_comment, keys_of, type_names
from deepmd_ema.config.messages import (
    NOT_AVAILABLE,
    Place,
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
from deepmd_ema.config.peer import UNAVAILABLE_TYPES, is_replaced, is_unavailable_value, unavailable_key
from deepmd_ema.config.schema.run import RunConfig

if typing.TYPE_CHECKING:
    from collections.abc import Iterator


def explain(section: type, values: Any, path: Place = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Return what can be used of a section that dargs refuses, and all its mistakes.

    Args:
        section: its class.
        values: as the input has them.
        path: where they stand.

    Returns:
        Values under canonical keys, ``INVALID`` where one is wrong or missing; and the mistakes.
    """
    validator = _Validator()
    found = validator.section(section, values, path, path)
    return ({o.name: INVALID for o in input_options(section)} if found is INVALID else found), validator.problems


@dataclass
class _Validator:
    """Walks through an input and notes all mistakes; paths come twice, canonical and as the input spells them."""

    problems: list[Problem] = field(default_factory=list)

    def section(self, kind: type, raw: Any, path: Place, spelled: Place) -> Any:
        """Return the values of a section under canonical keys, or ``INVALID``."""
        if not isinstance(raw, dict):
            self._note(spelled, bad_value(raw, "a section {...}"))
            return INVALID
        missed = _misspelled(kind, raw, path)
        values, found = self._sort_keys(kind, raw, path, spelled, missed)
        for option in input_options(kind):
            if option.name in found:
                key = found[option.name]
                here, there = (*path, option.name), (*spelled, key)
                values[option.name] = self._value(kind, option, raw[key], here, there)
            elif option.required:
                values[option.name] = INVALID
                if option.name not in missed.values() and not is_replaced(_name(path), option.name, raw):
                    self._note((*spelled, option.name), missing_key(option))
        if hasattr(kind, "type"):
            values["type"] = kind.type
        return values

    def _note(self, spelled: Place, text: str) -> None:
        self.problems.append(Problem(spelled, text))

    def _sort_keys(
        self, kind: type, raw: dict[Any, Any], path: Place, spelled: Place, missed: dict[str, str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Note unknown keys, keys given twice and absent features.

        Returns:
            ``INVALID`` for each option that an unknown key may mean, of which no rule then says that it is missing;
            and the known keys, canonical name to key as spelled.
        """
        canonical = {key: o.name for o in input_options(kind) for key in o.keys}
        meant: dict[str, Any] = {}
        found: dict[str, str] = {}
        for key, value in raw.items():
            if not isinstance(key, str):
                self._note((*spelled, str(key)), ": a key must be a text. Put it in quotes.")
            elif key in canonical:
                name = canonical[key]
                if name in found:
                    self._note((*spelled, key), f": the same option as {found[name]}. Remove one of the two.")
                found.setdefault(name, key)
            elif is_comment(key) or (key == "type" and hasattr(kind, "type")):
                continue
            elif unavailable_key(_name(path), key) is not None:
                known = unavailable_key(_name(path), key)
                instead = f" {known.instead}" if known and known.instead else " Remove it."
                self._note((*spelled, key), f" = {show(value)}: {NOT_AVAILABLE}.{instead}")
            else:
                others = _other_types(kind, key)
                elsewhere = _type_words(kind, others) or _places(key) or _places_in_lists(kind, key)
                self._note((*spelled, key), unknown_key(key, keys_of(kind), elsewhere, missed.get(key)))
                meant |= {canonical[name]: INVALID for name in close_names(key, keys_of(kind)) if name in canonical}
                # the type may be the mistake, so nothing is expected of what the other types do not have
                meant |= {name: INVALID for s in others for name in set(canonical.values()) - set(keys_of(s))}
        return meant, found

    def _value(self, kind: type, option: Option, value: Any, path: Place, spelled: Place) -> Any:
        if value is None and option.nullable:
            return None
        if option.many:
            if isinstance(value, list):
                return [self._nested(option, v, (*path, n), (*spelled, n)) for n, v in enumerate(value)]
            self._note(spelled, wrong_type(option, value))
            return INVALID
        if option.sections:
            return self._nested(option, value, path, spelled)
        text = _leaf_problem(option, value, path)
        if text is None:
            return value
        self._note(spelled, text)
        return INVALID

    def _nested(self, option: Option, value: Any, path: Place, spelled: Place) -> Any:
        kind = option.section_of(value)
        if kind is not None:
            return self.section(kind, value, path, spelled)
        known, name = type_names(option.sections), value.get("type")
        if "type" not in value:
            text = f": required, but missing. Expected one of {', '.join(known)}."
        elif name in UNAVAILABLE_TYPES.get(dotted(path), ()):
            text = f" = {show(name)}: {NOT_AVAILABLE}. Available: {', '.join(known)}."
        else:
            text = unknown_choice(name, known)
        self._note((*spelled, "type"), text)
        return INVALID  # the keys of an unknown type cannot be judged


def _leaf_problem(option: Option, value: Any, path: Place) -> str | None:
    """Return what is wrong with a plain value, or None; dargs judges the type and the check of the declaration."""
    from dargs.dargs import ArgumentTypeError, ArgumentValueError

    if is_unavailable_value(dotted(path), value):
        return f" = {show(value)}: {NOT_AVAILABLE}. Use {wants(option)}."
    if any(isinstance(v, int) and not is_bounded(v) for v in leaves(value)):
        return bad_value(value, f"a number of at most {len(str(LARGEST_INTEGER)) - 1} digits")
    if has_stray_bool(option, value):
        return wrong_type(option, value)
    try:
        argument(option).check_value(value)
    except ArgumentTypeError:
        return wrong_type(option, value)
    except ArgumentValueError:
        if option.choices:
            return unknown_choice(value, option.choices)
        is_right = option.check is None or option.check.test(value)
        return bad_value(value, "a finite number" if is_right else wants(option))
    return None


def _misspelled(kind: type, raw: dict[Any, Any], path: Place) -> dict[str, str]:
    """Return unknown keys that look like a required key which is missing, with that key."""
    known = keys_of(kind)
    missing = [o for o in input_options(kind) if o.required and not any(key in raw for key in o.keys)]
    found: dict[str, str] = {}
    for key in raw:
        if isinstance(key, str) and key not in known and not is_comment(key):
            close = next((o.name for o in missing if close_names(key, o.keys)), None)
            if close is not None and close not in found.values() and not unavailable_key(_name(path), key):
                found[key] = close
    return found


def _name(path: Place) -> str:
    return dotted(path) if path else ""


def _places(key: str) -> tuple[str, ...]:
    """Return where ``key`` is an option, anywhere in the input, when that is one or two places."""
    found = tuple(dict.fromkeys(_find(RunConfig, key, "")))
    return found if len(found) <= 2 else ()


def _other_types(kind: type, key: str) -> tuple[type, ...]:
    """Return the other types of a section that has several, of which ``key`` is an option."""
    several = next((o.sections for o in _all_options(RunConfig) if kind in o.sections), ())
    return tuple(s for s in several if s is not kind and key in keys_of(s))


def _type_words(kind: Any, others: tuple[Any, ...]) -> tuple[str, ...]:
    names = " or ".join(s.type for s in others)
    return (f"type {names}, and this one is of type {kind.type}",) if others else ()


def _places_in_lists(kind: type, key: str) -> tuple[str, ...]:
    """Return the lists of sections in ``kind`` whose entries have the option ``key``."""
    lists = [o for o in input_options(kind) if o.many]
    return tuple(f"an entry of {o.name}" for o in lists if any(key in keys_of(s) for s in o.sections))


def _all_options(kind: type) -> Iterator[Option]:
    for o in input_options(kind):
        yield o
        for s in o.sections:
            yield from _all_options(s)


def _find(kind: type, key: str, path: str) -> Iterator[str]:
    for o in input_options(kind):
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
