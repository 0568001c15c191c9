"""The text of a config file as plain values, with the line of every key, and messages about its syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from deepmd_ema.config.messages import Place, dotted
from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

JSON_SUFFIXES = (".json",)
YAML_SUFFIXES = (".yaml", ".yml")
_DEEPEST = 100  # sections within sections; an input has five, and what reads it recurses
_MAX_BYTES = 50_000_000  # bytes; an input has a few thousand, a data file given by mistake has more


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[Place, int]]:
    """Return the values of a file and the line, from 1, of each key and list item.

    Raises:
        ConfigError: if the file is missing, is no JSON or YAML, names a key twice, or holds no section.
    """
    text = _read_text(path)
    if not text.strip():
        expected = "a JSON object {...} or YAML with the sections of a run"
        raise ConfigError(f"{path}: the file is empty. Expected {expected}.")
    marks = Marks(str(path))
    if path.suffix.lower() in YAML_SUFFIXES:
        from deepmd_ema.config.text_yaml import parse_yaml

        values = parse_yaml(text, marks)
    else:
        values = parse_json(text, marks)
    marks.refuse_repeated()
    if not isinstance(values, dict):
        expected = "an object {...} with the sections model, learning_rate, loss and training"
        raise ConfigError(f"{path}:1: expected {expected}, found {_kind(values)}.")
    _refuse_nul(values, marks)
    return values, marks.lines


def _refuse_nul(values: Any, marks: Marks, place: Place = ()) -> None:
    """Raise a ``ConfigError`` if a text holds a NUL, which no name of a file can."""
    if isinstance(values, str) and "\0" in values:
        line = marks.lines.get(place, 1)
        raise ConfigError(f"{marks.source}:{line}: {dotted(place)}: the text holds a NUL character. Remove it.")
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        _refuse_nul(value, marks, (*place, key))


class Marks:
    """Collects the line of every key and item of a text, JSON or YAML, which is walked through in its order."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Place, int] = {}
        self._twice: list[tuple[Place, int, int]] = []

    def value(self, place: Place, line: int) -> None:
        """Record the line of a value, unless that of its key was recorded.

        Raises:
            RecursionError: if it is nested too deeply.
        """
        if len(place) > _DEEPEST:
            raise RecursionError
        self.lines.setdefault(place, line)

    def key(self, place: Place, line: int, *, may_repeat: bool = False) -> None:
        """Record the line of a key, and whether its section has it already."""
        if place in self.lines and not may_repeat:
            self._twice.append((place, self.lines[place], line))
        self.lines[place] = line

    def refuse_repeated(self) -> None:
        """Raise a ``ConfigError`` if a section has a key twice."""
        if self._twice:
            raise ConfigError(
                f"{self.source}:{line}: {dotted(place)}: given twice, first on line {first}. Remove one of the two."
                for place, first, line in self._twice
            )


def parse_json(text: str, marks: Marks) -> Any:
    """Return the values of a JSON text, and mark their lines.

    Raises:
        ConfigError: with line and column of the first mistake, and what it looks like.
    """

    def refuse_constant(name: str) -> NoReturn:
        line = next((n for n, t in enumerate(text.splitlines(), 1) if re.search(rf"(?<![\w\"]){name}", t)), 1)
        raise ConfigError(f"{marks.source}:{line}: {name} is no JSON number. Write a finite number, or null.")

    try:
        values = json.loads(text, parse_constant=refuse_constant)
        tokens = _tokens(text)
        _mark_json(*next(tokens), tokens, (), marks)
    except json.JSONDecodeError as error:
        raise ConfigError(_json_message(text, error, marks.source)) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{marks.source}: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{marks.source}: nested too deeply to be an input.") from None
    return values


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s,:{}\[\]"]+')


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield texts, numbers, words and brackets of a text that is known to be JSON, each with its line."""
    line, end = 1, 0
    for found in _TOKEN.finditer(text):
        line += text.count("\n", end, found.start())
        end = found.end()
        yield found[0], line


def _mark_json(token: str, line: int, tokens: Iterator[tuple[str, int]], place: Place, marks: Marks) -> None:
    """Mark the value that begins with ``token``, to its end."""
    marks.value(place, line)
    if token == "{":
        for key, key_line in tokens:
            if key == "}":
                return
            inside = (*place, json.loads(key))
            marks.key(inside, key_line)
            _mark_json(*next(tokens), tokens, inside, marks)
    elif token == "[":
        for number, (item, item_line) in enumerate(tokens):
            if item == "]":
                return
            _mark_json(item, item_line, tokens, (*place, number), marks)


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


def _json_message(text: str, error: json.JSONDecodeError, source: str) -> str:
    where = f"{source}:{error.lineno}:{error.colno}"
    line = text.splitlines()[error.lineno - 1].strip() if error.lineno <= len(text.splitlines()) else ""
    shown = f"\n    {line[:100]}" if line else ""
    return f"{where}: not JSON: {_json_hint(text, error)}{shown}"


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


def _kind(value: Any) -> str:
    names = {list: "a list [...]", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
