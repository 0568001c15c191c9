"""A bank of averages in a run: files, logs, snapshots, restarts. Names carry the demand that a test is for."""

import copy
import io
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, trains_in
from infer_models import random_model, tiny_config
from test_train import StopAfter, load

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank, SwaProfile
from deepmd_ema.config import config_from_dict, to_dict
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import ConfigError, Interrupted
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.report.log import set_up_logging
from deepmd_ema.training.prepare import tracked_averages
from deepmd_ema.training.saver import StateBuilder

pytestmark = pytest.mark.timeout(120)

BANK = [
    {"name": "slow", "decay": 0.95, "full_validation": True, "lcurve": True},
    {"name": "epoch", "type": "ema", "half_life": 0.5, "half_life_unit": "epochs", "warmup": False, "dtype": "float64"},
    {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 4, "full_validation": True},
    {"name": "p15", "type": "power", "gamma": 3, "snapshots": True, "update_every": 2, "device": "cpu", "lcurve": True},
    {"name": "flat", "type": "swa", "start_epoch": 0.75, "ckpt_keep": 1, "buffers": "average"},
]
OPTIONS = {
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "training__averaging": BANK,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 4,
    "validating__full_val_start": 0,
}
NAMES = ["ema", *(entry["name"] for entry in BANK)]


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, num_steps, options, **how)."""

    return trains_in(tmp_path, monkeypatch, ([water_like], [water_like_valid]), OPTIONS)


def files_of(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_each_average_has_files_and_logs_of_its_own(start):
    folder = start("run", 20)
    found = files_of(folder)
    for name in NAMES:
        assert f"model_{name}.ckpt-20.pt" in found
        assert (folder / f"model_{name}.ckpt.pt").is_symlink()
        assert load(folder / f"model_{name}.ckpt-20.pt")["average"]["profile"] == name
    for name in ("slow", "p05", "ema"):
        assert f"val_{name}.log" in found
        assert any(f.startswith(f"best_{name}.ckpt-") for f in found)
    for name in ("epoch", "p15", "flat"):  # did not ask for it
        assert f"val_{name}.log" not in found
        assert not any(f.startswith(f"best_{name}.ckpt-") for f in found)
    assert {f for f in found if f.startswith("lcurve_")} == {"lcurve_slow.out", "lcurve_p15.out"}
    assert "model_flat.ckpt-10.pt" not in found  # keeps one
    assert "model_slow.ckpt-10.pt" in found


def test_a_run_with_a_bank_only_needs_no_short_form(start):
    folder = start("run", 10, {"training__enable_ema": False, "validating__ema_full_validation": False})
    assert not any("ema" in f for f in files_of(folder) if not f.startswith(".dp-ema"))  # hidden, of the program
    assert "val_slow.log" in files_of(folder)


def test_an_averaged_learning_curve_has_the_errors_of_the_average_on_the_same_batches(start, water_like_valid):
    # the display batch is the whole validation set, so that a test of the averaged file must give the same errors
    folder = start("run", 20, {"training__validation_data__batch_size": 6})
    curve = np.genfromtxt(folder / "lcurve_slow.out", names=True)
    errors = measure(str(folder / "model_slow.ckpt-20.pt"), [str(water_like_valid)]).total
    live = np.genfromtxt(folder / "lcurve.out", names=True)
    assert curve["step"].tolist() == live["step"].tolist() == [1, 5, 10, 15, 20]
    assert curve["rmse_f_val"][-1] == pytest.approx(errors.metric("F:RMSE"), rel=5e-3)  # three digits in the file
    assert not np.array_equal(curve["rmse_e_val"], live["rmse_e_val"])
    assert np.isfinite(curve["rmse_f_trn"]).all()


@pytest.mark.parametrize("at", [3, 8, 13])
def test_a_restart_continues_the_whole_bank_to_the_last_bit(start, at):
    whole = start("whole", 20)
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


def test_a_bank_with_all_that_it_writes_leaves_the_live_trajectory_alone(start):
    with_bank = start("with", 12)
    without = start(
        "without",
        12,
        {
            "training__enable_ema": False,
            "training__averaging": [],
            "validating__full_validation": False,
            "validating__ema_full_validation": False,
        },
    )
    a, b = load(with_bank / "model.ckpt-12.pt"), load(without / "model.ckpt-12.pt")
    assert_same(a["model"], b["model"])
    assert_same(a["optimizer"], b["optimizer"])
    assert (with_bank / "lcurve.out").read_bytes() == (without / "lcurve.out").read_bytes()


def test_a_changed_profile_is_used_from_the_restart_on_and_said(start, caplog):
    start("run", 10)
    changed = [{**BANK[0], "decay": 0.5}, *BANK[1:4]]  # and the last one is gone
    with caplog.at_level("INFO"):
        start("run", 12, {"training__averaging": changed}, restart="model.ckpt.pt")
    assert "average slow: decay was 0.95 in the checkpoint and is 0.5 from now on" in caplog.text
    assert "average flat of the checkpoint is not tracked any more" in caplog.text


def test_the_best_file_of_an_average_gives_its_logged_metric_again(start, water_like_valid):
    folder = start("run", 20, {"validating__validation_metric": "F:RMSE"})
    for name in ("slow", "p05"):
        best = next(folder.glob(f"best_{name}.ckpt-*.t-1.pt"))
        logged = [r for r in (folder / f"val_{name}.log").read_text().splitlines() if best.name in r][-1]
        errors = measure(str(best), [str(water_like_valid)]).total
        assert f"{1000 * errors.metric('F:RMSE'):.3f}"[:5] in logged


def test_the_best_so_far_of_each_average_survives_a_restart(start):
    folder = start("run", 10)
    before = load(folder / "model.ckpt-10.pt")["best"]
    assert set(before) == {"live", "ema", "slow", "p05"}
    start("run", 10, restart="model.ckpt.pt")
    assert_same(load(folder / "model.ckpt-10.pt")["best"], before)


@pytest.mark.parametrize("name", NAMES)
def test_an_average_out_of_a_training_checkpoint_is_that_of_its_own_file(start, name):
    folder = start("run", 10)
    one = load_model(folder / "model.ckpt-10.pt", average=name)
    two = load_model(folder / f"model_{name}.ckpt-10.pt")
    assert_same(dict(one.model.state_dict()), dict(two.model.state_dict()))


def test_snapshots_are_kept_at_their_own_pace_in_float32_and_after_the_last_step(start):
    folder = start("run", 18)
    found = sorted(files_of(folder / "snapshots"))
    steps = {name: [int(f.split("-")[1][:-3]) for f in found if name in f] for name in ("p05", "p15")}
    assert sorted(steps["p05"]) == [4, 8, 12, 16, 18]
    assert sorted(steps["p15"]) == [10, 18]  # at the pace of the checkpoints
    kept, own = load(folder / "snapshots/model_p05.ckpt-18.pt"), load(folder / "model_p05.ckpt-18.pt")
    assert kept["kind"] == "snapshot"
    assert kept["weights"] == "p05"
    assert kept["run"] == load(folder / "model.ckpt-18.pt")["run"]
    assert kept["average"]["type"] == "power"
    assert kept["average"]["updates"] == 18
    assert set(kept["averaged"]) == {n for n in own["model"] if "weight" in n or "bias" in n or "idt" in n} - {
        "out_bias", "fitting.bias_atom_e",
    }  # fmt: skip
    for n, tensor in kept["model"].items():
        if n in kept["averaged"]:
            assert torch.equal(tensor, own["model"][n].to(torch.float32))
        else:
            assert torch.equal(tensor, own["model"][n])
            assert tensor.dtype == own["model"][n].dtype


def test_a_run_that_is_stopped_keeps_snapshots_of_its_last_step(start):
    """`dp-ema posthoc` ended with the last regular snapshot, up to snapshot_freq steps before the stop."""
    with pytest.raises(Interrupted):
        start("run", 18, callback=StopAfter(7))
    folder = start("run", 18, restart="model.ckpt-7.pt")
    steps = {f: load(folder / "snapshots" / f)["step"] for f in files_of(folder / "snapshots")}
    assert sorted(step for f, step in steps.items() if "p05" in f) == [4, 7, 8, 12, 16, 18]
    assert sorted(step for f, step in steps.items() if "p15" in f) == [7, 10, 18]


def test_an_average_that_has_not_begun_leaves_no_snapshot(start, caplog):
    late = [{"name": "late", "type": "swa", "start_step": 6, "snapshots": True, "snapshot_freq": 3}]
    with caplog.at_level("INFO"):
        folder = start("run", 12, {"training__averaging": late})
    assert "late every 3 steps: 2 files" in caplog.text
    assert sorted(files_of(folder / "snapshots")) == ["model_late.ckpt-12.pt", "model_late.ckpt-9.pt"]


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


def test_the_start_says_what_is_averaged_and_what_snapshots_will_take(start, caplog):
    with caplog.at_level("INFO"):
        folder = start("run", 18)
    for name in NAMES:
        assert re.search(rf"average +{name}: ", caplog.text)
    files = [f for f in (folder / "snapshots").iterdir() if "p05" in f.name]
    assert "p05 every 4 steps: 5 files" in caplog.text
    assert len(files) == 5
    assert "p15 every 10 steps: 2 files" in caplog.text
    assert "of disk in all" in caplog.text


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
    assert np.ptp([frames for _, frames in halved["frames"]]) < 1e-6
    assert halved["frames"][0][1] == pytest.approx(100)
    assert np.ptp([frames for _, frames in halved["epochs"]]) < 1e-6
    assert halved["epochs"][0][1] == pytest.approx(200)
    assert np.ptp([steps for steps, _ in halved["steps"]]) < 1e-9


def test_a_smaller_last_batch_counts_in_half_lives_of_frames():
    config = config_from_dict(
        tiny_input(["a"], training__averaging=[{"name": "a", "half_life": 70, "half_life_unit": "frames"}])
    )
    sampler = Sampler([7], [10], batch_size=5)  # an epoch is a batch of 5 and one of 2
    (profile,) = tracked_averages(config, {"frames": 1 / sampler.frames_per_step}, None, 100)
    assert profile.decay == pytest.approx(0.5 ** (1 / 20))


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


def test_the_hook_sees_steps_and_epochs(start):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EveryThird, "__call__", lambda self, step, epoch: seen.append((step, epoch)) or True)
        start("run", 4, {"training__averaging": [{"name": "third", "decay": 0.5}]},
              should_update={"third": EveryThird()})  # fmt: skip
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    assert [epoch for _, epoch in seen] == [step / 8 for step in (1, 2, 3, 4)]  # 16 frames in batches of 2


def test_each_average_keeps_its_own_number_of_files(start):
    folder = start("run", 30, {"training__max_ckpt_keep": 2, "training__ema_ckpt_keep": 1})
    kept = {name: len(list(folder.glob(f"model_{name}.ckpt-*.pt"))) for name in NAMES}
    assert kept == {"ema": 1, "slow": 2, "epoch": 2, "p05": 2, "p15": 2, "flat": 1}
    assert len(list(folder.glob("model.ckpt-*.pt"))) == 2


def test_the_facts_of_each_average_stand_in_its_file(start):
    folder = start("run", 20)
    facts = {name: checkpoint.load(folder / f"model_{name}.ckpt.pt")["average"] for name in NAMES}
    assert facts["flat"]["type"] == "swa"
    assert facts["flat"]["updates"] == 14  # from epoch 0.75, which is step 6
    assert facts["flat"]["mean_age"] == pytest.approx(6.5)
    assert facts["p15"]["updates"] == 10
    assert facts["slow"]["decay"] == 0.95
    assert facts["epoch"]["decay"] == pytest.approx(0.5 ** (1 / 4))


def rows_of(path):
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def test_an_average_that_has_not_begun_is_validated_as_the_live_weights(start):
    late = {"name": "late", "decay": 0.9, "start_step": 100, "full_validation": True}
    folder = start("run", 12, {"training__averaging": [late]})
    assert len(rows_of(folder / "val_late.log")) == 3
    assert rows_of(folder / "val_late.log") == rows_of(folder / "val.log") != rows_of(folder / "val_ema.log")


def test_the_last_step_of_a_run_is_averaged_too(start):
    every = {"training__averaging": [{"name": "flat", "type": "swa"}], "training__save_freq": 1,
             "training__max_ckpt_keep": 0}  # fmt: skip
    folder = start("run", 7, every)
    live = [load(folder / f"model.ckpt-{step}.pt")["model"] for step in range(1, 8)]
    average = load(folder / "model_flat.ckpt-7.pt")["model"]
    for name, tensor in average.items():
        mean = torch.stack([weights[name].double() for weights in live]).mean(0)
        assert torch.allclose(tensor.double(), mean, rtol=1e-12, atol=1e-14), name
    assert any(not torch.equal(live[-1][name], live[-2][name]) for name in average)


def test_the_short_form_is_a_bank_of_one_called_ema():
    def tracked(**changes):
        return config_from_dict(tiny_input(["a"], ["b"], **changes)).training.averaging

    assert tracked() == []
    plain = tracked(training__enable_ema=True, training__max_ckpt_keep=7)
    assert plain == tracked(training__averaging=[{"name": "ema", "decay": 0.999}], training__max_ckpt_keep=7)
    options = {
        "training__enable_ema": True,
        "training__ema_decay": 0.9,
        "training__ema_warmup": False,
        "training__ema_ckpt_keep": 2,
        "validating__ema_full_validation": True,
    }
    entry = {"name": "ema", "decay": 0.9, "warmup": False, "ckpt_keep": 2, "full_validation": True}
    assert tracked(**options) == tracked(training__averaging=[entry]) != plain


def test_the_log_names_averaged_files_like_the_others_and_says_how_far_each_looks_back(start, caplog):
    late = {"name": "late", "decay": 0.9, "start_step": 15}
    entries = [{"name": "slow", "decay": 0.5, "warmup": False}, {"name": "flat", "type": "swa"}, late]
    with caplog.at_level("DEBUG"):
        start("run", 20, {"training__averaging": entries})
    said = [record.getMessage() for record in caplog.records]
    names = ("model", "model_ema", "model_slow", "model_flat", "model_late")
    for step in (10, 20):
        assert f"saved {', '.join(f'{name}.ckpt-{step}.pt' for name in names)}" in said
    (words,) = [line for line in said if line.startswith("averages of step 10: ")]
    decays = [min(0.9, (1 + t) / (10 + t)) for t in range(10)]
    assert words.startswith(f"averages of step 10: ema: decay {decays[-1]:.6g}, looks back ")
    assert (
        "; slow: decay 0.5, looks back 1.0 steps on average; flat: decay 0.9, looks back 4.5 steps on average; "
        "late: no update yet" in words
    )
    age = 0.0
    for decay in decays:
        age = decay * (age + 1)
    assert f"looks back {age:.1f} steps on average; slow" in words
    (words,) = [line for line in said if line.startswith("averages of step 20: ")]
    assert "late: decay 0.357143, looks back " in words


def test_windows_of_averages_that_have_not_changed_are_logged_once(start, caplog):
    with caplog.at_level("DEBUG"):
        start("run", 20, {"training__averaging": [{"name": "slow", "decay": 0.1, "warmup": False}],
                          "training__enable_ema": False, "training__save_freq": 5,
                          "validating__ema_full_validation": False})  # fmt: skip
    said = [message for message in caplog.messages if message.startswith("averages of step")]
    assert said == ["averages of step 5: slow: decay 0.1, looks back 0.1 steps on average"]


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


def test_E2_a_file_holds_the_moment_that_it_was_made_of():
    """Buffers are the live ones of that step, and no later step reaches what waits to be written."""
    config = tiny_config()
    model = random_model(config)
    bank = AverageBank(model, [SwaProfile("flat")])
    payloads = StateBuilder(model, bank, to_dict(config), 0.9, "run", 10)

    def step(bias):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            model.out_bias.fill_(bias)
        bank.update()

    step(-5.0)
    step(-6.0)
    made = {
        "training": payloads.training(2, lambda *_: {}),
        "best": payloads.weights("live", 2, "best"),
        "average": payloads.weights("flat", 2, "average"),
        "snapshot": payloads.snapshot("flat", 2),
    }
    before = copy.deepcopy(made)
    step(9.0)
    assert_same(made, before)
    for name, content in made.items():
        assert torch.equal(content["model"]["out_bias"], torch.full_like(model.out_bias, -6.0)), name
    for name in ("out_bias", "out_std"):
        assert torch.equal(made["average"]["model"][name], made["training"]["model"][name])
