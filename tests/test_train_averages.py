"""A bank of averages in a run: files, logs, snapshots, restarts. Names carry the demand that a test is for."""

import io
import logging
import math
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, trains_in
from test_train import InAveragedPassOfStep8, StopAfter, load

from deepmd_ema import checkpoint
from deepmd_ema.config import config_from_dict
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import ConfigError, Interrupted
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.report.log import set_up_logging
from deepmd_ema.training.prepare import tracked_averages

pytestmark = pytest.mark.timeout(120)

BANK = [
    {"name": "slow", "decay": 0.95, "full_validation": True, "lcurve": True},
    {"name": "epoch", "type": "ema", "half_life": 0.5, "half_life_unit": "epochs", "warmup": False, "dtype": "float64"},
    {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 4, "full_validation": True},
    {"name": "p15", "type": "power", "gamma": 3, "snapshots": True, "update_every": 2, "device": "cpu", "lcurve": True},
    {"name": "flat", "type": "swa", "start_epoch": 0.75, "ckpt_keep": 1, "buffers": "average"},
]
OPTIONS = {
    "training__enable_ema": True, "training__ema_decay": 0.9, "training__averaging": BANK,
    "training__validation_data__batch_size": 6,  # the whole validation set
    "validating__full_validation": True, "validating__ema_full_validation": True, "validating__validation_freq": 4,
    "validating__full_val_start": 0, "validating__validation_metric": "F:RMSE",
}  # fmt: skip
NAMES = ["ema", *(entry["name"] for entry in BANK)]


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, num_steps, options, **how)."""
    return trains_in(tmp_path, monkeypatch, ([water_like], [water_like_valid]), OPTIONS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, water_like, water_like_valid):
    """The folder of a run of 20 steps, whose log is the file ``log`` there."""
    logger, home = logging.getLogger("deepmd_ema"), tmp_path_factory.mktemp("bank")
    handler = logging.FileHandler(home / "log")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    with pytest.MonkeyPatch.context() as patch:
        folder = trains_in(home, patch, ([water_like], [water_like_valid]), OPTIONS)("whole")
    logger.removeHandler(handler)
    handler.close()
    return folder


def files_of(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_each_average_has_files_logs_and_facts_of_its_own(whole):
    found = files_of(whole)
    facts = {name: checkpoint.load(whole / f"model_{name}.ckpt.pt")["average"] for name in NAMES}
    for name in NAMES:
        assert (whole / f"model_{name}.ckpt.pt").is_symlink()
        assert facts[name]["profile"] == name
        own = f"val_{name}.log" in found, any(f.startswith(f"best_{name}.ckpt-") for f in found)
        assert own == ((True, True) if name in ("slow", "p05", "ema") else (False, False))  # where it is requested
    assert {f for f in found if f.startswith("lcurve_")} == {"lcurve_slow.out", "lcurve_p15.out"}
    assert "model_flat.ckpt-10.pt" not in found  # keeps one
    assert "model_slow.ckpt-10.pt" in found
    assert (facts["flat"]["type"], facts["flat"]["updates"]) == ("swa", 14)  # from epoch 0.75, which is step 6
    assert facts["flat"]["mean_age"] == pytest.approx(6.5)
    assert (facts["p15"]["updates"], facts["slow"]["decay"]) == (10, 0.95)
    assert facts["epoch"]["decay"] == pytest.approx(0.5 ** (1 / 4))


def test_an_averaged_learning_curve_has_the_errors_of_the_average_on_the_same_batches(whole, water_like_valid):
    curve, live = (np.genfromtxt(whole / f"lcurve{name}.out", names=True) for name in ("_slow", ""))
    errors = measure(str(whole / "model_slow.ckpt-20.pt"), [str(water_like_valid)]).total
    assert curve["step"].tolist() == live["step"].tolist() == [1, 5, 10, 15, 20]
    assert curve["rmse_f_val"][-1] == pytest.approx(errors.metric("F:RMSE"), rel=5e-3)  # three digits in the file
    assert not np.array_equal(curve["rmse_e_val"], live["rmse_e_val"])
    assert np.isfinite(curve["rmse_f_trn"]).all()


def test_the_best_file_of_an_average_gives_its_logged_metric_again(whole, water_like_valid):
    for name in ("_ema", "_p05"):
        best = next(whole.glob(f"best{name}.ckpt-*.t-1.pt"))
        logged = [r for r in (whole / f"val{name}.log").read_text().splitlines() if best.name in r][-1]
        errors = measure(str(best), [str(water_like_valid)]).total
        assert f"{1000 * errors.metric('F:RMSE'):.3f}"[:5] in logged


def test_an_average_out_of_a_training_checkpoint_is_that_of_its_own_file(whole):
    for name in NAMES:
        one = load_model(whole / "model.ckpt-10.pt" if name != "flat" else whole / "model.ckpt-20.pt", average=name)
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
    names = [f for f in files_of(whole) if "ckpt-20" in f or f.startswith(("lcurve", "val", "snapshots", "best"))]
    assert len(names) > 20
    for name in names:
        if name.endswith(".pt"):
            assert_same(load(whole / name), load(parts / name), name)
        else:
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_a_bank_with_all_that_it_writes_leaves_the_live_trajectory_alone(whole, start):
    off = dict.fromkeys(
        ("training__enable_ema", "validating__full_validation", "validating__ema_full_validation"), False
    )
    without = start("without", 20, {**off, "training__averaging": []})
    a, b = load(whole / "model.ckpt-20.pt"), load(without / "model.ckpt-20.pt")
    assert_same(a["model"], b["model"])
    assert_same(a["optimizer"], b["optimizer"])
    assert (whole / "lcurve.out").read_bytes() == (without / "lcurve.out").read_bytes()


def test_snapshots_are_kept_at_their_own_pace_in_float32_and_after_the_last_step(start):
    """Also of a run that is stopped: `dp-ema posthoc` ended up to snapshot_freq steps before the stop."""
    with pytest.raises(Interrupted):
        start("run", 18, callback=StopAfter(7))
    folder = start("run", 18, restart="model.ckpt-7.pt")
    steps = {f: load(folder / "snapshots" / f)["step"] for f in files_of(folder / "snapshots")}
    assert sorted(step for f, step in steps.items() if "p05" in f) == [4, 7, 8, 12, 16, 18]
    assert sorted(step for f, step in steps.items() if "p15" in f) == [7, 10, 18]
    kept, own = load(folder / "snapshots/model_p05.ckpt-18.pt"), load(folder / "model_p05.ckpt-18.pt")
    assert (kept["kind"], kept["weights"], kept["run"]) == ("snapshot", "p05", load("model.ckpt-18.pt")["run"])
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
    kept = {f: load(folder / "snapshots" / f)["run"] for f in files_of(folder / "snapshots") if "p05" in f}
    assert sorted(kept) == [f"model_p05.ckpt-{step}.pt" for step in (10, 4, 8)]
    assert first not in kept.values()
    assert load(folder / "earlier-1/snapshots/model_p05.ckpt-12.pt")["run"] == first
    shutil.copy(folder / "snapshots/model_p05.ckpt-10.pt", folder / "snapshots/model_p05.ckpt-11.pt")
    start("run", 12, {"training__seed": 4}, restart="model.ckpt-10.pt", allow_config_change=True)
    assert not (folder / "snapshots/model_p05.ckpt-11.pt").exists()


def test_half_lives_in_frames_and_epochs_survive_a_change_of_batch_and_of_ranks():
    sections = [
        {"name": "frames", "half_life": 100, "half_life_unit": "frames"},
        {"name": "epochs", "half_life": 2, "half_life_unit": "epochs"},
        {"name": "steps", "half_life": 8},
    ]
    config = config_from_dict(tiny_input(["a"], training__averaging=sections))
    halved = {}
    for batch, ranks in ((1, 1), (2, 1), (1, 4), (5, 2)):
        sampler = Sampler([40, 60], [10, 10], batch_size=batch, world_size=ranks)
        steps_per = {"steps": 1.0, "frames": 1 / sampler.frames_per_step, "epochs": sampler.batches_per_epoch}
        for profile in tracked_averages(config, steps_per, None, 100):
            steps = math.log(0.5) / math.log(profile.decay)
            halved.setdefault(profile.name, []).append((steps, steps * batch * ranks))
    assert [frames for _, frames in halved["frames"]] == pytest.approx([100] * 4)
    assert [frames for _, frames in halved["epochs"]] == pytest.approx([200] * 4)
    assert [steps for steps, _ in halved["steps"]] == pytest.approx([8] * 4)


class EveryThird:
    """A hook as a user writes it."""

    def __call__(self, step, epoch):
        return step % 3 == 0


def test_the_hook_decides_which_steps_an_average_takes_in(start, caplog):
    with caplog.at_level("INFO"):
        folder = start("run", 10, {"training__averaging": [{"name": "third", "decay": 0.5}]},
                       should_update={"third": EveryThird()})  # fmt: skip
    assert "third: updated when EveryThird says so" in caplog.text
    assert load(folder / "model_third.ckpt-10.pt")["average"]["updates"] == 3
    with pytest.raises(ConfigError, match=r"no average is called fourth\. This run tracks: ema, third"):
        start("run", 10, {"training__averaging": [{"name": "third", "decay": 0.5}]},
              should_update={"fourth": EveryThird()})  # fmt: skip


def test_best_files_of_an_average_are_pruned_with_the_checkpoint_that_knows_of_them(start):
    """As those of the live weights: what no record names is gone after the next checkpoint."""
    folder = start("run", 6)
    stale = [folder / f"best{name}.ckpt-900.t-1.pt" for name in ("", "_ema", "_slow")]
    for path in stale:
        path.touch()
    start("run", 9, restart="model.ckpt.pt")
    for path in stale:
        assert not path.exists()
        assert len(list(folder.glob(f"{path.name.partition('.')[0]}.ckpt-*"))) == 1


def test_the_row_of_a_validation_that_a_stop_broke_off_is_cut_at_each_restart(whole, start):
    """Else a second restart from that checkpoint leaves the row of the first one, and writes it again."""
    with pytest.raises(Interrupted):
        start("parts", callback=InAveragedPassOfStep8(lambda trainer: trainer.stop.request(signal.SIGTERM)))
    for _ in range(2):
        parts = start("parts", restart="model.ckpt-8.pt")
        for name in ("val.log", "val_ema.log", "val_slow.log"):
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_files_and_snapshots_of_averages_that_a_restart_overtakes_go(start):
    """A restart from step 3 saves step 8 next: what was written at step 6 is of the branch that it has left."""
    entry = {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True}
    series = ["model.ckpt", "model_ema.ckpt", "model_p05.ckpt", "snapshots/model_p05.ckpt"]
    options = {"training__averaging": [{**entry, "snapshot_freq": 3}], "training__save_freq": 3}
    folder = start("run", 12, {**options, "training__max_ckpt_keep": 0})
    options = {"training__averaging": [{**entry, "snapshot_freq": 8}], "training__save_freq": 8}
    start("run", 8, {**options, "training__max_ckpt_keep": 0}, restart="model.ckpt-3.pt")
    for name in series:
        assert {int(p.stem.rpartition("-")[2]) for p in folder.glob(f"{name}-*.pt")} == {3, 8, 9, 12}


def test_the_short_form_is_a_bank_of_one_called_ema():
    def tracked(**changes):
        return config_from_dict(tiny_input(["a"], ["b"], **changes)).training.averaging

    assert tracked() == []
    plain = tracked(training__enable_ema=True, training__max_ckpt_keep=7)
    assert plain == tracked(training__averaging=[{"name": "ema", "decay": 0.999}], training__max_ckpt_keep=7)
    options = {"training__enable_ema": True, "training__ema_decay": 0.9, "training__ema_warmup": False,
               "training__ema_ckpt_keep": 2, "validating__ema_full_validation": True}  # fmt: skip
    entry = {"name": "ema", "decay": 0.9, "warmup": False, "ckpt_keep": 2, "full_validation": True}
    assert tracked(**options) == tracked(training__averaging=[entry]) != plain


def test_the_log_names_averaged_files_like_the_others_and_says_how_far_each_looks_back(start, caplog):
    late = {"name": "late", "decay": 0.9, "start_step": 15}
    entries = [{"name": "slow", "decay": 0.5, "warmup": False}, {"name": "flat", "type": "swa"}, late]
    with caplog.at_level("DEBUG"):
        start("run", 20, {"training__averaging": entries})
    names = ("model", "model_ema", "model_slow", "model_flat", "model_late")
    assert f"saved {', '.join(f'{name}.ckpt-10.pt' for name in names)}" in caplog.messages
    (words,) = [line for line in caplog.messages if line.startswith("averages of step 10: ")]
    assert words.startswith(f"averages of step 10: ema: decay {10 / 19:.6g}, looks back ")
    assert words.endswith(
        "; slow: decay 0.5, looks back 1.0 steps on average; flat: decay 0.9, looks back 4.5 steps on average; "
        "late: no update yet"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_no_line_about_averages_breaks_the_progress_bar(start, monkeypatch):
    """Restart, banner, displayed and validated averages, snapshots and saves, on a terminal that draws a bar."""
    start("run", 10)
    changed = [{**BANK[0], "decay": 0.5}, *BANK[1:4], {"name": "new", "type": "swa"}]
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("DEBUG")
    start("run", 20, {"training__averaging": changed}, restart="model.ckpt.pt")
    text = stream.getvalue()
    assert "average flat of the checkpoint is not tracked any more" in text
    for words in ("slow: decay was 0.95", "no average new", "15  train E ", "  slow E ", "20  full  live",
                  "averages of step 20: ema", "model_p05.ckpt-20.pt"):  # fmt: skip
        assert words in text
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    bars = [line for line in lines if re.match(r"\d+%\|.*\| \d+/20", line)]
    assert bars
    messages = [line for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert not [line for line in messages if "step/s]" in line or "%|" in line]
    more = [line.strip() for line in text.splitlines() if line.startswith("  ")]  # of a message of several lines
    assert {*lines} == {*bars, *messages, *more, ""}
