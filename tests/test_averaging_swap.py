"""Averages in place of the live weights: swaps that leave no trace, copies on their way to host memory."""

import os
import pickle
import signal
from unittest import mock

import pytest
import torch
from averaging_nets import (
    PLAIN,
    POWER,
    SWA,
    WARM,
    Net,
    assert_same,
    copies,
    make_net,
    move,
    on_device,
    through_staging,
    train,
)
from torch import nn

from deepmd_ema.averaging import AverageBank, EmaProfile, SwaProfile
from deepmd_ema.averaging.average import Average
from deepmd_ema.errors import ConfigError


@pytest.fixture
def net():
    return make_net()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_a_swap_restores_the_live_weights(net, error):
    bank = AverageBank(net, [PLAIN])
    train(net, bank, [0])
    live, average = copies(net), bank.weights("ema")

    def fail():
        assert_same(copies(net), average)
        raise error

    with pytest.raises(error), bank.swapped_in("ema"):
        fail()
    assert_same(copies(net), live)
    assert_same(bank.weights("ema"), average)


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


def test_before_the_first_update_the_average_is_the_live_model(net):
    bank = AverageBank(net, [WARM, EmaProfile("late", 0.9, start_step=5)])
    for name in bank.names:
        with bank.swapped_in(name):
            assert_same(copies(net), bank.weights("live"))
    train(net, bank, range(4))
    with bank.swapped_in("ema"):
        assert_same(bank.weights("late"), bank.weights("live"))


def test_a_swap_inside_a_swap_is_an_error_and_keeps_the_outer_one(net):
    bank = AverageBank(net, [PLAIN, EmaProfile("slow", 0.999)])
    train(net, bank, [0])
    live, average = copies(net), bank.weights("ema")
    with bank.swapped_in("ema"):
        with pytest.raises(RuntimeError, match="'slow' cannot be swapped in: 'ema' is already"):
            bank.swapped_in("slow").__enter__()
        assert_same(copies(net), average)
    assert_same(copies(net), live)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run slower")  # of torch, on Python 3.13.0
def test_a_compiled_model_sees_the_swap_without_compiling_again(net):
    compiled = torch.compile(net, backend=(backend := mock.Mock(side_effect=lambda graph, _: graph.forward)))
    bank, x = AverageBank(compiled, [PLAIN]), torch.ones(2, 3, dtype=torch.float64)
    with torch.no_grad():
        compiled(x)
        train(net, bank, [0])
        with bank.swapped_in("ema"):
            seen = compiled(x)
            assert torch.equal(seen, net(x))
        assert not torch.equal(compiled(x), seen)
    assert backend.call_count == 1


def test_names_are_those_of_the_bare_model_whatever_wraps_it(net):
    wrapped = nn.DataParallel(torch.compile(nn.DataParallel(net), backend="eager"))
    bank = AverageBank(wrapped, [PLAIN])
    assert sorted(bank.weights("ema")) == sorted(net.state_dict())
    inside = nn.ModuleDict({"module": torch.compile(net, backend="eager"), "last": nn.Linear(1, 1)})
    assert {"module.first.weight", "last.weight"} < AverageBank(inside, [PLAIN]).weights("ema").keys()


def test_a_model_without_trained_parameters_is_an_error(net):
    net.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trained parameter to average"):
        AverageBank(net, [PLAIN])


def test_the_extra_memory_of_a_swap_is_one_tensor_at_a_time(net, monkeypatch):
    bank = AverageBank(net, [PLAIN])
    pointers = {p.data_ptr() for p in net.parameters()} | {t.data_ptr() for t in bank["ema"].tensors}
    cloned, clone = [], torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: cloned.append(t.numel()) or clone(t))
    with bank.swapped_in("ema"):  # each changes places, none is set aside
        assert sorted(cloned) == sorted(p.numel() for p in net.parameters())
    assert pointers == {p.data_ptr() for p in net.parameters()} | {t.data_ptr() for t in bank["ema"].tensors}


def test_states_taken_inside_a_swap_hold_raw_weights_and_averages(net):
    for model in (net, Net(dtype=torch.bfloat16)):
        bank = AverageBank(model, [PLAIN, EmaProfile("slow", 0.999, warmup=False)])
        train(model, bank, [0])
        live, state = copies(model), bank.state_dict()
        outside = {name: bank.weights(name) for name in bank.names}
        with bank.swapped_in("ema"):
            assert_same(bank.weights("live"), live)
            for name in bank.names:
                assert_same(bank.state_dict()["profiles"][name]["weights"], state["profiles"][name]["weights"])
                assert_same(bank.weights(name), outside[name])
        assert_same(copies(model), live)
        assert_same(bank.weights("ema"), outside["ema"])


@pytest.mark.parametrize("profile", [POWER, SwaProfile("ema", dtype="float32")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swap_of_any_kind_leaves_live_weights_and_average_bitwise_alone(profile, dtype):
    net = make_net(dtype=dtype)
    bank = AverageBank(net, [profile])
    train(net, bank, range(6))
    live, average = copies(net), bank.weights("ema")
    for _ in range(2):
        with bank.swapped_in("ema"):
            assert_same(copies(net), {n: t.to(live[n].dtype) for n, t in average.items()})
        assert_same(copies(net), live)
        assert_same(bank.weights("ema"), average)


def test_what_would_mix_live_and_averaged_weights_is_refused_inside_a_swap(net):
    bank = AverageBank(net, [PLAIN])
    state = bank.state_dict()
    with bank.swapped_in("ema"):
        for act in (bank.update, bank.rebind, lambda: bank.load_state_dict(state), lambda: pickle.dumps(bank)):
            with pytest.raises(AssertionError, match="while an average is swapped in"):
                act()


BUFFERED = EmaProfile("ema", 0.9, buffers="average", dtype="float64")


SPARSE = EmaProfile("ema", 0.9, start_step=2, update_every=3)


EACH = pytest.mark.parametrize("profile", [WARM, POWER, SWA, BUFFERED, SPARSE], ids=lambda p: p.name)


def pair(profile, **how):
    """Return a network with a staged bank and one without."""
    net = make_net(**how)
    with through_staging():
        staged = AverageBank(net, [profile])
    return net, staged, AverageBank(net, [profile])


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("read_every", [1, 4])
def test_staged_averages_are_the_same_bits_however_often_they_are_read(profile, dtype, read_every):
    net, staged, direct = pair(profile, dtype=dtype)
    for step in range(12):
        move(net, step)
        net.mean.mul_(1.5)
        staged.update()
        direct.update()
        if (step + 1) % read_every == 0:
            assert_same(staged.weights("ema"), direct.weights("ema"))
            assert staged.info("ema") == direct.info("ema")


@EACH
def test_D6_the_fate_of_a_step_travels_with_its_copy(profile):
    net, staged, direct = pair(profile)
    for step in range(12):
        good = step % 3 != 1
        weights = copies(net)
        move(net, step)
        if not good:
            with torch.no_grad():
                net.first.weight.fill_(torch.inf)
                net.mean.fill_(torch.nan)
        ok = torch.tensor(float(good))
        direct.update(ok)
        with on_device():
            staged.update(ok)
        ok.fill_(1)  # the next step writes into the same memory
        if not good:
            net.load_state_dict(weights)
    assert_same(staged.weights("ema"), direct.weights("ema"))
    assert staged.info("ema") == direct.info("ema")
    assert all(bool(value.isfinite().all()) for value in staged.weights("ema").values())
