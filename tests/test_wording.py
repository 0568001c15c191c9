"""Names, docstrings, comments and messages of package, benchmarks and tests are plain technical
English.

`python tests/test_wording.py [PATH ...]` prints what is found, as places and words.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from deepmd_ema.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
CHECKED = ("deepmd_ema", "benchmarks", "tests")
# parts of names, of any case, and what is used instead
NAMES = {
    r"^_*(MOST|FEWEST|LARGEST|LEAST|WORTH|SHORTEST|LONGEST|SMALLEST)(?=_|$)": (
        "MAX_, MIN_, *_THRESHOLD"
    ),
    r"(^|_)in_words($|_)": "describe, format_",
    r"(^|_)(told|tells|untold)($|_)|^_*tell_": "reported, reports",
    r"(^|_)(asked|asks)($|_)": "requested",
    r"(^|_)(stands|stood)($|_)": "is",
    r"(^|_)hood($|_)": "neighborhood",
    r"(^|_)goes_on($|_)": "continues",
    r"(^|_)seen_through($|_)": "with_slots",
    r"(^|_)by_hand($|_)": "cpu",
    r"(^|_)twin($|_)": "reference",
    r"(^|_)(house|rooms?|floors)($|_)": "code base, package, layer",
    r"(^|_)owes($|_)": "pending",
}
# words of docstrings, comments and messages
WORDS = {
    r"told|tells?|untold": "report, state, distinguish",
    r"asked|asks": "request, call for",
    r"stands|stood": "is, is stored, remains",
    r"goes on|go on|gone on|going on": "continue",
    r"said": "reported, stated",
    r"by hand": "written out, for the CPU",
    r"twins?": "reference version",
    r"house|rooms|floors": "code base, packages, layers",
    r"owes|owed": "pending",
    r"shared? out|shares out": "distribute, shard",
    r"in words": "as text",
    r"overtak\w+": "pass, exceed",
    r"hood": "neighborhood",
}
OPENINGS = {
    r"(Return|Yield|Print|Write|Give) (what|how|which|where|who)\b": (
        "name the thing that is returned"
    ),
    r"(What|How|Which|Where|Who|Whatever|Whoever) ": "name the content",
}


def findings(path: Path) -> Iterator[str]:
    """Yield the places with a forbidden name, word or opening."""
    text = path.read_text()
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            for pattern, instead in NAMES.items():
                if re.search(
                    pattern,
                    token.string
                    if pattern.startswith("^_*(MOST")
                    else token.string.lower(),
                ):
                    yield f"{where}:{token.start[0]}: name {token.string}: {instead}"
        elif token.type == tokenize.COMMENT:
            yield from _words(token.string, f"{where}:{token.start[0]}")
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            docstring = ast.get_docstring(node)
            if docstring:
                docstrings.add(id(node.body[0].value))
                line = f"{where}:{node.body[0].lineno}"
                yield from _words(docstring, line)
                for pattern, instead in OPENINGS.items():
                    if re.match(pattern, docstring):
                        yield (
                            f"{line}: docstring begins with {re.match(pattern, docstring)[0]!r}: "
                            f"{instead}"
                        )
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield from _words(node.value, f"{where}:{node.lineno}")


def _words(text: str, line: str) -> Iterator[str]:
    for pattern, instead in WORDS.items():
        for found in re.finditer(rf"\b({pattern})\b", text, flags=re.I):
            yield f"{line}: {found[0]!r}: {instead}"


def files_of(names: tuple[str, ...] | list[str]) -> list[Path]:
    """Return the Python files at or below paths."""
    paths = [Path(name) if Path(name).is_absolute() else ROOT / name for name in names]
    return sorted(
        file
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*.py"))
    )


def test_names_and_sentences_have_no_private_vocabulary():
    found = [
        text
        for path in files_of(CHECKED)
        if path != Path(__file__)
        for text in findings(path)
    ]
    assert not found, "\n".join(found)


_COMMAND = re.compile(
    rf"(?<!by )\b(dp-ema|dp|dp --pt) ({'|'.join([*COMMANDS, 'convert-backend'])})( [^.`]*)? $"
)


def unquoted_commands(text: str) -> Iterator[int]:
    """Yield the lines of commands in messages whose words come from values, which a shell may read
    as several.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            for before, after in zip(node.values, node.values[1:]):
                is_text = isinstance(before, ast.Constant) and isinstance(
                    after, ast.FormattedValue
                )
                if is_text and _COMMAND.search(str(before.value)):
                    yield before.lineno


def test_commands_in_messages_quote_their_words_for_a_shell():
    found = [
        f"{path}:{line}"
        for path in files_of(["deepmd_ema"])
        for line in unquoted_commands(path.read_text())
    ]
    assert not found, "\n".join([*found, "errors.command(...) quotes words"])


if __name__ == "__main__":
    for one in files_of(sys.argv[1:] or list(CHECKED)):
        for finding in findings(one):
            print(finding)
