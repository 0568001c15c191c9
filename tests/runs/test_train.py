"""A run as a whole: files, restarts to the last bit, signals, bad numbers, full validation,
displayed errors.
"""

import errno
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
from helpers import assert_same, changed, tiny_input, trains_in, validated, write_system
from training_runs import OPTIONS as OPTIONS
from training_runs import StopAfter, load

from deepmd_ema import checkpoint, cli
from deepmd_ema.config import config_from_dict, to_dict
from deepmd_ema.distributed import launch
from deepmd_ema.errors import DivergedError, Interrupted
from deepmd_ema.report import curves
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback


@pytest.fixture(scope="module")
def whole(tmp_path_factory, water_like, water_like_valid):
    """The folder of an unbroken run of 20 steps."""
    home, data = tmp_path_factory.mktemp("run"), ([water_like], [water_like_valid])
    with pytest.MonkeyPatch.context() as patch:
        return trains_in(home, patch, data, OPTIONS)("whole")


class InAveragedPassOfStep8(Callback):
    """Calls ``act(trainer)`` there, when validations are due every 4 steps."""

    def __init__(self, act):
        self.act = act

    def in_validation(self, trainer, weights):
        if trainer.step == 8 and weights != "live":
            self.act(trainer)


@pytest.mark.parametrize(
    ("num_steps", "rate", "rows"), [(60, 0.01, 0), (60, 30.0, 20), (3, 30.0, 2)]
)
def test_a_run_that_learns_nothing_is_warned_about_once_with_both_errors(
    start, caplog, num_steps, rate, rows
):
    start(
        "run",
        num_steps,
        {
            "learning_rate__start_lr": rate,
            "learning_rate__stop_lr": rate,
            "training__disp_freq": 1,
        },
    )
    said = [text for text in caplog.messages if "nothing is learned" in text]
    assert len(said) == bool(rows)
    for text in said:
        words = (
            rf"rmse_f of the training batches of the last {rows} rows is (\S+), no better than "
            r"(\S+) with"
        )
        found = re.search(words, text)
        assert float(found[1]) >= float(found[2]) > 0
        assert "lower learning_rate.start_lr" in text


