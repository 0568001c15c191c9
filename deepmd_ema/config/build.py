"""Section objects from checked values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from deepmd_ema.config.fields import Option, options

INVALID: Any = object()  # stands where an input has no value that can be used


class InvalidOptionError(Exception):
    """A rule has read an option that is wrong in itself, so the rule has nothing to say."""


def build(section: type, values: Mapping[str, Any], **more: Any) -> Any:
    """Return a section object.

    Args:
        section: its class.
        values: by canonical key; what is not there gets its default. Options that are ``INVALID`` raise
            ``InvalidOptionError`` when they are read.
        more: fields that are no options.
    """
    given = {o.name: _built(o, values[o.name]) for o in options(section) if o.name in values}
    invalid = [name for name, value in given.items() if value is INVALID]
    if not invalid:
        return section(**given, **more)
    usable = {o.name: o.default for o in options(section)} | given | more
    guards = {name: property(_refuse) for name in invalid}
    made: Any = object.__new__(type(section.__name__, (section,), guards))
    for name in usable.keys() - guards.keys():
        object.__setattr__(made, name, usable[name])  # sections are frozen
    return made


def _refuse(section: Any) -> NoReturn:
    raise InvalidOptionError


def _built(option: Option, value: Any) -> Any:
    if option.many and isinstance(value, list):
        return [_section(option, v) for v in value]
    if value is INVALID:
        return INVALID
    if option.sections and value is not None:
        return _section(option, value)
    value = _with_floats(option, value)
    return value if option.convert is None or value is None else option.convert(value)


def _section(option: Option, value: Any) -> Any:
    if value is INVALID:  # an entry of a list, of which nothing can be read
        return build(option.sections[0], {o.name: INVALID for o in options(option.sections[0])})
    section = option.section_of(value)
    assert section is not None, f"unchecked type {value.get('type')}"
    return build(section, value)


def _with_floats(option: Option, value: Any) -> Any:
    """Return whole numbers as floats where the declaration says float."""
    if float in option.types and int not in option.types and isinstance(value, int) and bool not in option.types:
        return float(value)
    if isinstance(value, list) and any("float" in str(t) for t in option.types):
        return [float(v) if isinstance(v, int) else v for v in value]
    return value
