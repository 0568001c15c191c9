"""A bank of averages in a run: files, logs, snapshots, restarts.

Names carry the demand that a test is for.
"""

import io
import logging
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, trains_in, validated
from training_runs import StopAfter, load

from deepmd_ema import checkpoint
from deepmd_ema.errors import ConfigError, Interrupted
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.report.log import set_up_logging

BANK = [
    {"name": "slow", "decay": 0.95, "full_validation": True, "lcurve": True},
    {
        "name": "epoch",
        "type": "ema",
        "half_life": 0.5,
        "half_life_unit": "epochs",
        "warmup": False,
        "dtype": "float64",
    },
    {
        "name": "p05",
        "type": "power",
        "sigma_rel": 0.05,
        "snapshots": True,
        "snapshot_freq": 4,
        "full_validation": True,
    },
    {
        "name": "p15",
        "type": "power",
        "gamma": 3,
        "snapshots": True,
        "update_every": 2,
        "device": "cpu",
        "lcurve": True,
    },
    {
        "name": "flat",
        "type": "swa",
        "start_epoch": 0.75,
        "ckpt_keep": 1,
        "buffers": "average",
    },
]
# the second: the whole validation set
OPTIONS = validated(
    4,
    training__averaging=BANK,
    training__validation_data__batch_size=6,
    validating__validation_metric="F:RMSE",
)
NAMES = ["ema", *(entry["name"] for entry in BANK)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, water_like, water_like_valid):
    """The folder of a run of 20 steps, whose log is the file ``log`` there."""
    logger, home = logging.getLogger("deepmd_ema"), tmp_path_factory.mktemp("bank")
    handler = logging.FileHandler(home / "log")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    with pytest.MonkeyPatch.context() as patch:
        folder = trains_in(home, patch, ([water_like], [water_like_valid]), OPTIONS)(
            "whole"
        )
    logger.removeHandler(handler)
    handler.close()
    return folder


