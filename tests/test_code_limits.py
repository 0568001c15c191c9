"""Limits of the length of files, functions and classes, of packages, and of the way to the first step."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deepmd_ema"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_METHODS = 500, 100, 15
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
    if source.count("\n") > MAX_FILE_LINES:
        yield f"{name}: {source.count(chr(10))} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and body_length(node) > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {body_length(node)} lines"
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
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


# lines of code, without blank lines, comments and docstrings; a number may only fall, and falls with the code
MAX_LINES = {
    "all": 31165,
    "averaging": 1326,
    "checkpoint": 785,
    "cli": 1041,
    "config": 4262,
    "data": 3984,
    "distributed": 946,
    "infer": 1685,
    "interop": 2077,
    "model": 7844,
    "modules": 884,
    "optim": 865,
    "report": 2349,
    "training": 3117,
}
SKIPPED = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}


def lines_of_code(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept = [token for token in tokens if tokenize.tok_name[token.type] not in SKIPPED]
    lines = {line for token in kept for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_no_package_has_more_lines_than_its_budget():
    found = Counter()
    for path in FILES:
        first, *rest = path.relative_to(PACKAGE).parts
        found[first if rest else "modules"] += lines_of_code(path.read_text())
    found["all"] = found.total()
    over = [f"{name}: {number} lines, at most {MAX_LINES.get(name, 0)}" for name, number in found.items()
            if number > MAX_LINES.get(name, 0)]  # fmt: skip
    assert not over, "\n".join(over)


# of examples/water without validation and averages, by tests/first_step.py; they may only fall
MAX_FUNCTIONS, MAX_FILES, MAX_DEPTH = 540, 104, 8


@pytest.mark.slow
def test_no_more_functions_than_today_are_entered_before_the_first_step(tmp_path):
    values = json.loads((ROOT / "examples" / "water" / "input.json").read_text())
    del values["validating"], values["training"]["validation_data"], values["training"]["enable_ema"]
    del values["training"]["ema_decay"]
    (tmp_path / "input.json").write_text(json.dumps(values | {"training": values["training"] | {"numb_steps": 2}}))
    (tmp_path / "data").symlink_to(ROOT / "examples" / "water" / "data")
    command = [sys.executable, ROOT / "tests" / "first_step.py", "input.json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    functions, files, depth = map(int, run.stdout.split())
    assert (functions <= MAX_FUNCTIONS, files <= MAX_FILES, depth <= MAX_DEPTH) == (True, True, True), run.stdout
