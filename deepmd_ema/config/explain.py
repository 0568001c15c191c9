"""All mistakes of an input that dargs refuses, each with its place and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepmd_ema.config.argcheck import argument, bad_value, unknown_choice, value_fault, wrong_type
from deepmd_ema.config.fields import INVALID, Option, input_options, is_comment, keys_of, listed_types, wants
from deepmd_ema.config.messages import NOT_AVAILABLE, Place, Problem, close_names, dotted, show
from deepmd_ema.config.schema.run import SingleTaskRun
from deepmd_ema.config.unsupported import unavailable_key, unavailable_type


def explain(section: type, values: Any, path: Place = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Return the usable part of a section that dargs refuses, and all its mistakes.

    Args:
        section: its class.
        values: as the input has them, under canonical keys.
        path: where they stand.

    Returns:
        Values under canonical keys, ``INVALID`` where one is wrong or missing; and the mistakes.
    """
    validator = _Validator()
    found = validator.section(section, (section,), values, path)
    return ({o.name: INVALID for o in input_options(section)} if found is INVALID else found), validator.problems


@dataclass
class _Validator:
    """Walks through an input and notes all mistakes, at canonical paths."""

    problems: list[Problem] = field(default_factory=list)

    def section(self, kind: Any, choices: Sequence[type], raw: Any, path: Place) -> Any:
        """Return the values of a section of a ``kind``, one of ``choices``, or ``INVALID``."""
        if not isinstance(raw, dict):
            return self._refuse(path, bad_value(raw, "a section {...}"))
        missed = _misspelled(kind, raw, path)
        values = self._other_keys(kind, [s for s in choices if s is not kind], raw, path, missed)
        for option in input_options(kind):
            here = (*path, option.name)
            if option.name in raw:
                values[option.name] = self._value(option, raw[option.name], here)
            elif option.required:
                values[option.name] = INVALID
                if option.name not in missed.values():
                    is_section = f"a section {{...}}: {option.doc.lower()}"
                    expected = is_section if option.sections else f"{wants(option)}."
                    self._refuse(here, f": required, but missing. Expected {expected}")
        if hasattr(kind, "type"):
            values["type"] = kind.type
        return values

    def _refuse(self, path: Place, text: str) -> Any:
        """Note a mistake, and return ``INVALID`` to stand in its place."""
        self.problems.append(Problem(path, text))
        return INVALID

    def _other_keys(
        self, kind: Any, others: Sequence[Any], raw: dict[Any, Any], path: Place, missed: dict[str, str]
    ) -> dict[str, Any]:
        """Note unknown keys and absent features.

        Returns:
            ``INVALID`` for each option that an unknown key may mean, of which no rule then says that it is missing.
        """
        canonical = {key: o.name for o in input_options(kind) for key in o.keys}
        meant: dict[str, Any] = {}
        for key, value in raw.items():
            if not isinstance(key, str):
                self._refuse((*path, str(key)), ": a key must be a text. Put it in quotes.")
            elif key in canonical or is_comment(key) or (key == "type" and hasattr(kind, "type")):
                continue
            elif (known := unavailable_key(path, key)) is not None:
                self._refuse((*path, key), f" = {show(value)}: {known.reason}. {known.instead or 'Remove it.'}")
            else:
                having = [s for s in others if key in keys_of(s)]
                self._refuse((*path, key), _unknown_key(kind, having, (*path, key), missed))
                meant |= {canonical[name]: INVALID for name in close_names(key, keys_of(kind)) if name in canonical}
                # the type may be the mistake, so nothing is expected of what the other types do not have
                meant |= {name: INVALID for s in having for name in set(canonical.values()) - set(keys_of(s))}
        return meant

    def _value(self, option: Option, value: Any, path: Place) -> Any:
        if value is None and option.nullable:
            return None
        if value is INVALID:  # its mistake is already reported
            return INVALID
        if option.many:
            if isinstance(value, list):
                return [self._nested(option, v, (*path, n)) for n, v in enumerate(value)]
            return self._refuse(path, wrong_type(option, value))
        if option.named:
            if isinstance(value, dict):
                return {name: self._nested(option, v, (*path, name)) for name, v in value.items()}
            return self._refuse(path, wrong_type(option, value))
        if option.sections:
            return self._nested(option, value, path)
        text = _leaf_problem(option, value)
        return self._refuse(path, text) if text else value

    def _nested(self, option: Option, value: Any, path: Place) -> Any:
        kind = option.section_of(value)
        if kind is not None:
            return self.section(kind, option.sections, value, path)
        known, name = listed_types(option.sections), value.get("type")
        if "type" not in value:
            text = f": required, but missing. Expected one of {', '.join(known)}."
        elif (instead := unavailable_type(path, name)) is not None:
            text = f" = {show(name)}: {' '.join(filter(None, (f'{NOT_AVAILABLE}.', instead)))}"
            text += f" Available: {', '.join(known)}."
        elif option.registry is not None and str(name) in option.registry.faults:
            text = f" = {show(name)}: {option.registry.faults[str(name)]}"
        else:
            text = unknown_choice(name, known)
            if option.registry is not None and option.registry.group and "Did you mean" not in text:
                text += " A type of another package is known where that package is installed."
        return self._refuse((*path, "type"), text)  # the keys of an unknown type cannot be judged


