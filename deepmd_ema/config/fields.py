"""Declaration of an option, once: type, default, unit, check and manual text on the field of a frozen dataclass."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from deepmd_ema.config.registry import Registry, aliases_of
from deepmd_ema.utils import Check as Check
from deepmd_ema.utils import fraction as fraction
from deepmd_ema.utils import not_negative as not_negative
from deepmd_ema.utils import not_negative_int as not_negative_int
from deepmd_ema.utils import positive as positive
from deepmd_ema.utils import positive_int as positive_int


@dataclass(frozen=True)
class Option:
    """The declaration of one option of a section.

    Attributes:
        name: canonical key.
        types: types of a plain value in the file, without None (``float`` also takes whole numbers).
        classes: dataclasses of a nested section, as the annotation names them.
        many: whether the value is a list of such sections.
        named: whether the value is a mapping of such sections, by names that the user chooses.
        nullable: whether null is a value.
        default: default value, or ``dataclasses.MISSING`` for a required option.
        required: whether the key must be in the file.
        keys: the canonical key and its other spellings.
        alias: other spellings of the key.
        unit: unit of the value, or an empty string.
        doc: manual text.
        check: test of a value that has the right type.
        choices: the values of a text option; a ``check`` beside them lets other texts pass.
        default_type: the ``type`` taken when a nested section does not say one.
        convert: applied to a value that passed all checks.
        removed: values that an earlier version took, each with what to use instead; they are refused.
        unavailable: pattern of the beginning of texts that DeePMD-kit takes and dp-ema does not.
        registry: the types of a nested section that is open to more of them; replaces ``classes``.
        left_out: types of the registry that are not taken here.
        own: whether DeePMD-kit does not have it.
    """

    name: str
    types: tuple[Any, ...]
    classes: tuple[type, ...]
    many: bool
    named: bool
    nullable: bool
    default: Any
    required: bool
    keys: tuple[str, ...]
    alias: tuple[str, ...] = ()
    unit: str = ""
    doc: str = ""
    check: Check | None = None
    choices: tuple[str, ...] = ()
    default_type: str | None = None
    convert: Callable[[Any], Any] | None = None
    removed: Mapping[str, str] | None = None
    unavailable: str | None = None
    registry: Registry | None = None
    left_out: tuple[str, ...] = ()
    own: bool = False

    @property
    def sections(self) -> tuple[type, ...]:
        """The dataclasses of a nested section; those with a ``type`` are chosen by the key ``type``."""
        return self.classes if self.registry is None else self.registry.sections(self.left_out)

    @property
    def by_type(self) -> bool:
        """Whether the nested section is one of several, distinguished by the key ``type``."""
        return bool(self.sections) and hasattr(self.sections[0], "type")

    def section_of(self, value: Any) -> type | None:
        """Return the section that a value chooses by its key ``type``, or None if it has an unknown one."""
        if not self.by_type or not isinstance(value, dict):
            return self.sections[0]
        name = value.get("type", self.default_type)
        return next((s for s in self.sections if name in type_names([s])), None)


def option(default: Any = dataclasses.MISSING, *, doc: str, **about: Any) -> Any:
    """Declare one option of a section; ``about`` are the attributes of ``Option``: alias, unit, choices, ...

    ``also`` names types that the file may hold and that ``convert`` turns into the annotated one. A default that is a
    list, a dict or a section is copied for each owner.
    """
    metadata = {"doc": doc, **about}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def redefined(section: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare an option as the class ``section`` has it, with another default or with the same."""
    declared = next(f for f in dataclasses.fields(section) if f.name == name)
    if default is not dataclasses.MISSING:
        return option(default, **declared.metadata)
    if declared.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=declared.default_factory, metadata=declared.metadata)
    return dataclasses.field(default=declared.default, metadata=declared.metadata)


@cache
def options(section: type) -> tuple[Option, ...]:
    """Return the options of a section class: its ``first_options``, the others in the order of their declaration.

    Options of a base class are declared before those of the section, but may be less important.
    """
    hints, first = typing.get_type_hints(section), getattr(section, "first_options", ())
    declared = {f.name: f for f in dataclasses.fields(section) if f.metadata}
    names = dict.fromkeys([*(name for name in first if name in declared), *declared])
    return tuple(_read_option(declared[name], hints[name]) for name in names)


