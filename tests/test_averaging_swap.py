"""Averages in place of the live weights: swaps, and that they leave no trace. Names carry the demand of a test."""

import os
import pickle
import signal

import pytest
import torch
from averaging_nets import PLAIN, POWER, SWA, WARM, Net, assert_same, copies, make_net, move, train
from torch import nn

from deepmd_ema.averaging import AverageBank, EmaProfile, SwaProfile
from deepmd_ema.averaging.average import Average
from deepmd_ema.averaging.storage import Shard, lerp
from deepmd_ema.errors import ConfigError


@pytest.fixture
def net():
    return make_net()


def test_swaps_leave_the_live_trajectory_bitwise_alone():
    runs = []
    for validated in (False, True):
        torch.manual_seed(3)
        net = Net()
        bank, optimizer = AverageBank(net, [WARM]), torch.optim.Adam(net.parameters(), 0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            bank.update()
            if validated:
                with bank.swapped_in("ema"):
                    net(torch.ones(1, 3, dtype=torch.float64))
        runs.append((copies(net), bank.weights("ema")))
    assert_same(runs[0][0], runs[1][0])
    assert_same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_a_swap_restores_the_live_weights(net, error):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    live, average = copies(net), bank.weights("ema")

    def fail():
        assert_same(copies(net), average)
        raise error

    with pytest.raises(error), bank.swapped_in("ema"):
        fail()
    assert_same(copies(net), live)
    assert_same(bank.weights("ema"), average)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_an_exchange_waits_until_it_is_complete(net, monkeypatch, number):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    live = copies(net)
    whole = Average.swap_in
    seen = []

    def swap_in(self):
        os.kill(os.getpid(), number)
        whole(self)
        seen.append("exchanged")

    def stop(_number, _frame):
        seen.append("delivered")
        raise KeyboardInterrupt

    monkeypatch.setattr(Average, "swap_in", swap_in)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt), bank.swapped_in("ema"):
            pytest.fail("the body must not run")
    finally:
        signal.signal(number, before)
    assert seen == ["exchanged", "delivered"]
    assert_same(copies(net), live)


def test_a_second_signal_in_an_exchange_is_delivered_although_the_first_raises(net, monkeypatch):
    bank = AverageBank(net, [PLAIN])
    live, whole, seen = copies(net), Average.swap_in, []

    def swap_in(self):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        whole(self)

    def stop(number, _frame):
        seen.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    monkeypatch.setattr(Average, "swap_in", swap_in)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyboardInterrupt), bank.swapped_in("ema"):
            pytest.fail("the body must not run")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(seen) == [signal.SIGINT, signal.SIGTERM]
    assert_same(copies(net), live)


def test_running_out_of_memory_in_the_middle_of_an_exchange_is_undone(net, monkeypatch):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    live, average = copies(net), bank.weights("ema")
    clone, count = torch.Tensor.clone, []

    def fail_third(tensor, **how):
        count.append(1)
        if len(count) == 3:
            raise MemoryError
        return clone(tensor, **how)

    monkeypatch.setattr(torch.Tensor, "clone", fail_third)
    with pytest.raises(MemoryError), bank.swapped_in("ema"):
        pytest.fail("the body must not run")
    monkeypatch.undo()
    assert_same(copies(net), live)
    assert_same(bank.weights("ema"), average)


def test_before_the_first_update_the_average_is_the_live_model(net):
    bank = AverageBank(net, [WARM, EmaProfile("late", 0.9, start_step=5)])
    for name in bank.names:
        with bank.swapped_in(name):
            assert_same(copies(net), bank.weights("live"))
    for step in range(4):
        move(net, step)
        bank.update()
    assert_same(bank.weights("late"), copies(net))
    with bank.swapped_in("ema"):
        live = bank.weights("live")
        assert_same(bank.weights("late"), live)
        assert_same(bank.state_dict()["profiles"]["late"]["weights"], {n: live[n] for n, _ in net.named_parameters()})
    assert_same(copies(net), live)


def test_a_swap_inside_a_swap_is_an_error_and_keeps_the_outer_one(net):
    bank = AverageBank(net, [PLAIN, EmaProfile("slow", 0.999)])
    move(net, 0)
    bank.update()
    live, average = copies(net), bank.weights("ema")
    with bank.swapped_in("ema"):
        inner = bank.swapped_in("slow")
        with pytest.raises(RuntimeError, match="'slow' cannot be swapped in: 'ema' is already"):
            inner.__enter__()
        assert_same(copies(net), average)
    assert_same(copies(net), live)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run slower")  # of torch, on Python 3.13.0
def test_a_compiled_model_sees_the_swap_without_compiling_again(net):
    compilations = []

    def count(graph, _inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=count)
    bank = AverageBank(compiled, [PLAIN])
    x = torch.ones(2, 3, dtype=torch.float64)
    with torch.no_grad():
        compiled(x)
        move(net, 0)
        bank.update()
        with bank.swapped_in("ema"):
            seen, eager = compiled(x), net(x)
        assert torch.equal(seen, eager)
        assert not torch.equal(compiled(x), seen)
    assert len(compilations) == 1


