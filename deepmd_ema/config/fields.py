"""Declaration of an option, once: type, default, unit, check and manual text on the field of a frozen dataclass."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from deepmd_ema.config.messages import NOT_AVAILABLE, close_names, show
from deepmd_ema.config.registry import Registry
from deepmd_ema.utils import Check as Check
from deepmd_ema.utils import fraction as fraction
from deepmd_ema.utils import not_negative as not_negative
from deepmd_ema.utils import not_negative_int as not_negative_int
from deepmd_ema.utils import positive as positive
from deepmd_ema.utils import positive_int as positive_int

WithoutEffect = Mapping[str, tuple[Any, str]]
"""Options of DeePMD-kit that do nothing here, no options of a section: its default there, and why."""


@dataclass(frozen=True)
class Option:
    """The declaration of one option of a section.

    Attributes:
        name: canonical key.
        types: types of a plain value in the file, without None (``float`` also takes whole numbers).
        classes: dataclasses of a nested section, as the annotation names them.
        by_type: whether the nested section is one of several, distinguished by the key ``type``.
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
    by_type: bool
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
    def sections(self) -> tuple[Any, ...]:
        """The dataclasses of a nested section; those with a ``type`` are chosen by the key ``type``."""
        return self.classes if self.registry is None else self.registry.sections(self.left_out)

    @property
    def wants(self) -> str:
        """Text about the values: ``a number > 0``, ``one of tanh, relu``."""
        if self.many:
            return "a list of sections [{...}, {...}]"
        if self.named:
            return 'sections by name {"a": {...}, "b": {...}}'
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.check is not None:
            return self.check.wants
        words = []
        for kind in self.types:
            inner = members(typing.get_args(kind)[0]) if typing.get_origin(kind) is list else ()
            plurals = " or ".join(_PLURAL.get(p, "lists") for p in inner)
            words.append(f"a list of {plurals}" if inner else _WORDS.get(kind, "a section {...}"))
        return " or ".join(words)

    def accepts(self, value: Any) -> bool:
        """Whether a value of the right type is one of the option: the additional check of dargs.

        Refused are also what Python takes for a number: true and false, infinity and nan, whole numbers that do not
        fit 64 bits; and texts that no file can have as its name.
        """
        if value is None and self.nullable:
            return True
        return not self._unusable_part(value) and self._is_known(value)

    def explain(self, value: Any, has_type: bool) -> str:
        """Return the rest of the message about a value that dargs has refused.

        Args:
            value: what the input has.
            has_type: whether the type is right, so that the value is the mistake.
        """
        if reason := self._absence(value):
            return f" = {show(value)}: {reason}"
        if not has_type:
            return self.wrong_type(value)
        expected = self._unusable_part(value)
        if expected == _NO_BOOLEAN:
            return self.wrong_type(value)
        if expected and (expected != _FINITE or self._is_known(value)):
            return bad_value(value, expected)
        if self.choices:
            return unknown_choice(value, self.choices)
        return bad_value(value, self.wants)

    def _absence(self, value: Any) -> str:
        """Return why a text of DeePMD-kit or of an earlier version is not here, or an empty string."""
        if not isinstance(value, str):
            return ""
        if self.unavailable is not None and re.match(self.unavailable, value):
            return f"{NOT_AVAILABLE}. Use {self.wants}."
        if self.removed and value in self.removed:
            return f"was removed. {self.removed[value]}"
        return ""

    def _is_known(self, value: Any) -> bool:
        if self._absence(value):
            return False
        if value in self.choices:
            return True
        return not self.choices if self.check is None else self.check.test(value)

    def _unusable_part(self, value: Any) -> str:
        """Return the expected kind of a part of a value that no option takes, or an empty string."""
        parts = list(_leaves(value)) if isinstance(value, list | dict) else [value]
        takes_bool = any(bool in (kind, *typing.get_args(kind)) for kind in self.types)
        if not takes_bool and any(isinstance(part, bool) for part in parts):
            return _NO_BOOLEAN
        if any(isinstance(part, int) and abs(part) >= MAX_INTEGER for part in parts):
            return f"a number of at most {len(str(MAX_INTEGER)) - 1} digits"
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            return _FINITE
        if any(isinstance(part, str) and _NO_NAME.search(part) for part in parts):
            return "a text without the characters \\u0000 and \\ud800 to \\udfff, which no file name has"
        return ""

    def wrong_type(self, value: Any) -> str:
        """Return the message of a value of the wrong type, with the way to mend it when it can be guessed."""
        scalars, hint = {t for t in self.types if typing.get_origin(t) is None}, ""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.many and isinstance(value, dict):
            hint = "Put [ ] around the section."
        elif value is None:
            hint = "Remove the key to get the default."
        elif isinstance(value, str) and bool in scalars and value.lower() in _SWITCHES:
            hint = f"Write {_SWITCHES[value.lower()]}, without quotes."
        elif isinstance(value, str) and scalars & {int, float} and _NUMBER.fullmatch(value):
            hint = "Write the number without quotes."
        elif is_number and bool in scalars and value in (0, 1):
            hint = f"Write {'true' if value else 'false'}."
        elif is_number and int in scalars and float(value).is_integer():
            hint = f"{show(value)} is a number with a fraction part; write {int(value)}."
        elif is_number and any(typing.get_origin(t) is list for t in self.types):
            hint = f"Write [{show(value)}]."
        return bad_value(value, self.wants, hint)


