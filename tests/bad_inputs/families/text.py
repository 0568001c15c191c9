"""Text: files that are no JSON or YAML, or text that a parser stumbles over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bad_inputs.case import ACCEPTED, CHECK_OPTIONS, REFUSED, TRAIN, Case, write

YAML_CHECK = ("check", "input.yaml", "--config-only")
_DEEP = 100_000


def bomb(levels: int, merge: bool = False) -> str:
    """Return a few hundred bytes of YAML that stand for ``9 ** levels`` values."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x, x]"]
    for n in range(1, levels):
        many = ", ".join([f"*a{n - 1}"] * 9)
        lines.append(f"a{n}: &a{n} {{<<: [{many}]}}" if merge else f"a{n}: &a{n} [{many}]")
    return "\n".join(lines)


JSON = {
    "empty": "", "blanks": " \n\n", "a list": "[]", "a number": "3", "a text": '"x"', "null": "null", "nothing inside": "{}",
    "no end": '{"model": ', "an end too many": '{"model": {}}}', "a comma at the end": '{"model": {},}',
    "no comma": '{"a": 1 "b": 2}', "single quotes": "{'model': 1}", "a comment": '{"model": 1} // x', "True": '{"a": True}',
    "NaN": '{"training": NaN}', "Infinity": '{"training": -Infinity}', "1e999": '{"training": 1e999}',
    "a number of 5,000 digits": '{"training": ' + "9" * 5000 + "}", "a key twice": '{"model": {}, "model": {}}',
    "600 deep": '{"a":' * 600 + "1" + "}" * 600, "lists 100,000 deep": "[" * _DEEP + "]" * _DEEP,
    "sections 100,000 deep": '{"a":' * _DEEP + "1" + "}" * _DEEP, "a tab in a text": '{"a": "\t"}', "NUL": '{"a": "\0"}',
    "half a surrogate": '{"model": "\\ud800"}', "a key of half a surrogate": '{"\\ud800": 1}', "a byte order mark": "\ufeff{}",
    "an empty key": '{"": 1}', "a key of 10,000 letters": '{"' + "k" * 10_000 + '": 1}',
    "a value of 100,000 letters": '{"model": "' + "v" * 100_000 + '"}', "a hundred unknown keys":
    "{" + ", ".join(f'"k{n}": 1' for n in range(100)) + "}", "terminal codes": '{"\\u001b[31mred": "\\u001b[2J"}',
    "no value": '{"a": }', "a leading zero": '{"a": 01}', "a plus": '{"a": +1}', "hex": '{"a": 0x10}', "two objects": "{}{}",
    "backslash": '{"a": "\\q"}', "not closed": '{"a": "b', "million items": '{"a": [' + "1," * 10**6 + "1]}",
    "right to left": '{"\u202emodel": 1}',
}  # fmt: skip
BYTES = {"no UTF-8": b'{"a": "\xff\xfe"}', "UTF-16": '{"a": 1}'.encode("utf-16"), "an image": b"\x89PNG\r\n\x1a\n" * 50,
         "zeros": bytes(10_000), "51 MB": b" " * (51 << 20)}  # fmt: skip
YAML = {
    "empty": "", "a comment": "# x", "a word": "x", "a tab": "model:\n\ttype_map: [O]", "!!bool x": "a: !!bool x",
    "!!timestamp x": "a: !!timestamp x", "!!int x": "a: !!int x", "!!float x": "a: !!float x", "!!binary x": "a: !!binary x",
    "!!set x": "a: !!set x", "!!omap x": "a: !!omap x", "!!pairs x": "a: !!pairs x", "an unknown tag": "a: !x y",
    "code": "a: !!python/object/apply:os.system ['touch broken']", "a control character": "a: \x01", "a bell": 'a: "x\x07"',
    "a list as a key": "? [1, 2]\n: 3", "a section as a key": "? {a: 1}\n: 3", "two documents": "a: 1\n---\nb: 2",
    "an anchor in itself": "a: &a [*a]", "an unknown anchor": "a: *b", "a bomb of lists": bomb(10), "a bomb of merges":
    bomb(10, merge=True), "merge of a number": "<<: 3", "merge of a list": "<<: [1]", "a key twice": "a: 1\na: 2",
    "no end": "a: [1, 2", "a quote": "a: 'x", "wrong indent": "a: 1\n  b: 2", "100,000 deep": "[" * _DEEP,
    "5,000 sections deep": "{a: " * 5000 + "1" + "}" * 5000, "a number as a key": "1: 2", "null as a key": "~: 2",
    "a date": "model: 2024-01-01", "infinity": "training: .inf", "nan": "training: .nan", "a percent": "%YAML 9.9\n---\na: 1",
    "a bool as a key": "true: 1", "!!null x": "a: !!null x", "!!str list": "a: !!str [1]", "!!map x": "a: !!map x",
    "!!seq x": "a: !!seq x", "!!float of a section": "a: !!float {b: 1}", "!!int list": "a: !!int [1]",
    "!!timestamp of month 13": "a: !!timestamp 2001-13-45", "!!binary with letters": "a: !!binary ä",
    "an anchor used for a section twice": "a: &b {c: 1}\nd: *b",
}  # fmt: skip


def cases() -> Iterator[Case]:
    for name, content in (JSON | BYTES).items():
        words = TRAIN if name == "a hundred unknown keys" else CHECK_OPTIONS  # `check` shows all of them
        yield Case("text", f"JSON: {name}", words, write("input.json", content), says=["input.json"])
    for name, content in YAML.items():
        yield Case("text", f"YAML: {name}", YAML_CHECK, write("input.yaml", content), says=["input.yaml"])
    for name in ("input.txt", "input", "input.toml", "data", "input.json/x"):
        yield Case("text", f"the name {name}", ("check", name))
    for number, cut in enumerate((0.1, 0.3, 0.5, 0.7, 0.9, 0.99)):
        yield Case("text", f"cut off, {number}", CHECK_OPTIONS, _cut(cut), says=["input.json"])
    for number in range(20):
        expected = ACCEPTED if number in (0, 17) else REFUSED  # a blank, and a digit, are what they change
        yield Case("text", f"a letter changed, {number}", CHECK_OPTIONS, _changed(number), expected)


def _cut(part: float):
    def cut() -> None:
        text = Path("input.json").read_text()
        Path("input.json").write_text(text[: int(part * len(text))])

    return cut


def _changed(number: int):
    def change() -> None:
        text = Path("input.json").read_text()
        place = (number * 7919) % len(text)
        Path("input.json").write_text(text[:place] + '{"}],:0x '[number % 9] + text[place + 1 :])

    return change
