"""Two tasks with parts in common and every optimizer, on one process and sharded on two; the Kalman filter by task."""

from pathlib import Path

import pytest
import torch
from config_inputs import write
from helpers import assert_same
from parallel_runs import train as train_ranks
from test_parallel import assert_near
from test_train import load
from test_train_sharing import input_of, write_data

from deepmd_ema import cli
from deepmd_ema.optim.lkf import LKF

pytestmark = pytest.mark.timeout(480)

KINDS = {"Adam": {}, "AdamW": {"weight_decay": 0.01}, "AdaMuon": {}, "HybridMuon": {"enable_gram": False},
         "LKF": {"kf_blocksize": 64, "kf_start_pref_f": 2.0}}  # fmt: skip
STEPS, HALF = 8, 4
FILES = (f"model.ckpt-{STEPS}.pt", f"model_ema.ckpt-{STEPS}.pt")


def config_of(way, kind, **training):
    """Return the input of two tasks for one optimizer."""
    values = input_of(way, **training)
    if kind == "LKF":
        del values["loss_dict"]  # it fits no virials
    return {**values, "optimizer": {"type": kind, **KINDS[kind]}}


@pytest.mark.parametrize(
    ("way", "kind", "stage"),
    [("all", "Adam", 3), ("the type embedding", "Adam", 3), ("all", "AdaMuon", 1), ("all", "HybridMuon", 2)],
)
def test_two_ranks_train_what_tasks_share_as_one_process_does(tmp_path, way, kind, stage):
    """With all in common stages 2 and 3 had failed."""
    for ranks, zero_stage in ((1, 0), (2, stage)):
        values = config_of(way, kind, zero_stage=zero_stage)
        for task in values["training"]["data_dict"].values():
            task["training_data"]["batch_size"] = 2 // ranks
        write_data(tmp_path / str(ranks))
        train_ranks(tmp_path / str(ranks), ranks, values)
    for name in FILES:  # moments of Adam beside Muon are in float32
        assert_near(load(tmp_path / "1" / name), load(tmp_path / "2" / name), tolerance=1e-6)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)


def trained(values, *options):
    """Train and return the last checkpoint."""
    write(Path(), values)
    assert cli.main(["train", "input.json", *options]) == 0
    return load("model.ckpt.pt")


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_with_shared_parts_is_the_same_run_to_the_last_bit(kind):
    values = config_of("the fitting network", kind)
    whole, first = trained(values), load(f"model.ckpt-{HALF}.pt")["model"]
    again = trained(values, "--restart", f"model.ckpt-{HALF}.pt")
    for part in ("model", "optimizer", "averages"):
        assert_same(whole[part], again[part])
    for name in first:
        assert not (name.endswith("weight") and torch.equal(first[name], whole["model"][name])), name


def test_weights_of_other_tasks_share_no_block_and_stay_as_they_are():
    tasks = {"shared": ["a", "b"], "own": ["a"], "other": ["b"]}
    parameters = {name: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in tasks}
    alone = {name: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in ("shared", "own")}
    both, one = LKF(parameters.items(), 100, tasks), LKF(alone.items(), 3)
    assert [len(c) for c in both.state_dict()["covariances"]] == [3, 3, 3]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradients = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
        error = torch.tensor(0.3, dtype=torch.float64)
        both.update(gradients, error, torch.ones(()), "a")
        one.update(gradients, error, torch.ones(()))
    assert_same({name: parameters[name].detach() for name in alone}, {n: p.detach() for n, p in alone.items()})
    assert torch.equal(parameters["other"], torch.ones(3, dtype=torch.float64))
    *_, untouched = both.state_dict()["covariances"]
    assert torch.equal(untouched, torch.eye(3, dtype=torch.float64))


@pytest.mark.usefixtures("desk")
def test_covariances_do_not_continue_with_other_tasks(capsys):
    values = config_of("all", "LKF", numb_steps=2, save_freq=2)
    trained(values)
    for section in (values["model"]["model_dict"], values["training"]["data_dict"], values["training"]["model_prob"]):
        del section["ice"]
    write(Path(), values)
    assert cli.main(["train", "input.json", "--restart", "model.ckpt-2.pt", "--allow-config-change"]) == 2
    assert 'optimizer.type = "LKF": its covariances are of blocks' in capsys.readouterr().err
