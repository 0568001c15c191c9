"""A run of two tasks that share nothing."""

import copy
import os
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, write_system
from parallel_runs import run_ranks
from test_parallel import assert_same_run
from test_train import StopAfter, load

from deepmd_ema.averaging import AverageBank, EmaProfile
from deepmd_ema.config import config_from_dict
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.distributed.world import World, open_world
from deepmd_ema.errors import CheckpointError, DataError, Interrupted
from deepmd_ema.model.build import build_model
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.training.prepare import prepare
from deepmd_ema.training.restart import check_resumable
from deepmd_ema.training.trainer import Callback, Trainer
from deepmd_ema.training.weights import Start, load_restart, load_weights

pytestmark = pytest.mark.timeout(480)

STEPS = 12
DATA = ("training_data", "validation_data")
COMMON = {
    "training__enable_ema": True,
    "training__ema_decay": 0.8,
    "training__save_freq": 5,
    "training__disp_freq": 1,
    "training__averaging": [{"name": "slow", "decay": 0.9, "lcurve": True, "full_validation": True}],
    "training__change_bias_after_training": True,
    "validating__full_validation": True,
    "validating__validation_freq": 4,
    "validating__full_val_start": 0,
}
OF_TASK = {
    "water": {"num_steps": STEPS},
    "salt": {
        "type_map": ("Na", "Cl", "O"),
        "model__descriptor__neuron": [4, 6],
        "model__fitting_net__neuron": [6],
        "loss__start_pref_v": 0,
        "loss__limit_pref_v": 0,
        "training__training_data__batch_size": 1,
        "num_steps": STEPS,
    },
}


def write_data(folder):
    """Write two systems of each task, the second to validate on."""
    for k in (1, 2):
        write_system(folder / f"water{k}", frames=6, natoms=6, seed=k)
        write_system(folder / f"salt{k}", frames=5, natoms=9, elements=("Na", "Cl", "O"), seed=k + 5)
    return folder


def input_of_two_tasks(data, **changes):
    """Return the input of two tasks: two elements and virials, and three elements without."""
    inputs = {
        name: tiny_input([data / f"{name}1"], [data / f"{name}2"], **COMMON, **{**of_task, **changes})
        for name, of_task in OF_TASK.items()
    }
    return joined(inputs)


def two_tasks(data, **changes):
    """Return the config of :func:`input_of_two_tasks`."""
    return config_from_dict(input_of_two_tasks(data, **changes))


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


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Results of checks of the data are written into the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path):
    return two_tasks(write_data(tmp_path / "data"))


@pytest.fixture
def train(tmp_path, monkeypatch, config):
    """Return a function that trains in a folder of its own and returns it: train(name, restart=..., callback=...)."""

    def run(name, restart=None, callback=None, run_config=config):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        start, world = load_restart(restart) if restart else Start(), World()
        adopted = start.adopt_from_checkpoint(run_config)
        if restart:
            check_resumable(start, adopted, allow_change=False)
        Trainer(prepare(adopted, start, world), start, world, callback=callback).run()
        return folder

    return run


def test_two_tasks_train_and_are_validated_and_saved_each(train):
    folder = train("run")
    files = {p.name for p in folder.iterdir()}
    assert {
        "model.ckpt.pt", "model_ema.ckpt.pt", "model_slow.ckpt.pt", "lcurve.out", "lcurve_slow.out",
        "val_water.log", "val_salt.log", "val_water_slow.log", "val_salt_slow.log",
    } <= files  # fmt: skip
    for best in ("best_water", "best_salt", "best_water_slow", "best_salt_slow"):
        assert any(name.startswith(f"{best}.ckpt-") for name in files), best
    first, last = load(folder / "model.ckpt-5.pt")["model"], load(folder / "model.ckpt-12.pt")["model"]
    assert {name.partition(".")[0] for name in last} == {"water", "salt"}
    for task in ("water", "salt"):
        weights = [n for n in last if n.startswith(task) and n.endswith("weight")]
        assert any(not torch.equal(first[n], last[n]) for n in weights), task
    rows = np.genfromtxt(folder / "lcurve.out", names=True)
    assert {"rmse_v_val_water", "rmse_e_trn_salt", "rmse_f_val_salt"} <= set(rows.dtype.names)
    assert "rmse_v_val_salt" not in rows.dtype.names
    assert np.isfinite(rows["rmse_f_val_water"]).all()
    assert np.isfinite(rows["rmse_f_val_salt"]).all()
    logs = [(folder / f"val_{task}.log").read_text() for task in ("water", "salt")]
    assert logs[0] != logs[1]


