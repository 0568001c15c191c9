"""The manual of all options as text, a JSON Schema for editors, and arguments of dargs, from the declarations."""

from __future__ import annotations

import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import Option, input_options, listed_types, options, plain, type_names, wants
from deepmd_ema.config.messages import close_names, show
from deepmd_ema.config.schema.run import ModelsConfig, MultiTaskRun, SingleTaskRun
from deepmd_ema.config.schema.training import MultiTaskTrainingConfig, TrainingConfig
from deepmd_ema.config.sections import value_fault
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
        default = "required" if o.required else f"default {_default_words(o)}"
        aliases = f"also spelled {', '.join(o.alias)}" if o.alias else ""
        types = f"of {', '.join(self.types)}" if self.types else ""
        return "; ".join(filter(None, [_kind_words(o), o.unit, default, aliases, types]))

    def is_under(self, topic: str) -> bool:
        """Whether the option is ``topic`` or in it."""
        return any(p == topic or p.startswith((f"{topic}.", f"{topic}[")) for p in (self.path, self.plain_path))


def manual(topic: str | None = None) -> str:
    """Return the manual of all options, or of those under the dotted path ``topic``, or with that word in their name.

    Raises:
        ConfigError: if there is no such option; the message names those that look like it.
    """
    entries = manual_entries()
    topic = re.sub(r"\[\d+\]", "", topic or "")  # as messages name the entries of a list
    if not topic:
        return "\n\n".join([_INTRO.rstrip("\n"), *map(_entry_text, entries)])
    meanings: list[Callable[[Entry], bool]] = [
        lambda entry: entry.is_under(topic),
        lambda entry: topic in entry.keys,
        lambda entry: any(topic in key.split("_") for key in entry.keys),  # `ema` finds ema_decay, enable_ema, ...
    ]
    for is_meant in meanings:
        chosen = [_entry_text(entry) for entry in entries if is_meant(entry)]
        if chosen:
            return "\n\n".join(chosen)
    raise ConfigError(f"doc {topic}: no such option. Try {', '.join(_like(topic, entries))}.")


def manual_entries() -> list[Entry]:
    """Return all options, and the types of sections, in the order of the manual."""
    return [*_entries(SingleTaskRun, ""), *_entries_of_tasks()]


def _like(topic: str, entries: Sequence[Entry]) -> list[str]:
    """Return paths of options that look like a topic that is none: by their last name, one word of it, or in all."""
    paths: dict[str, str] = {}
    for key, path in ((key, entry.plain_path) for entry in entries for key in entry.keys):
        paths.setdefault(key, path)  # of sections in sections, the outermost
    last = topic.split(".")[-1]
    same = [entry.plain_path for entry in entries if last in entry.keys]
    words = [path for key, path in paths.items() if last in key.split("_")]
    close = [paths[key] for key in close_names(last, list(paths))]
    found = same or words or get_close_matches(topic, [e.plain_path for e in entries], 3, cutoff=0.75) or close
    return list(dict.fromkeys(found))[:_MAX_SIMILAR] or ["model", "training", "or no name at all"]


