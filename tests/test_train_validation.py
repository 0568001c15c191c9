"""Full validation in a run: when it happens, and what a run says of its last weights."""

import numpy as np
import pytest
import torch
from helpers import assert_same, trains_in, validated, write_system
from test_train import StopAfter

from deepmd_ema.errors import Interrupted

pytestmark = pytest.mark.timeout(120)

OPTIONS = validated(4)


class StopIn(StopAfter):
    """Requests it before the validation of that step."""

    after_update = StopAfter.after_step


def validated_steps(file):
    return [int(row.split()[0]) for row in file.read_text().splitlines() if not row.startswith("#")]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"validating__validation_freq": 5000}, [10]),
        ({"validating__validation_freq": 5}, [5, 10]),
        ({"validating__full_val_start": 7}, [7, 10]),
    ],
)
def test_the_last_step_is_validated_once_whatever_the_pace(start, options, steps, caplog):
    with caplog.at_level("INFO"):
        folder = start("run", 10, {"training__disp_freq": 100, **options})
    for log, best in (("val.log", "best.ckpt-*"), ("val_ema.log", "best_ema.ckpt-*")):
        assert validated_steps(folder / log) == steps
        assert len(list(folder.glob(best))) == 1
    end = caplog.text[caplog.text.index("trained model:") :]
    assert "live, step 10, MAE / RMSE" in end
    assert "ema, step 10, MAE / RMSE" in end


def test_a_stop_in_the_last_step_is_validated_by_the_restart(start):
    options = {"validating__validation_freq": 5000}
    whole = start("whole", 10, options)
    with pytest.raises(Interrupted, match="after step 10 of 10"):
        start("parts", 10, options, callback=StopIn(10))
    parts = start("parts", 10, options, restart="model.ckpt.pt")
    assert_same(torch.load(whole / "model.ckpt.pt"), torch.load(parts / "model.ckpt.pt"))
    assert (whole / "val_ema.log").read_bytes() == (parts / "val_ema.log").read_bytes()


def test_a_run_that_is_extended_has_the_weights_of_one_without_a_break_and_one_more_row(start):
    constant = {"learning_rate__stop_lr": 1e-3}  # any other depends on the number of steps
    whole = start("whole", 14, constant)
    start("parts", 10, constant)
    parts = start("parts", 14, constant, restart="model.ckpt.pt")
    one, two = (torch.load(folder / "model.ckpt.pt") for folder in (whole, parts))
    for part in ("model", "averages", "optimizer", "streams"):
        assert_same(one[part], two[part], part)
    assert validated_steps(whole / "val.log") == [4, 8, 12, 14]
    assert validated_steps(parts / "val.log") == [4, 8, 10, 12, 14]


def rows_of(folder):
    return np.genfromtxt(folder / "lcurve.out", names=True)


@pytest.fixture
def start_without_forces(tmp_path, monkeypatch):
    """Return a function that trains on one system with forces and one without, each a batch; and the systems."""
    data = [write_system(tmp_path / f"forces {force}", frames=4, seed=force, force=force) for force in (True, False)]
    options = {f"training__{part}__batch_size": 4 for part in ("training_data", "validation_data")}
    return trains_in(tmp_path, monkeypatch, (data, data), options), data


def test_a_batch_without_a_label_does_not_count_in_the_displayed_mean_of_its_error(start_without_forces):
    start, (with_forces, _) = start_without_forces
    every_step = {"training__disp_freq": 1}
    both = rows_of(start("both", 4, {**every_step, "training__validation_data__numb_btch": 2}))
    one = rows_of(start("one", 4, {**every_step, "training__validation_data__systems": [str(with_forces)]}))
    assert np.isnan(both["rmse_f_trn"]).sum() == 2  # such a batch alone has none
    assert np.isfinite(both["rmse_f_val"]).all()
    assert both["rmse_f_val"] == pytest.approx(one["rmse_f_val"])


def test_an_average_over_steps_is_over_those_that_have_the_label_and_continues_at_a_restart(start_without_forces):
    start, _ = start_without_forces
    steps = rows_of(start("steps", 8, {"training__disp_freq": 1}))
    options = {"training__disp_freq": 4, "training__disp_avg": True}
    whole = start("whole", 8, options)
    with pytest.raises(Interrupted):
        start("parts", 8, options, callback=StopAfter(6))
    parts = start("parts", 8, options, restart="model.ckpt.pt")
    assert (whole / "lcurve.out").read_bytes() == (parts / "lcurve.out").read_bytes()
    for name in ("rmse_e_trn", "rmse_f_trn", "rmse_trn"):
        means = [np.nanmean(steps[name][begin:end]) for begin, end in ((1, 4), (4, 8))]
        assert rows_of(whole)[name][1:] == pytest.approx(means, rel=0.01), name
