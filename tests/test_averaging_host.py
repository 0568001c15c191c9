"""Averages that are kept in host memory: copies on their way, their order, and the fate that travels with them.

Weights of a GPU reach them through staged copies. Without a GPU the same path is taken by ``through_staging``.
"""

import pickle

import pytest
import torch
from averaging_nets import (
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

from deepmd_ema.averaging import AverageBank, EmaProfile, SwaProfile

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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read_every", [1, 4, 12])
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


def test_an_update_requests_a_copy_and_the_next_one_takes_it_in():
    net, staged, _ = pair(SWA)
    average = staged["ema"]
    train(net, staged, range(1))
    first = net.first.weight.detach().clone()
    assert not torch.equal(average.tensors[0], first)
    train(net, staged, range(1, 2))
    assert torch.equal(average.tensors[0], first)
    assert torch.allclose(staged.weights("ema")["first.weight"], (first + net.first.weight.detach()) / 2)


def test_what_moves_after_the_copy_does_not_reach_the_average():
    net, staged, direct = pair(WARM)
    for bank in (staged, direct):
        bank.update()
    expected = direct.weights("ema")
    with torch.no_grad():
        net.first.weight.fill_(torch.nan)
    for name, value in staged.weights("ema").items():
        assert torch.equal(value, expected[name])


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


def test_a_swap_takes_in_what_is_on_its_way_and_puts_everything_back():
    net, staged, direct = pair(SWA)
    for step in range(3):
        move(net, step)
        staged.update()
        direct.update()
    live = copies(net)
    with staged.swapped_in("ema"):
        inside = copies(net)
        assert_same(staged.weights("live"), live)
    assert_same(copies(net), live)
    assert_same(inside, direct.weights("ema"))
    assert_same(staged.weights("ema"), direct.weights("ema"))


def test_starting_again_drops_what_is_on_its_way():
    net, staged, _ = pair(SWA)
    train(net, staged, range(3))
    net.load_state_dict(Net().state_dict())
    staged.load_state_dict(None)
    assert_same(staged.weights("ema"), copies(net))
    assert staged.info("ema")["updates"] == 0


def test_a_parameter_switched_on_while_a_copy_is_on_its_way_starts_live():
    net, staged, direct = pair(WARM)
    for step in range(6):
        net.first.requires_grad_(step < 2 or step > 3)
        move(net, step)
        with through_staging():
            staged.update()
        direct.update()
    assert_same(staged.weights("ema"), direct.weights("ema"))


def test_a_bank_with_a_copy_on_its_way_can_be_pickled():
    net, staged, direct = pair(WARM)
    for step in range(3):
        move(net, step)
        staged.update()
        direct.update()
    assert_same(pickle.loads(pickle.dumps(staged)).weights("ema"), direct.weights("ema"))


def test_the_memory_of_copies_counts():
    _, staged, direct = pair(SWA)
    assert staged["ema"].num_bytes == 2 * direct["ema"].num_bytes


def test_weights_of_the_host_need_no_staging():
    net = make_net()
    bank = AverageBank(net, [SwaProfile("ema", device="cpu")])
    assert bank["ema"].staging is None


@pytest.mark.gpu
@pytest.mark.parametrize("with_ok", [False, True])
def test_averages_of_a_gpu_are_kept_in_pinned_host_memory(with_ok):
    net = make_net(dtype=torch.float32).cuda()
    host = EmaProfile("host", 0.9, device="cpu")
    bank = AverageBank(net, [host, EmaProfile("near", 0.9)])
    storage = bank["host"]
    for step in range(8):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * step)
        bank.update(torch.tensor(float(step != 3), device="cuda") if with_ok else None)
    assert all(tensor.device.type == "cpu" for tensor in storage.tensors)
    assert all(flat.is_pinned() for flat in storage.staging.flats)
    assert bank.info("host")["updates"] == (7 if with_ok else 8)
    near = bank.weights("near")
    for name, value in bank.weights("host").items():
        assert torch.allclose(value, near[name], rtol=1e-6, atol=1e-6)
    live = {name: value.cpu() for name, value in copies(net).items()}
    with bank.swapped_in("host"):
        assert not torch.equal(net.first.weight.cpu(), live["first.weight"])
    assert_same({name: value.cpu() for name, value in copies(net).items()}, live)
