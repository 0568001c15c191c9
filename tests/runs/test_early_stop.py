"""Runs that end early: when the errors of full validation no longer fall, and when their time is
over.
"""

import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same_files, tiny_input
from parallel_runs import train

from deepmd_ema import checkpoint, cli
from deepmd_ema.cli.main import build_parser
from deepmd_ema.config.labels import QUANTITIES
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.config.schema.training import EarlyStopConfig
from deepmd_ema.model.metrics import Errors
from deepmd_ema.report.record import read_record
from deepmd_ema.report.status import RunStatus
from deepmd_ema.training.trainer import Callback
from deepmd_ema.training.validate import EarlyStop

STEPS, EVERY = 24, 2
# the first full validation of a row is an improvement; none after it lowers the error by as much as
# 1 eV/angstrom
STOP = {"patience": 3, "metric": "F:RMSE", "min_delta": 1.0}
END = 4 * EVERY + 2  # full validation begins after step 4
VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": EVERY,
    "full_val_start": 4,
    "early_stop": STOP,
}
BANK = [
    {
        "name": "p05",
        "type": "power",
        "sigma_rel": 0.05,
        "snapshots": True,
        "snapshot_freq": 7,
    }
]
OPTIONS = {
    "training__enable_ema": True,
    "training__save_freq": 0,
    "training__averaging": BANK,
    "validating": VALIDATED,
}
LIVE, EMA = ("live", ""), ("ema", "")


def errors(value):
    """Return errors of which the RMSE of the forces is ``value``, in eV/angstrom."""
    found = Errors()
    found.sums[list(QUANTITIES).index("f")] = torch.tensor([value, value**2, 1.0])
    return found


def fed(rows, **options):
    """Return the count after full validations with these force errors, each a dictionary by row."""
    metrics = dict.fromkeys(("", "ice"), Metric("F:RMSE"))
    stop = EarlyStop(EarlyStopConfig(**{"patience": 2, **options}), metrics)
    for number, row in enumerate(rows, 1):
        stop.add(10 * number, {name: errors(value) for name, value in row.items()})
    return stop


def test_the_count_begins_anew_at_an_error_that_is_lower_by_more_than_min_delta():
    assert fed([{LIVE: v} for v in (1.0, 0.9, 0.95, 0.9)]).is_met
    assert not fed([{LIVE: v} for v in (1.0, 0.9, 0.95, 0.89)]).is_met
    assert fed([{LIVE: v} for v in (1.0, 0.95, 0.91)], min_delta=0.1).is_met
    assert not fed(
        [{LIVE: v} for v in (1.0, 0.95, 0.89)], min_delta=0.1
    ).is_met  # compared with 1, not with 0.95


def test_a_run_of_which_no_error_is_known_has_all_its_steps():
    # the validation frames of all tasks lack the label
    unknown = {LIVE: math.nan, EMA: math.nan}
    assert not fed([unknown] * 3).is_met
    # once there was one, the run ends where it is lost
    assert fed([{LIVE: 1.0}, unknown, unknown]).is_met


def test_the_improvement_of_one_of_several_rows_is_enough_unless_one_is_chosen():
    rows = [{LIVE: 1.0, EMA: 1.0}, {LIVE: 1.1, EMA: 0.9}, {LIVE: 1.2, EMA: 0.8}]
    assert not fed(rows).is_met
    assert fed(rows, weights="live").is_met
    assert not fed(rows, weights="ema").is_met


def test_another_metric_is_counted_anew(caplog):
    stop = EarlyStop(
        EarlyStopConfig(patience=2, metric=Metric("E:MAE")), {"": Metric("E:MAE")}
    )
    stop.load_state_dict(fed([{LIVE: 1.0}, {LIVE: 1.0}]).state_dict(), [LIVE])
    assert stop.waited == 0
    assert "early_stop: E:MAE counts now, F:RMSE before" in caplog.text


class OutOfTime(Callback):
    """Lets the time be over: after a step, or in the validation of the averaged weights after
    it.
    """

    def __init__(self, step, in_validation=False):
        self.step, self.in_average = step, in_validation

    def after_update(self, trainer):
        if trainer.step == self.step and not self.in_average:
            trainer.deadline = 0.0

    def in_validation(self, trainer, weights):
        if trainer.step == self.step and weights == "ema":
            trainer.deadline = 0.0


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")


def step_of(folder):
    return checkpoint.load(folder)["step"]


def test_a_run_that_no_longer_improves_ends_and_continues_with_more_patience_only(
    start, caplog
):
    folder = start("run", STEPS, {"training__change_bias_after_training": True})
    assert (
        f"early stop after step {END} of {STEPS}: F:RMSE has not fallen by more than"
        in caplog.text
    )
    payload = checkpoint.load(folder)
    assert (
        payload["step"],
        payload["early_stop"]["waited"],
        bool(payload["refitted"]),
    ) == (
        END,
        3,
        True,
    )
    names = {path.name for path in Path().rglob("*.pt")}
    assert {
        f"model_ema.ckpt-{END}.pt",
        f"model_p05.ckpt-{END}.pt",
        "model_p05.ckpt-7.pt",
    } <= names
    assert (Path("snapshots") / f"model_p05.ckpt-{END}.pt").exists()
    assert read_record(".")[-1].ended.startswith("ended early: F:RMSE")
    assert "ended (early: F:RMSE has not fallen" in str(RunStatus(".").describe())
    assert step_of(start("run", STEPS, restart="model.ckpt.pt")) == END
    assert f"step {END} ended the run early" in caplog.text
    assert "Raise validating.early_stop.patience" in caplog.text
    patient = {"validating": {**VALIDATED, "early_stop": {**STOP, "patience": 5}}}
    assert (
        step_of(start("run", STEPS, patient, restart="model.ckpt.pt"))
        == END + 2 * EVERY
    )


