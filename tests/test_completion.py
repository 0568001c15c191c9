"""``dp-ema completion``: a shell offers commands, options and files."""

import shutil
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
def test_bash_completes_commands_options_values_and_files(words, expected, tmp_path, monkeypatch, capsys):
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
    found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert found.stdout.strip() == expected, found.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dp-ema in", ["init"]),
        ("dp-ema train --re", ["--restart"]),
        ("dp-ema train wat", ["water.json"]),
        ("dp-ema train --restart mod", ["model.ckpt.pt"]),
        ("dp-ema init --size ", ["S", "M", "L"]),
    ],
)
def test_fish_completes_commands_options_values_and_files(line, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("water.json", "model.ckpt.pt"):
        Path(name).touch()
    assert main(["completion", "fish"]) == 0
    Path("dp-ema.fish").write_text(capsys.readouterr().out)
    ask = f"source ./dp-ema.fish; complete -C'{line}'"
    found = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert [row.split("\t")[0] for row in found.stdout.splitlines()] == expected, found.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_the_script(tmp_path, capsys):
    assert main(["completion", "zsh"]) == 0
    script = tmp_path / "_dp-ema"
    script.write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-n", str(script)], check=True, timeout=60, stdin=subprocess.DEVNULL)


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys):
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
