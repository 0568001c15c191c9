"""The thread that writes the files of a run: order, memory, errors, and what waits for it."""

import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import assert_same_files, validated
from test_train import load

from deepmd_ema.checkpoint import series
from deepmd_ema.checkpoint.writer import Writer
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError
from deepmd_ema.training.trainer import Callback


def test_an_error_is_raised_once_in_training_and_nothing_more_is_written():
    writer, done = Writer(World()), []
    writer.begin(1)
    writer.submit(lambda: done.append(1))
    writer.submit(Mock(side_effect=CheckpointError("no room")))
    writer.submit(lambda: done.append("behind"))
    writer.wait()
    with pytest.raises(CheckpointError, match="no room"):
        writer.begin(2)
    writer.submit(lambda: done.append("after it was raised"))
    writer.finish()
    writer.close()
    assert (done, writer.error, writer.steps) == ([1], None, 1)


SNAPSHOTS = {"name": "p", "type": "power", "sigma_rel": 0.2, "snapshots": True, "snapshot_freq": 2}
OPTIONS = validated(2, training__averaging=[SNAPSHOTS], training__disp_freq=1, training__save_freq=2)


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


def test_an_error_of_training_leaves_the_files_of_the_step_before_whole(start):
    class Fail(Callback):
        def after_update(self, trainer):
            if trainer.step == 3:
                raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        start("run", 6, callback=Fail())
    assert load("model.ckpt.pt")["step"] == load("model_ema.ckpt.pt")["step"] == 2
    assert not list(Path().rglob("*.part*"))
