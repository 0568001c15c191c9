"""Text for a terminal: wrapped with the indentation of its text, sparingly colored; files get lines
as they are.
"""

import io
import json
import logging
import os
import pty
import re
from pathlib import Path

import pytest
from helpers import tiny_input, write_system
from infer_models import write_run

import deepmd_ema
from deepmd_ema import checkpoint
from deepmd_ema.cli.main import main
from deepmd_ema.report.log import set_up_logging
from deepmd_ema.text import RED, YELLOW, colored, printable, width_of, wrapped


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, without a number."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (
            "one two three four five six seven eight",
            ["one two three four five six", "  seven eight"],
        ),
        (
            "  1. one two three four five six seven",
            ["  1. one two three four five", "     six seven"],
        ),
        (
            "  memory  one two three four five six",
            ["  memory  one two three four", "          five six"],
        ),
        (
            "    one two three four five six seven",
            ["    one two three four five", "      six seven"],
        ),
        (
            "  system  frames  energy  forces  virials",
            ["  system  frames  energy  forces  virials"],
        ),
        (
            "it is a well-known-word-with-hyphens",
            ["it is a", "  well-known-word-with-hyphens"],
        ),
        (
            "then: dp-ema train --restart a.pt in.json",
            ["then:", "  dp-ema train --restart a.pt in.json"],
        ),
    ],
)
def test_long_lines_continue_below_the_beginning_of_their_text(line, lines):
    assert wrapped(line, 28).split("\n") == lines


def test_the_width_is_that_of_the_terminal_or_of_columns_or_80(monkeypatch):
    assert width_of(io.StringIO()) is None
    assert width_of(Terminal()) == 80  # it has no number to ask with
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        assert width_of(terminal) == 80  # a new one reports 0
        monkeypatch.setenv("COLUMNS", "33")
        assert width_of(terminal) == 33
        monkeypatch.setenv("COLUMNS", "0")
        assert width_of(terminal) == 80
    os.close(leader)


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colors_are_for_terminals_that_want_them(monkeypatch, variable, value):
    assert colored("x", RED, Terminal()) == "\x1b[31mx\x1b[0m"
    assert colored("x", RED, io.StringIO()) == "x"
    monkeypatch.setenv(variable, value)
    assert colored("x", RED, Terminal()) == "x"


def test_an_error_on_a_terminal_fits_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert main(["show", "a_file_that_is_not_there.pt"]) == 2
    lines = terminal.getvalue().splitlines()
    assert lines[0].startswith("\x1b[31mdp-ema\x1b[0m: ")
    assert len(lines) > 1
    assert max(map(len, lines[1:])) <= 40


def test_a_warning_in_the_log_is_yellow_and_wrapped_on_a_terminal_only(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    set_up_logging("INFO", tmp_path / "log")
    logging.getLogger("deepmd_ema").warning("word %s", "word " * 20 + "end")
    set_up_logging("ERROR")
    shown, kept = terminal.getvalue(), (tmp_path / "log").read_text()
    assert re.match("\\d\\d:\\d\\d:\\d\\d \x1b\\[33mWARNING:\x1b\\[0m word", shown)
    assert len(shown.splitlines()) > 1
    assert len(kept.splitlines()) == 1
    assert "] WARNING: word word" in kept


ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e"
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\x202e"


def test_only_the_colors_of_this_program_remain_and_only_where_they_are_shown():
    text = f"{colored('1 warning', YELLOW, Terminal())}: a\tb {ESCAPE}\nand more"
    clean = f"\\x1b[33m1 warning\\x1b[0m: a\tb {SHOWN}\nand more"
    assert printable(text) == printable(text, io.StringIO()) == clean
    assert printable(text, Terminal()) == clean.replace(
        "\\x1b[33m", "\x1b[33m"
    ).replace("\\x1b[0m", "\x1b[0m")


def test_a_name_in_a_file_of_another_does_not_steer_the_terminal(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = f"data{ESCAPE}"
    write_system(folder)
    other = str(write_system(f"other{ESCAPE}", seed=1, natoms=8))
    model, _ = write_run(tmp_path / "run")
    content = checkpoint.load(model)
    checkpoint.save("model.pt", {**content, "version": f"1{ESCAPE}"})
    name = f"input{ESCAPE}.json"
    Path(name).write_text(json.dumps(tiny_input([folder], num_steps=1)))
    for words in (
        ["show", "model.pt"],
        ["check", name],
        ["train", name, "-l", f"log{ESCAPE}"],
        ["test", "-m", str(model), "-s", folder],
        ["test", "-m", str(model), "-s", folder, "-d", folder],
        ["model-devi", "-m", str(model), str(model), "-s", folder],
        ["convert", folder, "converted"],
        ["neighbor-stat", "-s", folder, "-r", "3", "-t", "O", "H"],
        ["init", folder, "-o", f"proposed{ESCAPE}.json"],
        ["report", ".", "-s", folder, other, "-o", f"page{ESCAPE}.html"],
        ["show", folder],
    ):
        main(words)
        out, err = capsys.readouterr()
        text = out + err
        assert not set("\x1b\x07\u202e") & set(text), words
        assert SHOWN in text or words[0] in ("train", "neighbor-stat"), (
            words
        )  # which name no file here
    # nor does it when a person prints what was written
    for pattern in ("data*.e.out", "model_devi.out", "page*.html"):
        (file,) = tmp_path.glob(pattern)
        written = file.read_text()
        assert SHOWN in written, pattern
        assert not set("\x1b\x07\u202e") & set(written), pattern


def test_a_name_that_is_no_text_is_written_with_a_question_mark(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = os.fsdecode(b"data\xff")
    try:
        write_system(folder)
    except OSError:
        pytest.skip("this file system has names in Unicode only")
    other = str(write_system("other", seed=1, natoms=8))
    Path("input.json").write_text(json.dumps(tiny_input([other], num_steps=1)))
    assert main(["train", "input.json", "--device", "cpu"]) == 0
    assert main(["test", "-m", ".", "-s", folder, "-d", "detail"]) == 0
    assert main(["model-devi", "-m", ".", ".", "-s", folder, "-o", "devi.out"]) == 0
    assert main(["report", ".", "-s", folder, other, "-o", "page.html"]) == 0
    for name in ("detail.e.out", "devi.out", "page.html"):
        assert "data?" in Path(name).read_text(encoding="utf-8"), name


def test_commands_print_by_the_function_that_filters():
    folder = Path(deepmd_ema.__file__).parent
    calls = {
        (path.name, line.strip())
        for path in folder.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*print\(|.*=print\b", line)
    }
    names = {name for name, _ in calls}
    # the filter itself, help and completion of the command line, an example in a docstring
    assert names <= {"streams.py", "main.py", "loggers.py"}, sorted(calls)