def test_a_restart_of_two_tasks_is_bitwise_the_unbroken_run(train):
    whole = train("whole")
    for at in (3, 8):
        with pytest.raises(Interrupted, match=f"after step {at} of {STEPS}"):
            train(f"parts{at}", callback=StopAfter(at))
        parts = train(f"parts{at}", restart="model.ckpt.pt")
        for name in ("model", "model_ema", "model_slow"):
            assert_same(load(whole / f"{name}.ckpt-{STEPS}.pt"), load(parts / f"{name}.ckpt-{STEPS}.pt"), name)
        for file in whole.glob("*.out"):
            assert file.read_bytes() == (parts / file.name).read_bytes(), file.name
        for file in whole.glob("val*.log"):
            assert file.read_bytes() == (parts / file.name).read_bytes(), file.name
        assert {f.name for f in whole.glob("best*")} == {f.name for f in parts.glob("best*")}


def test_a_restart_names_the_task_whose_data_have_changed(train, tmp_path, caplog):
    train("run")
    shutil.rmtree(tmp_path / "data" / "salt1")
    write_system(tmp_path / "data" / "salt1", frames=7, natoms=9, elements=("Na", "Cl", "O"), seed=6)
    train("run", restart="model.ckpt.pt")
    assert "the training data of task salt have 7 frames now and had 5" in caplog.text
    assert "of task water" not in caplog.text


def train_tasks_here(folder, data, stage, batch):
    """Train two tasks in ``folder`` as one rank of those that were launched together."""
    os.chdir(folder)
    sizes = {f"training__{section}__batch_size": batch for section in ("training_data", "validation_data")}
    config, start = two_tasks(data, training__zero_stage=stage, **sizes), Start()
    with open_world("cpu", find_launch()) as world:
        train_and_forget(config, start, world)


