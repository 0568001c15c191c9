"""Limits of the length of files, functions and classes."""

import ast
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deepmd_ema"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_METHODS, MAX_TRAINER_LINES = 500, 60, 15, 400
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.read_text().strip())


def body_length(function):
    """Return the lines of a function, its docstring not counted."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_files_functions_and_classes_are_short():
    found = [text for path in FILES for text in excesses(path)]
    assert not found, "\n".join(found)


def excesses(path):
    """Yield the parts of a file that are too long."""
    source, name = path.read_text(), path.relative_to(PACKAGE)
    tree = ast.parse(source)
    if not ast.get_docstring(tree):
        yield f"{name}: expected a docstring of the module that names its content"
    if source.count("\n") > (MAX_TRAINER_LINES if path.name == "trainer.py" else MAX_FILE_LINES):
        yield f"{name}: {source.count(chr(10))} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and body_length(node) > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {body_length(node)} lines"
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            if len(methods) > MAX_METHODS:
                yield f"{name}:{node.lineno}: class {node.name} has {len(methods)} methods"


def test_the_version_is_in_the_changelog_and_in_the_citation():
    import deepmd_ema

    release, is_development, _ = deepmd_ema.__version__.partition(".dev")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == release
    dated = f"{release} ({citation['date-released']})"
    headings = re.findall("^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased" if is_development else dated)
    # files name the program that wrote them: what is not released yet must not pass for the release before
    assert not is_development or dated not in headings
