"""The cost of a run: it is measured without a trace, and counts what the run does."""

import json
import os
import re
from pathlib import Path

import pytest
from helpers import tiny_input, write_system

from deepmd_ema.cli.main import main
from deepmd_ema.config import load_config
from deepmd_ema.training.estimate import measure_steps
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback


class Count(Callback):
    """Counts validations and checkpoints."""

    def __init__(self):
        self.phases = []

    def during(self, trainer, phase):
        self.phases.append(phase)
        return super().during(trainer, phase)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes an input with relative paths."""
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=8)

    def write(**changes):
        config = tiny_input(["data"], ["data"], **changes)
        Path("input.json").write_text(json.dumps(config))
        return load_config("input.json")

    return write


VALIDATED = {"full_validation": True, "validation_freq": 5, "full_val_start": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 17, "training__save_freq": 5, "validating": VALIDATED},
        {
            "num_steps": 17,
            "training__save_freq": 100,
            "validating": VALIDATED | {"full_val_start": 0.5},
        },
        {
            "num_steps": 6,
            "training__save_freq": 6,
            "validating": VALIDATED | {"full_val_start": 1},
        },
    ],
)
def test_validations_and_checkpoints_of_the_run_are_counted_as_they_come(
    written, changes
):
    cost = measure_steps(written(**changes), "cpu", seconds=0.0)
    watch = Count()
    run_training("input.json", device="cpu", callback=watch)
    assert cost.steps == changes["num_steps"]
    assert cost.validations == watch.phases.count("validation")
    assert cost.checkpoints == watch.phases.count("checkpoint")
    assert (cost.validation_s > 0) == (cost.validations > 0)
    assert cost.step_s > 0
    assert cost.memory_bytes > 100e6
    assert cost.total_s > cost.steps * cost.step_s


def test_nothing_is_left_of_the_steps_that_were_measured(written):
    config = written(
        num_steps=100, training__tensorboard=False, training__stat_file="stat.h5"
    )
    before = sorted(os.listdir())
    measure_steps(config, "cpu", seconds=0.0)
    assert sorted(os.listdir()) == before


def test_check_says_how_long_the_run_takes(written, capsys):
    written(num_steps=8, validating=VALIDATED)
    assert main(["check", "input.json", "--time", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "Cost on this machine as it is now (" in out
    assert "started now, it ends at 20" in out
    assert "8 steps of" in out
    assert "2 validations of" in out
    assert re.search(r"memory  \d+ MB at most", out)
