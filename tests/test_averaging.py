"""Averages of the weights used alone, by another trainer: the documented interface, processes, imports, mistakes."""

import ast
import json
import multiprocessing
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from averaging_nets import PLAIN, POWER, SWA, WARM, Net, assert_same, continue_elsewhere, copies, make_net, move, train
from torch import nn

import deepmd_ema.averaging
from deepmd_ema.averaging import AverageBank, EmaProfile, SwaProfile
from deepmd_ema.errors import CheckpointError, ConfigError

# what nobody should have to import for an average of weights
HEAVY = {"h5py", "vesin", "dargs", "tqdm", "ase", "matplotlib"}
PACKAGES = {"averaging", "config", "distributed", "errors", "utils"}


@pytest.fixture
def net():
    return make_net()


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = deepmd_ema.averaging.__doc__.partition("::\n")[2].partition("\nA bank can be pickled")[0]
    names = {}
    exec(compile(ast.parse(textwrap.dedent(text)), "example", "exec"), names)
    bank, published = names["bank"], names["published"]
    assert bank.names == ("ema", "slow", "p1", "flat")
    assert bank.info("ema")["updates"] == 100
    assert bank.info("slow")["updates"] == 10
    assert_same(copies(published), {name: tensor.float() for name, tensor in bank.weights("p1").items()})


def test_copy_to_publishes_an_average_into_another_module(net):
    bank = AverageBank(net, [PLAIN])
    train(net, bank, range(1))
    net.mean.fill_(9.0)
    other = Net(dtype=torch.float32)
    bank.copy_to("ema", other)
    assert_same(copies(other), {n: t.to(other.state_dict()[n].dtype) for n, t in bank.weights("ema").items()})
    with pytest.raises(CheckpointError, match=r"first.weight is \(5, 3\) there, \(6, 3\) here"):
        bank.copy_to("ema", Net(width=6))


def test_copy_to_publishes_one_task_of_several():
    water, ice = make_net(), Net(width=2)
    bank = AverageBank({"water": water, "ice": ice}, [PLAIN])
    move(water, 0)
    move(ice, 1)
    bank.update()
    other = Net(width=2)
    bank.copy_to("ema", other, task="ice")
    assert torch.equal(other.first.weight, bank.weights("ema")["ice.first.weight"])
    with pytest.raises(CheckpointError, match=r"first.weight is \(5, 3\) there, \(2, 3\) here"):
        bank.copy_to("ema", other, task="water")


def test_the_facts_of_an_average_are_plain_values(net):
    profiles = [WARM, EmaProfile("slow", 0.99, start_step=50), SwaProfile("flat", update_every=2)]
    bank = AverageBank(net, profiles)
    train(net, bank, range(21))
    info = bank.info("ema")
    assert info["type"] == "ema"
    assert info["decay"] == 0.99
    assert info["updates"] == 21
    assert info["effective_decay"] == pytest.approx(21 / 30)
    assert 0 < info["mean_age"] < 21
    assert bank.info("slow")["updates"] == 0
    assert bank.info("slow")["mean_age"] == 0
    assert bank.info("flat")["mean_age"] == pytest.approx(21 - 11)
    assert bank.info("flat")["effective_decay"] == pytest.approx(9 / 10)
    for name in bank.names:
        assert json.loads(json.dumps(bank.info(name))) == bank.info(name)


@pytest.mark.parametrize("profile", [WARM, POWER, SWA], ids=lambda p: p.name)
def test_a_bank_can_be_pickled_and_continues(net, profile):
    bank = AverageBank(net, [profile])
    train(net, bank, range(3))
    copy = pickle.loads(pickle.dumps(bank))
    assert_same(copy.weights("ema"), bank.weights("ema"))
    assert copy.info("ema") == bank.info("ema")
    copy.update()
    assert copy.info("ema")["updates"] == 4
    assert bank.info("ema")["updates"] == 3


def test_a_spawned_process_continues_with_a_bank():
    net = make_net()
    bank = AverageBank(net, [WARM, POWER_TOO])
    train(net, bank, range(4))
    module, reference = pickle.loads(pickle.dumps((net, bank)))
    train(module, reference, range(4, 7))
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=continue_elsewhere, args=(net, bank, range(4, 7), there))
    process.start()
    there.close()
    state, live, info = pickle.loads(here.recv_bytes())
    here.close()
    process.join()
    process.close()
    assert info == reference.info("ema")
    assert_same(live, reference.weights("live"))
    for name in bank.names:
        assert_same(state["profiles"][name]["weights"], reference.state_dict()["profiles"][name]["weights"])


POWER_TOO = deepmd_ema.averaging.PowerProfile("p", 3.0, update_every=2, device="cpu")


def test_importing_averages_imports_neither_the_trainer_nor_what_reads_data():
    code = (
        "import sys, torch; before = set(sys.modules); import deepmd_ema.averaging; "
        "print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in found} & HEAVY
    packages = {name.split(".")[1] for name in found if name.startswith("deepmd_ema.")}
    assert packages == PACKAGES


def test_names_that_clash_are_an_error(net):
    with pytest.raises(ConfigError, match="averages ema, flat, ema: the names must differ"):
        AverageBank(net, [PLAIN, SwaProfile("flat"), WARM])


def test_a_bank_without_profiles_is_an_empty_list(net):
    bank = AverageBank(net, [])
    bank.update()
    assert bank.names == ()
    assert bank.state_dict()["profiles"] == {}
    assert_same(bank.weights("live"), copies(net))


def test_updates_do_not_touch_gradients_and_the_grad_mode(net):
    bank = AverageBank(net, [PLAIN])
    loss = net(torch.ones(2, 3, dtype=torch.float64)).sum()
    bank.update()
    assert torch.is_grad_enabled()
    loss.backward()
    assert all(p.grad is not None and p.requires_grad for p in net.parameters())
    assert not any(t.requires_grad for t in bank.weights("ema").values())
    with torch.no_grad():
        bank.update()
        assert not torch.is_grad_enabled()


def test_the_same_tensor_under_two_names_is_averaged_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.near = nn.Linear(3, 3)
            self.far = nn.Linear(3, 3)
            self.far.weight = self.near.weight

    net = Tied()
    bank = AverageBank(net, [PLAIN])
    assert len(bank["ema"].tensors) == 3
    train(net, bank, range(1))
    weights = bank.weights("ema")
    assert weights["near.weight"] is weights["far.weight"]
    assert "far.weight" in bank["ema"].tensor_names