@cache
def input_options(section: type) -> tuple[Option, ...]:
    """Return the options that an input may give in a section: its own, and those of its ``shorthand``, if any.

    A shorthand is a class of options that stand for other ones; ``deepmd_ema.config.upgrade`` replaces them.
    """
    return options(section) + (options(section.shorthand) if hasattr(section, "shorthand") else ())


def keys_of(section: type) -> tuple[str, ...]:
    """Return every key that a section accepts: canonical names and aliases, and ``type`` where there is a choice."""
    first = ("type",) if hasattr(section, "type") else ()
    return first + tuple(key for o in input_options(section) for key in o.keys)


def is_comment(key: Any) -> bool:
    """Whether a key is not an option: it begins with ``_``, or names the JSON Schema for an editor."""
    return isinstance(key, str) and (key.startswith("_") or key == "$schema")


def type_names(sections: Iterable[Any]) -> list[str]:
    """Return the values of ``type`` that choose one of ``sections``, aliases last."""
    chosen: list[Any] = list(sections)
    return [s.type for s in chosen] + [a for s in chosen for a in aliases_of(s)]


def listed_types(sections: Iterable[Any]) -> list[str]:
    """Return the values of ``type`` to choose from; those that are read for another program's sake are not listed."""
    return [section.type for section in sections]


def wants(option: Option) -> str:
    """Return text about the values of an option: ``a number > 0``, ``one of tanh, relu``."""
    if option.many:
        return "a list of sections [{...}, {...}]"
    if option.named:
        return 'sections by name {"a": {...}, "b": {...}}'
    if option.choices:
        return "one of " + ", ".join(option.choices)
    return option.check.wants if option.check is not None else " or ".join(_type_words(t) for t in option.types)


def _read_option(field: dataclasses.Field[Any], hint: Any) -> Option:
    container = typing.get_origin(hint)
    inner = members(typing.get_args(hint)[-1]) if container in (list, dict) else ()
    default, about = field.default, dict(field.metadata)
    several = bool(inner) and ("registry" in about or any(dataclasses.is_dataclass(p) for p in inner))
    parts = inner if several else members(hint)
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if "registry" in about:  # its annotation is a protocol
        parts = tuple(p for p in parts if p is type(None))
    plain_parts = (p for p in parts if p is not type(None) and not dataclasses.is_dataclass(p))
    return Option(
        name=field.name,
        types=(
            # a text with parts, which `convert` makes, is a text in the file
            *(str if isinstance(p, type) and issubclass(p, str) else p for p in plain_parts),
            *about.pop("also", ()),
        ),
        classes=tuple(p for p in parts if isinstance(p, type) and dataclasses.is_dataclass(p)),
        many=several and container is list,
        named=several and container is dict,
        nullable=type(None) in parts,
        default=default,
        required=default is dataclasses.MISSING,
        keys=(field.name, *about.get("alias", ())),
        **about,
    )


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the hint itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def plain(value: Any, for_deepmd: bool = False) -> Any:
    """Return a section as plain dictionaries and lists that JSON can hold, with ``type`` first where there is one.

    Args:
        value: the section.
        for_deepmd: leaves out options that DeePMD-kit does not have, and those that are null, which it refuses.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        head = {"type": value.type} if hasattr(value, "type") else {}
        found = [(o, getattr(value, o.name)) for o in options(type(value))]
        if for_deepmd:
            found = [(o, inner) for o, inner in found if not o.own and inner is not None]
        return head | {o.name: plain(inner, for_deepmd) for o, inner in found}
    if isinstance(value, list | tuple):
        return [plain(v, for_deepmd) for v in value]
    if isinstance(value, dict):
        return {k: plain(v, for_deepmd) for k, v in value.items()}
    return str(value) if isinstance(value, str) else value  # a text with parts is a text in a file


def _type_words(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        inner = typing.get_args(kind)[0]
        return "a list of " + " or ".join(_PLURAL.get(p, "lists") for p in members(inner))
    return _WORDS.get(kind, "a section {...}")


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a section {...}"}
_PLURAL = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts", type(None): "null"}

file_name = Check(lambda v: v.strip() != "" and not v.endswith("/"), "the name of a file")
