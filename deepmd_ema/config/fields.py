"""Declaration of an option, once, on the field of a frozen dataclass.

It has type, default, unit, check and manual text; checks, messages, manual and schema follow.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from deepmd_ema.config.messages import NOT_AVAILABLE, Names, close_names, show
from deepmd_ema.config.registry import Registry
from deepmd_ema.utils import (  # noqa: F401
    Check,
    fraction,
    not_negative,
    not_negative_int,
    positive,
    positive_int,
)

WithoutEffect = Mapping[str, tuple[Any, str]]
"""Options of DeePMD-kit that do nothing here: the default there, and the reason.

A section accepts them and leaves them out; they are not among its options.
"""


T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # in typing since Python 3.11

    @dataclass_transform(frozen_default=True, kw_only_default=True)
    def section(kind: type[T]) -> type[T]:
        """Make a class of options a frozen dataclass whose arguments have names."""
        return kind

else:
    section = dataclass(frozen=True, kw_only=True)


@dataclass(frozen=True)
class Option:
    """The declaration of one option of a section.

    Attributes:
        name: canonical key.
        types: types of a plain value in the file, without None (``float`` also takes whole
            numbers).
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
        removed: values that an earlier version took, each with what to use instead; they are
            refused.
        unavailable: pattern of the beginning of texts that DeePMD-kit takes and dp-ema does not.
        registry: the types of a nested section that is open to more of them; replaces ``classes``.
        left_out: types of the registry that are not taken here.
        is_own: whether DeePMD-kit does not have it.
    """

    name: str
    types: tuple[Any, ...]
    classes: tuple[Any, ...]
    by_type: bool
    many: bool
    named: bool
    nullable: bool
    default: Any
    required: bool
    keys: Names
    alias: Names = ()
    unit: str = ""
    doc: str = ""
    check: Check | None = None
    choices: Names = ()
    default_type: str | None = None
    convert: Callable[[Any], Any] | None = None
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unavailable: str | None = None
    registry: Registry | None = None
    left_out: Names = ()
    is_own: bool = False

    @property
    def sections(self) -> tuple[Any, ...]:
        """The dataclasses of a nested section, which ``type`` chooses where they have one."""
        return (
            self.classes
            if self.registry is None
            else self.registry.sections(self.left_out)
        )

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
        texts = []
        for kind in self.types:
            # list[int | float] is "a list of whole numbers or numbers"
            inner = (
                members(typing.get_args(kind)[0])
                if typing.get_origin(kind) is list
                else ()
            )
            plurals = " or ".join(_PLURAL.get(p, "lists") for p in inner)
            texts.append(
                f"a list of {plurals}" if inner else _WORDS.get(kind, "a section {...}")
            )
        return " or ".join(texts)

    def explain(self, value: Any, has_type: bool = True) -> str:
        """Return the rest of the message about a value, or an empty string if it is right.

        Some values that Python takes for numbers are refused: true and false, infinity and nan,
        whole numbers that do not fit 64 bits. So are texts that no file can have as its name.

        Args:
            value: value in the input.
            has_type: whether the type is right, which dargs judges, so that the value is the
                mistake.
        """
        if value is None and self.nullable and has_type:
            return ""
        # Texts of DeePMD-kit or of an earlier version come first: they have a remedy of their own,
        # which a list of the choices would hide.
        text = value if isinstance(value, str) else ""
        if self.unavailable is not None and re.match(self.unavailable, text):
            return f" = {show(value)}: {NOT_AVAILABLE}. Use {self.wants}."
        if text in self.removed:
            return f" = {show(value)}: was removed. {self.removed[text]}"
        parts = [value]
        for part in parts:  # the list grows by the items of lists and sections
            if isinstance(part, list):
                parts += part
            elif isinstance(part, dict):
                parts += part.values()
        # bool is a subclass of int, so that dargs takes true for 1 wherever a number may be
        takes_bool = any(bool in (kind, *typing.get_args(kind)) for kind in self.types)
        if not has_type or (
            not takes_bool and any(isinstance(part, bool) for part in parts)
        ):
            return self.wrong_type(value)
        if any(isinstance(part, int) and abs(part) >= MAX_INTEGER for part in parts):
            return bad_value(
                value, f"a number of at most {len(str(MAX_INTEGER)) - 1} digits"
            )
        if any(isinstance(part, str) and _NO_NAME.search(part) for part in parts):
            return bad_value(
                value,
                "a text without the characters \\u0000 and \\ud800 to \\udfff, which no file name "
                "has",
            )
        # a check beside choices lets further texts pass, such as silut:3
        is_known = value in self.choices or (
            not self.choices if self.check is None else self.check.test(value)
        )
        if not is_known and self.choices:
            return unknown_choice(value, self.choices)
        if not is_known:
            return bad_value(value, self.wants)
        # last, because the check of an option has the better text where it refuses nan as well
        is_finite = all(
            math.isfinite(part) for part in parts if isinstance(part, float)
        )
        return "" if is_finite else bad_value(value, "a finite number")

    def wrong_type(self, value: Any) -> str:
        """Return the message of a value of the wrong type, with a guessed remedy."""
        scalars = {t for t in self.types if typing.get_origin(t) is None}
        hint = ""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.many and isinstance(value, dict):
            hint = "Put [ ] around the section."
        elif value is None:
            hint = "Remove the key to get the default."
        elif isinstance(value, str) and bool in scalars and value.lower() in _SWITCHES:
            hint = f"Write {_SWITCHES[value.lower()]}, without quotes."
        elif (
            isinstance(value, str)
            and scalars & {int, float}
            and _NUMBER.fullmatch(value)
        ):
            hint = "Write the number without quotes."
        elif is_number and bool in scalars and value in (0, 1):
            hint = f"Write {'true' if value else 'false'}."
        elif is_number and int in scalars and float(value).is_integer():
            hint = (
                f"{show(value)} is a number with a fraction part; write {int(value)}."
            )
        elif is_number and any(typing.get_origin(t) is list for t in self.types):
            hint = f"Write [{show(value)}]."
        return bad_value(value, self.wants, hint)


def option(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    check: Check | None = None,
    **about: Any,
) -> Any:
    """Declare one option of a section.

    A default that is a list or a dict is copied for each owner.

    Args:
        default: its value where the input does not give it; without a default it is required.
        doc: manual text.
        check: test of a value that has the right type.
        **about: other attributes of ``Option`` (alias, unit, choices, ...), and ``also``: types
            that the file may hold and that ``convert`` turns into the annotated one.
    """
    metadata = {"default": default, "doc": doc, "check": check, **about}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def redefined(section: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare an option as the class ``section`` has it, with another default or with the same."""
    declared = next(f.metadata for f in dataclasses.fields(section) if f.name == name)
    return option(
        **declared
        if default is dataclasses.MISSING
        else {**declared, "default": default}
    )


