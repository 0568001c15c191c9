"""``validating.physics``: what full validation measures beside errors, ranks by, logs and continues."""

import json
import logging
import math
from pathlib import Path

import pytest
from helpers import tiny_input
from out_of_time import OutOfTime
from parallel_runs import train

from deepmd_ema import checkpoint
from deepmd_ema.config import config_from_dict
from deepmd_ema.errors import ConfigError, UserError
from deepmd_ema.infer.potential import Potential
from deepmd_ema.labels import PHYSICS
from deepmd_ema.physics.report import PhysicsOptions, measure_physics
from deepmd_ema.report.curves import curve_files
from deepmd_ema.report.status import read_status
from deepmd_ema.training.run import run_training

STEPS, SHORT = 8, 10
VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": 2,
    "full_val_start": 4,
    "physics": {"md_steps": SHORT},
}
FILES = {"live": "physics_val.log", "ema": "physics_val_ema.log"}


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that writes an input into a folder of its own and goes there: start(name, **validating)."""

    def enter(name, more=None, **validating):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        values = tiny_input(
            [water_like], [water_like_valid], num_steps=STEPS, training__enable_ema=True, training__ema_decay=0.9,
            validating={**VALIDATED, **validating}, **(more or {}),
        )  # fmt: skip
        Path("input.json").write_text(json.dumps(values))
        return values

    return enter


def rows(file):
    """Return the rows of a log of physics by step."""
    lines = [line.split() for line in Path(file).read_text().splitlines() if not line.startswith("#")]
    return {int(step): dict(zip(PHYSICS, map(float, values))) for step, *values in lines}


def test_full_validation_measures_what_the_command_measures(start, caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")
    systems = start("run")["training"]["validation_data"]["systems"]
    run_training("input.json", device="cpu")
    for weights, file in FILES.items():
        found = rows(file)
        assert list(found) == [4, 6, 8]
        of_file = measure_physics(
            "model.ckpt.pt", systems, PhysicsOptions(md_steps=SHORT), average=None if weights == "live" else weights
        ).metrics
        assert found[STEPS] == pytest.approx(dict(of_file), rel=1e-3)
    assert f"Batch {STEPS:7d}: physics of the weights     , ema : drift " in caplog.text
    assert [file.name for file in curve_files(".")] == ["lcurve.out", "val.log", "val_ema.log"]
    assert read_status(".").describe()


def test_the_best_file_and_the_early_stop_follow_a_metric_of_physics(start):
    start("run", validation_metric="P:SPREAD", early_stop={"metric": "p:limits", "patience": 1})
    found = run_training("input.json", device="cpu")
    assert found.step == 6  # the number of limits does not fall after step 4
    spread = {step: row["SPREAD"] for step, row in rows("physics_val.log").items()}
    lowest = min(spread, key=spread.get)
    assert found.best["live"].name == f"best.ckpt-{lowest}.t-1.pt"
    assert f"best.ckpt-{lowest}.t-1.pt (P:SPREAD = " in Path("val.log").read_text()
    assert checkpoint.load(found.checkpoint)["early_stop"]["metric"] == "P:LIMITS"


def test_of_equal_numbers_of_physics_the_later_one_is_the_best(start):
    start("run", validation_metric="P:FAILURE")
    found = run_training("input.json", device="cpu")
    row = rows("physics_val.log")
    lowest = min(one["FAILURE"] for one in row.values())
    last = max(step for step, one in row.items() if one["FAILURE"] == lowest)
    assert len([step for step, one in row.items() if one["FAILURE"] == lowest]) > 1
    assert found.best["live"].name == f"best.ckpt-{last}.t-1.pt"


def test_a_restart_has_the_logs_of_the_unbroken_run(start):
    start("parts")
    run_training("input.json", device="cpu", callback=OutOfTime(6, in_validation=True))
    run_training("input.json", device="cpu", restart="model.ckpt.pt")
    start("whole")
    run_training("input.json", device="cpu")
    for file in (*FILES.values(), "val.log", "val_ema.log"):
        assert Path(file).read_text() == Path("../parts", file).read_text()


def test_weights_without_finite_energies_are_the_worst_and_do_not_end_the_run(start, monkeypatch, caplog):
    def fail(*_args, **_kept):
        raise UserError("no finite energies")

    start("run", validation_metric="P:DRIFT")
    monkeypatch.setattr(Potential, "evaluate", fail)
    found = run_training("input.json", device="cpu")
    assert found.step == STEPS
    assert found.best == {}
    assert set(rows("physics_val.log")[STEPS].values()) == {math.inf}
    assert "physics of the weights live: nothing measured. no finite energies" in caplog.text


def test_a_metric_of_physics_needs_physics(start):
    values = start("run", validation_metric="P:DRIFT", early_stop={"metric": "P:LIMITS", "patience": 1}, physics=None)
    with pytest.raises(ConfigError) as raised:
        config_from_dict(values)
    for name, metric in (("validation_metric", "P:DRIFT"), ("early_stop.metric", "P:LIMITS")):
        assert f'validating.{name} = "{metric}": needs validating.physics' in str(raised.value)


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_measure_what_one_measures(start, tmp_path):
    values = start("one", more={"training__zero_stage": 0})
    run_training("input.json", device="cpu")
    one = {file: rows(file) for file in FILES.values()}
    values["training"]["zero_stage"] = 3
    values["training"]["training_data"]["batch_size"] = 1  # two ranks take the frames of one
    train(tmp_path / "two", 2, values)
    two = {file: rows(tmp_path / "two" / file) for file in FILES.values()}
    for file, found in one.items():
        assert list(two[file]) == list(found)
        assert two[file][STEPS]["LIMITS"] == found[STEPS]["LIMITS"]
        assert two[file][STEPS]["SPREAD"] == pytest.approx(found[STEPS]["SPREAD"], rel=0.2)
