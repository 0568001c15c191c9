"""Optimizers and averages on a GPU: few kernels, no wait, no number of the host, memory that stays in its place."""

from contextlib import contextmanager

import pytest
import torch
from helpers import assert_same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.config.schema import optim as sections
from deepmd_ema.optim.build import (
    build_optimizer,
    guarded_step,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS = ["Adam", "AdamW", "AdaMuon", "HybridMuon", "AdamWScheduleFree", "SOAP"]
MUONS = ["AdaMuon", "HybridMuon"]
DTYPES = [torch.float64, torch.float32]
LR = 1e-3
IN_HALF = 3e-5  # directions are in bfloat16 and float16, and sums of products are in another order


class Kernels(TorchDispatchMode):
    """Counts operations that a GPU launches: those with a result on it that is no view; a list of tensors is one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        tensors = [t for t in torch.utils._pytree.tree_leaves((found, args)) if isinstance(t, torch.Tensor)]
        no_kernel = function._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view"))
        self.count += not view and not no_kernel and any(t.is_cuda for t in tensors)
        return found


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


@pytest.mark.parametrize(("kind", "most"), [("Adam", 5), ("AdamW", 5), ("AdaMuon", 85), ("HybridMuon", 150)])
def test_an_update_is_few_kernels(kind, most):
    named = network()
    optimizer = build(kind, named)
    for number in range(2):
        step(optimizer, named, number)
    with Kernels() as seen:
        guarded_step(optimizer, torch.zeros((), device="cuda"))
    assert 0 < seen.count <= most


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


@pytest.mark.parametrize("kind", KINDS)
def test_state_by_name_continues_to_the_last_bit(kind):
    named, other = network(), network()
    optimizer, restored = build(kind, named), build(kind, other)
    for number in range(2):
        step(optimizer, named, number)
    step(restored, other, 7)
    load_optimizer_state(restored, other, optimizer_state(optimizer, named))
    with torch.no_grad():
        for name, p in other.items():
            p.copy_(named[name])
    for number in range(2, 4):
        step(optimizer, named, number)
        step(restored, other, number)
    assert_same(everything(optimizer, named), everything(restored, other))


@pytest.mark.parametrize("kind", MUONS)
def test_matrices_that_share_a_stack_get_the_updates_of_the_cpu(kind):
    ends = []
    for device in ("cpu", "cuda"):
        named = network(device)
        optimizer = build(kind, named)
        for number in range(3):
            if device == "cuda":
                step(optimizer, named, number)
            else:
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(number)
                    for p in named.values():
                        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                set_learning_rate(optimizer, LR)
                guarded_step(optimizer, torch.zeros(()))
        ends.append({name: p.detach().cpu() for name, p in named.items()})
    first = network("cpu")
    for name, value in ends[0].items():
        assert (value - first[name]).abs().max() > LR / 10 > 3 * IN_HALF
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=IN_HALF, msg=name)


EMA = EmaProfile("ema", 0.9)
AVERAGES = {
    "one": ([EMA], 16),
    "two": ([EMA, PowerProfile("power", 3.0)], 21),
    "five": ([EMA, *(EmaProfile(f"e{k}", 1 - 0.1**k) for k in (1, 2, 3)), SwaProfile("flat")], 35),
    "some are due": ([EMA, EmaProfile("rare", 0.9, update_every=50)], 16),
    "later": ([EmaProfile("late", 0.9, start_step=2)], 20),
    "first and third": ([EMA, EmaProfile("rare", 0.9, update_every=50), SwaProfile("flat")], 26),
    "host": ([EmaProfile("host", 0.9, device="cpu")], 5),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_update_of_averages_is_few_kernels_and_does_not_wait(name):
    profiles, most = AVERAGES[name]
    module = module_of(network())
    bank, ok = AverageBank(module, profiles), torch.ones((), device="cuda")
    for _ in range(3):
        bank.update(ok)
    with Kernels() as seen, no_wait():
        bank.update(ok)
    assert 0 < seen.count <= most


def test_a_step_number_on_the_device_gives_the_bits_of_one_on_the_host_and_memory_stays_in_its_place():
    named = network()
    profiles = [EMA, PowerProfile("power", 3.0, update_every=2), EmaProfile("late", 0.9, start_step=4, dtype="float32")]
    banks = [AverageBank(module_of(named), profiles) for _ in range(2)]
    number, where = torch.zeros((), dtype=torch.int64, device="cuda"), []
    for count in range(9):
        with torch.no_grad():
            for p in named.values():
                p.add_(0.1).mul_(torch.nan if count == 5 else 1)
            ok = torch.tensor(float(count != 5), device="cuda")
            number.add_(1)
            with no_wait() if count else torch.no_grad():
                banks[0].update(ok)
                banks[1].apply(banks[1].begin(), ok, step=number)
            if count == 5:
                for p, value in zip(named.values(), network().values()):
                    p.copy_(value)
        tensors = [t for average in map(banks[1].__getitem__, banks[1].names) for t in average.tensors]
        counters = [banks[1][name].on_device for name in banks[1].names]
        where.append([t.data_ptr() for t in [*tensors, *counters]])
    assert len({tuple(addresses) for addresses in where}) == 1
    for name in banks[0].names:
        assert_same(banks[0].weights(name), banks[1].weights(name))
        assert banks[0].info(name) == banks[1].info(name)


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


def test_the_numbers_of_the_kalman_filter_are_drawn_by_one_copy_that_does_not_wait():
    from deepmd_ema.training.kalman import KalmanStep

    filter_ = object.__new__(KalmanStep)
    filter_._seed = 3
    with no_wait(), Kernels() as seen:
        numbers = filter_._draws(7, torch.device("cuda"))
    assert seen.count == 1
    assert torch.equal(numbers.cpu(), filter_._draws(7, torch.device("cpu")))