@cache
def options(section: type) -> tuple[Option, ...]:
    """Return the options of a section class: its ``first_options``, then the others as declared.

    Options of a base class are declared before those of the section, but may be less important.
    """
    hints = typing.get_type_hints(section)
    first = getattr(section, "first_options", ())
    # fields without metadata, such as the source of a run, are no options
    declared = {f.name: f for f in dataclasses.fields(section) if f.metadata}
    names = dict.fromkeys([*(name for name in first if name in declared), *declared])
    declarations = []
    for name in names:
        hint = hints[name]
        about = dict(declared[name].metadata)
        container = typing.get_origin(hint)
        is_open = "registry" in about
        # list[A | B] and dict[str, A | B] of sections are options with several sections; a list of
        # numbers or texts is one value
        inner = members(typing.get_args(hint)[-1]) if container in (list, dict) else ()
        several = bool(inner) and (is_open or any(map(dataclasses.is_dataclass, inner)))
        parts = inner if several else members(hint)
        # with a registry the annotation is a protocol or a base class: the registry has the classes
        kinds = [] if is_open else [part for part in parts if part is not type(None)]
        classes = tuple(filter(dataclasses.is_dataclass, kinds))
        # a text with parts, which `convert` makes, is a text in the file
        values = [
            str if isinstance(k, type) and issubclass(k, str) else k
            for k in kinds
            if k not in classes
        ]
        declarations.append(
            Option(
                name=name,
                types=(*values, *about.pop("also", ())),
                classes=classes,
                by_type=is_open or any(hasattr(kind, "type") for kind in classes),
                many=several and container is list,
                named=several and container is dict,
                nullable=type(None) in parts,
                required=about["default"] is dataclasses.MISSING,
                keys=(name, *about.get("alias", ())),
                **about,
            )
        )
    return tuple(declarations)


@cache
def input_options(section: type) -> tuple[Option, ...]:
    """Return the options that an input may give in a section, with those of its ``shorthand``.

    A shorthand is a class of options that are read in place of others, which
    ``deepmd_ema.config.upgrade`` writes in their place.
    """
    return options(section) + (
        options(section.shorthand) if hasattr(section, "shorthand") else ()
    )


def type_names(section: Any) -> list[str]:
    """Return the values of ``type`` that choose a section, aliases last."""
    return [section.type, *getattr(section, "aliases", ())]


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the hint itself."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def plain(value: Any, for_deepmd: bool = False) -> Any:
    """Return a section as plain dictionaries and lists that JSON can hold.

    ``type`` is the first key where there is one.

    Args:
        value: the section.
        for_deepmd: leaves out options that DeePMD-kit does not have, and those that are null, which
            it refuses.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {"type": value.type} if hasattr(value, "type") else {}
        for o in options(type(value)):
            inner = getattr(value, o.name)
            if not (for_deepmd and (o.is_own or inner is None)):
                values[o.name] = plain(inner, for_deepmd)
        return values
    if isinstance(value, list | tuple):
        return [plain(v, for_deepmd) for v in value]
    if isinstance(value, dict):
        return {k: plain(v, for_deepmd) for k, v in value.items()}
    # a text with parts is a plain text in a file: pickle would write its class, which
    # torch.load(weights_only=True) refuses in a checkpoint
    return str(value) if isinstance(value, str) else value


def bad_value(value: Any, expected: str, hint: str = "") -> str:
    """Return the rest of the message about a value in place of which another is ``expected``."""
    return f" = {show(value)}: expected {expected}." + (f" {hint}" if hint else "")


def unknown_choice(value: Any, choices: Sequence[str]) -> str:
    """Return the message of a value that is none of the ``choices``."""
    close = close_names(str(value), choices)
    mean = f" Did you mean {close[0]}?" if close else ""
    return f" = {show(value)}: unknown.{mean} Known: {', '.join(choices)}."


# Whole numbers below it fit 64 bits wherever they go: numpy and torch raise OverflowError from
# 2**63, about 9.2e18, on, long after the input was checked.
MAX_INTEGER = 10**18
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
_SWITCHES = {
    "true": "true",
    "yes": "true",
    "on": "true",
    "false": "false",
    "no": "false",
    "off": "false",
}
_NO_NAME = re.compile(
    "[\0\ud800-\udfff]"
)  # JSON can write them, files and terminals cannot
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a section {...}",
}
_PLURAL = {
    bool: "true or false",
    int: "whole numbers",
    float: "numbers",
    str: "texts",
    type(None): "null",
}

file_name = Check(
    lambda v: v.strip() != "" and not v.endswith("/"), "the name of a file"
)
