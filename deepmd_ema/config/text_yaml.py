"""YAML as plain values with the line of every key; numbers and booleans are those of YAML 1.2, as in JSON."""

from __future__ import annotations

import re
from typing import Any

import yaml

from deepmd_ema.config.messages import DEEPEST, ConfigText, dotted
from deepmd_ema.config.messages import Path as ConfigPath
from deepmd_ema.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``No`` is an element and ``1e-3`` is a number."""


# PyYAML follows YAML 1.1, where yes, no, on and off are booleans, 1e-3 is a text and 1:30 is a number
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
     list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # decimal, also with a leading zero


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def parse_yaml(text: str, source: str) -> ConfigText:
    """Return the values and lines of a YAML text; a key named twice in one section is an error.

    Raises:
        ConfigError: with line and column of the first mistake.
    """
    marks = _Marks()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            marks.visit(node, (), ())
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(text, error, source)) from None
    except (RecursionError, _LoopError):
        raise ConfigError(f"{source}: an anchor that contains itself, or nested too deeply to be an input.") from None
    except _TooManyError:
        raise ConfigError(f"{source}: anchors that stand for more than {_MOST:,} values: this is no input.") from None
    except (ValueError, KeyError, AttributeError) as error:  # of constructors of tags: !!int x, !!bool x, !!timestamp x
        raise ConfigError(f"{source}: not YAML: a tag (!!...) before a value that it does not fit: {error}.") from None
    if marks.twice:
        raise ConfigError(
            f"{source}:{line}: {dotted(path)}: given twice, first on line {first}. Remove one of the two."
            for path, first, line in marks.twice
        )
    return ConfigText(values, marks.lines)


class _LoopError(Exception):
    """An alias stands inside its own anchor."""


class _TooManyError(Exception):
    """Aliases of aliases multiply what a text stands for."""


_MOST = 100_000  # values of an input


class _Marks:
    """Lines of the keys and items of a tree of YAML nodes."""

    def __init__(self) -> None:
        self.visited = 0
        self.lines: dict[ConfigPath, int] = {}
        self.twice: list[tuple[ConfigPath, int, int]] = []

    def visit(self, node: yaml.Node, path: ConfigPath, above: tuple[int, ...]) -> None:
        """Note the lines of everything in ``node``; ``above`` are the nodes around it."""
        self.visited += 1
        if id(node) in above or len(path) > DEEPEST:
            raise _LoopError
        if self.visited > _MOST:
            raise _TooManyError
        self.lines.setdefault(path, node.start_mark.line + 1)
        inside = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.visit(item, (*path, number), inside)
        elif isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                self._key(key, path)
                self.visit(item, (*path, str(key.value)), inside)

    def _key(self, key: yaml.Node, path: ConfigPath) -> None:
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if here in self.lines and key.tag != "tag:yaml.org,2002:merge":
            self.twice.append((here, self.lines[here], line))
        self.lines[here] = line


def _yaml_message(text: str, error: yaml.YAMLError, source: str) -> str:
    mark: Any = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{source}: not YAML: {str(error).splitlines()[0]}."
    lines = text.splitlines()
    where = f"{source}:{mark.line + 1}:{mark.column + 1}"
    tab = next((n for n, line in enumerate(lines, 1) if re.match(r" *\t", line)), None)
    if tab is not None and "\\t" in str(error):
        return f"{source}:{tab}: not YAML: a tab. Indent with spaces only."
    shown = f"\n    {lines[mark.line].strip()[:100]}" if mark.line < len(lines) and lines[mark.line].strip() else ""
    problem = getattr(error, "problem", None) or "cannot be read"
    if "mapping values are not allowed" in problem:
        problem = 'a colon where none can be; is the line above unfinished, or does a text with ": " need quotes?'
    context = getattr(error, "context", None)
    return f"{where}: not YAML: {problem}{f' ({context})' if context else ''}.{shown}"
