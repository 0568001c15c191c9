"""Averages of the weights used alone, by another trainer: the documented interface, processes, imports, mistakes."""

import ast
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from averaging_nets import PLAIN, WARM, Net, assert_same, copies, make_net, train

import deepmd_ema.averaging
from deepmd_ema.averaging import AverageBank, PowerProfile, SwaProfile
from deepmd_ema.errors import CheckpointError, ConfigError

# what nobody should have to import for an average of weights
HEAVY = {"h5py", "vesin", "dargs", "tqdm", "ase", "matplotlib"}
PACKAGES = {"averaging", "config", "distributed", "errors", "utils"}


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


def test_copy_to_publishes_an_average_into_another_module():
    net = make_net()
    bank = AverageBank(net, [PLAIN])
    train(net, bank, range(1))
    net.mean.fill_(9.0)
    other = Net(dtype=torch.float32)
    bank.copy_to("ema", other)
    assert_same(copies(other), {n: t.to(other.state_dict()[n].dtype) for n, t in bank.weights("ema").items()})
    with pytest.raises(CheckpointError, match=r"first.weight is \(5, 3\) there, \(6, 3\) here"):
        bank.copy_to("ema", Net(width=6))
    tasks = AverageBank({"water": net, "ice": Net(width=2)}, [PLAIN])
    tasks.copy_to("ema", other, task="water")
    with pytest.raises(CheckpointError, match=r"first.weight is \(2, 3\) there, \(5, 3\) here"):
        tasks.copy_to("ema", other, task="ice")


def test_a_bank_can_be_pickled_with_its_network_and_continues():
    net = make_net()
    bank = AverageBank(net, [WARM, PowerProfile("p", 3.0, update_every=2, device="cpu")])
    train(net, bank, range(4))
    module, again = pickle.loads(pickle.dumps((net, bank)))
    train(net, bank, range(4, 7))
    assert again.info("ema")["updates"] == 4
    train(module, again, range(4, 7))
    for name in ("live", *bank.names):
        assert_same(again.weights(name), bank.weights(name))
    assert again.info("p") == bank.info("p")


def test_importing_averages_imports_neither_the_trainer_nor_what_reads_data():
    code = (
        "import sys, torch; before = set(sys.modules); import deepmd_ema.averaging; "
        "print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in found} & HEAVY
    packages = {name.split(".")[1] for name in found if name.startswith("deepmd_ema.")}
    assert packages == PACKAGES


def test_names_that_clash_are_an_error():
    with pytest.raises(ConfigError, match="averages ema, flat, ema: the names must differ"):
        AverageBank(make_net(), [PLAIN, SwaProfile("flat"), WARM])


def test_updates_do_not_touch_gradients_and_the_grad_mode():
    net = make_net()
    bank = AverageBank(net, [PLAIN])
    loss = net(torch.ones(2, 3, dtype=torch.float64)).sum()
    bank.update()
    assert torch.is_grad_enabled()
    loss.backward()
    assert all(p.grad is not None and p.requires_grad for p in net.parameters())
    assert not any(t.requires_grad for t in bank.weights("ema").values())