def json_schema_text() -> str:
    """Return the JSON Schema as the text of a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False)


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft-07, which editors read) of the input, with aliases and comments."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "input of dp-ema",
        "type": "object",
        "anyOf": [_section_schema(SingleTaskRun, top=True), _schema_of_tasks()],
    }


# ---- manual


def _entries(section: type, path: str) -> Iterator[Entry]:
    for o in input_options(section):
        yield from _option_entries(o, f"{path}.{o.name}" if path else o.name, ())


def _entries_of_tasks() -> Iterator[Entry]:
    """Yield the options that only an input of several tasks has; sections by task are those of an input of one task."""
    places = {"model": ModelsConfig, "training": MultiTaskTrainingConfig, "": MultiTaskRun}
    for place, section in places.items():
        known = {o.name for o in input_options({"training": TrainingConfig}.get(place, SingleTaskRun))}
        for o in input_options(section):
            if o.name not in known:
                yield Entry(f"{place}.{o.name}".lstrip("."), o, o.doc)


def _option_entries(option: Option, here: str, listed: tuple[Any, ...]) -> Iterator[Entry]:
    """Yield an option and those of its sections, unless it or the sections are already ``listed``."""
    yield Entry(here, option, option.doc)
    if option.by_type:
        yield Entry(f"{here}.type", None, _type_words(option))
    if option in listed or all(section in listed for section in option.sections):
        return
    if len(option.sections) == 1:
        yield from _entries(option.sections[0], here)
    elif option.sections:
        yield from _choice_entries(option.sections, here, listed)


def _choice_entries(sections: tuple[Any, ...], path: str, listed: tuple[Any, ...]) -> Iterator[Entry]:
    """Yield the options that sections declare alike, then each type with its own; the usual one has plain paths."""
    listed = (*listed, *sections)
    declared: dict[str, list[Option]] = {}
    for o in (o for s in sections for o in options(s)):
        declared.setdefault(o.name, []).append(o)
    shared = [same[0] for same in declared.values() if len(same) > 1 and all(o == same[0] for o in same)]
    for o in shared:
        having = tuple(s.type for s in sections if o in options(s))
        first, *inner = _option_entries(o, f"{path}.{o.name}", listed)
        yield replace(first, types=having if len(having) < len(sections) else ())
        yield from inner
    for s in sections:
        is_usual = getattr(s, "is_usual", False)
        there = path if is_usual else f"{path}[{s.type}]"
        if not is_usual:
            yield Entry(there, None, _class_doc(s))
        for o in options(s):
            if o not in shared:
                yield from _option_entries(o, f"{there}.{o.name}", listed)
        listed = (*listed, *options(s), *(inner for o in options(s) for inner in o.sections))


def _type_words(option: Option) -> str:
    """Return text about the values of the key ``type`` of a section."""
    others = [name for name in type_names(option.sections) if name not in listed_types(option.sections)]
    read = f" DeePMD-kit's {', '.join(others)} is read as well." if others else ""
    default = f"; {option.default_type} if not given" if option.default_type else "; required"
    return f"one of {', '.join(listed_types(option.sections))}{default}.{read}"


def _entry_text(entry: Entry) -> str:
    texts = [textwrap.fill(text, _WIDTH - len(_INDENT)) for text in (entry.facts, entry.doc) if text or entry.option]
    return "\n".join([entry.path, *(textwrap.indent(text, _INDENT) for text in texts)])


def _kind_words(option: Option) -> str:
    if option.by_type:
        names = " or ".join(listed_types(option.sections))
        if option.named:
            return f"sections by name; type is {names}"
        if not option.many:
            return f"section; type is {names}"
        default = f" ({option.default_type} if not given)" if option.default_type else ""
        return f"list of sections; type is {names}{default}"
    if option.sections:
        return "sections by name" if option.named else "list of sections" if option.many else "section"
    return wants(option) + " or null" * option.nullable


def _default_words(option: Option) -> str:
    if option.sections and not (option.many or option.named):
        return "null" if option.default is None else f"type {option.default_type}" if option.by_type else "all defaults"
    return show(option.default)


def _class_doc(section: type) -> str:
    return " ".join((section.__doc__ or "").partition("Attributes:")[0].split())


# ---- JSON Schema


def _section_schema(section: type, *, top: bool = False) -> dict[str, Any]:
    properties: dict[str, Any] = {"$schema": {"type": "string"}} if top else {}
    if hasattr(section, "type"):
        properties["type"] = {"enum": type_names([section])}
    needed = []
    for o in input_options(section):
        schema = _option_schema(o)
        for key in o.keys:
            properties[key] = schema if key == o.name else {**schema, "description": f"The same as `{o.name}`."}
        if o.required:
            needed.append({"required": [o.name]} if not o.alias else {"anyOf": [{"required": [k]} for k in o.keys]})
    out: dict[str, Any] = {"type": "object", "description": _class_doc(section), "properties": properties}
    out |= {"patternProperties": _COMMENTS, "additionalProperties": False}
    return out | ({"allOf": needed} if needed else {})


def _schema_of_tasks() -> dict[str, Any]:
    """Return the schema of an input of several tasks: parts of models may be names, and keys may hold for all."""
    schema = _section_schema(MultiTaskRun, top=True)
    models: dict[str, Any] = schema["properties"]["model"]
    kinds: list[dict[str, Any]] = models["properties"]["model_dict"]["additionalProperties"]["oneOf"]
    of_all: dict[str, Any] = {}
    for kind in kinds:
        own = kind["properties"]
        own |= {part: {"anyOf": [{"type": "string"}, own[part]]} for part in PARTS if part in own}
        del kind["allOf"]  # what all models need may stand beside model_dict
        of_all = {**own, **of_all}
    of_all["type"] = {"enum": [name for kind in kinds for name in kind["properties"]["type"]["enum"]]}
    models["properties"] = {**of_all, **models["properties"]}
    return schema


def _option_schema(option: Option) -> dict[str, Any]:
    null = [{"type": "null"}] if option.nullable else []
    if option.by_type:  # editors offer the keys of the type that is given
        choices = [
            _section_schema(s) | ({} if option.default_type in type_names([s]) else {"required": ["type"]})
            for s in option.sections
        ]
        schema = _one_of("oneOf", choices)
    elif option.sections:
        schema = _section_schema(option.sections[0])
    elif option.choices and option.check is None:
        schema = {"enum": [*option.choices, *([None] if option.nullable else [])]}
    else:
        schema = _one_of("anyOf", [*map(_type_schema, option.types), *null])
    if option.many:
        schema = {"type": "array", "items": schema}
    if option.named:
        schema = {"type": "object", "additionalProperties": schema}
    if option.sections:
        schema = _one_of("anyOf", [schema, *null])
    unit = f" Unit: {option.unit}." if option.unit else ""
    schema = {**schema, "description": option.doc + unit}
    return schema if option.required else {**schema, "default": plain(option.default)}


def _one_of(word: str, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {word: schemas}


def _type_schema(kind: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inner[1])}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type_schema(k) for k in inner]}
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
        null, tag = [type(None)] if o.nullable else [], o.default_type or ""
        about: dict[str, Any] = {"optional": not o.required, "alias": list(o.alias), "doc": o.doc}
        about |= {} if o.required else {"default": plain(o.default)}
        if not o.sections:
            about |= {"extra_check": partial(_is_right, o), "extra_check_errmsg": wants(o)}
            declared.append(Argument(o.name, [*o.types, *null], **about))
            continue
        about |= {"dtype": [list if o.many else dict, *null], "repeat": o.many or o.named}
        if o.by_type:
            kinds: tuple[Any, ...] = o.sections
            choices = [
                Argument(s.type, dict, _arguments(s), alias=getattr(s, "aliases", ()), doc=s.__doc__ or "")
                for s in kinds
            ]
            about["sub_variants"] = [Variant("type", choices, optional=bool(tag), default_tag=tag)]
        else:
            about["sub_fields"] = _arguments(o.sections[0])
        declared.append(Argument(o.name, **about))
    return tuple(declared)


def _is_right(option: Option, value: Any) -> bool:
    return not value_fault(option, value)
