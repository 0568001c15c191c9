"""Averages of parts: buffers, frozen parameters, tasks. Names carry the demand that a test is for."""

import logging

import pytest
import torch
from averaging_nets import PLAIN, POWER, SWA, WARM, Net, assert_same, copies, make_net, move, oracle, train
from torch import nn

from deepmd_ema.averaging import AverageBank, EmaProfile, SwaProfile

PARAMETERS = ["first.weight", "first.bias", "second.weight", "second.bias"]


@pytest.fixture
def net():
    return make_net()


def test_E2_buffers_are_the_live_ones_and_integers_stay_integers(net):
    bank = AverageBank(net, [PLAIN])
    net.mean.fill_(7.0)
    net.atomic_number.fill_(26)
    move(net, 0)
    bank.update()
    weights = bank.weights("ema")
    assert torch.equal(weights["mean"], torch.full((3,), 7.0, dtype=torch.float64))
    assert torch.equal(weights["atomic_number"], torch.tensor([26, 26]))
    assert weights["atomic_number"].dtype == torch.int64
    assert "cache" not in weights
    assert list(weights) == list(net.state_dict())


def test_frozen_parameters_cost_no_memory_and_stand_live_in_the_average(net):
    net.first.requires_grad_(False)
    bank = AverageBank(net, [PLAIN])
    assert len(bank["ema"].tensors) == 2
    with torch.no_grad():
        net.first.weight.add_(1)
    assert torch.equal(bank.weights("ema")["first.weight"], net.first.weight)


class Overlapping(nn.Module):
    """Parameters that begin at one address: a matrix, its first row, and both names of one vector."""

    def __init__(self):
        super().__init__()
        memory = torch.arange(12.0, dtype=torch.float64)
        self.matrix = nn.Parameter(memory.view(4, 3))
        self.row = nn.Parameter(memory[:3])
        self.vector = self.same = nn.Parameter(torch.ones(2))


def test_parameters_at_one_address_are_one_only_with_one_shape_and_precision():
    net = Overlapping()
    bank = AverageBank(net, [PLAIN])
    assert [shard.names for shard in bank["ema"].shards] == [["matrix"], ["row"], ["vector", "same"]]
    assert {n: tuple(t.shape) for n, t in bank.weights("ema").items()} == {
        "matrix": (4, 3), "row": (3,), "vector": (2,), "same": (2,)
    }  # fmt: skip


def test_a_parameter_that_is_switched_on_starts_from_its_live_value(net, caplog):
    caplog.set_level(logging.INFO)
    net.first.requires_grad_(False)
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    state, second = bank.state_dict(), bank.weights("ema")["second.weight"]
    net.first.requires_grad_(True)
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    bank.update()
    expected = torch.lerp(second, net.second.weight.detach(), 1 - 0.9)
    assert torch.equal(bank.weights("ema")["first.weight"], net.first.weight)
    assert torch.equal(bank.weights("ema")["second.weight"], expected)
    with torch.no_grad():
        net.first.weight.fill_(4.0)
    bank.update()
    assert torch.allclose(bank.weights("ema")["first.weight"], torch.full((5, 3), 3.1, dtype=torch.float64))
    restarted = AverageBank(net, [PLAIN])
    restarted.load_state_dict(state)
    assert torch.equal(restarted.weights("ema")["second.weight"], second)
    assert "first.weight, first.bias was not averaged before" in caplog.text


def test_an_average_of_a_parameter_that_is_frozen_now_is_dropped(net):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    state = bank.state_dict()
    net.first.requires_grad_(False)
    again = AverageBank(net, [PLAIN])
    again.load_state_dict(state)
    assert torch.equal(again.weights("ema")["first.weight"], net.first.weight)
    assert torch.equal(again.weights("ema")["second.weight"], state["profiles"]["ema"]["weights"]["second.weight"])


def test_no_module_is_copied(net, monkeypatch):
    monkeypatch.setattr(nn.Module, "__deepcopy__", lambda *_: pytest.fail("deep copy"), raising=False)
    bank = AverageBank(net, [PLAIN])
    bank.update()
    with bank.swapped_in("ema"):
        pass
    bank.state_dict()


def test_a_tensor_shared_by_tasks_has_one_average_under_both_names():
    water, ice = make_net(), make_net()
    ice.first = water.first
    first = water.first.weight.detach().clone()
    bank = AverageBank({"water": water, "ice": ice}, [PLAIN])
    assert len(bank["ema"].tensors) == 6
    assert sorted(bank["ema"].tensor_names) == sorted([f"{t}.{n}" for t in ("water", "ice") for n in PARAMETERS])
    move(water, 0)
    bank.update()
    weights = bank.weights("ema")
    assert torch.equal(weights["water.first.weight"], weights["ice.first.weight"])
    expected = oracle([first, water.first.weight.detach()], [0.9])
    assert torch.allclose(weights["ice.first.weight"], expected)
    saved = bank.state_dict()["profiles"]["ema"]["weights"]
    assert saved["water.first.weight"] is saved["ice.first.weight"]


def test_adding_or_removing_a_task_keeps_the_averages_of_the_others():
    water, ice = Net(), Net()
    ice.first = water.first
    both = AverageBank({"water": water, "ice": ice}, [PLAIN])
    move(water, 0)
    move(ice, 1)
    both.update()
    alone = AverageBank({"ice": ice}, [PLAIN])
    alone.load_state_dict(both.state_dict())
    expected = {n: t for n, t in both.weights("ema").items() if n.startswith("ice.")}
    assert_same(alone.weights("ema"), expected)
    again = AverageBank({"water": water, "ice": ice}, [PLAIN])
    again.load_state_dict(alone.state_dict())
    assert_same({n: t for n, t in again.weights("ema").items() if n.startswith("ice.")}, expected)
    assert torch.equal(again.weights("ema")["water.second.weight"], water.second.weight)


