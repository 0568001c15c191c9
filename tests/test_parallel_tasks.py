"""Restarts of several processes with other tasks than the checkpoint has, at every stage."""

import json
import shutil
from functools import cache

import pytest
from helpers import write_system
from parallel_runs import train
from test_parallel import assert_same_run
from test_train_sharing import input_of, with_steam

from deepmd_ema.training.run import run_training

pytestmark = pytest.mark.timeout(480)

MUON = {"type": "HybridMuon"}  # its scores do not begin with zero


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """Return a function that gives the folder of a run that was restarted with a task more or less."""
    base = tmp_path_factory.mktemp("tasks")
    for n in (1, 2):
        write_system(base / f"water{n}", frames=4, natoms=5, seed=n)
        write_system(base / f"ice{n}", frames=4, natoms=7, seed=10 + n)

    def made(name, config, stage=0, ranks=1, **how):
        folder, config = base / name, json.loads(json.dumps(config))
        folder.mkdir(exist_ok=True)
        config["training"]["zero_stage"] = stage
        for task in config["training"]["data_dict"].values():
            for section in task.values():
                section.update(systems=[f"../{system}" for system in section["systems"]], batch_size=2 // ranks)
        (folder / "input.json").write_text(json.dumps(config))
        if ranks > 1:
            train(folder, ranks, **how)
            return folder
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run_training("input.json", device="cpu", **how)
        return folder

    @cache
    def restart(change, optimizer="{}", stage=0, ranks=1):
        few = {**input_of("nothing", save_freq=2, numb_steps=6), "optimizer": json.loads(optimizer)}
        for model in few["model"]["model_dict"].values():  # room for a third case
            model["fitting_net"]["dim_case_embd"] = 3
        many = with_steam(few)
        many["training"]["model_prob"]["steam"] = 0.8
        before, after = (few, many) if change == "added" else (many, few)
        name = f"{change}-{json.loads(optimizer).get('type')}"
        origin = base / name
        if not origin.exists():
            made(name, {**before, "training": {**before["training"], "numb_steps": 4}})
        folder = base / f"{name}-{stage}-{ranks}"
        folder.mkdir()
        shutil.copy(origin / "model.ckpt-4.pt", folder)
        return made(folder.name, after, stage, ranks, restart="model.ckpt-4.pt", allow_config_change=True)

    return restart


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("change", ["added", "removed"])
def test_two_ranks_continue_with_a_task_more_or_less_as_one_process_does(restarted, change, stage):
    assert_same_run(restarted(change), restarted(change, stage=stage, ranks=2))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_new_task_begins_with_the_first_state_of_any_optimizer(restarted, stage):
    assert_same_run(restarted("added", json.dumps(MUON)), restarted("added", json.dumps(MUON), stage, 2))
