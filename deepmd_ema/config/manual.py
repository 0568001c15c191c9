"""The manual of all options as text, and a JSON Schema for editors, from the tree of arguments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from dargs.json_schema import generate_json_schema

from deepmd_ema.config.argcheck import TYPE, Field, kinds_of, run_arguments
from deepmd_ema.config.fields import Option
from deepmd_ema.config.messages import Names, Values, close_names, show
from deepmd_ema.config.upgrade import PARTS
from deepmd_ema.errors import ConfigError

_WIDTH = 100
_INDENT = "    "
_MAX_SIMILAR = 6
_INTRO = """\
Options of dp-ema: one JSON or YAML file with the sections model, learning_rate, optimizer, loss, training and
validating. Keys that begin with "_" are comments. A whole number may stand for a number, not the reverse. What
DeePMD-kit 3.2.0 reads for these features is read here, with its other spellings and defaults.
"""  # noqa: E501
_COMMENTS = {"^_": {"description": "a comment"}}


@dataclass(frozen=True)
class Entry:
    """One option in the manual, or one type of a section.

    An option that several types declare alike is listed once.

    Attributes:
        path: dotted path, with the type in brackets where only this type has the option.
        option: its declaration; None for a type of a section.
        doc: its text.
        types: the types that have the option, if not all have it.
    """

    path: str
    option: Option | None
    doc: str
    types: Names = ()

    @property
    def keys(self) -> Names:
        """The keys of the option."""
        if self.option is not None:
            return self.option.keys
        return ("type",) if self.path.endswith(".type") else ()

    @property
    def plain_path(self) -> str:
        """The path as an input has it."""
        return re.sub(r"\[[^]]*\]", "", self.path)

    @property
    def facts(self) -> str:
        """Values, unit, default, other spellings and types of the option, as text.

        Empty for a type of a section.
        """
        o = self.option
        if o is None:
            return ""
        kind = f"{o.wants} or null" if o.nullable else o.wants
        if o.sections:
            kind = "section"
            if o.named:
                kind = "sections by name"
            elif o.many:
                kind = "list of sections"
            kind += (
                f"; type is {' or '.join(s.type for s in o.sections)}"
                if o.by_type
                else ""
            )
            kind += (
                f" ({o.default_type} if not given)" if o.many and o.default_type else ""
            )
        default = show(o.default)
        # a whole section as JSON would be longer than its entries in the manual
        if o.sections and o.default is not None and not (o.many or o.named):
            default = f"type {o.default_type}" if o.by_type else "all defaults"
        default = "required" if o.required else f"default {default}"
        aliases = f"also spelled {', '.join(o.alias)}" if o.alias else ""
        types = f"of {', '.join(self.types)}" if self.types else ""
        return "; ".join(filter(None, [kind, o.unit, default, aliases, types]))


def manual(topic: str | None = None) -> str:
    """Return the manual of all options, or of those about a topic.

    Args:
        topic: dotted path of a section or an option, or a word of the names of options.

    Raises:
        ConfigError: if there is no such option; the message names those that look like it.
    """
    entries = manual_entries()
    topic = re.sub(
        r"\[\d+\]", "", topic or ""
    )  # as messages name the entries of a list
    inside = (f"{topic}.", f"{topic}[")
    # the first of these three that finds any: by path, by name, by a word of the name
    chosen = (
        [
            e
            for e in entries
            if not topic
            or any(f"{path}.".startswith(inside) for path in (e.path, e.plain_path))
        ]
        or [entry for entry in entries if topic in entry.keys]
        # `ema` finds ema_decay, enable_ema, ...
        or [
            entry
            for entry in entries
            if any(topic in key.split("_") for key in entry.keys)
        ]
    )
    if not chosen:
        # paths of options that look like the topic: by its last name, by one word of it, as a whole
        paths: dict[str, str] = {}
        for entry in entries:
            for key in entry.keys:
                paths.setdefault(
                    key, entry.plain_path
                )  # the outermost of sections in sections
        last = topic.split(".")[-1]
        close = [entry.plain_path for entry in entries if last in entry.keys]
        close = close or [path for key, path in paths.items() if last in key.split("_")]
        close = close or get_close_matches(
            topic, [entry.plain_path for entry in entries], 3, cutoff=0.75
        )
        close = close or [paths[key] for key in close_names(last, list(paths))]
        shown = list(dict.fromkeys(close))[:_MAX_SIMILAR] or [
            "model",
            "training",
            "or no name at all",
        ]
        raise ConfigError(f"doc {topic}: no such option. Try {', '.join(shown)}.")
    texts = [] if topic else [_INTRO.rstrip("\n")]
    for entry in chosen:
        paragraphs = (text for text in (entry.facts, entry.doc) if text)
        filled = (
            textwrap.fill(
                text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
            )
            for text in paragraphs
        )
        texts.append("\n".join([entry.path, *filled]))
    return "\n\n".join(texts)


def manual_entries() -> list[Entry]:
    """Return all options, and the types of sections, in the order of the manual."""
    root = run_arguments()
    entries = list(_entries([root], "", ()))
    # Options that only an input of several tasks has come last, without their sections, which are
    # those of an input of one task.
    multi_task = run_arguments(has_tasks=True)
    for path in ("model", "training", ""):
        section, listed = (
            tree.sub_fields[path] if path else tree for tree in (multi_task, root)
        )
        names = set(listed.sub_fields)
        if listed.kinds:
            names = {name for kind in listed.kinds.values() for name in kind.sub_fields}
        entries += [
            Entry(f"{path}.{field.name}".lstrip("."), field.option, field.option.doc)
            for field in section.sub_fields.values()
            if field.name not in names
        ]
    return entries


def json_schema_text() -> str:
    """Return the JSON Schema as the text of a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False)


