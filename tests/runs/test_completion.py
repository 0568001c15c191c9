"""``dp-ema completion``: a shell offers commands, options and files."""

import subprocess
from pathlib import Path

import pytest

from deepmd_ema.cli.commands import SHELLS
from deepmd_ema.cli.main import main

shtab = pytest.importorskip("shtab")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_every_shell_has_commands_and_options(shell, capsys):
    assert shell in shtab.SUPPORTED_SHELLS
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "dp-ema" in script
    assert "neighbor-stat" in script
    assert "restart" in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["in"], "init"),
        (["train", "--re"], "--restart"),
        (["train", "wat"], "water.json"),
        (["init", "--size", ""], "S M L"),
    ],
)
def test_bash_completes_commands_options_values_and_files(
    words, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("water.json").touch()
    assert main(["completion", "bash"]) == 0
    Path("script").write_text(capsys.readouterr().out)
    line = " ".join(f'"{word}"' for word in ["dp-ema", *words])
    before = ["dp-ema", *words][-2]
    ask = (
        f"source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        f'_shtab_dp_ema dp-ema "{words[-1]}" "{before}"; echo "${{COMPREPLY[@]}}"'
    )
    found = subprocess.run(
        ["bash", "-c", ask],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert found.stdout.strip() == expected, found.stderr


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys):
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
