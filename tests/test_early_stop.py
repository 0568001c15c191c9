"""``validating.early_stop``: a run that ends when the errors of full validation no longer fall."""

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers import assert_same_files, tiny_input
from out_of_time import OutOfTime
from parallel_runs import train
from test_train_tasks import input_of_two_tasks, write_data

from deepmd_ema import checkpoint
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.labels import QUANTITIES
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.config.schema.training import EarlyStopConfig
from deepmd_ema.model.metrics import Errors
from deepmd_ema.report.record import read_record
from deepmd_ema.report.status import RunStatus
from deepmd_ema.training.run import run_training
from deepmd_ema.training.validate import EarlyStop

STEPS, EVERY = 24, 2
# the first full validation of a row is an improvement; none after it lowers the error by as much as 1 eV/angstrom
STOP = {"patience": 3, "metric": "F:RMSE", "min_delta": 1.0}
END = 4 * EVERY + 2  # full validation begins after step 4
VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": EVERY,
    "full_val_start": 4,
    "early_stop": STOP,
}
LIVE, EMA = ("live", ""), ("ema", "")


def errors(value):
    """Return errors of which the RMSE of the forces is ``value``, in eV/angstrom."""
    found = Errors()
    found.sums[list(QUANTITIES).index("f")] = torch.tensor([value, value**2, 1.0])
    return found


def fed(rows, **options):
    """Return the count after full validations with these force errors, each a dictionary by row."""
    stop = EarlyStop(EarlyStopConfig(**{"patience": 2, **options}), Metric("F:RMSE"))
    for number, row in enumerate(rows, 1):
        stop.add(10 * number, {name: errors(value) for name, value in row.items()})
    return stop


def test_the_count_begins_anew_at_an_error_that_is_lower_by_more_than_min_delta():
    assert fed([{LIVE: v} for v in (1.0, 0.9, 0.95, 0.9)]).is_met
    assert not fed([{LIVE: v} for v in (1.0, 0.9, 0.95, 0.89)]).is_met
    assert fed([{LIVE: v} for v in (1.0, 0.95, 0.91)], min_delta=0.1).is_met
    assert not fed([{LIVE: v} for v in (1.0, 0.95, 0.89)], min_delta=0.1).is_met  # compared with 1, not with 0.95


def test_an_error_that_is_not_finite_is_no_improvement():
    stop = fed([{LIVE: v} for v in (float("nan"), float("nan"))])
    assert stop.is_met
    assert "improvements: none" in stop.describe()


def test_the_improvement_of_one_of_several_rows_is_enough_unless_one_is_chosen():
    rows = [{LIVE: 1.0, EMA: 1.0}, {LIVE: 1.1, EMA: 0.9}, {LIVE: 1.2, EMA: 0.8}]
    assert not fed(rows).is_met
    assert fed(rows, weights="live").is_met
    assert not fed(rows, weights="ema").is_met


def test_the_reason_names_metric_patience_and_the_last_improvements():
    found = fed([{LIVE: 1.0, ("ema", "ice"): 0.9}, {LIVE: 2.0}, {LIVE: 2.0}], min_delta=0.01).describe()
    assert found == (
        "F:RMSE has not fallen by more than 10.000 meV/Å in the last 2 full validations; "
        "last improvements: "
        "live 1000.0 meV/Å after step 10, ice ema 900.00 meV/Å after step 10"
    )


@pytest.mark.parametrize("task", ["", "ice"])
def test_the_count_continues_from_its_state(task):
    one, other = (fed([{("live", task): v} for v in values]) for values in ((1.0, 0.9, 0.95), ()))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())), [("live", task)])
    assert (
        (other.waited, other.improvements)
        == (one.waited, one.improvements)
        == (1, {("live", task): (pytest.approx(0.9), 20)})
    )


