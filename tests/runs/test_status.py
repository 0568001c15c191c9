"""``dp-ema show RUN``: how far a run is, from its files alone, at any moment."""

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from helpers import tiny_input, write_system
from run_records import change_record, train_in
from training_runs import StopAfter

from deepmd_ema.cli.main import main
from deepmd_ema.config.outputs import LOCK, RECORD
from deepmd_ema.errors import CheckpointError, Interrupted
from deepmd_ema.files import this_machine
from deepmd_ema.report.record import read_record
from deepmd_ema.report.status import RunStatus
from deepmd_ema.training.run import run_training
from deepmd_ema.training.weights import load_restart

VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": 3,
    "full_val_start": 0.0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six steps, and one that was interrupted after four."""
    root = tmp_path_factory.mktemp("runs")
    write_system(root / "data", frames=8)
    values = tiny_input(
        ["../data"],
        ["../data"],
        num_steps=6,
        training__enable_ema=True,
        training__save_freq=3,
        training__disp_freq=2,
        validating=VALIDATED,
    )
    train_in(root / "whole", values)
    with pytest.raises(Interrupted):
        train_in(root / "stopped", values, callback=StopAfter(4))
    return root


@pytest.fixture
def runs(here, trained, tmp_path):
    """Copies of these runs, in the working directory."""
    shutil.copytree(trained, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def take_lock(folder, pid, machine=None):
    holder = {
        "machine": machine or this_machine(),
        "host": "here",
        "pid": pid,
        "since": "2026-01-01 00:00:00",
    }
    (folder / LOCK).write_text(json.dumps(holder))


def shown(capsys, folder):
    assert main(["show", str(folder)]) == 0
    return capsys.readouterr().out


def test_a_finished_run_shows_its_errors_files_and_time(runs, capsys):
    text = shown(capsys, "whole")
    assert text.startswith("whole: ended, step 6 of 6 (100 %)\n  time ")
    rows = [line.split(maxsplit=1) for line in text.splitlines()[1:]]
    names = [name for name, _ in rows]
    assert names[:4] == ["time", "last", "validation", "validation"]
    last = (runs / "whole" / "val_ema.log").read_text().splitlines()
    force = [line.split()[4] for line in last if not line.startswith("#")][-1]
    assert f"RMSE {float(force):.4g}"[:9] in next(
        row for name, row in rows if row.startswith("ema, step 6")
    )
    rows = (runs / "whole" / "lcurve.out").read_text().splitlines()
    column = rows[0].lstrip("# ").split().index("rmse_f_trn")
    force = 1000 * float(rows[-1].split()[column])
    assert (
        f" F {force:.3g}"
        in text.partition("single batches, meV and Å: train E ")[2].partition(";")[0]
    )
    assert "model.ckpt-6.pt" in text
    assert "ema: model_ema.ckpt-6.pt, 6 updates, mean age" in text
    assert "so far" not in text


def test_json_holds_the_same_without_nan(runs, capsys):
    assert main(["show", "whole", "--json"]) == 0
    found = json.loads(
        capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name)
    )
    assert (found["state"], found["step"], found["num_steps"], found["left"]) == (
        "ended",
        6,
        6,
        None,
    )
    assert found["validation"]["ema"]["step"] == found["last_row"]["step"] == 6
    assert (
        found["best"]["ema"][found["metric"]]
        <= found["validation"]["ema"][found["metric"]]
    )
    assert found["checkpoint"] == "model.ckpt-6.pt"
    assert found["averages"] == {"ema": "model_ema.ckpt-6.pt"}


def test_an_interrupted_run_differs_from_a_killed_one(runs, capsys):
    assert shown(capsys, "stopped").startswith(
        "stopped: interrupted (by SIGTERM), step 4 of 6 (67 %)\n"
    )
    change_record(runs / "stopped", ended="")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    take_lock(runs / "stopped", gone.pid)
    assert shown(capsys, "stopped").startswith(
        "stopped: killed (without a last entry in its record), step 4 of 6"
    )


def test_a_run_that_trains_has_a_time_left_that_runs_down(runs, capsys):
    folder = runs / "stopped"
    written = (datetime.now().astimezone() - timedelta(seconds=100)).isoformat(
        " ", "seconds"
    )
    change_record(folder, ended="", left=1000.0, elapsed=50.0, updated=written)
    take_lock(folder, os.getpid())
    found = RunStatus(folder)
    assert found.state == "training"
    assert found.left == pytest.approx(900, abs=10)
    assert found.elapsed == pytest.approx(150, abs=10)
    text = shown(capsys, folder)
    assert f"training (process {os.getpid()} on here), step 4 of 6 (67 %)" in text
    assert " so far, " in text
    assert " left, ends about " in text


def test_nothing_is_changed_and_half_written_lines_do_no_harm(runs, capsys):
    folder = runs / "stopped"
    take_lock(folder, os.getpid())
    for name in ("lcurve.out", "val.log"):
        with (folder / name).open("a") as file:
            file.write("      6    1.0")
    with (folder / "val_ema.log").open("a") as file:
        file.write("      6    1.0e")
    (folder / RECORD).write_text((folder / RECORD).read_text()[:200])
    before = {
        path: (path.stat().st_mtime_ns, path.lstat().st_ino)
        for path in folder.iterdir()
    }
    text = shown(capsys, folder)
    assert "last row    step 4" in text
    assert "ema, step 3" in text
    assert {
        path: (path.stat().st_mtime_ns, path.lstat().st_ino)
        for path in folder.iterdir()
    } == before


def test_the_status_of_a_run_needs_no_torch(runs):
    code = (
        "import sys; from deepmd_ema.cli.main import main; sys.exit(main(['show', 'whole']) or "
        "'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", ["show", "report"])
def test_what_is_no_run_is_answered_in_one_line(runs, command, capsys):
    if command == "report":
        pytest.importorskip("matplotlib")
    (runs / "empty").mkdir()
    for folder, message in [
        (
            "empty",
            "empty: no run here. Give the folder in which `dp-ema train` was started.",
        ),
        (
            ".",
            ".: no run here, but 2 runs in folders: stopped, whole. Give one of them.",
        ),
    ]:
        assert main([command, folder]) == 2
        assert capsys.readouterr().err == f"dp-ema: {message}\n"


@pytest.mark.parametrize("named", ["/dev/zero", "../notes.txt", "checkpoint", "pipe"])
def test_a_pointer_that_names_no_checkpoint_is_not_shown(runs, capsys, named):
    pointer = Path("whole/checkpoint")
    Path("notes.txt").write_text("")
    pointer.write_text(named)
    if named == "pipe":
        pointer.unlink()
        os.mkfifo(pointer)
    assert main(["show", "whole"]) == 0
    assert "checkpoint  the run names none" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="checkpoint"):
        load_restart("whole")


def test_a_restart_adds_a_part_and_a_new_run_begins_anew(runs, monkeypatch):
    monkeypatch.chdir(runs / "stopped")
    run_training("input.json", restart="model.ckpt.pt", device="cpu")
    record = [(p.first_step, p.step, p.ended) for p in read_record(".")]
    assert record == [(0, 4, "interrupted by SIGTERM"), (4, 6, "ended")]
    run_training("input.json", device="cpu")
    assert [(p.first_step, p.step) for p in read_record(".")] == [(0, 6)]
    assert [p.first_step for p in read_record("earlier-1")] == [0, 4]
