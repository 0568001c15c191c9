"""The input as dargs arguments: the gate that every config passes, and the declaration for other tools."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import Option, input_options, plain, wants
from deepmd_ema.config.messages import close_names, show
from deepmd_ema.config.schema.averaging import AVERAGES
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.loggers import LOGGERS
from deepmd_ema.config.schema.model import FITTINGS
from deepmd_ema.config.schema.run import MultiTaskRun, SingleTaskRun

if TYPE_CHECKING:
    from dargs import Argument

_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
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
    return _run_arguments(multi_task, tuple(chain(*(r.sections() for r in (DESCRIPTORS, FITTINGS, AVERAGES, LOGGERS)))))


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


def value_fault(option: Option, value: Any) -> str:
    """Return the rest of the message about a value that the option does not take, or an empty string.

    The type of the value is checked by dargs before. Beside the check of the declaration this refuses what dargs, like
    Python, would take for a number: true and false, infinity and nan, whole numbers that do not fit 64 bits; and texts
    that no file can have as its name.
    """
    if value is None:
        return ""
    if any(isinstance(v, int) and abs(v) >= MAX_INTEGER for v in leaves(value)):
        return bad_value(value, f"a number of at most {len(str(MAX_INTEGER)) - 1} digits")
    if any(isinstance(v, str) and _NO_NAME.search(v) for v in leaves(value)):
        return bad_value(value, "a text without the characters \\u0000 and \\ud800 to \\udfff, which no file name has")
    takes_bool = any(bool in (t, *typing.get_args(t)) for t in option.types)
    if not takes_bool and any(isinstance(v, bool) for v in leaves(value)):  # Python takes them for 1 and 0
        return wrong_type(option, value)
    is_finite = not any(isinstance(v, float) and not math.isfinite(v) for v in leaves(value))
    if option.choices and value not in option.choices and (option.check is None or not option.check.test(value)):
        return unknown_choice(value, option.choices)
    if not option.choices and option.check is not None and not option.check.test(value):
        return bad_value(value, wants(option))
    return "" if is_finite else bad_value(value, "a finite number")


def bad_value(value: Any, expected: str, hint: str = "") -> str:
    """Return the rest of the message about a value of which another one was ``expected``."""
    return f" = {show(value)}: expected {expected}." + (f" {hint}" if hint else "")


def wrong_type(option: Option, value: Any) -> str:
    """Return the message of a value of the wrong type, with the way to mend it when it can be guessed."""
    return bad_value(value, wants(option), _type_hint(option, value))


def unknown_choice(value: Any, known: Sequence[str]) -> str:
    """Return the message of a value that is none of the ``known`` ones."""
    close = close_names(str(value), known)
    mean = f" Did you mean {close[0]}?" if close else ""
    return f" = {show(value)}: unknown.{mean} Known: {', '.join(known)}."


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
        common |= {"extra_check": lambda value: not value_fault(option, value), "extra_check_errmsg": wants(option)}
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


def _type_hint(option: Option, value: Any) -> str:
    plain = {t for t in option.types if typing.get_origin(t) is None}
    if option.many and isinstance(value, dict):
        return "Put [ ] around the section."
    if value is None:
        return "Remove the key to get the default."
    if isinstance(value, str) and bool in plain and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return f"Write {'true' if value.lower() in ('true', 'yes', 'on') else 'false'}, without quotes."
    if isinstance(value, str) and plain & {int, float} and _NUMBER.fullmatch(value):
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
