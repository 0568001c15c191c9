"""Averages as numbers: precision, bad steps, and that an update does nothing but average. Names carry the demand."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from averaging_nets import (
    PLAIN,
    POWER,
    SWA,
    WARM,
    Net,
    Recorded,
    assert_same,
    copies,
    make_net,
    move,
    on_device,
    oracle,
    train,
)
from torch import nn

from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile, storage


@pytest.fixture
def net():
    return make_net()


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


LONG = [
    EmaProfile("ema", 0.9999, warmup=False),
    EmaProfile("ema", 0.9999),
    PowerProfile.from_sigma_rel("ema", 0.05),
    PowerProfile.from_sigma_rel("ema", 0.25),
    SWA,
]


@pytest.mark.parametrize("profile", LONG, ids=lambda p: p.name)
def test_bfloat16_weights_are_averaged_to_1e_5_over_5000_updates(profile):
    profile = replace(profile, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    bank = AverageBank(net, [profile])
    expected = net.weight.detach().double().clone()
    for step in range(5000):
        with torch.no_grad():
            net.weight.add_(0.01 * torch.randn(8, 8, generator=generator).bfloat16())
        bank.update()
        d = profile.decay_at(step)
        expected = d * expected + (1 - d) * net.weight.detach().double()
    average = bank.weights("ema")["weight"]
    assert average.dtype == torch.float32
    assert (average.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("weights", "requested", "held"), [("float64", "float32", "float64"), ("bfloat16", "float32", "float32")]
)
def test_an_average_is_never_narrower_than_its_weights(weights, requested, held):
    net = make_net(dtype=getattr(torch, weights))
    bank = AverageBank(net, [replace(PLAIN, dtype=requested)])
    first = net.first.weight.detach().clone()
    train(net, bank, [0])
    assert {t.dtype for t in bank["ema"].tensors} == {getattr(torch, held)}
    if weights == held:
        expected = 0.9 * first + (1 - 0.9) * net.first.weight.detach()
        assert torch.allclose(bank.weights("ema")["first.weight"], expected, rtol=1e-14, atol=0)


def test_an_average_in_float64_is_exact_to_float64():
    net = make_net(dtype=torch.float32)
    bank = AverageBank(net, [EmaProfile("ema", 0.99, warmup=False, dtype="float64")])
    history = [net.first.weight.detach().clone()]
    for step in range(300):
        move(net, step)
        bank.update()
        history.append(net.first.weight.detach().clone())
    average = bank.weights("ema")["first.weight"]
    assert average.dtype == torch.float64
    assert torch.allclose(average, oracle(history, [0.99] * 300), rtol=0, atol=1e-14)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_constant_parameter_keeps_its_bits(dtype, where):
    net = Net(dtype=dtype)
    others = [EmaProfile("fast", 0.5), PowerProfile("p", 3.0), SwaProfile("flat"), SwaProfile("wide", dtype="float64")]
    bank = AverageBank(net, [EmaProfile("ema", 0.999), *others])
    live = copies(net)
    with on_device() if where == "device" else nullcontext():
        for _ in range(300):
            bank.update(torch.ones(()))
    for name in bank.names:
        for key, value in bank.weights(name).items():
            assert torch.equal(value, live[key].to(value.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_host_path_the_device_path_and_single_tensors_agree_bitwise(dtype):
    torch.manual_seed(1)
    net = Net(width=37, dtype=dtype)
    host, device = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    single = net.first.weight.detach().double().clone()
    for step in range(50):
        move(net, step)
        host.update()
        with on_device():
            device.update(torch.ones(()))
        single.lerp_(net.first.weight.detach().double(), 1 - min(0.99, (1 + step) / (10 + step)))
    assert_same(host.weights("ema"), device.weights("ema"))
    assert torch.equal(host.weights("ema")["first.weight"], single)
    assert host.info("ema") == device.info("ema")


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_step_that_is_not_finite_does_not_poison_an_average(net, where):
    bank, reference = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    good = [copies(net)]
    for step in range(3):
        move(net, step)
        good.append(copies(net))
    with on_device() if where == "device" else nullcontext():
        for weights in good[1:]:
            net.load_state_dict(weights)
            bank.update(torch.tensor(1.0))
            reference.update()
            with torch.no_grad():
                net.first.weight.fill_(torch.nan)
                net.second.weight.fill_(torch.inf)
            bank.update(torch.tensor(0.0))
    net.load_state_dict(good[-1])
    assert_same(bank.weights("ema"), reference.weights("ema"))


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_skipped_step_does_not_count_as_an_update(net, where):
    bank = AverageBank(net, [WARM])
    with on_device() if where == "device" else nullcontext():
        for ok in (1.0, 0.0, 1.0, 0.0, 0.0):
            bank.update(torch.tensor(ok))
    assert bank.info("ema")["updates"] == 2


def test_host_and_device_counting_continue_each_other(net):
    bank, reference = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    for step in range(12):
        move(net, step)
        reference.update()
        if step % 3:
            bank.update()
        else:
            with on_device():
                bank.update(torch.ones(()))
    assert bank.info("ema") == reference.info("ema")
    assert_same(bank.weights("ema"), reference.weights("ema"))


def test_a_bad_step_at_the_start_of_an_average_defers_it(net):
    bank = AverageBank(net, [EmaProfile("ema", 0.9, start_step=2)])
    bank.update()
    bank.update(torch.tensor(0.0))
    move(net, 1)
    bank.update()
    assert_same(bank.weights("ema"), copies(net))
    assert bank.info("ema")["updates"] == 0


LATE = EmaProfile("ema", 0.9, warmup=False, start_step=7, update_every=4)


@pytest.mark.parametrize("profile", [PLAIN, WARM, POWER, SWA, LATE], ids=lambda p: p.name)
def test_every_formula_gives_the_same_on_host_and_device(profile):
    net, profile = make_net(width=37, dtype=torch.float32), replace(profile, dtype="float32")
    host, device = AverageBank(net, [profile]), AverageBank(net, [profile])
    for step in range(40):
        move(net, step)
        host.update()
        with on_device():
            device.update(torch.ones(()))
    for name, value in host.weights("ema").items():
        # the power of a number may round differently in the last of 53 bits, which float32 rarely sees
        assert torch.allclose(value, device.weights("ema")[name], rtol=3e-7, atol=0)
    if profile.type != "power":
        assert_same(host.weights("ema"), device.weights("ema"))
    assert host.info("ema") == pytest.approx(device.info("ema"))


def test_an_update_is_one_operation_per_average(net):
    bank = AverageBank(net, [WARM, EmaProfile("slow", 0.999), SwaProfile("late", start_step=100)])
    bank.update()
    with Recorded() as seen:
        bank.update()
    assert seen.names == ["aten::_foreach_lerp_.Scalar"] * 2


@pytest.mark.parametrize("at_once", [1, 200, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averages_that_are_updated_together_have_the_bits_of_one_tensor_at_a_time(dtype, at_once, monkeypatch):
    monkeypatch.setattr(storage, "_AT_ONCE", at_once)
    net = make_net(dtype=dtype)
    decays = {"a": 0.9, "b": 0.99, "narrow": 0.5, "every_second": 0.8}
    more = {"narrow": {"dtype": "float32"}, "every_second": {"update_every": 2, "buffers": "average"}}
    bank = AverageBank(net, [EmaProfile(n, d, warmup=False, **more.get(n, {})) for n, d in decays.items()])
    wide = {n: bank[n].buffers[0].flat.dtype for n in decays}
    expected = {n: {key: p.detach().to(wide[n], copy=True) for key, p in net.named_parameters()} for n in decays}
    for step in range(1, 5):
        move(net, step)
        bank.update()
        for name, averages in expected.items():
            if name != "every_second" or step % 2 == 0:
                decay = decays[name] ** (2 if name == "every_second" else 1)
                for key, p in net.named_parameters():
                    averages[key] = averages[key].lerp(p.detach().to(averages[key].dtype), 1 - decay)
    for name, averages in expected.items():
        found = bank.weights(name)
        assert all(torch.equal(found[key], average) for key, average in averages.items()), name


def test_averages_in_another_precision_widen_the_weights_once():
    net = make_net(dtype=torch.float32)
    bank = AverageBank(net, [EmaProfile(f"e{i}", 0.9) for i in range(3)])
    bank.update()
    with Recorded() as seen:
        bank.update()
    assert seen.names == ["aten::_foreach_copy_", *["aten::_foreach_lerp_.Scalar"] * 3]


@pytest.mark.parametrize("profile", [WARM, POWER, SWA], ids=lambda p: p.name)
def test_the_fate_of_a_step_is_never_read_by_the_host(net, profile):
    bank = AverageBank(net, [profile])
    with on_device(), Recorded() as seen:
        bank.update(torch.ones(()))
        bank.update(torch.zeros(()))
    assert seen.names
    assert not [name for name in seen.names if "_local_scalar_dense" in name or "item" in name or "nonzero" in name]
    with Recorded() as seen:  # what reads numbers is noticed
        bank.info("ema")
    assert "aten::_local_scalar_dense" in seen.names or bank.info("ema")["updates"] == 1