def _leaf_problem(option: Option, value: Any) -> str:
    """Return the mistake in a plain value, or an empty string."""
    from dargs.dargs import ArgumentTypeError, ArgumentValueError

    if option.unavailable is not None and isinstance(value, str) and re.match(option.unavailable, value):
        return f" = {show(value)}: {NOT_AVAILABLE}. Use {wants(option)}."
    if option.removed and isinstance(value, str) and value in option.removed:
        return f" = {show(value)}: was removed. {option.removed[value]}"
    try:
        argument(option).check_value(value)
    except ArgumentTypeError:
        return wrong_type(option, value)
    except ArgumentValueError:
        return value_fault(option, value)
    return ""


def _misspelled(kind: type, raw: dict[Any, Any], path: Place) -> dict[str, str]:
    """Return unknown keys that look like a required key which is missing, with that key."""
    missing = [o for o in input_options(kind) if o.required and o.name not in raw]
    found: dict[str, str] = {}
    for key in raw:
        if isinstance(key, str) and key not in keys_of(kind) and not is_comment(key):
            close = next((o.name for o in missing if close_names(key, o.keys)), None)
            if close is not None and close not in found.values() and not unavailable_key(path, key):
                found[key] = close
    return found


def _unknown_key(kind: Any, having: Sequence[Any], path: Place, missed: dict[str, str]) -> str:
    """Return the message of a key that a section does not have; ``having`` are the other types that have it."""
    key = str(path[-1])
    if (each := _place_of_each_task(kind, path)) is not None:
        return f": unknown key here, in an input of several tasks. There it is {each}."
    if key in missed:
        return f": unknown key. Did you mean {missed[key]}, which is required and missing?"
    places = list(dict.fromkeys(_find(SingleTaskRun, key, "")))
    if having:
        names = " or ".join(s.type for s in having)
        places = [f"type {names}, and this one is of type {kind.type}"]
    elif len(places) not in (1, 2):  # a key of many sections is no hint
        lists = [o for o in input_options(kind) if o.many]
        places = [f"an entry of {o.name}" for o in lists if any(key in keys_of(s) for s in o.sections)]
    close = close_names(key, keys_of(kind))
    if places:
        mean = f" Or did you mean {' or '.join(close)}?" if close else ""
        return f": unknown key here. It belongs to {' or '.join(places)}.{mean}"
    mean = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(keys_of(kind))}."
    return f": unknown key. {mean}"


def _place_of_each_task(kind: Any, path: Place) -> str | None:
    """Return the place in an input of several tasks of the option at ``path`` in an input of one task."""
    key = str(path[-1])
    for o in (o for o in input_options(kind) if o.named):
        outer = dotted((*path[:-1], o.name))
        if o.name == f"{key}_dict":
            return f"{outer}.TASK"
        if any(key in keys_of(section) for section in o.sections):
            return f"{outer}.TASK.{key}"
    return None


def _find(kind: type, key: str, path: str) -> Iterator[str]:
    for o in input_options(kind):
        here = f"{path}.{o.name}" if path else o.name
        if key in o.keys:
            yield here
        if o.many:
            continue  # `name`, `device` are too common to be missed anywhere
        having = [s for s in o.sections if key in keys_of(s)]
        if len(having) < len(o.sections):
            yield from (f"{here}.{key} of type {getattr(s, 'type', '')}" for s in having)
        else:
            for s in o.sections:
                yield from _find(s, key, here)
