"""Averages of the weights: numbers, swaps, restarts, frozen parts. Names carry the demand that a test stands for."""

import logging
import os
import pickle
import signal

import pytest
import torch
from torch import nn

from deepmd_ema.averaging import AverageBank, AverageProfile, note_unused
from deepmd_ema.errors import CheckpointError, ConfigError

PLAIN = AverageProfile("ema", 0.9, warmup=False)
WARM = AverageProfile("ema", 0.99)


class Net(nn.Module):
    """Two layers, a floating buffer, an integer buffer, a temporary buffer."""

    def __init__(self, width=5, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(3, width, dtype=dtype)
        self.second = nn.Linear(width, 1, dtype=dtype)
        self.register_buffer("mean", torch.ones(3, dtype=dtype))
        self.register_buffer("atomic_number", torch.tensor([1, 8]))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def move(module, seed):
    """Change every trained parameter as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(parameter.dtype))


def copies(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(left, right):
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def oracle(history, decays):
    """Return the average of a list of weight tensors, in float64 and by its definition."""
    average = history[0].double()
    for weight, d in zip(history[1:], decays):
        average = d * average + (1 - d) * weight.double()
    return average


# the average itself


def test_an_average_follows_its_definition_with_and_without_warmup(net):
    for profile in (PLAIN, WARM):
        bank, history = AverageBank(net, [profile]), [net.first.weight.detach().clone()]
        for step in range(30):
            move(net, step)
            bank.update()
            history.append(net.first.weight.detach().clone())
        decays = [min(profile.decay, (1 + t) / (10 + t)) if profile.warmup else profile.decay for t in range(30)]
        expected = oracle(history, decays)
        assert torch.allclose(bank.weights("ema")["first.weight"], expected, rtol=1e-13, atol=1e-15)


def test_A2_warmup_does_not_start_again_after_a_restart(net):
    bank = AverageBank(net, [WARM])
    for step in range(20):
        move(net, step)
        bank.update()
    again = AverageBank(net, [WARM])
    again.load_state_dict(bank.state_dict())
    assert again.info("ema") == bank.info("ema")
    assert again.info("ema")["effective_decay"] == pytest.approx(20 / 29)


def test_A1_a_restart_continues_every_average_bitwise(net):
    profiles = [WARM, AverageProfile("slow", 0.999, start_step=7, update_every=3)]
    bank = AverageBank(net, profiles)
    for step in range(11):
        move(net, step)
        bank.update()
    state, weights = bank.state_dict(), copies(net)
    other = Net()
    other.load_state_dict(weights)
    restarted = AverageBank(other, profiles)
    restarted.load_state_dict(state)
    for step in range(11, 31):
        for module, averages in ((net, bank), (other, restarted)):
            move(module, step)
            averages.update()
    for name in bank.names:
        assert_same(bank.weights(name), restarted.weights(name))
        assert bank.info(name) == restarted.info(name)


def test_A5_what_is_handed_out_does_not_alias_the_average_or_the_weights(net):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    state, weights = bank.state_dict(), bank.weights("ema")
    before = {name: value.clone() for name, value in weights.items()}
    saved = {name: value.clone() for name, value in state["profiles"]["ema"]["weights"].items()}
    move(net, 1)
    net.mean.add_(1)
    bank.update()
    assert_same(weights, before)
    assert_same(state["profiles"]["ema"]["weights"], saved)


def test_A6_the_decay_of_the_input_wins_with_one_warning_that_names_both(net, caplog):
    state = AverageBank(net, [PLAIN]).state_dict()
    bank = AverageBank(net, [AverageProfile("ema", 0.5, warmup=False)])
    bank.load_state_dict(state)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "0.9" in warnings[0]
    assert "0.5" in warnings[0]
    assert bank.info("ema")["decay"] == 0.5


def test_A7_an_average_switched_on_at_a_restart_starts_from_the_loaded_weights_and_says_so(net, caplog):
    caplog.set_level(logging.INFO)
    bank = AverageBank(net, [WARM])
    move(net, 0)
    bank.load_state_dict(None, step=100)
    assert "starts from the loaded weights" in caplog.text
    assert_same(bank.weights("ema"), copies(net))
    assert bank.info("ema")["updates"] == 0


def test_A7_an_average_switched_off_at_a_restart_is_said(net, caplog):
    caplog.set_level(logging.INFO)
    note_unused(None)
    assert not caplog.records
    note_unused(AverageBank(net, [PLAIN]).state_dict())
    assert "enable_ema is off" in caplog.text


def test_A8_reseeding_after_other_weights_were_loaded_starts_from_them(net):
    bank = AverageBank(net, [PLAIN])
    bank.update()
    net.load_state_dict(Net().state_dict())
    bank.reseed()
    assert_same(bank.weights("ema"), copies(net))
    assert bank.info("ema")["updates"] == 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: w.pop("first.bias"), "missing: first.bias"),
        (lambda w: w.update(strange=torch.zeros(2)), "not of this model: strange"),
        (lambda w: w.update(first_weight=w.pop("first.weight")), "renamed: first.weight is called first_weight"),
        (lambda w: w.update({"first.weight": torch.zeros(4, 3)}), r"another shape: first.weight is \(4, 3\) there"),
    ],
)
def test_A9_keys_that_do_not_fit_fail_with_their_names(net, spoil, said):
    bank = AverageBank(net, [PLAIN])
    state = bank.state_dict()
    spoil(state["profiles"]["ema"]["weights"])
    with pytest.raises(CheckpointError, match=said):
        bank.load_state_dict(state)


def test_A10_a_float32_average_of_a_bfloat16_model_is_float32_after_loading():
    net = Net(dtype=torch.bfloat16)
    bank = AverageBank(net, [AverageProfile("ema", 0.999, warmup=False)])
    for step in range(5):
        move(net, step)
        bank.update()
    state = bank.state_dict()
    again = AverageBank(net, [AverageProfile("ema", 0.999, warmup=False)])
    again.load_state_dict(state)
    for bank_ in (bank, again):
        weight = bank_.state_dict()["profiles"]["ema"]["weights"]["first.weight"]
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
    assert_same(state["profiles"]["ema"]["weights"], again.state_dict()["profiles"]["ema"]["weights"])


# swaps


def test_B1_swaps_leave_the_live_trajectory_bitwise_alone():
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
def test_B2_an_exception_inside_a_swap_restores_the_live_weights(net, error):
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
def test_B2_a_signal_in_the_middle_of_an_exchange_waits_until_it_is_complete(net, monkeypatch, number):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    live = copies(net)
    average = bank._averages["ema"]
    whole = type(average).swap_in
    seen = []

    def swap_in(self):
        os.kill(os.getpid(), number)
        whole(self)
        seen.append("exchanged")

    def stop(_number, _frame):
        seen.append("delivered")
        raise KeyboardInterrupt

    monkeypatch.setattr(type(average), "swap_in", swap_in)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt), bank.swapped_in("ema"):
            pytest.fail("the body must not run")
    finally:
        signal.signal(number, before)
    assert seen == ["exchanged", "delivered"]
    assert_same(copies(net), live)


def test_B2_running_out_of_memory_in_the_middle_of_an_exchange_is_undone(net, monkeypatch):
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


def test_B3_before_the_first_update_the_average_is_the_live_model(net):
    bank = AverageBank(net, [WARM, AverageProfile("late", 0.9, start_step=5)])
    for name in bank.names:
        with bank.swapped_in(name):
            assert_same(copies(net), bank.live_weights())
    for step in range(4):
        move(net, step)
        bank.update()
    assert_same(bank.weights("late"), copies(net))
    with bank.swapped_in("ema"):
        live = bank.live_weights()
        assert_same(bank.weights("late"), live)
        assert_same(bank.state_dict()["profiles"]["late"]["weights"], {n: live[n] for n, _ in net.named_parameters()})
    assert_same(copies(net), live)


def test_B4_a_swap_inside_a_swap_is_an_error_and_keeps_the_outer_one(net):
    bank = AverageBank(net, [PLAIN, AverageProfile("slow", 0.999)])
    move(net, 0)
    bank.update()
    live, average = copies(net), bank.weights("ema")
    with bank.swapped_in("ema"):
        inner = bank.swapped_in("slow")
        with pytest.raises(RuntimeError, match="'slow' cannot be swapped in: 'ema' is already"):
            inner.__enter__()
        assert_same(copies(net), average)
    assert_same(copies(net), live)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_B5_a_compiled_model_sees_the_swap_without_compiling_again(net):
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


def test_B6_names_are_those_of_the_bare_model_whatever_wraps_it(net):
    wrapped = nn.DataParallel(torch.compile(nn.DataParallel(net), backend="eager"))
    bank = AverageBank(wrapped, [PLAIN])
    assert sorted(bank.weights("ema")) == sorted(net.state_dict())
    inside = nn.Sequential(torch.compile(net, backend="eager"), nn.Linear(1, 1))
    assert "0.first.weight" in AverageBank(inside, [PLAIN]).weights("ema")


def test_B6_a_layer_that_happens_to_be_called_module_keeps_its_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

    assert sorted(AverageBank(Odd(), [PLAIN]).weights("ema")) == ["module.bias", "module.weight", "scale"]


def test_B6_a_model_without_trained_parameters_is_an_error(net):
    net.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trained parameter to average"):
        AverageBank(net, [PLAIN])


def test_B7_the_extra_memory_of_a_swap_is_one_tensor_at_a_time(net, monkeypatch):
    bank = AverageBank(net, [PLAIN])
    pointers = {p.data_ptr() for p in net.parameters()} | {t.data_ptr() for t in bank._averages["ema"].tensors}
    cloned = []
    clone = torch.Tensor.clone

    def remember(tensor, **how):
        cloned.append(tensor.numel())
        return clone(tensor, **how)

    monkeypatch.setattr(torch.Tensor, "clone", remember)
    with bank.swapped_in("ema"):
        assert not bank._averages["ema"]._held
    after = {p.data_ptr() for p in net.parameters()} | {t.data_ptr() for t in bank._averages["ema"].tensors}
    assert pointers == after
    assert max(cloned) == max(p.numel() for p in net.parameters())


def test_A4_states_taken_inside_a_swap_hold_raw_weights_and_averages(net):
    for model in (net, Net(dtype=torch.bfloat16)):
        bank = AverageBank(model, [PLAIN, AverageProfile("slow", 0.999, warmup=False)])
        move(model, 0)
        bank.update()
        live, state = copies(model), bank.state_dict()
        outside = {name: bank.weights(name) for name in bank.names}
        with bank.swapped_in("ema"):
            assert_same(bank.live_weights(), live)
            for name in bank.names:
                assert_same(bank.state_dict()["profiles"][name]["weights"], state["profiles"][name]["weights"])
                assert_same(bank.weights(name), outside[name])
        assert_same(copies(model), live)
        assert_same(bank.weights("ema"), outside["ema"])


# numbers


def test_D1_bfloat16_weights_are_averaged_to_1e_5_over_5000_updates():
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    decay = 0.9999
    bank = AverageBank(net, [AverageProfile("ema", decay, warmup=False)])
    expected = net.weight.detach().double().clone()
    for _ in range(5000):
        with torch.no_grad():
            net.weight.add_(0.01 * torch.randn(8, 8, generator=generator).bfloat16())
        bank.update()
        expected = decay * expected + (1 - decay) * net.weight.detach().double()
    average = bank.weights("ema")["weight"]
    assert average.dtype == torch.float32
    assert (average.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_D2_a_constant_parameter_keeps_its_bits(dtype):
    net = Net(dtype=dtype)
    fast = AverageProfile("fast", 0.5)
    bank = AverageBank(net, [AverageProfile("ema", 0.999), fast])
    live = copies(net)
    for _ in range(300):
        bank.update()
    for name in bank.names:
        for key, value in bank.weights(name).items():
            assert torch.equal(value.to(live[key].dtype), live[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_D3_the_host_path_the_device_path_and_single_tensors_agree_bitwise(dtype):
    torch.manual_seed(1)
    net = Net(width=37, dtype=dtype)
    host, device = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    single = net.first.weight.detach().clone()
    for step in range(50):
        move(net, step)
        host.update()
        for average in device._averages.values():  # what a GPU does when the fate of a step is known there only
            average.update(torch.ones(()))
        single.lerp_(net.first.weight.detach(), 1 - min(0.99, (1 + step) / (10 + step)))
    assert_same(host.weights("ema"), device.weights("ema"))
    assert torch.equal(host.weights("ema")["first.weight"], single)
    assert host.info("ema") == device.info("ema")


def update_of(bank, where):
    """Return ``bank.update``, or the path that it takes on a GPU: only the device reads the fate of a step."""
    return bank.update if where == "host" else bank._averages["ema"].update


@pytest.mark.parametrize("where", ["host", "device"])
def test_D5_a_step_that_is_not_finite_does_not_poison_an_average(net, where):
    bank, reference = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    good = [copies(net)]
    for step in range(3):
        move(net, step)
        good.append(copies(net))
    update = update_of(bank, where)
    for weights in good[1:]:
        net.load_state_dict(weights)
        update(torch.tensor(1.0))
        reference.update()
        with torch.no_grad():
            net.first.weight.fill_(torch.nan)
            net.second.weight.fill_(torch.inf)
        update(torch.tensor(0.0))
    net.load_state_dict(good[-1])
    assert_same(bank.weights("ema"), reference.weights("ema"))


@pytest.mark.parametrize("where", ["host", "device"])
def test_D6_a_skipped_step_does_not_count_as_an_update(net, where):
    bank = AverageBank(net, [WARM])
    update = update_of(bank, where)
    for ok in (1.0, 0.0, 1.0, 0.0, 0.0):
        update(torch.tensor(ok))
    assert bank.info("ema")["updates"] == 2


def test_host_and_device_counting_continue_each_other(net):
    bank, reference = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    for step in range(12):
        move(net, step)
        reference.update()
        if step % 3:
            bank.update()
        else:
            bank._averages["ema"].update(torch.ones(()))
    assert bank.info("ema") == reference.info("ema")
    assert_same(bank.weights("ema"), reference.weights("ema"))


def test_G5_the_mean_age_is_that_of_explicit_weights_that_sum_to_one(net):
    for profile in (PLAIN, WARM, AverageProfile("ema", 0.99, warmup=False, update_every=3)):
        bank = AverageBank(net, [profile])
        shares = [(0, 1.0)]  # (step, weight in the average)
        for step in range(1, 31):
            bank.update()
            if step % profile.update_every == 0:
                d = profile.decay_at(step // profile.update_every - 1)
                shares = [(s, d * w) for s, w in shares] + [(step, 1 - d)]
        assert sum(w for _, w in shares) == pytest.approx(1)
        assert bank.info("ema")["mean_age"] == pytest.approx(sum((30 - s) * w for s, w in shares))


def test_an_average_starts_at_its_step_from_the_live_weights_and_skips_between(net):
    bank = AverageBank(net, [AverageProfile("ema", 0.9, warmup=False, start_step=4, update_every=2)])
    history = {}
    for step in range(1, 9):
        move(net, step)
        bank.update()
        history[step] = net.first.weight.detach().clone()
        if step == 5:
            assert torch.equal(bank.weights("ema")["first.weight"], history[4])
    expected = oracle([history[4], history[6], history[8]], [0.81, 0.81])
    assert torch.allclose(bank.weights("ema")["first.weight"], expected, rtol=1e-13)
    assert bank.info("ema")["updates"] == 2


def test_a_bad_step_at_the_start_of_an_average_defers_it(net):
    bank = AverageBank(net, [AverageProfile("ema", 0.9, start_step=2)])
    bank.update()
    bank.update(torch.tensor(0.0))
    move(net, 1)
    bank.update()
    assert_same(bank.weights("ema"), copies(net))
    assert bank.info("ema")["updates"] == 0


# buffers, frozen parts, tasks


def test_E1_E2_buffers_are_the_live_ones_and_integers_stay_integers(net):
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


def test_E4_frozen_parameters_cost_no_memory_and_stand_live_in_the_average(net):
    net.first.requires_grad_(False)
    bank = AverageBank(net, [PLAIN])
    assert len(bank._averages["ema"].tensors) == 2
    with torch.no_grad():
        net.first.weight.add_(1)
    assert torch.equal(bank.weights("ema")["first.weight"], net.first.weight)


def test_E4_a_parameter_that_is_switched_on_starts_from_its_live_value(net, caplog):
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
    restarted = AverageBank(net, [PLAIN])
    restarted.load_state_dict(state)
    assert torch.equal(restarted.weights("ema")["second.weight"], second)
    assert "first.weight, first.bias was not averaged before" in caplog.text


def test_E4_an_average_of_a_parameter_that_is_frozen_now_is_dropped(net):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    state = bank.state_dict()
    net.first.requires_grad_(False)
    again = AverageBank(net, [PLAIN])
    again.load_state_dict(state)
    assert torch.equal(again.weights("ema")["first.weight"], net.first.weight)
    assert torch.equal(again.weights("ema")["second.weight"], state["profiles"]["ema"]["weights"]["second.weight"])


def test_E5_no_module_is_copied(net, monkeypatch):
    monkeypatch.setattr(nn.Module, "__deepcopy__", lambda *_: pytest.fail("deep copy"), raising=False)
    bank = AverageBank(net, [PLAIN])
    bank.update()
    with bank.swapped_in("ema"):
        pass
    bank.state_dict()


def test_I1_a_tensor_shared_by_tasks_has_one_average_under_both_names():
    water, ice = Net(), Net()
    ice.first = water.first
    bank = AverageBank({"water": water, "ice": ice}, [PLAIN])
    assert len(bank._averages["ema"].tensors) == 6
    move(water, 0)
    bank.update()
    weights = bank.weights("ema")
    assert torch.equal(weights["water.first.weight"], weights["ice.first.weight"])
    expected = oracle([Net_first_before(water), water.first.weight], [0.9])
    assert torch.allclose(weights["ice.first.weight"], expected)
    saved = bank.state_dict()["profiles"]["ema"]["weights"]
    assert saved["water.first.weight"] is saved["ice.first.weight"]


def Net_first_before(net):
    """Undo ``move(net, 0)`` on the first weight."""
    generator = torch.Generator().manual_seed(0)
    return net.first.weight.detach() - 0.1 * torch.randn(
        net.first.weight.shape, generator=generator, dtype=torch.float64
    )


def test_I2_adding_or_removing_a_task_keeps_the_averages_of_the_others():
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


def test_copy_to_publishes_an_average_into_another_module(net):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    other = Net(dtype=torch.float32)
    bank.copy_to("ema", other)
    assert torch.equal(other.first.weight, bank.weights("ema")["first.weight"].float())
    with pytest.raises(CheckpointError, match=r"first.weight is \(5, 3\) there, \(6, 3\) here"):
        bank.copy_to("ema", Net(width=6))


def test_a_bank_can_be_pickled_and_goes_on(net):
    bank = AverageBank(net, [WARM])
    for step in range(3):
        move(net, step)
        bank.update()
    copy = pickle.loads(pickle.dumps(bank))
    assert_same(copy.weights("ema"), bank.weights("ema"))
    assert copy.info("ema") == bank.info("ema")
    copy.update()
    assert copy.info("ema")["updates"] == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decay": 1.0}, "0 <= decay < 1"),
        ({"decay": -0.1}, "0 <= decay"),
        ({"decay": 0.9, "update_every": 0}, "at least 1"),
    ],
)
def test_a_profile_out_of_range_is_an_error(settings, said):
    with pytest.raises(ConfigError, match=said):
        AverageProfile("ema", **settings)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_F3_a_sharded_module_sees_the_average_and_gets_its_weights_back(net, tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        twin = Net()
        twin.load_state_dict(net.state_dict())
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
        bank, twin_bank = AverageBank(net, [PLAIN]), AverageBank(twin, [PLAIN])
        x = torch.ones(2, 3, dtype=torch.float64)
        for model, averages in ((net, bank), (twin, twin_bank)):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                averages.update()
        assert_same(bank.weights("ema"), twin_bank.weights("ema"))
        live = net(x)
        with bank.swapped_in("ema"), twin_bank.swapped_in("ema"):
            assert torch.equal(net(x), twin(x))
            assert not torch.equal(net(x), live)
            assert_same(bank.live_weights(), twin_bank.live_weights())
        assert torch.equal(net(x), live)
        again = AverageBank(net, [PLAIN])
        again.load_state_dict(twin_bank.state_dict())
        assert_same(again.weights("ema"), bank.weights("ema"))
    finally:
        torch.distributed.destroy_process_group()