def test_a_new_run_writes_through_no_link_that_is_in_its_folder(start, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").mkdir()
    for name in (
        "checkpoint",
        "model.ckpt-4.pt",
        "model_ema.ckpt-4.pt",
        "best.ckpt-4.t-1.pt",
        "model.ckpt-99.pt",
    ):
        (tmp_path / "theirs" / name).write_bytes(b"no path\0\xff")
        (tmp_path / "run" / name).symlink_to(tmp_path / "theirs" / name)
    start("run", num_steps=4)
    assert {path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == {
        b"no path\0\xff"
    }
    assert Path("checkpoint").read_text() == "model.ckpt-4.pt"


def test_a_run_writes_the_files_that_a_user_of_deepmd_kit_expects(whole):
    names = {p.name for p in whole.iterdir()}
    assert {
        "out.json",
        "lcurve.out",
        "val.log",
        "val_ema.log",
        "checkpoint",
        "model.ckpt.pt",
        "model_ema.ckpt.pt",
        "model.ckpt-10.pt",
        "model.ckpt-20.pt",
        "model_ema.ckpt-10.pt",
        "model_ema.ckpt-20.pt",
    } <= names
    assert all(
        any(n.startswith(f"{best}.ckpt-") for n in names)
        for best in ("best", "best_ema")
    )
    assert (whole / "checkpoint").read_text().strip() == "model.ckpt-20.pt"
    rows = np.genfromtxt(whole / "lcurve.out", names=True)
    assert rows["step"].tolist() == [1, 5, 10, 15, 20]
    assert rows["rmse_f_val"][-1] < rows["rmse_f_val"][0]


@pytest.mark.parametrize(
    "schedule", [{"type": "exp", "stop_lr": 1e-6}, {"type": "invsqrt"}], ids=str
)
def test_a_run_of_no_steps_writes_its_starting_point_and_can_be_checked(
    tmp_path, monkeypatch, capsys, schedule
):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=3)
    rate = {**schedule, "start_lr": 1e-3, "warmup_steps": 3}
    values = tiny_input(
        ["data"], num_steps=0, training__enable_ema=True, learning_rate=rate
    )
    Path("input.json").write_text(json.dumps(values))
    assert cli.main(["check", "input.json", "--time"]) == 0
    assert "0 steps = 0.0 epochs" in capsys.readouterr().out
    run_training("input.json", device="cpu")
    assert Path("checkpoint").read_text().strip() == "model.ckpt-0.pt"
    assert load("model.ckpt-0.pt")["step"] == 0
    assert cli.main(["show", "."]) == 0


@pytest.mark.parametrize("where", [1, 4, 7, "in a validation"])
def test_a_restart_with_or_without_the_input_continues_to_the_last_bit(
    whole, start, caplog, where
):
    """Also a second one from that checkpoint: no row that the first has written is there twice."""
    step, callback = where, StopAfter(where)
    if where == "in a validation":
        step, callback = (
            8,
            InAveragedPassOfStep8(lambda trainer: trainer.stop.request(signal.SIGTERM)),
        )
    with pytest.raises(Interrupted, match=rf"after step {step} of 20"):
        start("parts", callback=callback)
    values = json.loads(Path("input.json").read_text())
    del values["training"]["seed"]  # that of the checkpoint counts
    Path("inputs").mkdir()
    Path("inputs/no_seed.json").write_text(json.dumps(values))
    for input_file in (None, "inputs/no_seed.json"):
        caplog.clear()
        run_training(input_file, restart=f"model.ckpt-{step}.pt", device="cpu")
        written = {path.name for path in Path().glob("*.*") if path.is_file()} - {
            "run_record.json"
        }
        assert {
            "model.ckpt-20.pt",
            "model_ema.ckpt-20.pt",
            "best_ema.ckpt.pt",
            "lcurve.out",
            "val_ema.log",
        } < written
        for name in written - {f"model.ckpt-{step}.pt", f"model_ema.ckpt-{step}.pt"}:
            assert Path(name).read_bytes() == (whole / name).read_bytes(), name
        assert "is not read" not in caplog.text
        assert "no effect" not in caplog.text or input_file


def test_a_restart_without_an_input_says_how_that_of_the_folder_differs(
    whole, start, caplog, capsys
):
    with pytest.raises(Interrupted):
        start("parts", callback=StopAfter(8))
    given = json.loads(Path("input.json").read_text())
    given["learning_rate"]["start_lr"], given["training"]["numb_steps"] = 5e-3, 30
    Path("input.json").write_text(json.dumps(given))
    assert cli.main(["train", "--restart", "model.ckpt.pt", "--device", "cpu"]) == 0
    line = next(
        record.getMessage()
        for record in caplog.records
        if "is not read" in record.getMessage()
    )
    assert line == (
        "input.json is not read, the config of model.ckpt.pt counts. The former differs: "
        "learning_rate.start_lr = 0.005 (checkpoint: 0.001), training.numb_steps = 30 "
        "(checkpoint: 20). `dp-ema train --restart model.ckpt.pt input.json` takes it instead."
    )
    assert_same(load("model.ckpt-20.pt"), load(whole / "model.ckpt-20.pt"))


def test_files_of_an_average_that_the_new_run_lacks_are_set_aside_with_the_others(
    start, tmp_path
):
    start("run", 2)
    others = {path.name for path in Path().glob("*_ema*")}
    assert {"best_ema.ckpt.pt", "val_ema.log", "model_ema.ckpt.pt"} <= others
    start("run", 2, {"training__enable_ema": False, "validating": {}})
    assert not list(Path().glob("*_ema*"))
    assert others <= {path.name for path in Path("earlier-1").iterdir()}

    # a run with checkpoints of another name in the same folder is no earlier one, and an out.json
    # that was made up moves nothing outside of the folder
    other = {"training__save_ckpt": "b", "training__disp_file": "b.out"}
    start("run", 2, other)
    assert checkpoint.load("model.ckpt.pt")["step"] == 2
    outside = tmp_path / "outside"
    outside.mkdir()
    file = outside / "best.ckpt-1.t-1.pt"
    file.touch()
    values = json.loads(Path("out.json").read_text())
    values["validating"] |= {"save_best_dir": str(outside), "full_validation": True}
    Path("out.json").write_text(json.dumps(values))
    start("run", 2, other)
    assert file.exists()


def test_without_an_input_that_of_the_folder_is_trained(start, capsys):
    start("run", 2)
    before = Path("model.ckpt-2.pt").read_bytes()
    assert cli.main(["train", "--device", "cpu"]) == 0
    assert Path("model.ckpt-2.pt").read_bytes() == before
    assert os.readlink("earlier-1/best_ema.ckpt.pt") == "best_ema.ckpt-2.t-1.pt"
    Path("input.json").unlink()
    capsys.readouterr()
    for words in (
        ["train"],
        ["train", "--init-model", "model.ckpt.pt"],
        ["train", "--finetune", "model.ckpt.pt"],
    ):
        assert cli.main(words) == 2
        assert capsys.readouterr().err == (
            "dp-ema: no input is given, and this folder has no input.json. Name the file: `dp-ema "
            "train INPUT`. `dp-ema init DATA -o input.json` writes one for your data.\n"
        )


def test_rows_are_on_the_disk_before_a_checkpoint_that_follows_them(start, monkeypatch):
    """A restart does not write rows of before its checkpoint again; those after it may be lost in a
    power cut.
    """
    events, fsync, add, move = [], os.fsync, curves.RowTable._add, os.replace

    def noted(event, call):
        return lambda *given: events.append(event(*given)) or call(*given)

    flushed = noted(
        lambda handle: ("flushed", Path(os.readlink(f"/proc/self/fd/{handle}")).name),
        fsync,
    )
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(
        curves.RowTable, "_add", noted(lambda table, _: ("row", table.path.name), add)
    )
    monkeypatch.setattr(
        os, "replace", noted(lambda _, new: ("moved", Path(new).name), move)
    )
    start("run", 20)
    waiting, saved = set(), 0
    for kind, name in events:
        if kind == "row":
            waiting.add(name)
        elif kind == "flushed":
            waiting.discard(name)
        elif re.fullmatch(r"model\.ckpt-\d+\.pt", name):
            saved += 1
            assert not waiting
    assert (saved, events.count(("row", "lcurve.out"))) == (2, 5)


def break_off(_trainer):
    raise ValueError("broken off")


ENDINGS = {
    "the end": (None, None, {3, 6, 9, 12}),
    "a signal": (
        lambda trainer: trainer.stop.request(signal.SIGTERM),
        Interrupted,
        {3, 6, 8},
    ),
    "an exception": (break_off, ValueError, {3, 6}),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_file_of_a_run_holds_the_raw_weights_or_the_average_of_its_step(
    start, ending
):
    """Files of a run, best files too, beside what model and average were after each step; also when
    a run ends while the average is in the model."""
    act, error, saved = ENDINGS[ending]
    seen = {}

    class Look(InAveragedPassOfStep8):
        def after_update(self, trainer):
            seen[trainer.step] = {
                "live": trainer.bank.weights("live"),
                "ema": trainer.bank.weights("ema"),
            }

        def on_start(self, trainer):
            self.trainer = trainer

    look = Look(act or (lambda _: None))
    options = {
        "training__save_freq": 3,
        "training__max_ckpt_keep": 0,
        "validating__max_best_ckpt": 9,
    }
    with pytest.raises(error) if error is not None else nullcontext():
        start("run", 12, options, callback=look)
    written = {path: load(path) for path in map(str, Path.cwd().glob("*.ckpt-*.pt"))}
    for path, content in written.items():
        assert_same(content["model"], seen[content["step"]][content["weights"]], path)
        if content["kind"] == "training":
            kept = content["averages"]["profiles"]["ema"]["weights"]
            assert_same(
                kept, {name: seen[content["step"]]["ema"][name] for name in kept}, path
            )
    for kind, weights in (("training", "live"), ("average", "ema")):
        assert {
            c["step"]
            for c in written.values()
            if (c["kind"], c["weights"]) == (kind, weights)
        } == saved
    for weights in ("live", "ema"):
        assert any(
            (c["kind"], c["weights"]) == ("best", weights) for c in written.values()
        )
    last = seen[max(seen)]
    assert not torch.equal(flat(last["live"]), flat(last["ema"]))
    (task,) = look.trainer.tasks
    assert_same(task.models.state_dict(), last["live"])


def flat(weights):
    return torch.cat([tensor.double().ravel() for tensor in weights.values()])


STANDING = {"learning_rate__start_lr": 1e-30, "learning_rate__stop_lr": 1e-31}


def test_a_new_run_starts_from_an_averaged_file(whole, start):
    average = load(whole / "model_ema.ckpt-10.pt")["model"]
    assert not torch.equal(
        flat(average), flat(load(whole / "model.ckpt-10.pt")["model"])
    )
    start("from_average", 1, STANDING, init_model=str(whole / "model_ema.ckpt-10.pt"))
    for name in ("model.ckpt-1.pt", "model_ema.ckpt-1.pt"):
        found = load(name)["model"]
        assert all(
            torch.allclose(found[n], average[n], rtol=0, atol=1e-20) for n in average
        ), name


WITHOUT_AVERAGES = {
    "training__enable_ema": False,
    "validating__ema_full_validation": False,
}


def test_averaging_switched_on_at_a_restart_starts_from_the_live_weights(start, caplog):
    start("run", 10, WITHOUT_AVERAGES)
    loaded = load("model.ckpt-10.pt")["model"]
    with caplog.at_level("INFO"):
        start("run", 11, {}, restart="model.ckpt-10.pt")
    assert (
        "the checkpoint has no average ema: it starts from the loaded weights"
        in caplog.text
    )
    live, average = load("model.ckpt-11.pt")["model"], load("model_ema.ckpt-11.pt")
    assert average["average"]["updates"] == 1
    assert average["average"]["mean_age"] == pytest.approx(0.1)
    assert not torch.equal(flat(loaded), flat(live))
    for name, tensor in average["model"].items():  # the first update of a warm-up
        assert torch.allclose(
            tensor, 0.1 * loaded[name] + 0.9 * live[name], rtol=1e-12, atol=1e-15
        ), name


def test_averaging_switched_off_at_a_restart_leaves_the_raw_weights(
    whole, start, caplog
):
    with pytest.raises(Interrupted):
        start("parts", callback=StopAfter(10))
    with caplog.at_level("INFO"):
        parts = start("parts", 20, WITHOUT_AVERAGES, restart="model.ckpt.pt")
    assert "averaging is off in this run" in caplog.text
    assert "the averages of the checkpoint (ema) are left behind" in caplog.text
    one, two = load(whole / "model.ckpt-20.pt"), load(parts / "model.ckpt-20.pt")
    for key in ("model", "optimizer", "streams"):
        assert_same(one[key], two[key], key)
    assert "averages" not in two


def test_a_non_finite_loss_stops_the_run_with_step_and_frames_and_no_bad_checkpoint(
    start,
):
    wild = {
        "learning_rate__start_lr": 1e200,
        "learning_rate__stop_lr": 1e199,
        "training__save_freq": 1,
    }
    with pytest.raises(DivergedError, match=r"step \d+: .*water_like.* frame \d+"):
        start("run", 60, {**wild, "training__max_ckpt_keep": 0})
    for file in Path().glob("model.ckpt-*"):
        assert all(torch.isfinite(t).all() for t in load(file)["model"].values()), file


def test_a_long_window_is_warned_of_and_commands_at_the_end_can_be_given_to_a_shell(
    start, caplog
):
    folder = start("run", 2)
    values = json.loads((folder / "input.json").read_text())
    values["training"]["ema_decay"] = 0.9999
    Path("my input.json").write_text(json.dumps(values))
    with caplog.at_level("INFO"):
        run_training("my input.json", device="cpu")
    assert "more than a fifth of the run of 2" in caplog.text
    assert "--valid-data 'my input.json' --plot" in caplog.text


def rows_after(folder, number=0):
    """Wait until a run has written so many rows more; return how many there are."""
    table, end = folder / "lcurve.out", time.monotonic() + 60
    while not table.exists() or len(table.read_text().splitlines()) <= number + 3:
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return len(table.read_text().splitlines())


@pytest.mark.parametrize(
    ("inherited", "sent"),
    [
        (signal.SIG_IGN, signal.SIGTERM),
        (signal.default_int_handler, signal.SIGHUP),
        (signal.SIG_DFL, signal.SIGUSR1),
        (signal.SIG_DFL, signal.SIGUSR2),
        (signal.SIG_DFL, signal.SIGXCPU),
        (signal.SIG_DFL, signal.SIGINT),
    ],
)
def test_a_signal_saves_the_current_step_and_says_how_to_continue(
    tmp_path, water_like, inherited, sent
):
    """A run under nohup inherits that SIGHUP is ignored, and outlives its terminal."""
    config = tiny_input([water_like], num_steps=100000, training__save_freq=100000)
    (tmp_path / "input.json").write_text(json.dumps(config))
    words = [
        sys.executable,
        "-m",
        "deepmd_ema",
        "train",
        "input.json",
        "--device",
        "cpu",
    ]
    before = signal.signal(signal.SIGHUP, inherited)
    try:
        process = subprocess.Popen(
            words,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        number = rows_after(tmp_path)
        if inherited is signal.SIG_IGN:
            process.send_signal(signal.SIGHUP)
            rows_after(tmp_path, number)
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()  # a run that does not react continues for a long time
    assert process.returncode == 128 + sent
    assert "dp-ema train --restart model.ckpt.pt\n" in said
    assert "Traceback" not in said
    assert load(tmp_path / "model.ckpt.pt")["step"] > 1


def test_a_signal_that_a_script_ignores_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with launch.handling(launch.END_SIGNALS, print):
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGUSR2) is print
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("refused", [["symlink"], ["symlink", "link"]])
def test_a_run_without_symbolic_links_restarts_and_freezes(
    tmp_path, water_like, monkeypatch, caplog, refused
):
    def refuse(source, *_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

    for name in refused:
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.chdir(tmp_path)
    values = tiny_input(
        [water_like], [water_like], num_steps=4, training__save_freq=2, **validated(2)
    )
    Path("input.json").write_text(json.dumps(values))
    assert cli.main(["train", "input.json", "--device", "cpu"]) == 0
    assert load(tmp_path / "model.ckpt.pt")["step"] == 4
    Path("checkpoint").write_text("model.ckpt-2.pt")
    caplog.clear()
    assert cli.main(["train", "--restart", ".", "--device", "cpu"]) == 0
    assert "earlier run" not in caplog.text
    assert load(tmp_path / "model_ema.ckpt.pt")["step"] == 4
    assert not list(tmp_path.glob("earlier-*"))
    assert cli.main(["freeze", "-c", "best_ema.ckpt.pt", "-o", "a.dp"]) == 0


OUTSIDE = {
    "training__save_ckpt": "../other/model.ckpt",
    "training__disp_file": "../lcurve.out",
    "training__save_dir": "../more",
    "training__stat_file": "/tmp/dp-ema-stat",
    "training__compile_options": {"cache_dir": "../cache"},
    "validating__full_val_file": "/tmp/val.log",
    "validating__save_best_dir": "a/../../best",
    "training__tensorboard_log_dir": "../board",
    "training__loggers": [{"type": "tensorboard", "log_dir": "../board"}],
}


@pytest.mark.parametrize("option", [*OUTSIDE])
def test_a_checkpoint_alone_does_not_choose_places_outside_of_the_folder(
    tmp_path, water_like, monkeypatch, capsys, option
):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    values = tiny_input([water_like], num_steps=2)
    Path("input.json").write_text(json.dumps(values))
    assert cli.main(["train", "input.json", "--device", "cpu"]) == 0
    payload = checkpoint.load("model.ckpt-2.pt")
    payload["config"] = to_dict(
        config_from_dict(changed(values, {option: OUTSIDE[option]}))
    )
    checkpoint.save("model.ckpt-2.pt", payload)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert cli.main(["train", "--restart", "model.ckpt-2.pt", "--device", "cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "model.ckpt-2.pt: its config writes outside of this folder: " in said
    assert option.replace("__", ".").partition("[")[0] in said
    assert "`dp-ema train --restart model.ckpt-2.pt input.json`" in said
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_run_that_writes_elsewhere_names_its_input_in_the_command_that_continues_it(
    tmp_path, water_like, monkeypatch, capsys
):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    values = tiny_input(
        [water_like],
        num_steps=6,
        training__save_ckpt=str(tmp_path / "far" / "model.ckpt"),
    )
    Path("input.json").write_text(json.dumps(values))
    with pytest.raises(
        Interrupted, match=r"dp-ema train --restart \S+far/model.ckpt.pt input.json$"
    ):
        run_training("input.json", device="cpu", callback=StopAfter(3))
    link = str(tmp_path / "far" / "model.ckpt.pt")
    assert cli.main(["train", "--restart", link, "input.json", "--device", "cpu"]) == 0
    values["training"]["save_ckpt"] = str(
        tmp_path / "run" / "sub" / "model.ckpt"
    )  # absolute, inside
    Path("input.json").write_text(json.dumps(values))
    assert cli.main(["train", "input.json", "--device", "cpu"]) == 0
    assert cli.main(["train", "--restart", "sub/model.ckpt.pt", "--device", "cpu"]) == 0


def test_data_under_another_path_are_no_change(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_system("scratch/train", frames=8, natoms=6, seed=1)
    write_system("scratch/valid", frames=4, natoms=6, seed=2)
    for place in ("scratch", "archive"):
        values = tiny_input(
            [f"{place}/train"], [f"{place}/valid"], num_steps=4, training__save_freq=2
        )
        Path(f"{place}.json").write_text(json.dumps(values))
    assert cli.main(["train", "scratch.json", "--device", "cpu"]) == 0
    expected = load(tmp_path / "model.ckpt-4.pt")
    Path("scratch").rename("archive")
    capsys.readouterr()
    restart = ["train", "--restart", "model.ckpt-2.pt", "--device", "cpu"]
    assert cli.main(restart) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "give an input with their new paths: `dp-ema train --restart model.ckpt-2.pt input.json`."
        in said
    )
    assert cli.main([*restart, "archive.json"]) == 0
    line = (
        "systems: [scratch/train] in the checkpoint, [archive/train] in the input: the same files "
        "under other paths"
    )
    said = " ".join(capsys.readouterr().err.replace('"', "").split())
    assert line in said, said
    found = load(tmp_path / "model.ckpt-4.pt")
    for key in ("model", "optimizer", "streams"):
        assert_same(found[key], expected[key])
    forces = np.load("archive/train/set.000/force.npy")
    forces[3, 0] += 1
    np.save("archive/train/set.000/force.npy", forces)
    assert cli.main([*restart, "archive.json"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "Their content is another, too. A restart continues the same run. Put this back, or say"
        in said
    )
    assert cli.main([*restart, "archive.json", "--allow-config-change"]) == 0


def test_data_that_have_changed_under_their_path_are_reported_at_a_restart(
    tmp_path, monkeypatch, capsys
):
    """The run was reported as continued, and had other frames."""
    monkeypatch.chdir(tmp_path)
    write_system("train", frames=8, natoms=6, seed=1)
    Path("input.json").write_text(
        json.dumps(tiny_input(["train"], num_steps=4, training__save_freq=2))
    )
    assert cli.main(["train", "input.json", "--device", "cpu"]) == 0
    restart = ["train", "--restart", "model.ckpt-2.pt", "--device", "cpu"]
    assert cli.main(restart) == 0
    text = (
        "the training data have changed since model.ckpt-2.pt was written: the restart continues "
        "with other frames"
    )
    assert text not in capsys.readouterr().err
    energy = np.load("train/set.000/energy.npy")
    np.save("train/set.000/energy.npy", energy + 1)
    assert cli.main(restart) == 0
    assert text in capsys.readouterr().err


class StopIn(StopAfter):
    """Requests it before the validation of that step."""

    after_update = StopAfter.after_step


def validated_steps(file):
    return [
        int(row.split()[0])
        for row in file.read_text().splitlines()
        if not row.startswith("#")
    ]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"validating__validation_freq": 5000}, [10]),
        ({"validating__validation_freq": 5}, [5, 10]),
        ({"validating__full_val_start": 7}, [7, 10]),
    ],
)
def test_the_last_step_is_validated_once_whatever_the_pace(
    start, options, steps, caplog
):
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
    assert_same(
        torch.load(whole / "model.ckpt.pt"), torch.load(parts / "model.ckpt.pt")
    )
    assert (whole / "val_ema.log").read_bytes() == (parts / "val_ema.log").read_bytes()


def test_a_run_that_is_extended_has_the_weights_of_one_without_a_break_and_one_more_row(
    start,
):
    constant = {
        "learning_rate__stop_lr": 1e-3
    }  # any other depends on the number of steps
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
    """Return a function that trains on one system with forces and one without, each a batch; and
    the systems.
    """
    data = [
        write_system(tmp_path / f"forces {force}", frames=4, seed=force, force=force)
        for force in (True, False)
    ]
    options = {
        f"training__{part}__batch_size": 4
        for part in ("training_data", "validation_data")
    }
    return trains_in(tmp_path, monkeypatch, (data, data), options), data


def test_a_batch_without_a_label_does_not_count_in_the_displayed_mean_of_its_error(
    start_without_forces,
):
    start, (with_forces, _) = start_without_forces
    every_step = {"training__disp_freq": 1}
    both = rows_of(
        start("both", 4, {**every_step, "training__validation_data__numb_btch": 2})
    )
    one = rows_of(
        start(
            "one",
            4,
            {**every_step, "training__validation_data__systems": [str(with_forces)]},
        )
    )
    assert np.isnan(both["rmse_f_trn"]).sum() == 2  # such a batch alone has none
    assert np.isfinite(both["rmse_f_val"]).all()
    assert both["rmse_f_val"] == pytest.approx(one["rmse_f_val"])


def test_an_average_over_steps_is_over_those_that_have_the_label_and_continues_at_a_restart(
    start_without_forces,
):
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