def test_another_metric_is_counted_anew(caplog):
    stop = EarlyStop(EarlyStopConfig(patience=2, metric=Metric("E:MAE")), Metric("F:RMSE"))
    stop.load_state_dict(fed([{LIVE: 1.0}, {LIVE: 1.0}]).state_dict(), [LIVE])
    assert stop.waited == 0
    assert "early_stop: E:MAE counts now, F:RMSE before" in caplog.text


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, early_stop, **options of the request)."""

    def run(name, stop=STOP, more=None, **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        bank = [{"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 7}]
        options = {"training__enable_ema": True, "training__save_freq": 0, "training__averaging": bank, **(more or {})}
        values = tiny_input(
            [water_like], [water_like_valid], num_steps=STEPS, validating={**VALIDATED, "early_stop": stop}, **options
        )
        (folder / "input.json").write_text(json.dumps(values))
        return run_training("input.json", device="cpu", **how)

    return run


def test_a_run_that_no_longer_improves_ends_as_after_its_last_step(start, caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")
    found = start("run", more={"training__change_bias_after_training": True})
    assert found.step == END
    assert f"early stop after step {END} of {STEPS}: F:RMSE has not fallen by more than" in caplog.text
    assert "best.ckpt-" in caplog.text
    payload = checkpoint.load(found.checkpoint)
    assert payload["step"] == END
    assert payload["refitted"]
    assert payload["early_stop"]["waited"] == 3
    names = {path.name for path in Path().rglob("*.pt")}
    assert {f"model_ema.ckpt-{END}.pt", f"model_p05.ckpt-{END}.pt", "model_p05.ckpt-7.pt"} <= names
    assert (Path("snapshots") / f"model_p05.ckpt-{END}.pt").exists()
    assert read_record(".")[-1].ended.startswith("ended early: F:RMSE")
    assert "ended (early: F:RMSE has not fallen" in str(RunStatus(".").describe())


@pytest.mark.parametrize(("step", "in_validation"), [(5, False), (8, False), (8, True), (END, True)])
def test_the_restart_of_an_interrupted_run_stops_early_as_the_unbroken_run_does(start, step, in_validation):
    part = start("parts", callback=OutOfTime(step, in_validation))
    assert part.step == step
    assert start("parts", restart=str(part.checkpoint)).step == END
    start("whole")
    for folder in ("../parts", "../whole"):  # a break leaves its own checkpoint and last snapshot
        for file in Path(folder).rglob(f"*-{step}.pt"):
            if step != END:
                file.unlink()
    assert_same_files(Path("../parts"), Path("../whole"))


def test_a_run_that_stopped_early_continues_with_more_patience_only(start, caplog):
    found = start("run")
    assert start("run", restart=str(found.checkpoint)).step == END
    assert f"step {END} ended the run early" in caplog.text
    assert "Raise validating.early_stop.patience" in caplog.text
    assert read_record(".")[-1].ended.startswith("ended early: F:RMSE")
    assert start("run", stop={**STOP, "patience": 5}, restart=str(found.checkpoint)).step == END + 2 * EVERY


def test_a_run_that_stops_at_its_last_step_has_not_ended_early(start, caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")
    # full validations after steps 4, 6, ..., 24, of which the first alone is an improvement
    assert start("run", stop={**STOP, "patience": (STEPS - 4) // EVERY}).step == STEPS
    assert "stopped   early" not in caplog.text
    assert "early stop after" not in caplog.text
    assert read_record(".")[-1].ended == "ended"


def test_without_early_stop_a_checkpoint_has_no_count(start):
    found = start("run", stop=None)
    assert found.step == STEPS
    assert "early_stop" not in checkpoint.load(found.checkpoint)


def test_without_patience_the_message_names_it():
    with pytest.raises(Exception, match=r"validating\.early_stop\.patience"):
        config_from_dict(tiny_input(["a"], ["b"], validating={"full_validation": True, "early_stop": {}}))


def test_a_run_of_two_tasks_stops_early_and_restarts_with_the_count_of_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = input_of_two_tasks(write_data(tmp_path / "data"))
    values["training"]["numb_steps"] = STEPS
    values["validating"]["early_stop"] = STOP
    Path("input.json").write_text(json.dumps(values))
    part = run_training("input.json", device="cpu", callback=OutOfTime(10))
    rows = checkpoint.load(part.checkpoint)["early_stop"]["improvements"]
    assert [(weights, set(tasks)) for weights, tasks in rows.items()] == [
        (weights, {"water", "salt"}) for weights in ("live", "slow")
    ]
    # the first of the full validations, every 4 steps, is the only improvement
    assert run_training("input.json", device="cpu", restart=str(part.checkpoint)).step == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kind", "link"), [(0, "gathered", "model.ckpt.pt"), (3, "sharded", "model.ckpt.dcp")]
)
def test_ranks_stop_early_at_the_same_step_and_their_restart_keeps_it(
    tmp_path, water_like, water_like_valid, stage, kind, link
):
    options = {"training__zero_stage": stage, "training__checkpoint_format": kind, "training__enable_ema": True}
    values = tiny_input([water_like], [water_like_valid], num_steps=STEPS, validating=VALIDATED, **options)
    train(tmp_path, 2, values)
    assert checkpoint.load(tmp_path / link)["early_stop"]["waited"] == STOP["patience"]
    train(tmp_path, 2, restart=link)
    assert checkpoint.load(tmp_path / link)["step"] == END