def files_of(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_each_average_has_files_logs_and_facts_of_its_own(whole):
    found = files_of(whole)
    facts = {
        name: checkpoint.load(whole / f"model_{name}.ckpt.pt")["average"]
        for name in NAMES
    }
    for name in NAMES:
        assert (whole / f"model_{name}.ckpt.pt").is_symlink()
        assert facts[name]["profile"] == name
        own = (
            f"val_{name}.log" in found,
            any(f.startswith(f"best_{name}.ckpt-") for f in found),
        )
        assert own == (
            (True, True) if name in ("slow", "p05", "ema") else (False, False)
        )  # where it is requested
    assert {f for f in found if f.startswith("lcurve_")} == {
        "lcurve_slow.out",
        "lcurve_p15.out",
    }
    assert "model_flat.ckpt-10.pt" not in found  # keeps one
    assert "model_slow.ckpt-10.pt" in found
    assert (facts["flat"]["type"], facts["flat"]["updates"]) == (
        "swa",
        14,
    )  # from epoch 0.75, which is step 6
    assert facts["flat"]["mean_age"] == pytest.approx(6.5)
    assert (facts["p15"]["updates"], facts["slow"]["decay"]) == (10, 0.95)
    assert facts["epoch"]["decay"] == pytest.approx(0.5 ** (1 / 4))


def test_an_averaged_learning_curve_has_the_errors_of_the_average_on_the_same_batches(
    whole, water_like_valid
):
    curve, live = (
        np.genfromtxt(whole / f"lcurve{name}.out", names=True) for name in ("_slow", "")
    )
    errors = measure(
        str(whole / "model_slow.ckpt-20.pt"), [str(water_like_valid)]
    ).total
    assert curve["step"].tolist() == live["step"].tolist() == [1, 5, 10, 15, 20]
    assert curve["rmse_f_val"][-1] == pytest.approx(
        errors.metric("F:RMSE"), rel=5e-3
    )  # three digits in the file
    assert not np.array_equal(curve["rmse_e_val"], live["rmse_e_val"])
    assert np.isfinite(curve["rmse_f_trn"]).all()


def test_an_average_out_of_a_training_checkpoint_is_that_of_its_own_file(whole):
    for name in NAMES:
        one = load_model(
            whole / "model.ckpt-10.pt"
            if name != "flat"
            else whole / "model.ckpt-20.pt",
            average=name,
        )
        two = load_model(whole / f"model_{name}.ckpt-{10 if name != 'flat' else 20}.pt")
        assert_same(dict(one.model.state_dict()), dict(two.model.state_dict()))


def test_the_start_says_what_is_averaged_and_what_snapshots_will_take(whole):
    text = Path(whole.parent / "log").read_text()
    for name in NAMES:
        assert re.search(rf"average +{name}: ", text)
    assert "p05 every 4 steps: 5 files" in text
    assert len(list((whole / "snapshots").glob("*p05*"))) == 5
    assert "p15 every 10 steps: 2 files" in text
    assert "of disk in all" in text


@pytest.mark.parametrize("at", [3, 13])
def test_a_restart_continues_the_whole_bank_to_the_last_bit(whole, start, at):
    with pytest.raises(Interrupted):
        start("parts", 20, callback=StopAfter(at))
    parts = start("parts", 20, restart="model.ckpt.pt")
    names = [
        f
        for f in files_of(whole)
        if "ckpt-20" in f or f.startswith(("lcurve", "val", "snapshots", "best"))
    ]
    assert len(names) > 20
    for name in names:
        if name.endswith(".pt"):
            assert_same(load(whole / name), load(parts / name), name)
        else:
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_a_bank_with_all_that_it_writes_leaves_the_live_trajectory_alone(whole, start):
    off = dict.fromkeys(
        (
            "training__enable_ema",
            "validating__full_validation",
            "validating__ema_full_validation",
        ),
        False,
    )
    without = start("without", 20, {**off, "training__averaging": []})
    a, b = load(whole / "model.ckpt-20.pt"), load(without / "model.ckpt-20.pt")
    assert_same(a["model"], b["model"])
    assert_same(a["optimizer"], b["optimizer"])
    assert (whole / "lcurve.out").read_bytes() == (without / "lcurve.out").read_bytes()


def test_snapshots_are_kept_at_their_own_pace_in_float32_and_after_the_last_step(start):
    """Also of a run that is stopped: `dp-ema posthoc` ended up to snapshot_freq steps before the
    stop.
    """
    with pytest.raises(Interrupted):
        start("run", 18, callback=StopAfter(7))
    folder = start("run", 18, restart="model.ckpt-7.pt")
    steps = {
        f: load(folder / "snapshots" / f)["step"]
        for f in files_of(folder / "snapshots")
    }
    assert sorted(step for f, step in steps.items() if "p05" in f) == [
        4,
        7,
        8,
        12,
        16,
        18,
    ]
    assert sorted(step for f, step in steps.items() if "p15" in f) == [7, 10, 18]
    kept, own = (
        load(folder / "snapshots/model_p05.ckpt-18.pt"),
        load(folder / "model_p05.ckpt-18.pt"),
    )
    assert (kept["kind"], kept["weights"], kept["run"]) == (
        "snapshot",
        "p05",
        load("model.ckpt-18.pt")["run"],
    )
    assert (kept["average"]["type"], kept["average"]["updates"]) == ("power", 18)
    trained = {n for n in own["model"] if "weight" in n or "bias" in n or "idt" in n}
    assert set(kept["averaged"]) == trained - {"out_bias", "fitting.bias_atom_e"}
    for n, tensor in kept["model"].items():
        dtype = torch.float32 if n in kept["averaged"] else own["model"][n].dtype
        assert tensor.dtype == dtype
        assert torch.equal(tensor, own["model"][n].to(dtype))


def test_snapshots_of_another_run_are_set_aside_and_those_of_a_left_branch_go(start):
    folder = start("run", 12)
    first = load(folder / "snapshots/model_p05.ckpt-12.pt")["run"]
    start("run", 10, {"training__seed": 4})
    kept = {
        f: load(folder / "snapshots" / f)["run"]
        for f in files_of(folder / "snapshots")
        if "p05" in f
    }
    assert sorted(kept) == [f"model_p05.ckpt-{step}.pt" for step in (10, 4, 8)]
    assert first not in kept.values()
    assert load(folder / "earlier-1/snapshots/model_p05.ckpt-12.pt")["run"] == first
    shutil.copy(
        folder / "snapshots/model_p05.ckpt-10.pt",
        folder / "snapshots/model_p05.ckpt-11.pt",
    )
    start(
        "run",
        12,
        {"training__seed": 4},
        restart="model.ckpt-10.pt",
        allow_config_change=True,
    )
    assert not (folder / "snapshots/model_p05.ckpt-11.pt").exists()


class EveryThird:
    """A hook as a user writes it."""

    def __call__(self, step, epoch):
        return step % 3 == 0


def test_the_hook_decides_which_steps_an_average_takes_in(start, caplog):
    with caplog.at_level("INFO"):
        folder = start(
            "run",
            10,
            {"training__averaging": [{"name": "third", "decay": 0.5}]},
            should_update={"third": EveryThird()},
        )
    assert "third: updated when EveryThird says so" in caplog.text
    assert load(folder / "model_third.ckpt-10.pt")["average"]["updates"] == 3
    with pytest.raises(
        ConfigError, match=r"no average is called fourth\. This run tracks: ema, third"
    ):
        start(
            "run",
            10,
            {"training__averaging": [{"name": "third", "decay": 0.5}]},
            should_update={"fourth": EveryThird()},
        )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_no_line_about_averages_breaks_the_progress_bar(start, monkeypatch):
    """Restart, banner, displayed and validated averages, snapshots and saves, on a terminal that
    draws a bar.
    """
    start("run", 10)
    changed = [{**BANK[0], "decay": 0.5}, *BANK[1:4], {"name": "new", "type": "swa"}]
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("DEBUG")
    start("run", 20, {"training__averaging": changed}, restart="model.ckpt.pt")
    text = stream.getvalue()
    assert "average flat of the checkpoint is not tracked any more" in text
    for words in (
        "slow: decay was 0.95",
        "no average new",
        "15  train E ",
        "  slow E ",
        "20  full  live",
        "averages of step 20: ema",
        "model_p05.ckpt-20.pt",
    ):
        assert words in text
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    bars = [line for line in lines if re.match(r"\d+%\|.*\| \d+/20", line)]
    assert bars
    messages = [line for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert not [line for line in messages if "step/s]" in line or "%|" in line]
    more = [
        line.strip() for line in text.splitlines() if line.startswith("  ")
    ]  # of a message of several lines
    assert {*lines} == {*bars, *messages, *more, ""}
