"""The input as dargs arguments: the gate that every config passes, and the declaration for other tools."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import Option, input_options, plain, wants
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import FITTINGS
from deepmd_ema.config.schema.run import MultiTaskRun, SingleTaskRun

if TYPE_CHECKING:
    from dargs import Argument

_NO_NAME = re.compile("[\0\ud800-\udfff]")  # JSON can write them, files and terminals cannot
MAX_INTEGER = 10**18  # whole numbers fit 64 bits wherever they go


def run_arguments(multi_task: bool = False) -> Argument:
    """Return the declaration of a whole input as a ``dargs.Argument``.

    It is what dp-ema itself checks an input with, and what other tools (editors, input generators, documentation) can
    use: ``run_arguments().normalize_value(values, trim_pattern="_*")`` fills in defaults and replaces aliases,
    ``run_arguments().check_value(values, strict=True)`` refuses what is wrong. Not in it: rules between options, the
    places of options in inputs of older versions, and options of DeePMD-kit that have no effect here.

    Args:
        multi_task: whether it is that of an input of several tasks, in which the names of shared parts are replaced by
            the parts.
    """
    return _run_arguments(multi_task, DESCRIPTORS.sections() + FITTINGS.sections())


@cache
def _run_arguments(multi_task: bool, registered: tuple[type, ...]) -> Argument:
    """Return the declaration for the ``registered`` sections; registries may grow between calls."""
    from dargs import Argument  # a third of the time that `--help` may take

    section = MultiTaskRun if multi_task else SingleTaskRun
    return Argument("input", dict, arguments(section), doc=section.__doc__ or "")


def arguments(section: type) -> tuple[Argument, ...]:
    """Return the declarations of the options of a section, nested sections included."""
    return tuple(argument(o) for o in input_options(section))


def refusal(declared: Argument, values: Any) -> str:
    """Return the first mistake that dargs finds in the values of a section, or an empty string.

    Args:
        declared: the section.
        values: under canonical keys, without comments. What is not given is not checked: defaults are those of the
            sections.
    """
    from dargs.dargs import ArgumentError

    try:
        declared.check_value(values, strict=True)
    except (ArgumentError, TypeError) as error:  # TypeError: a key that is no text, of which it seeks similar ones
        return str(error)
    return ""


def is_right_value(option: Option, value: Any) -> bool:
    """Whether a value of the right type is one that the option takes: the ``extra_check`` of its argument.

    Beside the check of the declaration this refuses what dargs, like Python, would take for a number: true and false,
    infinity and nan, whole numbers that do not fit 64 bits; and texts that no file can have as its name.
    """
    if value is None:
        return True
    if has_stray_bool(option, value) or not all(map(is_bounded, leaves(value))):
        return False
    if not option.choices and option.check is None:
        return True
    return value in option.choices or (option.check is not None and option.check.test(value))


def has_stray_bool(option: Option, value: Any) -> bool:
    """Whether true or false is given for a number, which Python would take for 1 and 0."""
    allowed = any(bool in (t, *typing.get_args(t)) for t in option.types)
    return not allowed and any(isinstance(v, bool) for v in leaves(value))


def is_bounded(leaf: Any) -> bool:
    """Whether a leaf is a finite number, with at most 18 digits if it is whole, or a text that can name a file."""
    if isinstance(leaf, float):
        return math.isfinite(leaf)
    if isinstance(leaf, str):
        return _NO_NAME.search(leaf) is None
    return not isinstance(leaf, int) or abs(leaf) < MAX_INTEGER


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values of nested lists and dictionaries."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield value
    for item in inner or ():
        yield from leaves(item)


def argument(option: Option) -> Argument:
    """Return the declaration of one option, nested sections included."""
    from dargs import Argument, Variant

    extra: dict[str, Any] = {} if option.required else {"default": plain(option.default)}
    null = [type(None)] if option.nullable else []
    common: dict[str, Any] = {"optional": not option.required, "alias": list(option.alias), "doc": option.doc, **extra}
    if not option.sections:
        common |= {"extra_check": partial(is_right_value, option), "extra_check_errmsg": wants(option)}
        return Argument(option.name, [*option.types, *null], **common)
    common |= {"dtype": [list if option.many else dict, *null], "repeat": option.many or option.named}
    if not option.by_type:
        return Argument(option.name, sub_fields=arguments(option.sections[0]), **common)
    kinds: tuple[Any, ...] = option.sections
    choices = [
        Argument(s.type, dict, arguments(s), alias=getattr(s, "aliases", ()), doc=s.__doc__ or "") for s in kinds
    ]
    tag = option.default_type or ""
    flag = Variant("type", choices, optional=bool(tag), default_tag=tag)
    return Argument(option.name, sub_variants=[flag], **common)