def json_schema() -> Values:
    """Return the JSON Schema of dargs (draft 2020-12) of an input of one task or of several."""
    schemas = []
    for has_tasks in (False, True):
        root = run_arguments(has_tasks)
        schema = generate_json_schema(root)
        _mark_unknown_keys(schema, root)
        schemas.append(schema)
    # The tree of several tasks is that of an expanded input. In a file parts of models may be names
    # of shared parts, and keys beside model_dict hold for all models, so that none is required in
    # a model.
    models = schemas[1]["properties"]["model"]
    models["additionalProperties"] = True
    for kind in models["properties"]["model_dict"]["additionalProperties"]["allOf"]:
        del kind["then"]["required"]
        properties = kind["then"]["properties"]
        for part in PARTS:
            if part in properties:
                properties[part] = {"anyOf": [{"type": "string"}, properties[part]]}
    head = {name: schemas[0][name] for name in ("$schema", "title")}
    return {**head, "type": "object", "anyOf": schemas}


# ---- manual


def _option_entries(
    field: Field, path: str, listed: tuple[Any, ...]
) -> Iterator[Entry]:
    """Yield an option, and the options of its sections unless they are already ``listed``."""
    option = field.option
    yield Entry(path, option, option.doc)
    if option.by_type:
        aliases = [alias for kind in field.kinds.values() for alias in kind.alias]
        read = f" DeePMD-kit's {', '.join(aliases)} is read as well." if aliases else ""
        default = (
            f"{option.default_type} if not given" if option.default_type else "required"
        )
        yield Entry(
            f"{path}.type", None, f"one of {', '.join(field.kinds)}; {default}.{read}"
        )
    kinds = kinds_of(field) if field.is_section else []
    # descriptors of a hybrid are descriptors again: without this the manual would not end
    if option not in listed and not all(kind.section in listed for kind in kinds):
        yield from _entries(kinds, path, listed)


def _entries(
    kinds: Sequence[Field], path: str, listed: tuple[Any, ...]
) -> Iterator[Entry]:
    """Yield the options that kinds declare alike, then each kind with its own options.

    The usual kind has paths without its type.
    """
    listed = (*listed, *(kind.section for kind in kinds))
    declared: dict[str, list[Field]] = {}
    for field in (field for kind in kinds for field in kind.sub_fields.values()):
        declared.setdefault(field.name, []).append(field)
    shared = [
        fields[0]
        for fields in declared.values()
        if len(fields) > 1 and all(field.option == fields[0].option for field in fields)
    ]
    names = {field.name for field in shared}
    for field in shared:
        having = tuple(kind.name for kind in kinds if field.name in kind.sub_fields)
        first, *inner = _option_entries(field, f"{path}.{field.name}", listed)
        yield replace(first, types=having if len(having) < len(kinds) else ())
        yield from inner
    for kind in kinds:
        is_usual = len(kinds) == 1 or getattr(kind.section, "is_usual", False)
        place = path if is_usual else f"{path}[{kind.name}]"
        if not is_usual:
            yield Entry(place, None, kind.doc)
        for field in kind.sub_fields.values():
            if field.name not in names:
                yield from _option_entries(
                    field, f"{place}.{field.name}".lstrip("."), listed
                )
        # the next kind does not repeat the sections of this one
        options = [field.option for field in kind.sub_fields.values()]
        sections = [section for option in options for section in option.sections]
        listed = (*listed, *options, *sections)


# ---- JSON Schema


def _mark_unknown_keys(schema: Values, field: Field) -> None:
    """Let editors mark unknown keys and wrong choices in a section.

    The schema of dargs leaves them out.
    """
    entries = schema
    if field.repeat:
        entries = (
            schema["items"] if field.option.many else schema["additionalProperties"]
        )
    for kind in kinds_of(field):
        section = entries
        if field.kinds:
            section = entries["allOf"][list(field.kinds).index(kind.name)]["then"]
            section["properties"][TYPE] = {}
        section |= {"patternProperties": _COMMENTS, "additionalProperties": False}
        section["properties"]["$schema"] = {"type": "string"}
        for inner in kind.sub_fields.values():
            for key in inner.keys:
                value = section["properties"][key]
                if inner.is_section:
                    _mark_unknown_keys(value, inner)
                elif inner.option.choices and inner.option.check is None:
                    null = [None] if inner.option.nullable else []
                    value["enum"] = [*inner.option.choices, *null]
