"""The text of a JSON or YAML file as plain values, with the line of every key, and messages about its syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from deepmd_ema.config.messages import Place, dotted
from deepmd_ema.errors import ConfigError

JSON_SUFFIXES = (".json",)
YAML_SUFFIXES = (".yaml", ".yml")
_DEEPEST = 100  # sections within sections; an input has five, and what reads it recurses
_MAX_BYTES = 50_000_000  # bytes; an input has a few thousand, a data file given by mistake has more
_MAX_VALUES = 100_000  # values of an input in YAML
_NEITHER = "nested too deeply to be an input"

Marks = Iterator[tuple[Place, int, bool]]
"""Place and line of each key and item of a text in its order, and whether it is a key."""


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[Place, int]]:
    """Return the values of a file and the line, from 1, of each key and list item.

    Raises:
        ConfigError: if the file is missing, is no JSON or YAML, names a key twice, or holds no section.
    """
    text = _read_text(path)
    if not text.strip():
        expected = "a JSON object {...} or YAML with the sections of a run"
        raise ConfigError(f"{path}: the file is empty. Expected {expected}.")
    is_yaml = path.suffix.lower() in YAML_SUFFIXES
    values, lines = (_parse_yaml if is_yaml else _parse_json)(text, str(path))
    if not isinstance(values, dict):
        names = {list: "a list [...]", str: "a text", bool: "true or false", type(None): "nothing"}
        expected = "an object {...} with the sections model, learning_rate, loss and training"
        raise ConfigError(f"{path}:1: expected {expected}, found {names.get(type(values), 'a number')}.")
    return values, lines


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder, expected a .json, .yaml or .yml file.{_inputs_near(path)}")
    if path.suffix.lower() not in JSON_SUFFIXES + YAML_SUFFIXES and path.exists():
        raise ConfigError(f"{path}: expected a file that ends in .json, .yaml or .yml. Rename it after its format.")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes is too large for an input. Is it a data file?")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.{_inputs_near(path.parent)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file (byte {error.start} is not UTF-8).") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def _inputs_near(folder: Path) -> str:
    """Return a sentence with the inputs that are in the folder, or nothing."""
    try:
        names = sorted(f.name for f in folder.iterdir() if f.suffix.lower() in JSON_SUFFIXES + YAML_SUFFIXES)
    except OSError:
        return ""
    return f" There is: {', '.join(names[:5])}." if names else ""


def _lines_of(marks: Marks, source: str, max_values: float = float("inf")) -> dict[Place, int]:
    """Return the line of each key and item.

    Raises:
        RecursionError: if one is nested too deeply.
        ConfigError: if a section has a key twice, or there are too many values.
    """
    lines: dict[Place, int] = {}
    twice = []
    for place, line, is_key in marks:
        if len(place) > _DEEPEST:
            raise RecursionError
        if len(lines) > max_values:  # aliases of aliases multiply the values of a text
            raise ConfigError(f"{source}: anchors that expand to more than {max_values:,} values: this is no input.")
        if is_key and place in lines:
            first = f"first on line {lines[place]}"
            twice.append(f"{source}:{line}: {dotted(place)}: given twice, {first}. Remove one of the two.")
        lines[place] = line
    if twice:
        raise ConfigError(twice)
    return lines


# ---- JSON


def _parse_json(text: str, source: str) -> tuple[Any, dict[Place, int]]:
    """Return the values of a JSON text and their lines.

    Raises:
        ConfigError: with line and column of the first mistake, and what it looks like.
    """

    def refuse_constant(name: str) -> NoReturn:
        line = next((n for n, t in enumerate(text.splitlines(), 1) if re.search(rf"(?<![\w\"]){name}", t)), 1)
        raise ConfigError(f"{source}:{line}: {name} is no JSON number. Write a finite number, or null.")

    try:
        values = json.loads(text, parse_constant=refuse_constant)
        tokens = _json_tokens(text)
        return values, _lines_of(_json_marks(*next(tokens), tokens, (), is_key=False), source)
    except json.JSONDecodeError as error:
        lines = [*text.splitlines(), ""]
        shown = "".join(f"\n    {line[:100]}" for line in [lines[min(error.lineno, len(lines)) - 1].strip()] if line)
        where = f"{source}:{error.lineno}:{error.colno}"
        raise ConfigError(f"{where}: not JSON: {_json_hint(text, error)}{shown}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{source}: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{source}: {_NEITHER}.") from None


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s,:{}\[\]"]+')


def _json_tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield texts, numbers, words and brackets of a text that is known to be JSON, each with its line."""
    line, end = 1, 0
    for found in _TOKEN.finditer(text):
        line += text.count("\n", end, found.start())
        end = found.end()
        yield found[0], line