def option(default: Any = dataclasses.MISSING, *, doc: str, **about: Any) -> Any:
    """Declare one option of a section; ``about`` are the attributes of ``Option``: alias, unit, choices, ...

    ``also`` names types that the file may hold and that ``convert`` turns into the annotated one. A default that is a
    list or a dict is copied for each owner.
    """
    metadata = {"default": default, "doc": doc, **about}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def redefined(section: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare an option as the class ``section`` has it, with another default or with the same."""
    declared = next(f.metadata for f in dataclasses.fields(section) if f.name == name)
    return option(**declared if default is dataclasses.MISSING else {**declared, "default": default})


@cache
def options(section: type) -> tuple[Option, ...]:
    """Return the options of a section class: its ``first_options``, the others in the order of their declaration.

    Options of a base class are declared before those of the section, but may be less important.
    """
    hints, first = typing.get_type_hints(section), getattr(section, "first_options", ())
    declared = {f.name: f for f in dataclasses.fields(section) if f.metadata}
    names = dict.fromkeys([*(name for name in first if name in declared), *declared])
    found = []
    for name in names:
        hint, about = hints[name], dict(declared[name].metadata)
        container = typing.get_origin(hint)
        inner = members(typing.get_args(hint)[-1]) if container in (list, dict) else ()
        several = bool(inner) and ("registry" in about or any(dataclasses.is_dataclass(p) for p in inner))
        parts = inner if several else members(hint)
        classes = tuple(p for p in parts if isinstance(p, type) and dataclasses.is_dataclass(p))
        if "registry" in about:  # its annotation is a protocol
            classes, parts = (), tuple(part for part in parts if part is type(None))
        kinds = (part for part in parts if part is not type(None) and part not in classes)
        found.append(
            Option(
                name=name,
                types=(
                    # a text with parts, which `convert` makes, is a text in the file
                    *(str if isinstance(kind, type) and issubclass(kind, str) else kind for kind in kinds),
                    *about.pop("also", ()),
                ),
                classes=classes,
                by_type="registry" in about or any(hasattr(kind, "type") for kind in classes),
                many=several and container is list,
                named=several and container is dict,
                nullable=type(None) in parts,
                required=about["default"] is dataclasses.MISSING,
                keys=(name, *about.get("alias", ())),
                **about,
            )
        )
    return tuple(found)


@cache
def input_options(section: type) -> tuple[Option, ...]:
    """Return the options that an input may give in a section: its own, and those of its ``shorthand``, if any.

    A shorthand is a class of options that stand for other ones; ``deepmd_ema.config.upgrade`` replaces them.
    """
    return options(section) + (options(section.shorthand) if hasattr(section, "shorthand") else ())


def type_names(sections: Sequence[Any]) -> list[str]:
    """Return the values of ``type`` that choose one of ``sections``, aliases last."""
    return [s.type for s in sections] + [a for s in sections for a in getattr(s, "aliases", ())]


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


def bad_value(value: Any, expected: str, hint: str = "") -> str:
    """Return the rest of the message about a value of which another one was ``expected``."""
    return f" = {show(value)}: expected {expected}." + (f" {hint}" if hint else "")


def unknown_choice(value: Any, known: Sequence[str]) -> str:
    """Return the message of a value that is none of the ``known`` ones."""
    close = close_names(str(value), known)
    mean = f" Did you mean {close[0]}?" if close else ""
    return f" = {show(value)}: unknown.{mean} Known: {', '.join(known)}."


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values of nested lists and dictionaries."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield value
    for item in inner or ():
        yield from _leaves(item)


_NO_BOOLEAN = "no boolean"
_FINITE = "a finite number"
MAX_INTEGER = 10**18  # whole numbers fit 64 bits wherever they go
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
_SWITCHES = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_NO_NAME = re.compile("[\0\ud800-\udfff]")  # JSON can write them, files and terminals cannot
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a section {...}"}
_PLURAL = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts", type(None): "null"}

file_name = Check(lambda v: v.strip() != "" and not v.endswith("/"), "the name of a file")
