"""Text of a JSON or YAML file as plain values with the lines of keys; messages about its syntax."""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from deepmd_ema.config.messages import Lines, Place, Values, dotted, is_comment
from deepmd_ema.errors import ConfigError

JSON_SUFFIXES = (".json",)
YAML_SUFFIXES = (".yaml", ".yml")
_DEEPEST = 100  # sections within sections; an input has five, and the code that reads it recurses
_MAX_BYTES = 50_000_000  # bytes; an input has a few thousand, a data file named by mistake has more
MAX_VALUES = 100_000  # values of an input in YAML
NEITHER = "nested too deeply to be an input"

Marks = Iterator[tuple[Place, int, bool]]
"""Place and line of each key and item of a text in its order, and whether it is a key."""


def read_config_file(path: Path) -> tuple[Values, Lines]:
    """Return the values of a file and the line, from 1, of each key and list item.

    Raises:
        ConfigError: if the file is missing, is no JSON or YAML, names a key twice, or holds no
            section.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path}: is a folder, expected a .json, .yaml or .yml file.{_inputs_near(path)}"
        )
    suffix = path.suffix.lower()
    if suffix not in JSON_SUFFIXES + YAML_SUFFIXES and path.exists():
        raise ConfigError(
            f"{path}: expected a file that ends in .json, .yaml or .yml. Rename it after its "
            "format."
        )
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: {path.stat().st_size} bytes is too large for an input. Is it a data file?"
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.{_inputs_near(path.parent)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file (byte {error.start} is not UTF-8)."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise ConfigError(
            f"{path}: the file is empty. Expected a JSON object {{...}} or YAML with the sections "
            "of a run."
        )
    if suffix in YAML_SUFFIXES:
        # PyYAML takes time that an input in JSON need not spend
        from deepmd_ema.config.text_yaml import parse_yaml

        values, lines = parse_yaml(text, str(path))
    else:
        values, lines = _parse_json(text, str(path))
    if not isinstance(values, dict):
        names = {
            list: "a list [...]",
            str: "a text",
            bool: "true or false",
            type(None): "nothing",
        }
        raise ConfigError(
            f"{path}:1: expected an object {{...}} with the sections model, "
            "learning_rate, loss and training, found "
            f"{names.get(type(values), 'a number')}."
        )
    return values, lines


def _inputs_near(folder: Path) -> str:
    """Return a sentence with the inputs that are in the folder, or nothing."""
    try:
        names = sorted(
            f.name
            for f in folder.iterdir()
            if f.suffix.lower() in JSON_SUFFIXES + YAML_SUFFIXES
        )
    except OSError:
        return ""
    return f" There is: {', '.join(names[:5])}." if names else ""


def lines_of(marks: Marks, source: str, max_values: float = float("inf")) -> Lines:
    """Return the line of each key and item.

    Raises:
        RecursionError: if one is nested too deeply.
        ConfigError: if a section has a key twice, or there are too many values.
    """
    lines: Lines = {}
    twice = []
    for place, line, is_key in marks:
        if len(place) > _DEEPEST:
            raise RecursionError
        if len(lines) > max_values:  # aliases of aliases multiply the values of a text
            raise ConfigError(
                f"{source}: anchors that expand to more than {max_values:,} values: this is no "
                "input."
            )
        if is_key and place in lines and not any(map(is_comment, place)):
            twice.append(
                f"{source}:{line}: {dotted(place)}: given twice, first on line {lines[place]}. "
                "Remove one of the two."
            )
        lines[place] = line
    ConfigError.raise_if_any(twice)
    return lines


# ---- JSON


def _parse_json(text: str, source: str) -> tuple[Any, Lines]:
    """Return the values of a JSON text and their lines.

    Raises:
        ConfigError: with line and column of the first mistake, and what it looks like.
    """

    # json.loads takes NaN and Infinity, and calls this without the place
    def refuse_constant(name: str) -> NoReturn:
        pattern = re.compile(rf"(?<![\w\"]){name}")
        line = next(
            (n for n, t in enumerate(text.splitlines(), 1) if pattern.search(t)), 1
        )
        raise ConfigError(
            f"{source}:{line}: {name} is no JSON number. Write a finite number, or null."
        )

    try:
        values = json.loads(text, parse_constant=refuse_constant)
        # json has no lines of keys, so that a valid text is read once more, token by token
        breaks = [match.start() for match in re.finditer("\n", text)]
        tokens = (
            (match[0], bisect(breaks, match.start()) + 1)
            for match in _TOKEN.finditer(text)
        )
        return values, lines_of(
            _json_marks(*next(tokens), tokens, (), is_key=False), source
        )
    except json.JSONDecodeError as error:
        # the mistake may be at the end, behind the last line
        lines = [*text.splitlines(), ""]
        line = lines[min(error.lineno, len(lines)) - 1].strip()
        shown = f"\n    {line[:100]}" if line else ""
        raise ConfigError(
            f"{source}:{error.lineno}:{error.colno}: not JSON: {_json_hint(text, error)}{shown}"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{source}: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{source}: {NEITHER}.") from None


# texts, numbers, words and brackets of a text that is known to be JSON
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s,:{}\[\]"]+')


def _json_marks(
    token: str,
    line: int,
    tokens: Iterator[tuple[str, int]],
    place: Place,
    *,
    is_key: bool,
) -> Marks:
    """Yield the marks of the value that begins with ``token``.

    The line of a value in a section is that of its key.
    """
    yield place, line, is_key
    if token == "{":
        for key, key_line in tokens:
            if key == "}":
                return
            yield from _json_marks(
                next(tokens)[0],
                key_line,
                tokens,
                (*place, json.loads(key)),
                is_key=True,
            )
    elif token == "[":
        for number, (item, item_line) in enumerate(tokens):
            if item == "]":
                return
            yield from _json_marks(
                item, item_line, tokens, (*place, number), is_key=False
            )


def _json_hint(text: str, error: json.JSONDecodeError) -> str:
    """Return a description of the mistake; ``error.pos`` is where JSON ended."""
    after = text[error.pos :]
    before = text[: error.pos].rstrip()
    rest = after.lstrip()
    # Python 3.13 and later report an illegal trailing comma at the comma, older versions after it
    at_end = rest.startswith(("}", "]")) or "delimiter" in error.msg
    trailing = re.match(r",\s*[}\]]", after) or (before.endswith(",") and at_end)
    # the first that applies is shown: texts that look like a known mistake come before the messages
    # of json, which name its consequence
    hints = [
        (
            rest.startswith(("//", "/*", "#")),
            'JSON has no comments. Use a key that begins with "_", or a .yaml file.',
        ),
        (rest.startswith("'"), 'texts stand in double quotes: "like this".'),
        (trailing, "a comma before the closing bracket. Remove the comma."),
        (rest.startswith(","), "a comma too many. Remove it."),
        (
            re.match(r"(True|False|None)\b", rest),
            "write true, false and null in lower case.",
        ),
        (re.match(r"[.+]\d", rest), "a number begins with a digit: 0.5, 5."),
        (not rest, "the text ends too early. A closing } or ] is missing."),
        (
            "',' delimiter" in error.msg,
            "a comma or a closing bracket is missing before this.",
        ),
        (
            "':' delimiter" in error.msg,
            "a colon is missing between a key and its value.",
        ),
        (
            "property name" in error.msg,
            'a key in double quotes is expected here: "key": value.',
        ),
        (
            "Extra data" in error.msg,
            "something follows after the end of the object. A closing } may be one too many.",
        ),
        (
            "Invalid control character" in error.msg,
            "a text is not closed on its line. A double quote is missing.",
        ),
        (
            "Invalid \\escape" in error.msg,
            r"a backslash in a text is written twice: \\.",
        ),
    ]
    return next(
        (hint for applies, hint in hints if applies),
        f"{error.msg[0].lower()}{error.msg[1:]}.",
    )
