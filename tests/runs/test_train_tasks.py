"""A run of two tasks that share nothing."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from parallel_cases import assert_same_run
from parallel_runs import train as train_ranks
from training_runs import load
from two_tasks import DATA, input_of_two_tasks, write_data

from deepmd_ema.errors import DataError
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

pytestmark = pytest.mark.timeout(480)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains in a folder of its own and returns it: train(name, **how)."""
    values = input_of_two_tasks(write_data(tmp_path / "data"))

    def run(name, **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        (folder / "input.json").write_text(json.dumps(values))
        run_training("input.json", device="cpu", **how)
        return folder

    return run


def test_two_tasks_train_and_are_validated_and_saved_each(train):
    folder = train("run")
    files = {p.name for p in folder.iterdir()}
    assert {
        "model.ckpt.pt",
        "model_ema.ckpt.pt",
        "model_slow.ckpt.pt",
        "lcurve.out",
        "lcurve_slow.out",
        "val_water.log",
        "val_salt.log",
        "val_water_slow.log",
        "val_salt_slow.log",
    } <= files
    for best in ("best_water", "best_salt", "best_water_slow", "best_salt_slow"):
        assert any(name.startswith(f"{best}.ckpt-") for name in files), best
    last = load(folder / "model.ckpt-12.pt")["model"]
    assert {name.partition(".")[0] for name in last} == {"water", "salt"}
    rows = np.genfromtxt(folder / "lcurve.out", names=True)
    assert {"rmse_v_val_water", "rmse_e_trn_salt", "rmse_f_val_salt"} <= set(
        rows.dtype.names
    )
    assert "rmse_v_val_salt" not in rows.dtype.names
    assert all(
        np.isfinite(rows[f"rmse_f_val_{task}"]).all() for task in ("water", "salt")
    )
    assert (folder / "val_water.log").read_text() != (
        folder / "val_salt.log"
    ).read_text()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_two_tasks_as_one_process_does(tmp_path, stage):
    data = write_data(tmp_path / "data")
    for name, ranks, zero_stage in (("alone", 1, 0), ("shared", 2, stage)):
        sizes = {f"training__{section}__batch_size": 2 // ranks for section in DATA}
        train_ranks(
            tmp_path / name,
            ranks,
            input_of_two_tasks(data, training__zero_stage=zero_stage, **sizes),
        )
    assert_same_run(tmp_path / "alone", tmp_path / "shared")


def test_a_step_of_one_task_leaves_the_model_of_the_other_as_it_is(train):
    seen = []

    class Look(Callback):
        def on_start(self, trainer, task=None):
            models = next(iter(trainer.tasks)).models
            seen.append(
                (
                    task,
                    {name: p.detach().clone() for name, p in models.named_parameters()},
                )
            )

        def after_update(self, trainer):
            self.on_start(trainer, trainer.tasks.draw(trainer.step).name)

    train("run", callback=Look())
    assert {task for task, _ in seen[1:]} == {"water", "salt"}
    for (_, before), (task, after) in pairwise(seen):
        assert {
            name.partition(".")[0]
            for name in after
            if not torch.equal(before[name], after[name])
        } == {task}


def test_problems_of_the_data_of_all_tasks_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"(?s)water1.*salt1"):
        run_training(input_of_two_tasks(tmp_path / "no"), device="cpu")
