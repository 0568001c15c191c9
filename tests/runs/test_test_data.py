"""Test data in an input: evaluated once, after the last step, with all weights, and without effect
on the run.
"""

import json
import os
import shutil
import signal

import numpy as np
import pytest
from helpers import assert_same, tiny_input, trains_in, write_system
from parallel_cases import STAGES
from parallel_runs import train as train_ranks
from training_runs import load

from deepmd_ema import checkpoint, cli
from deepmd_ema.errors import Interrupted
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.training.trainer import Callback

VALIDATED = {
    "training__enable_ema": True,
    "training__ema_decay": 0.8,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__full_val_start": 0,
    "validating__validation_freq": 3,
    "validating__validation_metric": "S:RMSE",
    "learning_rate__start_lr": 0.02,
}
ROWS = ("live", "ema", "best live", "best ema")
FILES = ("model.ckpt.pt", "model_ema.ckpt.pt", "best.ckpt.pt", "best_ema.ckpt.pt")
SAME = 1e-9  # of errors of other batches


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("systems")
    sizes = (("train", 8, 12), ("valid", 4, 12), ("test", 5, 10))
    return {
        name: write_system(folder / name, frames, natoms, seed=natoms + frames)
        for name, frames, natoms in sizes
    }


@pytest.fixture
def start(tmp_path, monkeypatch, systems):
    return trains_in(
        tmp_path, monkeypatch, ([systems["train"]], [systems["valid"]]), VALIDATED
    )


def with_test(*paths):
    return {"validating__test_data": {"systems": [str(path) for path in paths]}}


def status_of(folder, capsys):
    capsys.readouterr()
    assert cli.main(["show", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["test"]


def assert_errors_are_those_of(folder, found, test, files=FILES):
    """Compare the rows of a run with an evaluation of its files."""
    for row, file in zip(ROWS, files, strict=True):
        errors = measure(folder / file, [test], device="cpu").total
        for metric in ("E:MAE", "E:RMSE", "F:RMSE", "V:MAE"):
            column = next(
                key for key in found[row] if key.startswith(metric.replace(":", "_"))
            )
            assert found[row][column] == pytest.approx(
                1000 * errors.metric(metric), rel=SAME
            ), (
                row,
                metric,
            )
        assert found[row]["step"] == checkpoint.load(folder / file)["step"]


def test_rows_are_the_errors_of_the_files_and_the_run_is_the_same(
    start, systems, capsys, caplog
):
    caplog.set_level("INFO", "deepmd_ema")
    left = {}

    class Look(Callback):
        def on_end(self, trainer):
            left.update(
                {
                    name: tensor.clone()
                    for name, tensor in trainer.validator.models.state_dict().items()
                }
            )

    # each with a bias of its own, and with the best of several files
    options = {
        "training__change_bias_after_training": True,
        "validating__max_best_ckpt": 3,
    }
    folder = start(
        "tested", 10, {**options, **with_test(systems["test"])}, callback=Look()
    )
    plain = start("plain", 10, options)
    assert_same(left, dict(load(folder / "model.ckpt-10.pt")["model"]))
    found = status_of(folder, capsys)
    assert tuple(found) == ROWS
    assert found["best live"]["step"] < 10, "a best file of an earlier step is loaded"
    assert_errors_are_those_of(folder, found, systems["test"])
    assert any(
        "test" in line and "best ema, step" in line for line in caplog.text.splitlines()
    )
    for name in ("model.ckpt-10.pt", "model_ema.ckpt-10.pt"):
        one, other = load(folder / name), load(plain / name)
        for key in {
            "refitted",
            "model",
            "averages",
            "optimizer",
            "streams",
        } & one.keys():
            assert_same(one[key], other[key])


def test_the_page_shows_the_rows_without_the_data(start, systems, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = start(
        "page", 4, with_test(shutil.copytree(systems["test"], tmp_path / "moved"))
    )
    shutil.rmtree(tmp_path / "moved")
    assert cli.main(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    page = (folder / "page.html").read_text()
    assert "<h3>Test data</h3>" in page
    assert "are missing" not in page
    assert all(f"<dt>{row}</dt><dd>step " in page for row in ROWS)
    assert cli.main(["show", str(folder)]) == 0
    assert capsys.readouterr().out.count("\n  test ") == len(ROWS)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_test_as_one_process_does(tmp_path, systems, capsys, stage):
    config = tiny_input(
        [systems["train"]],
        [systems["valid"]],
        num_steps=10,
        **VALIDATED,
        **with_test(systems["test"]),
        training__zero_stage=stage,
        training__checkpoint_format="sharded" if stage > 1 else "gathered",
        model__descriptor__interpolate="never",
    )
    train_ranks(tmp_path, 2, config)
    found = status_of(tmp_path, capsys)
    assert found["best live"]["step"] < 10
    files = FILES if stage < 2 else [file.replace(".pt", ".dcp") for file in FILES]
    assert_errors_are_those_of(tmp_path, found, systems["test"], files)


def test_a_stop_in_the_test_is_continued_by_a_restart(start, systems, capsys):
    class Stop(Callback):
        def during(self, trainer, phase):
            if trainer.step == 5 and phase == "checkpoint":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().during(trainer, phase)

    more = with_test(systems["test"])
    with pytest.raises(Interrupted, match="after step 5 of 5; everything is saved"):
        start("stopped", 5, more, callback=Stop())
    folder = start("whole", 5, more)
    whole, stopped = status_of(folder, capsys), folder.parent / "stopped"
    assert status_of(stopped, capsys) == {}
    start("stopped", 5, more, restart="model.ckpt.pt")
    assert status_of(stopped, capsys) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"systems": ["nowhere"]},
            "validating.test_data.systems[0]: nowhere: no such file or folder",
        ),
        ({"batch_size": 2}, "validating.test_data.systems: required, but missing"),
    ],
)
def test_wrong_test_data_are_reported_before_the_first_step(
    here, tmp_path, capsys, systems, change, message
):
    (tmp_path / "input.json").write_text(
        json.dumps(tiny_input([systems["train"]], validating__test_data=change))
    )
    for command in ("check", "train"):
        assert cli.main([command, "input.json"]) == 2
        said = capsys.readouterr()
        assert message in said.out + said.err
    assert not (tmp_path / "lcurve.out").exists()


def test_test_frames_that_are_training_frames_or_near_them_are_named(
    here, tmp_path, capsys, systems
):
    same, near = (
        shutil.copytree(systems["train"], tmp_path / name) for name in ("same", "near")
    )
    for file in near.rglob("coord.npy"):
        np.save(
            file, np.load(file) + 1e-5
        )  # another frame in single precision, and no other structure
    config = tiny_input([systems["train"]], [systems["valid"]], **with_test(same, near))
    (tmp_path / "input.json").write_text(json.dumps(config))
    assert cli.main(["check", "input.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Test data: 2 systems, 16 frames" in said
    assert "near copies 16 of 16 test frames are near a training frame" in said
    assert "leaks 8 of 16 test frames are also training frames (first: " in said
    assert "16 of 16 test frames are near copies of training frames (first: " in said
    assert (
        "test errors will look too good. Take test frames from other trajectories."
        in said
    )
    assert cli.main(["check", "input.json", "--json"]) == 0
    [data] = json.loads(capsys.readouterr().out)["data"]
    assert [
        system["suspicious_frames"]
        for system in data["systems"]
        if system["part"] == "test"
    ] == [8, 8]
    assert data["checks"]["in_training_and_test"]["frames"] == 8
    assert data["checks"]["test_near_training_frames"]["frames"] == 16
