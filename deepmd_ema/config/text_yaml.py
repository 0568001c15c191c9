"""Inputs in YAML: values with numbers and booleans of YAML 1.2, and their lines."""

from __future__ import annotations

import re
from typing import Any

import yaml

from deepmd_ema.config.messages import Lines, Place
from deepmd_ema.config.text import MAX_VALUES, NEITHER, Marks, lines_of
from deepmd_ema.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``No`` is an element and ``1e-3`` is a number."""


# PyYAML follows YAML 1.1, where yes, no, on and off are booleans, 1e-3 is a text and 1:30 is a
# number
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # decimal, also with a leading zero


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def parse_yaml(text: str, source: str) -> tuple[Any, Lines]:
    """Return the values of a YAML text and their lines.

    Numbers and booleans are those of YAML 1.2, as in JSON.

    Raises:
        ConfigError: with line and column of the first mistake.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = lines_of(
            _marks(node, (), node.start_mark.line, is_key=False), source, MAX_VALUES
        )
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(_message(text, error, source)) from None
    except RecursionError:
        raise ConfigError(
            f"{source}: an anchor that contains itself, or {NEITHER}."
        ) from None
    except (ValueError, KeyError, AttributeError) as error:
        # raised by constructors of tags: !!int x, !!bool x, !!timestamp x
        raise ConfigError(
            f"{source}: not YAML: a tag (!!...) before a value that it does not fit: {error}."
        ) from None


def _marks(node: yaml.Node, place: Place, line: int, *, is_key: bool) -> Marks:
    """Yield the marks of everything in ``node``.

    Args:
        node: a value.
        place: its place.
        line: line of its key, or its own if it has none, counted from 0.
        is_key: whether it has a key that must be unique.
    """
    yield place, line + 1, is_key
    for number, item in (
        enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ()
    ):
        yield from _marks(item, (*place, number), item.start_mark.line, is_key=False)
    for key, item in node.value if isinstance(node, yaml.MappingNode) else ():
        # `<<` may occur twice: it names no key but adds those of another mapping
        is_merged = key.tag == "tag:yaml.org,2002:merge"
        yield from _marks(
            item, (*place, str(key.value)), key.start_mark.line, is_key=not is_merged
        )


def _message(text: str, error: yaml.YAMLError, source: str) -> str:
    mark: Any = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{source}: not YAML: {str(error).splitlines()[0]}."
    lines = text.splitlines()
    where = f"{source}:{mark.line + 1}:{mark.column + 1}"
    # the first line that is indented with a tab, wherever PyYAML has stopped
    tab = next((n for n, line in enumerate(lines, 1) if re.match(r" *\t", line)), None)
    if tab is not None and "\\t" in str(error):
        return f"{source}:{tab}: not YAML: a tab. Indent with spaces only."
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    shown = f"\n    {line[:100]}" if line else ""
    problem = getattr(error, "problem", None) or "cannot be read"
    if "mapping values are not allowed" in problem:
        problem = (
            'a colon where none can be; is the line above unfinished, or does a text with ": " '
            "need quotes?"
        )
    context = getattr(error, "context", None)
    return f"{where}: not YAML: {problem}{f' ({context})' if context else ''}.{shown}"