@pytest.mark.parametrize("profile", [WARM, POWER, SWA], ids=lambda p: p.name)
def test_the_average_of_an_idle_head_does_not_drift(profile):
    water, ice = make_net(), Net()
    ice.first = water.first
    bank = AverageBank({"water": water, "ice": ice}, [profile])
    idle = copies(ice)
    train(water, bank, range(200))
    weights = bank.weights("ema")
    for name in ("second.weight", "second.bias"):
        assert torch.equal(weights[f"ice.{name}"], idle[name])
        assert not torch.equal(weights[f"water.{name}"], water.state_dict()[name])


def test_buffers_are_averaged_on_request_and_integers_never(net):
    profile = EmaProfile("ema", 0.9, warmup=False, buffers="average")
    bank = AverageBank(net, [profile, EmaProfile("copy", 0.9, warmup=False)])
    assert bank["ema"].tensor_names == (*PARAMETERS, "mean")
    assert bank["copy"].tensor_names == tuple(PARAMETERS)
    history = [net.mean.clone()]
    for step in range(5):
        move(net, step)
        net.mean.add_(step)
        net.atomic_number.add_(1)
        net.cache.add_(1)
        bank.update()
        history.append(net.mean.clone())
    live = copies(net)
    weights = bank.weights("ema")
    assert torch.allclose(weights["mean"], oracle(history, [0.9] * 5), rtol=1e-13)
    assert torch.equal(weights["atomic_number"], live["atomic_number"])
    assert weights["atomic_number"].dtype == torch.int64
    assert list(weights) == list(live)
    assert torch.equal(bank.weights("copy")["mean"], live["mean"])
    with bank.swapped_in("ema"):
        assert torch.equal(net.mean, weights["mean"])
        assert_same(bank.weights("live"), live)
        assert torch.equal(bank.weights("copy")["mean"], live["mean"])
    assert_same(copies(net), live)


def test_a_buffer_that_a_forward_replaces_is_followed(net):
    bank = AverageBank(net, [EmaProfile("ema", 0.5, warmup=False, buffers="average")])
    net.mean = net.mean + 2
    bank.update()
    assert torch.equal(bank.weights("ema")["mean"], torch.full((3,), 2.0, dtype=torch.float64))


def test_buffers_switched_on_at_a_restart_start_live_and_switched_off_are_live(net, caplog):
    caplog.set_level(logging.INFO)
    plain, whole = EmaProfile("ema", 0.9), EmaProfile("ema", 0.9, buffers="average")
    bank = AverageBank(net, [plain])
    train(net, bank, range(3))
    net.mean.fill_(5.0)
    on = AverageBank(net, [whole])
    on.load_state_dict(bank.state_dict())
    assert "average ema: mean was not averaged before and starts from its live value" in caplog.text
    assert "buffers was copy in the checkpoint and is average from now on" in caplog.text
    assert_same(on.weights("ema"), bank.weights("ema"))
    net.mean.fill_(7.0)
    on.update()
    assert not torch.equal(on.weights("ema")["mean"], net.mean)
    off = AverageBank(net, [plain])
    off.load_state_dict(on.state_dict())
    assert torch.equal(off.weights("ema")["mean"], net.mean)
    assert torch.equal(off.weights("ema")["first.weight"], on.weights("ema")["first.weight"])


def test_buffers_of_the_averaged_model_are_those_of_the_moment(net):
    bank = AverageBank(net, [PLAIN])
    train(net, bank, range(3))
    net.mean.fill_(3.0)
    assert torch.equal(bank.weights("ema")["mean"], net.mean)


def test_frozen_parameters_take_no_bytes(net):
    whole = AverageBank(net, [PLAIN, EmaProfile("wide", 0.9, dtype="float64")])
    assert whole["wide"].num_bytes == whole["ema"].num_bytes > 0
    net.second.requires_grad_(False)
    assert AverageBank(net, [PLAIN])["ema"].num_bytes < whole["ema"].num_bytes
    narrow = make_net(dtype=torch.float32)
    both = AverageBank(narrow, [PLAIN, EmaProfile("narrow", 0.9, dtype="float32")])
    assert both["ema"].num_bytes == 2 * both["narrow"].num_bytes


def test_a_parameter_that_is_frozen_for_a_while_starts_again_from_its_live_value(net):
    bank = AverageBank(net, [PLAIN])
    train(net, bank, range(3))
    net.first.requires_grad_(False)
    train(net, bank, range(3, 5))
    assert torch.equal(bank.weights("ema")["first.weight"], net.first.weight)
    net.first.requires_grad_(True)
    bank.update()
    assert torch.equal(bank.weights("ema")["first.weight"], net.first.weight)
    assert not torch.equal(bank.weights("ema")["second.weight"], net.second.weight)
    assert bank.info("ema")["updates"] == 6


def test_a_parameter_that_was_replaced_is_followed_after_rebind(net):
    bank = AverageBank(net, [SwaProfile("ema")])
    train(net, bank, range(2))
    before = bank.weights("ema")["second.bias"]
    net.second.bias = nn.Parameter(torch.full((1,), 4.0, dtype=torch.float64))
    bank.rebind()
    assert torch.equal(bank.weights("ema")["second.bias"], before)
    bank.update()
    assert torch.allclose(bank.weights("ema")["second.bias"], before + (4.0 - before) / 3)
