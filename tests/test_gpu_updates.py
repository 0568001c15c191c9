"""Optimizers and averages on a GPU: few kernels, no wait, no number of the host, memory that stays in its place."""

from contextlib import contextmanager

import pytest
import torch
from helpers import assert_same
from torch import nn

from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.config.schema import optim as sections
from deepmd_ema.optim.build import (
    build_optimizer,
    guarded_step,
    optimizer_state,
    set_learning_rate,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS = ["Adam", "AdamW", "AdaMuon", "HybridMuon", "AdamWScheduleFree", "SOAP"]
DTYPES = [torch.float64, torch.float32]
LR = 1e-3


@contextmanager
def no_wait():
    """Make every wait for the device inside an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def network(device="cuda", dtype=torch.float64):
    """Return parameters of a network: matrices of eleven shapes, biases, a scalar."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"bias": (12,), "scale": (1,), "cube": (3, 4, 5)}
    for k, shape in enumerate([(1, 12), (12, 24), (24, 48), (48, 24), (24, 24), (24, 24), (24, 1), (96, 24), (8, 40)]):
        shapes |= {f"{k}.weight": shape, f"{k}.bias": shape[1:]}
    values = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(device)) for name, value in values.items()}


def module_of(named):
    return nn.ParameterDict({name.replace(".", "_"): p for name, p in named.items()})


def step(optimizer, named, number, ok=1.0, rate=LR):
    """Take a step by gradients that depend on its number; they are not finite where ``ok`` is 0."""
    generator = torch.Generator().manual_seed(number)
    device = named["bias"].device
    for p in named.values():
        gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad = (gradient if ok else gradient * torch.nan).to(device)
    set_learning_rate(optimizer, rate)
    found_inf = torch.tensor(1 - ok, device=device)
    with no_wait():
        guarded_step(optimizer, found_inf)


def build(kind, named, **options):
    return build_optimizer(getattr(sections, f"{kind}Config")(**options), named)


def everything(optimizer, named):
    weights = {name: p.detach().cpu() for name, p in named.items()}
    return {"weights": weights, "state": optimizer_state(optimizer, named)["state"]}


def addresses(optimizer, named):
    return [t.data_ptr() for p in named.values() for t in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize("groups", [[], [sections.GroupConfig(pattern="*.weight", lr_scale=0.3)]], ids=["", "groups"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_on_the_device_gives_the_bits_of_one_on_the_host(kind, dtype, groups):
    found = []
    for on_device in (False, True):
        named = network(dtype=dtype)
        optimizer = build(kind, named, weight_decay=0.05, groups=groups)
        rate = torch.zeros((), dtype=torch.float64, device="cuda")
        for number in range(4):
            now = 0.3 * LR / (1 + number)
            rate.copy_(torch.tensor(now))
            step(optimizer, named, number, rate=rate if on_device else now)
        found.append(everything(optimizer, named))
    assert_same(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_called_off_changes_no_bit_and_all_memory_stays_in_its_place(kind, dtype):
    named = network(dtype=dtype)
    optimizer = build(kind, named)
    where = addresses(optimizer, named)
    for number in range(2):
        step(optimizer, named, number)
    before = everything(optimizer, named)
    step(optimizer, named, 9, ok=0.0)
    assert_same(before, everything(optimizer, named))
    assert addresses(optimizer, named) == where


EMA = EmaProfile("ema", 0.9)


def test_averages_on_the_device_count_as_averages_on_the_host_do():
    named = network("cpu")
    profiles = [
        EMA,
        PowerProfile("power", 3.0),
        SwaProfile("flat", start_step=3),
        EmaProfile("rare", 0.9, update_every=3),
    ]
    near = AverageBank(module_of(named), profiles)
    far = AverageBank(module_of(network()), profiles)
    for _ in range(8):
        near.update()
        far.update(torch.ones((), device="cuda"))
    for name in near.names:
        assert far.info(name) == pytest.approx(near.info(name))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_first_step_that_was_not_finite_is_noted_in_place_without_a_wait(as_tensor):
    from deepmd_ema.training.step import Step

    step_ = Step(nn.Linear(2, 2, device="cuda"), lambda step: 1.0)
    where = step_._first_bad.data_ptr(), step_._own_fault.data_ptr()
    number, found = torch.zeros((), dtype=torch.int64, device="cuda"), []
    finite = [torch.tensor(value, device="cuda") for value in (True, False, True, False)]
    with no_wait():
        for count, value in enumerate(finite, 1):
            number.add_(1)
            found.append(step_._note(value, number if as_tensor else count))
    assert torch.stack(found).tolist() == [1, 0, 0, 0]
    assert (int(step_._first_bad), bool(step_._own_fault)) == (2, True)
    assert where == (step_._first_bad.data_ptr(), step_._own_fault.data_ptr())