def test_names_are_those_of_the_bare_model_whatever_wraps_it(net):
    wrapped = nn.DataParallel(torch.compile(nn.DataParallel(net), backend="eager"))
    bank = AverageBank(wrapped, [PLAIN])
    assert sorted(bank.weights("ema")) == sorted(net.state_dict())
    inside = nn.Sequential(torch.compile(net, backend="eager"), nn.Linear(1, 1))
    assert "0.first.weight" in AverageBank(inside, [PLAIN]).weights("ema")


def test_a_layer_that_happens_to_be_called_module_keeps_its_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

    assert sorted(AverageBank(Odd(), [PLAIN]).weights("ema")) == ["module.bias", "module.weight", "scale"]


def test_a_model_without_trained_parameters_is_an_error(net):
    net.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trained parameter to average"):
        AverageBank(net, [PLAIN])


def test_the_extra_memory_of_a_swap_is_one_tensor_at_a_time(net, monkeypatch):
    bank = AverageBank(net, [PLAIN])
    pointers = {p.data_ptr() for p in net.parameters()} | {t.data_ptr() for t in bank["ema"].tensors}
    cloned = []
    clone = torch.Tensor.clone

    def remember(tensor, **how):
        cloned.append(tensor.numel())
        return clone(tensor, **how)

    monkeypatch.setattr(torch.Tensor, "clone", remember)
    with bank.swapped_in("ema"):
        assert len(cloned) == len(list(net.parameters()))  # each changes places, none is set aside
    after = {p.data_ptr() for p in net.parameters()} | {t.data_ptr() for t in bank["ema"].tensors}
    assert pointers == after
    assert max(cloned) == max(p.numel() for p in net.parameters())


def test_states_taken_inside_a_swap_hold_raw_weights_and_averages(net):
    for model in (net, Net(dtype=torch.bfloat16)):
        bank = AverageBank(model, [PLAIN, EmaProfile("slow", 0.999, warmup=False)])
        move(model, 0)
        bank.update()
        live, state = copies(model), bank.state_dict()
        outside = {name: bank.weights(name) for name in bank.names}
        with bank.swapped_in("ema"):
            assert_same(bank.weights("live"), live)
            for name in bank.names:
                assert_same(bank.state_dict()["profiles"][name]["weights"], state["profiles"][name]["weights"])
                assert_same(bank.weights(name), outside[name])
        assert_same(copies(model), live)
        assert_same(bank.weights("ema"), outside["ema"])


@pytest.mark.parametrize("profile", [POWER, SWA, SwaProfile("ema", dtype="float32"), SwaProfile("ema", device="cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swap_of_any_kind_leaves_live_weights_and_average_bitwise_alone(profile, dtype):
    net = make_net(dtype=dtype)
    bank = AverageBank(net, [profile])
    train(net, bank, range(6))
    live, average = copies(net), bank.weights("ema")
    for _ in range(2):
        with bank.swapped_in("ema"):
            assert_same(copies(net), {n: t.to(live[n].dtype) for n, t in average.items()})
            assert_same(bank.weights("live"), live)
            assert_same(bank.weights("ema"), average)
        assert_same(copies(net), live)
        assert_same(bank.weights("ema"), average)


def test_a_growing_average_is_the_live_model_after_its_first_update(net):
    bank = AverageBank(net, [POWER])
    train(net, bank, range(1))
    assert_same(bank.weights("ema"), copies(net))


def test_what_would_mix_live_and_averaged_weights_is_refused_inside_a_swap(net):
    bank = AverageBank(net, [PLAIN])
    state = bank.state_dict()
    with bank.swapped_in("ema"):
        for act in (bank.update, bank.rebind, lambda: bank.load_state_dict(state), lambda: pickle.dumps(bank)):
            with pytest.raises(AssertionError, match="while an average is swapped in"):
                act()


class FirstRows(Shard):
    """The shard of rank 0 of 2, whose partner has the same rows with the other sign."""

    def __init__(self, name, parameter):
        super().__init__(name, parameter)
        self.local, self.is_sharded = self.local_shard(parameter.detach()), True

    def as_tensor(self, part):
        return torch.cat([part, -part])

    def local_shard(self, full):
        return full[:2]


def test_a_gathered_average_is_swapped_in_by_the_part_of_this_rank():
    weight = nn.Parameter(torch.arange(8.0).view(4, 2))
    first = weight.detach()[:2].clone()
    average = Average(EmaProfile("whole", 0.5, warmup=False, layout="full_tensor"), [FirstRows("weight", weight)])
    average.seed(0)
    with torch.no_grad():
        weight.mul_(3)
        share = average.count(1)
        lerp([(buffer, share) for buffer in average.buffers])
    average.swap_in()
    assert torch.equal(weight[:2], 2 * first)
    assert torch.equal(average.as_tensor(0), torch.cat([2 * first, -2 * first]))
    assert torch.equal(average.live(0), torch.cat([3 * first, -3 * first]))
    average.swap_out()
    assert torch.equal(weight[:2], 3 * first)
