"""Runs are killed at every write to the disk and restarted to the same end; the thread that writes
their files.
"""

import io
import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import assert_same_files, tiny_input, validated, write_system
from training_runs import StopAfter

from deepmd_ema.checkpoint import series
from deepmd_ema.errors import Interrupted
from deepmd_ema.report import curves
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

BEFORE, LAST = (
    2,
    4,
)  # the run is after BEFORE; all writes of the next step are hit; LAST is its end
MAX_WRITES = 80  # of one restart and one step


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    """Two folders of one input: ``whole``, with an unbroken run, and ``before``, with one that
    stopped after BEFORE.
    """
    home = tmp_path_factory.mktemp("kill")
    write_system(home / "data", frames=6, natoms=6, seed=1)
    write_system(home / "valid", frames=3, natoms=6, seed=2)
    options = validated(
        1,
        training__disp_freq=1,
        training__save_freq=1,
        training__max_ckpt_keep=2,
        training__ema_decay=0.6,
        training__ema_ckpt_keep=2,
        learning_rate__start_lr=5e-3,
        validating__validation_metric="F:RMSE",
    )
    config = tiny_input(["../data"], ["../valid"], num_steps=LAST, **options)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("whole", "before"):
            (home / name).mkdir()
            patch.chdir(home / name)
            Path("input.json").write_text(json.dumps(config))
            if name == "whole":
                run_training("input.json", device="cpu")
        with pytest.raises(Interrupted):
            run_training("input.json", device="cpu", callback=StopAfter(BEFORE))
    return home


def half_of_a_file(save, content, file):
    whole = io.BytesIO()
    save(content, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()


def half_of_a_row(add, table, line):
    add(table, line[: len(line) // 2])


class Reaper:
    """Kills the process at write number ``at``: half of the bytes are written, or a move or removal
    is not made.
    """

    def __init__(self, at):
        self.at, self.count = at, 0

    def strikes(self):
        self.count += 1
        return self.count == self.at

    def stand_behind(self):
        """Lay hands on everything that changes a file."""
        for owner, name, half in (
            (os, "replace", None),
            (Path, "unlink", None),
            (Path, "symlink_to", None),
            (torch, "save", half_of_a_file),
            (curves.RowTable, "_add", half_of_a_row),
        ):
            setattr(owner, name, self.watched(getattr(owner, name), half))

    def watched(self, call, half):
        def change(*arguments, **options):
            if self.strikes():
                if half is not None:
                    half(call, *arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return change


class LateReaper(Reaper):
    """Holds write number ``at`` of the writer up until training is a step ahead, and kills the
    process then.
    """

    def __init__(self, at):
        super().__init__(at)
        self.went_on = threading.Event()

    def strikes(self):
        if not threading.current_thread().name.startswith("dp-ema-writer"):
            return False
        strikes = super().strikes()
        assert not strikes or self.went_on.wait(60)
        return strikes


class EndAfterOneStep(Callback):
    """Ends the process well before it takes a second step, when the files of the first are
    written.
    """

    last = BEFORE + 1

    def __init__(self, reaper):
        self.reaper = reaper

    def during(self, trainer, phase):
        if phase == "step" and trainer.step == self.last:
            trainer.saver.writer.wait()
            os._exit(0)
        return nullcontext()


class EndAfterTwoSteps(EndAfterOneStep):
    """Ends the process when it has taken a second step, and reports to the reaper when its row is
    in the table.
    """

    last = BEFORE + 2

    def in_validation(self, trainer, weights):
        if trainer.step == self.last:
            self.reaper.went_on.set()


def newest():
    """Return the newest checkpoint in this folder, None without one."""
    return "model.ckpt.pt" if os.path.exists("model.ckpt.pt") else None


def train_and_die(at, reaper=Reaper, callback=EndAfterOneStep):
    """Continue in a child process, killed at write ``at``; return whether it was."""
    pid = (
        os.fork()
    )  # as a fork: starting torch anew for each write would take seconds each
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            reaper = reaper(at)
            reaper.stand_behind()
            run_training(
                "input.json", restart=newest(), device="cpu", callback=callback(reaper)
            )
        finally:
            os._exit(9)  # neither killed nor at the end of the step: a fault of the run
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def assert_same_end(stand, parts):
    """The run restarts in ``parts`` to the end of the unbroken one."""
    run_training("input.json", restart=newest(), device="cpu")
    for started_anew in parts.glob("earlier-*"):  # what was there then is kept
        shutil.rmtree(started_anew)
    assert_same_files(stand / "whole", parts)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.timeout(480)  # half a minute, but each of its many runs waits for a disk
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_run_that_is_killed_at_any_write_restarts_to_the_same_end(
    stand, monkeypatch, every
):
    struck = 0
    for at in range(1, MAX_WRITES, every):
        parts = stand / f"parts_{every}_{at}"
        shutil.copytree(stand / "before", parts, symlinks=True)
        monkeypatch.chdir(parts)
        killed = train_and_die(at)
        assert_same_end(stand, parts)
        if not killed:
            break
        struck += 1
    assert not killed, "raise MAX_WRITES"
    # out.json, three tables cut; then three rows and two remarks, two best and two numbered files
    # with their moves, ...
    assert struck * every > 20


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("at", [1, 7, 13, 19])  # of 21 writes
def test_a_kill_while_training_is_a_step_ahead_of_the_writer_restarts_to_the_same_end(
    stand, monkeypatch, at
):
    parts = stand / f"ahead_{at}"
    shutil.copytree(stand / "before", parts, symlinks=True)
    monkeypatch.chdir(parts)
    assert train_and_die(at, LateReaper, EndAfterTwoSteps)
    rows = (parts / "lcurve.out").read_text().splitlines()
    assert int(rows[-1].split()[0]) == BEFORE + 2  # training has continued
    assert_same_end(stand, parts)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_that_is_killed_again_and_again_from_its_first_write_on_ends_as_an_unbroken_one(
    stand, monkeypatch
):
    parts = stand / "again"
    parts.mkdir()
    shutil.copy(stand / "whole" / "input.json", parts)
    monkeypatch.chdir(parts)
    starts = []
    for at in (
        1,
        20,
        40,
        14,
        25,
    ):  # of some 50 writes until the first checkpoint can be restarted from
        starts.append(newest())
        assert train_and_die(at, callback=lambda _: None)
    assert starts == [None, None, None, "model.ckpt.pt", "model.ckpt.pt"]
    assert_same_end(stand, parts)


SNAPSHOTS = {
    "name": "p",
    "type": "power",
    "sigma_rel": 0.2,
    "snapshots": True,
    "snapshot_freq": 2,
}
OPTIONS = validated(
    2, training__averaging=[SNAPSHOTS], training__disp_freq=1, training__save_freq=2
)


class HeldUp(Callback):
    """Lets the files of step 2 wait until two more steps are done."""

    def __init__(self, monkeypatch):
        self.gate, self.writes, self.step, save = threading.Event(), [], 0, series.save

        def late(path, *arguments, **more):
            assert self.gate.wait(30)
            self.writes.append((path.name, self.step))
            save(path, *arguments, **more)

        monkeypatch.setattr(series, "save", late)

    def after_update(self, trainer):
        self.step = trainer.step
        if trainer.step == 4:
            self.gate.set()


def test_files_written_late_hold_the_step_that_they_are_of(start, monkeypatch):
    whole, held = start("whole", 6), HeldUp(monkeypatch)
    late = start("late", 6, callback=held)
    assert any("-2." in name and step == 4 for name, step in held.writes)
    assert_same_files(whole, late)
