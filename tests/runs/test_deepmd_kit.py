"""Formats that an installed DeePMD-kit reads and writes; here a program in its place copies, or
does something else.
"""

import shutil
import stat
import sys

import pytest
from infer_models import write_run
from toy_models import toy_model, write_dp

from deepmd_ema import cli
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential

COPIES = """
assert "DP_BACKEND" not in os.environ  # by which `dp` would call dp-ema
if words == ["--version"]:
    print("DeePMD-kit v3.2.0")
elif words[0] == "convert-backend":
    shutil.copy(words[1], words[2])
elif words[1] == "compress":
    assert words[0] == "--pt"
    shutil.copy(words[3], words[5])
"""
FAILS = (
    'print("DeePMD-kit v3.2.0") if words == ["--version"] else sys.exit("Traceback\\n  line '
    '1\\nNo such operator")'
)
OTHER = 'print("Data Parallel 1.0")'


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that puts a program with the name ``dp`` on the PATH and returns its
    path.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(text):
        path = folder / "dp"
        path.write_text(
            f"#!{sys.executable}\nimport os, shutil, sys\nwords = sys.argv[1:]\n{text}\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_run(folder)
    monkeypatch.chdir(folder)
    return folder


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_pth_is_written_and_read_through_a_program_on_the_path(
    home, program, capsys, monkeypatch
):
    monkeypatch.setenv("DP_BACKEND", "ema")
    path = program(COPIES)
    assert cli.main(["--pt", "freeze", "--use-ema"]) == 0
    assert (
        f"written by DeePMD-kit 3.2.0 ({path}) from the .dp file that was compared"
        in capsys.readouterr().out
    )
    assert cli.main(["convert", "frozen_model.pth", "again.dp"]) == 0
    assert cli.main(["show", "frozen_model.pth"]) == 0
    assert "averaged weights (ema) of step 7" in capsys.readouterr().out
    known, found = (
        load_model(home, use_average=True).model,
        load_model("again.dp").model,
    )
    assert all(
        (a == b).all()
        for a, b in zip(
            known.state_dict().values(), found.state_dict().values(), strict=True
        )
    )
    assert (
        Potential("frozen_model.pth", device="cpu").info.path.name == "frozen_model.pth"
    )
    assert cli.main(["--pt", "compress"]) == 0
    assert (
        "frozen_model_compressed.pth: frozen_model.pth with tables of DeePMD-kit"
        in capsys.readouterr().out
    )
    assert (home / "frozen_model_compressed.pth").read_bytes() == (
        home / "frozen_model.pth"
    ).read_bytes()


def test_the_program_may_be_named(home, program, tmp_path):
    path = shutil.move(program(COPIES), tmp_path / "dp-3.2")
    for words in (
        ["freeze", "-o", "a.pth"],
        ["convert", ".", "b.pth"],
        ["compress", "-i", "a.pth", "-o", "c.pth"],
    ):
        assert cli.main([*words, "--dp", str(path)]) == 0
    assert {"a.pth", "b.pth", "c.pth"} <= set(names(home))


@pytest.mark.parametrize(
    ("text", "words", "phrase"),
    [
        (
            None,
            [],
            "there is no `dp` on the PATH. Install it (pip install 'deepmd-kit[torch]==3.2.0'",
        ),
        (None, ["--dp", "nowhere/dp"], "--dp nowhere/dp is no program. Install it"),
        (
            None,
            [],
            "or use a .pt2 file, which LAMMPS with DeePMD-kit 3.2 reads as well",
        ),
        (
            OTHER,
            [],
            "dp --version does not say that it is DeePMD-kit: Data Parallel 1.0. Install it",
        ),
        (
            FAILS,
            [],
            "m.pth` of DeePMD-kit 3.2.0 ({program}) failed: Traceback line 1 No such operator",
        ),
        (
            "sys.exit(0) if words[0] != '--version' else print('DeePMD-kit v3.2.0')",
            [],
            "failed: it printed nothing",
        ),
    ],
)
def test_without_a_deepmd_kit_that_works_there_is_one_message_and_no_file(
    home, program, tmp_path, capsys, text, words, phrase
):
    path = program(text) if text is not None else tmp_path
    (home / "m.pth").write_bytes(b"PK older")
    before = names(home)
    assert cli.main(["freeze", "-o", "new.pth", *words]) == 2
    err = capsys.readouterr().err
    assert phrase.format(program=path).replace("m.pth`", "new.pth`") in err
    assert err.startswith("dp-ema: new.pth: ")
    assert err.count("\n") == 1
    assert names(home) == before


@pytest.mark.parametrize("suffix", [".pth", ".pb"])
def test_a_model_that_deepmd_kit_does_not_have_in_a_format_is_refused(
    home, program, capsys, suffix
):
    program(COPIES)
    config, model = toy_model("dpa4c", fitting_changes={"type": "dpa4_ener"})
    write_dp("small.dp", model, config)
    assert cli.main(["freeze", "-c", "small.dp", "-o", f"new{suffix}"]) == 2
    assert (
        "has models with dpa4_ener in .pt2 files only. Write a .dp or a .pt2 file"
        in capsys.readouterr().err
    )
    assert f"new{suffix}" not in names(home)