def test_errors_of_other_validation_data_are_not_compared_with_those_before(
    start, caplog, tmp_path, water_like_valid
):
    """A restart on the same frames under another path continues, one on others starts anew."""
    stop = {"validating": {**VALIDATED, "early_stop": {**STOP, "patience": 4}}}
    data = {"training__validation_data__systems": [str(tmp_path / "valid")]}
    moved = {"training__validation_data__systems": [str(tmp_path / "moved")]}
    for folder in ("valid", "moved"):
        shutil.copytree(water_like_valid, tmp_path / folder)
    start("run", STEPS, stop | data, callback=OutOfTime(END + 1))
    before = checkpoint.load("model.ckpt.pt")
    assert before["early_stop"]["waited"] == 3
    best = before["best"]["live"]["records"][0]

    start(
        "run", STEPS, stop | moved, restart="model.ckpt.pt", callback=OutOfTime(END + 2)
    )
    assert checkpoint.load("model.ckpt.pt")["best"] == before["best"]
    assert "validation data have changed" not in caplog.text

    # other labels: the errors before are of no frame that there is now
    file = tmp_path / "moved" / "set.000" / "energy.npy"
    np.save(file, np.load(file) + 1000.0)
    start(
        "run", STEPS, moved, restart="model.ckpt.pt"
    )  # with the patience that is at its end
    text = (
        "the validation data have changed since the checkpoint was written: best files"
    )
    assert text in caplog.text
    after = checkpoint.load("model.ckpt.pt")
    steps = [step for _, step in after["best"]["live"]["records"]]
    assert min(steps) > END >= best[1]
    assert not list(Path().glob(f"best.ckpt-{best[1]}.*"))
    assert after["early_stop"]["improvements"]["live"][1] > END


@pytest.mark.parametrize(
    ("step", "in_validation"), [(5, False), (8, True), (END, True)]
)
def test_the_restart_of_a_run_that_was_out_of_time_ends_as_the_unbroken_run_does(
    start, caplog, step, in_validation
):
    parts = start("parts", STEPS, callback=OutOfTime(step, in_validation))
    assert step_of(parts) == step
    if step != END:
        assert (
            f"after step {step} of {STEPS}, as the time is over; everything is saved"
            in caplog.text
        )
        assert "dp-ema train --restart model.ckpt.pt" in caplog.text
    assert (
        step_of(start("parts", STEPS, restart="model.ckpt.pt", max_time=1e6)) == END
    )  # with time of its own
    whole = start("whole", STEPS)
    for folder in (parts, whole):  # a break leaves its own checkpoint and last snapshot
        for file in folder.rglob(f"*-{step}.pt"):
            if step != END:
                file.unlink()
    assert_same_files(parts, whole)


def test_a_run_that_takes_its_last_step_when_the_time_is_over_has_ended(start, caplog):
    assert step_of(start("run", 4, callback=OutOfTime(4))) == 4
    assert "the time is over" not in caplog.text
    assert step_of(start("one", 4, max_time=1e-9)) == 1


def test_a_time_has_a_unit_or_colons(capsys):
    times = {
        "300s": 300,
        "90m": 5400,
        "23.5h": 84600,
        "2d": 172800,
        "0:01:30": 90,
        "1-00:00:10": 86410,
    }
    for text, seconds in times.items():
        assert (
            build_parser()
            .parse_args(["train", "input.json", "--max-time", text])
            .max_time
            == seconds
        )
    for text in (
        "300",
        "0s",
        "-1h",
        "90:00",
        "1:2:3",
        "h",
        "inf",
        "9" * 400 + "-0:00:00",
    ):
        assert cli.main(["train", "input.json", f"--max-time={text}"]) == 2
        assert (
            "expected a time above 0 with its unit (300s, 90m, 23.5h, 2d), or hours:min"
            in capsys.readouterr().err
        )


@pytest.mark.slow
def test_ranks_stop_early_at_the_same_step_and_their_restart_keeps_it(
    tmp_path, water_like, water_like_valid
):
    options = {
        "training__zero_stage": 3,
        "training__checkpoint_format": "sharded",
        "training__enable_ema": True,
    }
    values = tiny_input(
        [water_like],
        [water_like_valid],
        num_steps=STEPS,
        validating=VALIDATED,
        **options,
    )
    train(tmp_path, 2, values)
    assert checkpoint.load(tmp_path)["early_stop"]["waited"] == STOP["patience"]
    train(tmp_path, 2, restart="model.ckpt.dcp")
    assert step_of(tmp_path) == END
