"""The manual of all options as text, a JSON Schema for editors, and arguments of dargs, from the declarations."""

from __future__ import annotations

import json
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import Option, input_options, members, plain, type_names
from deepmd_ema.config.messages import close_names, show
from deepmd_ema.config.schema.run import ModelsConfig, MultiTaskRun, SingleTaskRun
from deepmd_ema.config.schema.training import MultiTaskTrainingConfig, TrainingConfig
from deepmd_ema.config.upgrade import PARTS
from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from dargs import Argument

_WIDTH, _INDENT, _MAX_SIMILAR = 100, "    ", 6
_INTRO = """\
Options of dp-ema: one JSON or YAML file with the sections model, learning_rate, optimizer, loss, training and
validating. Keys that begin with "_" are comments. A whole number may stand for a number, not the reverse. What
DeePMD-kit 3.2.0 reads for these features is read here, with its other spellings and defaults.
"""
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", type(None): "null"}
_COMMENTS = {"^_": {"description": "a comment"}}


@dataclass(frozen=True)
class Entry:
    """One option in the manual, or one type of a section; ``path`` holds the type where there is a choice.

    An option that several types declare alike is listed once, without a type; ``types`` are these, if not all.
    """

    path: str
    option: Option | None
    doc: str
    types: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the option."""
        return ("type",) * self.path.endswith(".type") if self.option is None else self.option.keys

    @property
    def plain_path(self) -> str:
        """The path as an input has it."""
        return re.sub(r"\[[^]]*\]", "", self.path)

    @property
    def facts(self) -> str:
        """Values, unit, default, other spellings and types of the option, as text; empty for a type of a section."""
        o = self.option
        if o is None:
            return ""
        kind = o.wants + " or null" * o.nullable
        if o.sections:
            kind = "sections by name" if o.named else "list of sections" if o.many else "section"
            kind += f"; type is {' or '.join(s.type for s in o.sections)}" if o.by_type else ""
            kind += f" ({o.default_type} if not given)" if o.many and o.default_type else ""
        default = show(o.default)
        if o.sections and o.default is not None and not (o.many or o.named):
            default = f"type {o.default_type}" if o.by_type else "all defaults"
        default = "required" if o.required else f"default {default}"
        aliases = f"also spelled {', '.join(o.alias)}" if o.alias else ""
        types = f"of {', '.join(self.types)}" if self.types else ""
        return "; ".join(filter(None, [kind, o.unit, default, aliases, types]))


def manual(topic: str | None = None) -> str:
    """Return the manual of all options, or of those under the dotted path ``topic``, or with that word in their name.

    Raises:
        ConfigError: if there is no such option; the message names those that look like it.
    """
    entries = manual_entries()
    topic = re.sub(r"\[\d+\]", "", topic or "")  # as messages name the entries of a list
    inside = (f"{topic}.", f"{topic}[")
    chosen = (
        [e for e in entries if not topic or any(f"{path}.".startswith(inside) for path in (e.path, e.plain_path))]
        or [entry for entry in entries if topic in entry.keys]
        # `ema` finds ema_decay, enable_ema, ...
        or [entry for entry in entries if any(topic in key.split("_") for key in entry.keys)]
    )
    if not chosen:  # paths of options that look like the topic: by its last name, one word of it, or in all
        paths: dict[str, str] = {}
        for key, path in ((key, entry.plain_path) for entry in entries for key in entry.keys):
            paths.setdefault(key, path)  # of sections in sections, the outermost
        last = topic.split(".")[-1]
        close = [entry.plain_path for entry in entries if last in entry.keys]
        close = close or [path for key, path in paths.items() if last in key.split("_")]
        close = close or get_close_matches(topic, [entry.plain_path for entry in entries], 3, cutoff=0.75)
        close = close or [paths[key] for key in close_names(last, list(paths))]
        shown = list(dict.fromkeys(close))[:_MAX_SIMILAR] or ["model", "training", "or no name at all"]
        raise ConfigError(f"doc {topic}: no such option. Try {', '.join(shown)}.")
    texts = [] if topic else [_INTRO.rstrip("\n")]
    for entry in chosen:
        paragraphs = (text for text in (entry.facts, entry.doc) if text)
        filled = (textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) for text in paragraphs)
        texts.append("\n".join([entry.path, *filled]))
    return "\n\n".join(texts)


def manual_entries() -> list[Entry]:
    """Return all options, and the types of sections, in the order of the manual."""
    entries = list(_entries((SingleTaskRun,), "", ()))
    # options that only an input of several tasks has; sections by task are those of an input of one task
    for place, section, of_one_task in (
        ("model.", ModelsConfig, SingleTaskRun),
        ("training.", MultiTaskTrainingConfig, TrainingConfig),
        ("", MultiTaskRun, SingleTaskRun),
    ):
        known = {o.name for o in input_options(of_one_task)}
        entries += [Entry(f"{place}{o.name}", o, o.doc) for o in input_options(section) if o.name not in known]
    return entries


def json_schema_text() -> str:
    """Return the JSON Schema as the text of a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False)


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft-07, which editors read) of the input, with aliases and comments."""
    # in an input of several tasks parts of models may be names, and keys may hold for all
    of_tasks = _section_schema(MultiTaskRun, top=True)
    models: dict[str, Any] = of_tasks["properties"]["model"]
    kinds: list[dict[str, Any]] = models["properties"]["model_dict"]["additionalProperties"]["oneOf"]
    of_all: dict[str, Any] = {}
    for kind in kinds:
        own = kind["properties"]
        own |= {part: {"anyOf": [{"type": "string"}, own[part]]} for part in PARTS if part in own}
        del kind["allOf"]  # what all models need may stand beside model_dict
        of_all = {**own, **of_all}
    of_all["type"] = {"enum": [name for kind in kinds for name in kind["properties"]["type"]["enum"]]}
    models["properties"] = {**of_all, **models["properties"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "input of dp-ema",
        "type": "object",
        "anyOf": [_section_schema(SingleTaskRun, top=True), of_tasks],
    }


# ---- manual


def _option_entries(option: Option, here: str, listed: tuple[Any, ...]) -> Iterator[Entry]:
    """Yield an option and those of its sections, unless it or the sections are already ``listed``."""
    yield Entry(here, option, option.doc)
    if option.by_type:
        names, known = type_names(option.sections), [s.type for s in option.sections]
        others = ", ".join(name for name in names if name not in known)
        read = f" DeePMD-kit's {others} is read as well." if others else ""
        default = f"{option.default_type} if not given" if option.default_type else "required"
        yield Entry(f"{here}.type", None, f"one of {', '.join(known)}; {default}.{read}")
    if option not in listed and not all(section in listed for section in option.sections):
        yield from _entries(option.sections, here, listed)


def _entries(sections: tuple[Any, ...], path: str, listed: tuple[Any, ...]) -> Iterator[Entry]:
    """Yield the options that sections declare alike, then each type with its own; the usual one has plain paths."""
    listed = (*listed, *sections)
    declared: dict[str, list[Option]] = {}
    for o in (o for s in sections for o in input_options(s)):
        declared.setdefault(o.name, []).append(o)
    shared = [same[0] for same in declared.values() if len(same) > 1 and all(o == same[0] for o in same)]
    for o in shared:
        having = tuple(s.type for s in sections if o in input_options(s))
        first, *inner = _option_entries(o, f"{path}.{o.name}", listed)
        yield replace(first, types=having if len(having) < len(sections) else ())
        yield from inner
    for s in sections:
        is_usual = len(sections) == 1 or getattr(s, "is_usual", False)
        there = path if is_usual else f"{path}[{s.type}]"
        if not is_usual:
            yield Entry(there, None, _class_doc(s))
        for o in input_options(s):
            if o not in shared:
                yield from _option_entries(o, f"{there}.{o.name}".lstrip("."), listed)
        listed = (*listed, *input_options(s), *(inner for o in input_options(s) for inner in o.sections))


def _class_doc(section: type) -> str:
    return " ".join((section.__doc__ or "").partition("Attributes:")[0].split())


# ---- JSON Schema


def _section_schema(section: type, *, top: bool = False) -> dict[str, Any]:
    properties: dict[str, Any] = {"$schema": {"type": "string"}} if top else {}
    if hasattr(section, "type"):
        properties["type"] = {"enum": type_names([section])}
    needed = []
    for o in input_options(section):
        null = [{"type": "null"}] if o.nullable else []
        if o.sections:
            choices = []
            for kind in o.sections:  # editors offer the keys of the type that is given
                is_default = not o.by_type or o.default_type in type_names([kind])
                choices.append(_section_schema(kind) | ({} if is_default else {"required": ["type"]}))
            schema = _one_of("oneOf", choices)
            schema = {"type": "array", "items": schema} if o.many else schema
            schema = {"type": "object", "additionalProperties": schema} if o.named else schema
            schema = _one_of("anyOf", [schema, *null])
        elif o.choices and o.check is None:
            schema = {"enum": [*o.choices, *([None] if o.nullable else [])]}
        else:
            schema = _one_of("anyOf", [*map(_type_schema, o.types), *null])
        schema = {**schema, "description": o.doc + f" Unit: {o.unit}." * bool(o.unit)}
        schema |= {} if o.required else {"default": plain(o.default)}
        for key in o.keys:
            properties[key] = schema if key == o.name else {**schema, "description": f"The same as `{o.name}`."}
        if o.required:
            needed.append(_one_of("anyOf", [{"required": [key]} for key in o.keys]))
    out: dict[str, Any] = {"type": "object", "description": _class_doc(section), "properties": properties}
    out |= {"patternProperties": _COMMENTS, "additionalProperties": False}
    return out | ({"allOf": needed} if needed else {})


def _one_of(word: str, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {word: schemas}


def _type_schema(kind: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inner[1])}
    if len(members(kind)) > 1:
        return {"anyOf": [_type_schema(k) for k in members(kind)]}
    return {} if kind is Any else {"type": _SCALARS[kind]}


# ---- dargs


def run_arguments(multi_task: bool = False) -> Argument:
    """Return the declaration of a whole input as a ``dargs.Argument``, for editors and generators of inputs.

    ``run_arguments().normalize_value(values, trim_pattern="_*")`` fills in defaults and replaces aliases,
    ``run_arguments().check_value(values, strict=True)`` refuses what is wrong. Not in it: rules between options, the
    places of options in inputs of older versions, and options of DeePMD-kit that have no effect here.

    Args:
        multi_task: whether it is that of an input of several tasks, in which the names of shared parts are replaced by
            the parts.
    """
    from dargs import Argument  # a third of the time that `--help` may take

    section = MultiTaskRun if multi_task else SingleTaskRun
    return Argument("input", dict, _arguments(section), doc=section.__doc__ or "")


def _arguments(section: type) -> tuple[Argument, ...]:
    """Return the declarations of the options of a section, nested sections included."""
    from dargs import Argument, Variant

    declared = []
    for o in input_options(section):
        dtype = [list if o.many else dict] if o.sections else list(o.types)
        about: dict[str, Any] = {"optional": not o.required, "alias": list(o.alias), "doc": o.doc}
        about |= {} if o.required else {"default": plain(o.default)}
        about |= {"repeat": o.many or o.named} if o.sections else {}
        if o.by_type:
            choices = [
                Argument(s.type, dict, _arguments(s), alias=getattr(s, "aliases", ()), doc=s.__doc__ or "")
                for s in o.sections
            ]
            tag = o.default_type or ""
            about["sub_variants"] = [Variant("type", choices, optional=bool(tag), default_tag=tag)]
        elif o.sections:
            about["sub_fields"] = _arguments(o.sections[0])
        else:
            about |= {"extra_check": lambda value, o=o: not o.fault(value), "extra_check_errmsg": o.wants}
        declared.append(Argument(o.name, [*dtype, *([type(None)] if o.nullable else [])], **about))
    return tuple(declared)