def train_and_forget(config, start, world):
    """Train; nothing of it may be left when the process group is destroyed."""
    Trainer(prepare(config, start, world), start, world).run()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_two_tasks_as_one_process_does(tmp_path, stage):
    data = write_data(tmp_path / "data")
    for name, ranks, zero_stage in (("alone", 1, 0), ("shared", 2, stage)):
        (tmp_path / name).mkdir()
        run_ranks(ranks, train_tasks_here, tmp_path / name, data, zero_stage, 2 // ranks)
    assert_same_run(tmp_path / "alone", tmp_path / "shared")


def test_a_step_of_one_task_leaves_the_model_of_the_other_as_it_is(train):
    seen = []

    class Look(Callback):
        def on_start(self, trainer):
            seen.append((None, self.weights(trainer)))

        def after_update(self, trainer):
            seen.append((trainer.tasks.draw(trainer.step).name, self.weights(trainer)))

        def weights(self, trainer):
            (task, *_) = trainer.tasks
            return {name: p.detach().clone() for name, p in task.models.named_parameters()}

    train("run", callback=Look())
    assert {task for task, _ in seen[1:]} == {"water", "salt"}
    for (_, before), (task, after) in pairwise(seen):
        changed = {name.partition(".")[0] for name in after if not torch.equal(before[name], after[name])}
        assert changed == {task}


def test_the_bias_of_each_task_is_fitted_with_its_frames(train):
    folder = train("run")
    fitted = load(folder / "model.ckpt-12.pt")["refitted"]
    assert fitted.keys() == {"live", "ema", "slow"}
    assert {name: tuple(bias.shape) for name, bias in fitted["ema"].items()} == {
        "water.out_bias": (1, 2, 1),
        "salt.out_bias": (1, 3, 1),
    }
    assert torch.equal(load(folder / "model_ema.ckpt-12.pt")["model"]["salt.out_bias"], fitted["ema"]["salt.out_bias"])


def test_a_run_of_two_tasks_starts_from_weights_and_refuses_other_elements(train, config, tmp_path):
    folder = train("run")
    path = folder / "model_ema.ckpt-12.pt"
    start = load_weights(str(path))
    assert start.min_nbor_dist("salt", None) != start.min_nbor_dist("water", None)
    config = replace(config, training=replace(config.training, seed=3))
    models = prepare(config, start, World()).models
    assert_same(dict(models.state_dict()), load(path)["model"])
    other = replace(config.tasks["salt"].model, type_map=["Na", "Cl", "K"])
    said = r"a model of type_map \['Na', 'Cl', 'O'\], but model.model_dict.salt.type_map is"
    with pytest.raises(CheckpointError, match=said):
        start.adopt_from_checkpoint(config.with_models({"salt": other}))


def test_tasks_share_one_limit_for_the_memory_of_neighbors(config):
    """Each task had a cache of its own, so that a run of N tasks kept N times the limit."""
    water, salt = prepare(config, Start(), World()).tasks.values()
    assert water.cache is salt.cache
    assert len(water.cache) > 0, "statistics have filled it"


def test_problems_of_the_data_of_all_tasks_are_reported_at_once(config):
    broken = {}
    for name, each in config.training.data_dict.items():
        broken[name] = replace(each, training_data=replace(each.training_data, systems=[f"no_{name}"]))
    with pytest.raises(DataError) as caught:
        prepare(replace(config, training=replace(config.training, data_dict=broken)), Start(), World())
    assert "no_water" in str(caught.value)
    assert "no_salt" in str(caught.value)


# ---- the models of a run


@pytest.fixture
def models(config):
    return {name: build_model(task.model, 1) for name, task in config.tasks.items()}


def test_a_single_task_without_a_name_keeps_the_names_of_its_model(models):
    model = models["water"]
    alone = ModelSet({"": model})
    assert list(alone.state_dict()) == list(model.state_dict())
    assert [n for n, _ in alone.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in alone.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert list(alone.parameters()) == list(model.parameters())


def test_names_of_several_tasks_begin_with_the_task_and_load_again(models):
    both = ModelSet(models)
    state = {name: tensor.clone() for name, tensor in both.state_dict().items()}
    assert len(state) == sum(len(m.state_dict()) for m in models.values())
    assert all(name.startswith(("water.", "salt.")) for name in state)
    with torch.no_grad():
        for p in both.parameters():
            p.zero_()
    both.load_state_dict(state)
    assert_same(dict(both.state_dict()), state)


def test_a_tensor_that_tasks_share_is_counted_once(config):
    first, second = (build_model(config.tasks["water"].model, seed) for seed in (1, 2))
    second.descriptor = first.descriptor
    both = ModelSet({"a": first, "b": second})
    names = [name for name, _ in both.named_parameters()]
    shared = sum(1 for _ in first.descriptor.parameters())
    assert len(names) == len(list(first.parameters())) + len(list(second.parameters())) - shared
    assert not any(name.startswith("b.descriptor") for name in names)
    assert "b." + next(n for n, _ in second.named_parameters()) in both.state_dict()
    apart = {task: build_model(config.tasks["water"].model, 1) for task in ("a", "b")}
    sizes = [AverageBank(each, [EmaProfile("ema", 0.5)])["ema"].num_bytes for each in (both.by_task, apart)]
    assert sizes[0] < sizes[1]