def _json_marks(token: str, line: int, tokens: Iterator[tuple[str, int]], place: Place, *, is_key: bool) -> Marks:
    """Yield the marks of the value that begins with ``token``; the line of one in a section is that of its key."""
    yield place, line, is_key
    if token == "{":
        for key, key_line in tokens:
            if key == "}":
                return
            yield from _json_marks(next(tokens)[0], key_line, tokens, (*place, json.loads(key)), is_key=True)
    elif token == "[":
        for number, (item, item_line) in enumerate(tokens):
            if item == "]":
                return
            yield from _json_marks(item, item_line, tokens, (*place, number), is_key=False)


def _json_hint(text: str, error: json.JSONDecodeError) -> str:
    """Return a description of the mistake; ``error.pos`` is where JSON ended."""
    here, before = text[error.pos :], text[: error.pos].rstrip()
    rest = here.lstrip()
    # an illegal trailing comma is reported at the comma by new versions of Python, after it by older ones
    at_end = rest.startswith(("}", "]")) or "delimiter" in error.msg
    trailing = re.match(r",\s*[}\]]", here) or (before.endswith(",") and at_end)
    hints = [
        (rest.startswith(("//", "/*", "#")), 'JSON has no comments. Use a key that begins with "_", or a .yaml file.'),
        (rest.startswith("'"), 'texts stand in double quotes: "like this".'),
        (trailing, "a comma before the closing bracket. Remove the comma."),
        (rest.startswith(","), "a comma too many. Remove it."),
        (re.match(r"(True|False|None)\b", rest), "write true, false and null in lower case."),
        (re.match(r"[.+]\d", rest), "a number begins with a digit: 0.5, 5."),
        (not rest, "the text ends too early. A closing } or ] is missing."),
        ("',' delimiter" in error.msg, "a comma or a closing bracket is missing before this."),
        ("':' delimiter" in error.msg, "a colon is missing between a key and its value."),
        ("property name" in error.msg, 'a key in double quotes is expected here: "key": value.'),
        ("Extra data" in error.msg, "something follows after the end of the object. A closing } may be one too many."),
        ("Invalid control character" in error.msg, "a text is not closed on its line. A double quote is missing."),
        ("Invalid \\escape" in error.msg, r"a backslash in a text is written twice: \\."),
    ]
    return next((hint for applies, hint in hints if applies), f"{error.msg[0].lower()}{error.msg[1:]}.")


# ---- YAML


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


def _parse_yaml(text: str, source: str) -> tuple[Any, dict[Place, int]]:
    """Return the values of a YAML text, with numbers and booleans of YAML 1.2, as in JSON, and their lines.

    Raises:
        ConfigError: with line and column of the first mistake.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = _lines_of(_yaml_marks(node, (), node.start_mark.line, is_key=False), source, _MAX_VALUES)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(text, error, source)) from None
    except RecursionError:
        raise ConfigError(f"{source}: an anchor that contains itself, or {_NEITHER}.") from None
    except (ValueError, KeyError, AttributeError) as error:  # of constructors of tags: !!int x, !!bool x, !!timestamp x
        raise ConfigError(f"{source}: not YAML: a tag (!!...) before a value that it does not fit: {error}.") from None


def _yaml_marks(node: yaml.Node, place: Place, line: int, *, is_key: bool) -> Marks:
    """Yield the marks of everything in ``node``; ``line``, from 0, is that of its key, if it has one."""
    yield place, line + 1, is_key
    for number, item in enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ():
        yield from _yaml_marks(item, (*place, number), item.start_mark.line, is_key=False)
    for key, item in node.value if isinstance(node, yaml.MappingNode) else ():
        is_merged = key.tag == "tag:yaml.org,2002:merge"
        yield from _yaml_marks(item, (*place, str(key.value)), key.start_mark.line, is_key=not is_merged)


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
