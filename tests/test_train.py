"""A run as a whole: files, restarts to the last bit, signals, kills, bad numbers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, write_system
from toy_models import SECTIONS

from deepmd_ema import cli
from deepmd_ema.config import config_summary, load_config
from deepmd_ema.errors import CheckpointError, ConfigError, DivergedError, Interrupted, UserError
from deepmd_ema.report import curves
from deepmd_ema.training.modes import products_in
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

pytestmark = pytest.mark.timeout(120)

WITH_AVERAGES = {
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 4,
    "validating__full_val_start": 0,
}


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, num_steps=..., options=..., **how)."""

    def run(name, num_steps=20, options=None, systems=None, **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        options = {**WITH_AVERAGES, **(options or {})}
        config = tiny_input(systems or [water_like], [water_like_valid], num_steps=num_steps, **options)
        (folder / "input.json").write_text(json.dumps(config))
        run_training("input.json", device="cpu", **how)
        return folder

    return run


class StopAfter(Callback):
    """Requests the run to stop, as SIGTERM does, while it takes a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, trainer):
        if trainer.step == self.step:
            trainer.stop.request(signal.SIGTERM)


class InAveragedPassOfStep8(Callback):
    """Calls ``act(trainer)`` there, when validations are due every 4 steps."""

    def __init__(self, act):
        self.act = act

    def in_validation(self, trainer, weights):
        if trainer.step == 8 and weights != "live":
            self.act(trainer)


def load(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("kind", ["se_e2_a", "se_e2_r", "se_atten_v2", "se_e3_tebd"])
def test_atoms_without_neighbors_are_trained_with_a_number_of_neighbors_that_is_counted(start, tmp_path, kind):
    atoms = write_system(tmp_path / "atoms", frames=4, natoms=1, pbc=False)
    descriptor = SECTIONS[kind] | {"sel": "auto", "seed": 1}
    alone = {"model__descriptor": descriptor, "training__validation_data__systems": [str(atoms)]}
    folder = start("run", 2, alone, [atoms])
    assert json.loads((folder / "out.json").read_text())["model"]["descriptor"]["sel"] in (4, [4, 4])


@pytest.mark.parametrize(
    ("num_steps", "rate", "disp_freq", "rows"), [(60, 0.01, 1, 0), (60, 30.0, 1, 20), (9, 30.0, 4, 1), (3, 30.0, 9, 0)]
)
def test_a_run_that_learns_nothing_is_warned_about_once_with_both_errors(
    start, caplog, num_steps, rate, disp_freq, rows
):
    options = {"learning_rate__start_lr": rate, "learning_rate__stop_lr": rate, "training__disp_freq": disp_freq}
    start("run", num_steps, options)
    said = [text for text in caplog.messages if "nothing is learned" in text]
    assert len(said) == bool(rows)
    for text in said:
        found = re.search(
            rf"rmse_f of the training batches of the last {rows} rows? is (\S+), no better than (\S+) with", text
        )
        assert float(found[1]) >= float(found[2]) > 0
        assert "lower learning_rate.start_lr" in text


def test_a_new_run_writes_through_no_link_that_is_in_its_folder(start, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("checkpoint", "model.ckpt-4.pt", "model_ema.ckpt-4.pt", "best.ckpt-4.t-1.pt", "model.ckpt-99.pt"):
        (tmp_path / "theirs" / name).write_bytes(b"no path\0\xff")
        (tmp_path / "run" / name).symlink_to(tmp_path / "theirs" / name)
    start("run", num_steps=4)
    assert {path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == {b"no path\0\xff"}
    assert Path("checkpoint").read_text() == "model.ckpt-4.pt"


def test_a_run_writes_the_files_that_a_user_of_deepmd_kit_expects(start):
    folder = start("run", 20)
    names = {p.name for p in folder.iterdir()}
    assert {
        "out.json", "lcurve.out", "val.log", "val_ema.log", "checkpoint", "model.ckpt.pt", "model_ema.ckpt.pt",
        "model.ckpt-10.pt", "model.ckpt-20.pt", "model_ema.ckpt-10.pt", "model_ema.ckpt-20.pt",
    } <= names  # fmt: skip
    assert any(n.startswith("best.ckpt-") for n in names)
    assert any(n.startswith("best_ema.ckpt-") for n in names)
    assert (folder / "checkpoint").read_text().strip() == "model.ckpt-20.pt"
    assert [int(row.split()[0]) for row in (folder / "lcurve.out").read_text().splitlines()[2:]] == [1, 5, 10, 15, 20]


@pytest.mark.parametrize("schedule", ["exp", "cosine", "wsd", "invsqrt"])
def test_a_run_of_no_steps_writes_its_starting_point_and_can_be_checked(tmp_path, monkeypatch, capsys, schedule):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=3)
    values = tiny_input(["data"], num_steps=0, training__enable_ema=True)
    values["learning_rate"] = {"type": schedule, "start_lr": 1e-3, "warmup_steps": 3}
    if schedule != "invsqrt":
        values["learning_rate"]["stop_lr"] = 1e-6
    Path("input.json").write_text(json.dumps(values))
    assert cli.main(["check", "input.json", "--time"]) == 0
    assert "0 steps = 0.0 epochs" in capsys.readouterr().out
    run_training("input.json", device="cpu")
    assert Path("checkpoint").read_text().strip() == "model.ckpt-0.pt"
    assert load("model.ckpt-0.pt")["step"] == 0
    assert cli.main(["show", "."]) == 0


def test_tf32_is_for_the_products_of_steps_on_a_gpu(start, caplog):
    with products_in(tf32=True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    options = {"model__descriptor__precision": "float32", "training__enable_tf32": True, "validating__tf32_infer": True}
    start("tf32", 1, options)
    assert "training.enable_tf32 has no effect on a CPU" in caplog.text
    assert "validating.tf32_infer has no effect on a CPU" in caplog.text


def test_cuda_graphs_are_for_a_gpu(start, caplog):
    start("graphs", 1, {"training__cuda_graphs": True})
    assert "training.cuda_graphs has no effect: there are none on a CPU." in caplog.text


def test_training_lowers_the_force_error(start):
    folder = start("run", 60, {"training__disp_freq": 60, "learning_rate__start_lr": 5e-3})
    rows = np.genfromtxt(folder / "lcurve.out", names=True)
    assert rows["rmse_f_val"][-1] < 0.7 * rows["rmse_f_val"][0]


@pytest.mark.parametrize("at", [1, 4, 7, 10, 13])
def test_a_restart_continues_to_the_last_bit(start, at):
    whole = start("whole", 20)
    with pytest.raises(Interrupted, match=f"after step {at} of 20"):
        start("parts", 20, callback=StopAfter(at))
    parts = start("parts", 20, restart="model.ckpt.pt")
    assert_same(load(whole / "model.ckpt-20.pt"), load(parts / "model.ckpt-20.pt"))
    assert_same(load(whole / "model_ema.ckpt-20.pt"), load(parts / "model_ema.ckpt-20.pt"))
    for name in ("lcurve.out", "val.log", "val_ema.log"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


@pytest.fixture
def broken_off(start):
    """Return the folder of a whole run, and, as the current folder, that of one that was stopped after step 8."""
    whole = start("whole")
    with pytest.raises(Interrupted):
        start("parts", callback=StopAfter(8))
    return whole


@pytest.mark.parametrize("input_file", [None, "input.json"])
def test_a_restart_with_or_without_the_input_writes_the_bytes_of_an_unbroken_run(broken_off, caplog, input_file):
    run_training(input_file, restart="model.ckpt.pt", device="cpu")
    written = {path.name for path in Path().glob("*.*") if path.is_file()} - {"run_record.json"}
    assert {"model.ckpt-20.pt", "model_ema.ckpt-20.pt", "best_ema.ckpt.pt", "lcurve.out", "val_ema.log"} < written
    for name in written - {"model.ckpt-8.pt", "model_ema.ckpt-8.pt"}:
        assert Path(name).read_bytes() == (broken_off / name).read_bytes(), name
    assert "is not read" not in caplog.text
    assert "no effect" not in caplog.text or input_file


def test_a_restart_without_an_input_says_how_that_of_the_folder_differs(broken_off, caplog, capsys):
    given = json.loads(Path("input.json").read_text())
    given["learning_rate"]["start_lr"], given["training"]["numb_steps"] = 5e-3, 30
    Path("input.json").write_text(json.dumps(given))
    assert cli.main(["train", "--restart", "model.ckpt.pt", "--device", "cpu"]) == 0
    line = next(record.getMessage() for record in caplog.records if "is not read" in record.getMessage())
    assert line == (
        "input.json is not read, the config of model.ckpt.pt counts. The former differs: learning_rate.start_lr = "
        "0.005 (checkpoint: 0.001), training.numb_steps = 30 (checkpoint: 20). `dp-ema train --restart model.ckpt.pt "
        "input.json` takes it instead."
    )
    assert_same(load("model.ckpt-20.pt"), load(broken_off / "model.ckpt-20.pt"))


def test_a_restart_without_an_input_says_that_that_of_the_folder_is_wrong(broken_off, caplog):
    Path("input.json").write_text('{"model": {}')
    run_training(restart="model.ckpt.pt", device="cpu", max_time=1e-9)
    assert "The former differs: input.json:1:13: not JSON: the text ends too early." in caplog.text


def test_without_an_input_that_of_the_folder_is_trained(start, monkeypatch, capsys):
    start("run", 2)
    before = Path("model.ckpt-2.pt").read_bytes()
    assert cli.main(["train", "--device", "cpu"]) == 0
    assert Path("model.ckpt-2.pt").read_bytes() == before
    assert Path("earlier-1/model.ckpt-2.pt").read_bytes() == before
    assert os.readlink("earlier-1/best_ema.ckpt.pt") == "best_ema.ckpt-2.t-1.pt"
    Path("input.json").unlink()
    capsys.readouterr()
    for words in (["train"], ["train", "--init-model", "model.ckpt.pt"], ["train", "--finetune", "model.ckpt.pt"]):
        assert cli.main(words) == 2
        assert capsys.readouterr().err == (
            "dp-ema: no input is given, and this folder has no input.json. Name the file: `dp-ema train INPUT`. "
            "`dp-ema init DATA -o input.json` writes one for your data.\n"
        )


def test_a_restart_with_averaged_rows_continues_to_the_last_bit(start):
    options = {"training__disp_avg": True}
    whole = start("whole", 20, options)
    with pytest.raises(Interrupted):
        start("parts", 20, options, callback=StopAfter(8))
    parts = start("parts", 20, options, restart="model.ckpt.pt")
    assert (whole / "lcurve.out").read_bytes() == (parts / "lcurve.out").read_bytes()


def test_rows_after_the_restored_step_are_cut_before_a_restart_writes(start):
    folder = start("run", 20)
    before = (folder / "lcurve.out").read_bytes()
    start("run", 20, restart="model.ckpt-10.pt")
    assert (folder / "lcurve.out").read_bytes() == before


@pytest.mark.parametrize("seconds", [10.0, 0.0])
def test_rows_are_on_the_disk_before_a_checkpoint_that_follows_them(start, monkeypatch, seconds):
    """A restart does not write rows of before its checkpoint again; those after it may be lost in a power cut."""
    monkeypatch.setattr(curves, "SYNC_S", seconds)
    events = []  # rows that are added, files that are flushed, links that are moved
    fsync, add, move = os.fsync, curves.RowTable._add, os.replace

    def note_fsync(handle):
        events.append(("flushed", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def note_row(table, line):
        events.append(("row", table.path.name))
        add(table, line)

    def note_move(old, new):
        events.append(("moved", Path(new).name))
        move(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(curves.RowTable, "_add", note_row)
    monkeypatch.setattr(os, "replace", note_move)
    start("run", 20)
    waiting, saved, flushed = set(), 0, 0
    for kind, name in events:
        if kind == "row":
            waiting.add(name)
        elif kind == "flushed":
            waiting.discard(name)
            flushed += name == "lcurve.out"
        elif re.fullmatch(r"model\.ckpt-\d+\.pt", name):
            saved += 1
            assert not waiting
    rows = events.count(("row", "lcurve.out"))
    assert (saved, rows) == (2, 5)
    assert flushed == (
        1 + saved if seconds else rows
    )  # the first row, as nothing was flushed before, and each checkpoint


def test_a_signal_inside_a_validation_restores_the_weights_and_the_restart_makes_up_for_it(start):
    whole = start("whole", 20)
    with pytest.raises(Interrupted, match="after step 8 of 20"):
        start("parts", 20, callback=InAveragedPassOfStep8(lambda trainer: trainer.stop.request(signal.SIGTERM)))
    parts = start("parts", 20, restart="model.ckpt.pt")
    assert_same(load(whole / "model.ckpt-20.pt"), load(parts / "model.ckpt-20.pt"))
    for name in ("lcurve.out", "val.log", "val_ema.log"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_averaged_validation_does_not_touch_the_live_trajectory(start):
    with_averages = start("with", 12)
    without = start(
        "without",
        12,
        dict.fromkeys(
            ("training__enable_ema", "validating__full_validation", "validating__ema_full_validation"), False
        ),
    )
    assert_same(load(with_averages / "model.ckpt-12.pt")["model"], load(without / "model.ckpt-12.pt")["model"])
    other_decay = start("decay", 12, {"training__ema_decay": 0.5})
    assert_same(load(with_averages / "model.ckpt-12.pt")["model"], load(other_decay / "model.ckpt-12.pt")["model"])


def test_a_checkpoint_holds_raw_weights_as_model_and_averages_as_averages(start):
    folder = start("run", 12)
    state, average = load(folder / "model.ckpt-12.pt"), load(folder / "model_ema.ckpt-12.pt")
    assert state["kind"] == "training"
    assert average["kind"] == "average"
    assert average["average"]["profile"] == "ema"
    assert state["model"].keys() == average["model"].keys()
    assert not all(torch.equal(state["model"][n], average["model"][n]) for n in state["model"])
    assert torch.equal(state["model"]["out_bias"], average["model"]["out_bias"])


def break_off(_trainer):
    raise ValueError("broken off")


ENDINGS = {
    "the end": (None, None, {3, 6, 9, 12}),
    "a signal": (lambda trainer: trainer.stop.request(signal.SIGTERM), Interrupted, {3, 6, 8}),
    "an exception": (break_off, ValueError, {3, 6}),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_file_of_a_run_holds_the_raw_weights_or_the_average_of_its_step(start, ending):
    """Files of a run, best files too, beside what model and average were after each step; also when a run ends
    while the average is in the model."""
    act, error, saved = ENDINGS[ending]
    seen = {}

    class Look(InAveragedPassOfStep8):
        def after_update(self, trainer):
            seen[trainer.step] = {"live": trainer.bank.weights("live"), "ema": trainer.bank.weights("ema")}

        def on_start(self, trainer):
            self.trainer = trainer

    look = Look(act or (lambda _: None))
    options = {"training__save_freq": 3, "training__max_ckpt_keep": 0, "validating__max_best_ckpt": 9}
    with pytest.raises(error) if error is not None else nullcontext():
        start("run", 12, options, callback=look)
    written = {path: load(path) for path in map(str, Path.cwd().glob("*.ckpt-*.pt"))}
    for path, content in written.items():
        assert_same(content["model"], seen[content["step"]][content["weights"]], path)
        if content["kind"] == "training":
            kept = content["averages"]["profiles"]["ema"]["weights"]
            assert_same(kept, {name: seen[content["step"]]["ema"][name] for name in kept}, path)
    for kind, weights in (("training", "live"), ("average", "ema")):
        assert {c["step"] for c in written.values() if (c["kind"], c["weights"]) == (kind, weights)} == saved
    for weights in ("live", "ema"):
        assert any((c["kind"], c["weights"]) == ("best", weights) for c in written.values())
    last = seen[max(seen)]
    assert not torch.equal(flat(last["live"]), flat(last["ema"]))
    (task,) = look.trainer.tasks
    assert_same(task.models.state_dict(), last["live"])


def flat(weights):
    return torch.cat([tensor.double().ravel() for tensor in weights.values()])


STANDING = {"learning_rate__start_lr": 1e-30, "learning_rate__stop_lr": 1e-31}


def test_averages_start_from_the_loaded_weights(start):
    folder = start("run", 10)
    start("from_live", 1, STANDING, init_model=str(folder / "model.ckpt.pt"))
    average = load("model_ema.ckpt-1.pt")["model"]
    live = load(folder / "model.ckpt-10.pt")["model"]
    assert all(torch.allclose(average[n], live[n], rtol=0, atol=1e-20) for n in live)


def test_a_new_run_starts_from_an_averaged_file(start):
    folder = start("run", 10)
    average = load(folder / "model_ema.ckpt-10.pt")["model"]
    assert not torch.equal(flat(average), flat(load(folder / "model.ckpt-10.pt")["model"]))
    start("from_average", 1, STANDING, init_model=str(folder / "model_ema.ckpt.pt"))
    for name in ("model.ckpt-1.pt", "model_ema.ckpt-1.pt"):
        found = load(name)["model"]
        assert all(torch.allclose(found[n], average[n], rtol=0, atol=1e-20) for n in average), name


def test_an_average_is_refused_by_restart_with_the_file_to_use(start):
    folder = start("run", 10)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-10\.pt"):
        start("run", 20, restart=str(folder / "model_ema.ckpt.pt"))


WITHOUT_AVERAGES = {"training__enable_ema": False, "validating__ema_full_validation": False}


def test_averaging_switched_on_at_a_restart_starts_from_the_live_weights(start, caplog):
    start("run", 10, WITHOUT_AVERAGES)
    loaded = load("model.ckpt-10.pt")["model"]
    with caplog.at_level("INFO"):
        start("run", 11, {}, restart="model.ckpt-10.pt")
    assert "the checkpoint has no average ema: it starts from the loaded weights" in caplog.text
    live, average = load("model.ckpt-11.pt")["model"], load("model_ema.ckpt-11.pt")
    assert average["average"]["updates"] == 1
    assert average["average"]["mean_age"] == pytest.approx(0.1)
    assert not torch.equal(flat(loaded), flat(live))
    for name, tensor in average["model"].items():  # the first update of a warm-up
        assert torch.allclose(tensor, 0.1 * loaded[name] + 0.9 * live[name], rtol=1e-12, atol=1e-15), name


def test_averaging_switched_off_at_a_restart_leaves_the_raw_weights(start, caplog):
    whole = start("whole", 20, WITHOUT_AVERAGES)
    with pytest.raises(Interrupted):
        start("parts", 20, callback=StopAfter(10))
    with caplog.at_level("INFO"):
        parts = start("parts", 20, WITHOUT_AVERAGES, restart="model.ckpt.pt")
    assert "averaging is off in this run" in caplog.text
    assert "the averages of the checkpoint (ema) are left behind" in caplog.text
    one, two = load(whole / "model.ckpt-20.pt"), load(parts / "model.ckpt-20.pt")
    for key in ("model", "optimizer", "streams"):
        assert_same(one[key], two[key], key)
    assert "averages" not in two


def test_the_best_file_gives_its_logged_metric_again(start, water_like_valid):
    from deepmd_ema.infer.evaluate import measure

    folder = start("run", 20, {"validating__validation_metric": "F:RMSE"})
    rows = [r for r in (folder / "val_ema.log").read_text().splitlines() if "best_ema.ckpt-" in r]
    best = next(folder.glob("best_ema.ckpt-*.t-1.pt"))
    logged = next(r for r in reversed(rows) if best.name in r)
    errors = measure(str(best), [str(water_like_valid)]).total
    assert f"{1000 * errors.metric('F:RMSE'):.3f}"[:5] in logged


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(start):
    a, b = start("a", 6), start("b", 6)
    c = start("c", 6, {"training__seed": 11})
    assert (a / "lcurve.out").read_bytes() == (b / "lcurve.out").read_bytes()
    assert (a / "lcurve.out").read_bytes() != (c / "lcurve.out").read_bytes()


def test_a_restart_with_another_model_or_other_data_is_refused_by_name(start, mixed_like):
    start("run", 10)
    with pytest.raises(ConfigError, match=r"model\.descriptor\.rcut_smth.*1\.0 in the checkpoint, 0\.9 in the input"):
        start("run", 20, {"model__descriptor__rcut_smth": 0.9}, restart="model.ckpt.pt")
    with pytest.raises(ConfigError, match=r"training\.seed"):
        start("run", 20, {"training__seed": 5}, restart="model.ckpt.pt")
    start("run", 20, {"loss__start_pref_e": 0.5}, restart="model.ckpt.pt", allow_config_change=True)


def test_a_non_finite_loss_stops_the_run_with_step_and_frames_and_no_bad_checkpoint(start):
    with pytest.raises(DivergedError, match=r"step \d+: .*water_like.* frame \d+"):
        start(
            "run",
            60,
            {
                "learning_rate__start_lr": 1e200,
                "learning_rate__stop_lr": 1e199,
                "training__save_freq": 1,
                "training__max_ckpt_keep": 0,
            },
        )
    for file in (p for p in os.listdir() if p.startswith("model.ckpt-")):
        assert all(torch.isfinite(t).all() for t in load(file)["model"].values()), file


def test_numb_epoch_counts_passes_over_the_frames(start):
    folder = start("run", None, {"training__numb_epoch": 2})
    assert load(folder / "model.ckpt.pt")["step"] == 16  # 16 frames, batches of 2


def test_mixed_and_plain_systems_train_together(start, water_like, mixed_like, open_like):
    start("run", 8, systems=[water_like, mixed_like, open_like])
    rows = np.genfromtxt("lcurve.out", names=True)
    assert np.isfinite(rows["rmse_f_trn"]).all()


def test_the_run_says_what_has_no_effect_and_warns_of_a_long_window(start, caplog):
    with caplog.at_level("INFO"):
        start("run", 10, {"training__ema_decay": 0.9999})
    assert "more than a fifth of the run of 10" in caplog.text
    assert "trained parameters" in caplog.text


def test_commands_at_the_end_of_a_run_can_be_given_to_a_shell(start, caplog):
    folder = start("run", 2)
    Path("my input.json").write_text((folder / "input.json").read_text())
    with caplog.at_level("INFO"):
        run_training("my input.json", device="cpu")
    assert "--valid-data 'my input.json' --plot" in caplog.text


def test_check_show_and_the_start_report_of_a_run_in_the_same_words(start, caplog, capsys):
    with caplog.at_level("INFO"):
        start("run", 3)
    assert cli.main(["check", "input.json", "--config-only"]) == 0
    assert cli.main(["show", "model.ckpt.pt"]) == 0
    reported = [re.sub(" +", " ", text) for text in (capsys.readouterr().out, caplog.text)]
    names = ("elements", "descriptor", "fitting", "loss", "learning rate", "optimizer", "validation")
    for name, text in config_summary(load_config("input.json")):
        if name in names:
            assert [t.count(f" {name} {text}") for t in reported] == [2, 1], name
    assert "3 steps = 0.4 epochs of 8 batches, batch_size 2" in reported[1]


def test_one_of_several_processes_says_what_its_launcher_has_not_set(start, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE = 2, but RANK is not set"):
        start("run", 5)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        start("run", 5)


def _spawn(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "deepmd_ema", "train", "input.json", "--device", "cpu"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize("signal_sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_the_current_step_and_says_how_to_continue(tmp_path, water_like, signal_sent):
    config = tiny_input([water_like], num_steps=100000, training__save_freq=100000)
    (tmp_path / "input.json").write_text(json.dumps(config))
    # a child inherits what is ignored, as SIGHUP is where the tests themselves run under nohup
    before = signal.signal(signal_sent, signal.default_int_handler)
    try:
        process = _spawn(tmp_path)
    finally:
        signal.signal(signal_sent, before)
    _wait_for(lambda: (tmp_path / "lcurve.out").exists() and len((tmp_path / "lcurve.out").read_text().split("\n")) > 4)
    process.send_signal(signal_sent)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()  # a run that does not react continues for a long time
    assert process.returncode == 128 + signal_sent
    assert "dp-ema train --restart model.ckpt.pt\n" in said
    assert "Traceback" not in said
    state = load(tmp_path / "model.ckpt.pt")
    assert state["step"] > 1


def test_a_run_under_nohup_outlives_its_terminal(tmp_path, water_like):
    (tmp_path / "input.json").write_text(json.dumps(tiny_input([water_like], num_steps=100000)))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; a child inherits it
    try:
        process = _spawn(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    rows = tmp_path / "lcurve.out"
    _wait_for(rows.exists)
    process.send_signal(signal.SIGHUP)
    number = len(rows.read_text().splitlines())
    _wait_for(lambda: len(rows.read_text().splitlines()) > number + 3)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_killed_run_restarts_from_its_last_checkpoint(tmp_path, monkeypatch, water_like):
    config = tiny_input([water_like], num_steps=30, training__save_freq=1, training__enable_ema=True)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "input.json").write_text(json.dumps(config))
    monkeypatch.chdir(whole)
    run_training("input.json", device="cpu")
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "input.json").write_text(json.dumps(config))
    process = _spawn(parts)
    _wait_for(lambda: (parts / "model.ckpt.pt").exists())
    process.kill()
    process.communicate()
    monkeypatch.chdir(parts)
    run_training("input.json", device="cpu", restart="model.ckpt.pt")
    assert_same(load(whole / "model.ckpt-30.pt"), load(parts / "model.ckpt-30.pt"))
    assert (whole / "lcurve.out").read_bytes() == (parts / "lcurve.out").read_bytes()


def test_a_system_without_virials_trains_with_a_virial_prefactor_and_a_warning(start, tmp_path, caplog):
    system = write_system(tmp_path / "no_virial", frames=6, virial=False, seed=5)
    with caplog.at_level("WARNING"):
        start("run", 6, systems=[system])
    assert "virial" in caplog.text
    rows = np.genfromtxt("lcurve.out", names=True)
    assert np.isnan(rows["rmse_v_trn"]).all()
    assert np.isfinite(rows["rmse_f_trn"]).all()


def test_a_restart_whose_steps_have_another_number_of_frames_says_so(start, caplog):
    start("run", 4, {"training__save_freq": 4})
    with caplog.at_level("WARNING"):
        start("run", 6, {"training__training_data__batch_size": 4}, restart="model.ckpt.pt", allow_config_change=True)
    assert "a step has 4 frames on average now, over all ranks together, and had 2 when" in caplog.text
