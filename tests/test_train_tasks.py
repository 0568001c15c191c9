"""A run of two tasks that share nothing."""

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import tiny_input, validated, write_system
from parallel_runs import train as train_ranks
from test_parallel import assert_same_run
from test_train import load

from deepmd_ema.errors import DataError
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

pytestmark = pytest.mark.timeout(480)

STEPS = 12
DATA = ("training_data", "validation_data")
COMMON = validated(
    4,
    training__ema_decay=0.8,
    training__save_freq=5,
    training__disp_freq=1,
    training__change_bias_after_training=True,
    training__averaging=[{"name": "slow", "decay": 0.9, "lcurve": True, "full_validation": True}],
    num_steps=STEPS,
    validating__ema_full_validation=False,
)
OF_TASK = {
    "water": {},
    "salt": {
        "type_map": ("Na", "Cl", "O"),
        "model__descriptor__neuron": [4, 6],
        "model__fitting_net__neuron": [6],
        "loss__start_pref_v": 0,
        "loss__limit_pref_v": 0,
        "training__training_data__batch_size": 1,
    },
}


def write_data(folder):
    """Write two systems of each task, the second to validate on."""
    for k in (1, 2):
        write_system(folder / f"water{k}", frames=6, natoms=6, seed=k)
        write_system(
            folder / f"salt{k}", frames=5, natoms=9, elements=("Na", "Cl", "O"), seed=k + 5
        )
    return folder


def input_of_two_tasks(data, **changes):
    """Return the input of two tasks: two elements and virials, and three elements without."""
    inputs = {
        name: tiny_input(
            [data / f"{name}1"], [data / f"{name}2"], **{**COMMON, **of_task, **changes}
        )
        for name, of_task in OF_TASK.items()
    }
    return joined(inputs)


def joined(inputs):
    """Return one input of several tasks from inputs of one by name; all else is as in the first."""
    whole = copy.deepcopy(next(iter(inputs.values())))
    data = {name: {key: each["training"][key] for key in DATA} for name, each in inputs.items()}
    rest = {key: value for key, value in whole["training"].items() if key not in DATA}
    del whole["loss"]
    return {
        **whole,
        "model": {"model_dict": {name: each["model"] for name, each in inputs.items()}},
        "loss_dict": {name: each["loss"] for name, each in inputs.items()},
        "training": {**rest, "data_dict": data, "model_prob": dict.fromkeys(inputs, 1.0)},
    }


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
    assert {"rmse_v_val_water", "rmse_e_trn_salt", "rmse_f_val_salt"} <= set(rows.dtype.names)
    assert "rmse_v_val_salt" not in rows.dtype.names
    assert all(np.isfinite(rows[f"rmse_f_val_{task}"]).all() for task in ("water", "salt"))
    assert (folder / "val_water.log").read_text() != (folder / "val_salt.log").read_text()


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
            seen.append((task, {name: p.detach().clone() for name, p in models.named_parameters()}))

        def after_update(self, trainer):
            self.on_start(trainer, trainer.tasks.draw(trainer.step).name)

    train("run", callback=Look())
    assert {task for task, _ in seen[1:]} == {"water", "salt"}
    for (_, before), (task, after) in pairwise(seen):
        assert {
            name.partition(".")[0] for name in after if not torch.equal(before[name], after[name])
        } == {task}


def test_problems_of_the_data_of_all_tasks_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"(?s)water1.*salt1"):
        run_training(input_of_two_tasks(tmp_path / "no"), device="cpu")
