"""The Kalman filter: DeePMD-kit's numbers, blocks, updates skipped, state, and what a step measures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_ema.errors import CheckpointError
from deepmd_ema.optim import lkf as lkf_module
from deepmd_ema.optim.lkf import LKF, block_sizes

GOLDEN = Path(__file__).parent / "golden" / "optim" / "lkf.npz"
PEER = 1e-10
BLOCK = 10
GOOD, BAD = torch.tensor(1.0), torch.tensor(0.0)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: torch.tensor(file[name]) for name in file.files}


def numbered(golden, prefix):
    names = [name for name in golden if name.startswith(prefix) and name[len(prefix) :].isdigit()]
    return [golden[f"{prefix}{k}"] for k in range(len(names))]


def parameters(golden):
    return [(f"p{k}", nn.Parameter(value.clone())) for k, value in enumerate(numbered(golden, "filter/w/"))]


def measurement(golden, k):
    divisor = golden[f"filter/divisor/{k}"]
    gradients = [golden[f"filter/g/{i}/{k}"] / divisor for i in range(len(numbered(golden, "filter/w/")))]
    return gradients, golden[f"filter/error/{k}"]


def everything(named, lkf):
    state = lkf.state_dict()
    return [p.detach().clone() for _, p in named] + [state["memory"], *state["covariances"]]


def test_updates_are_those_of_deepmd_kit(golden):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    for k in range(5):
        lkf.update(*measurement(golden, k), GOOD)
    for (name, p), start, after in zip(named, numbered(golden, "filter/w/"), numbered(golden, "filter/after/")):
        assert (p.detach() - start).abs().max() > 1e4 * PEER
        assert (p.detach() - after).abs().max() < PEER, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_covariances_stay_symmetric_to_the_last_bit(dtype):
    generator = torch.Generator().manual_seed(2)
    sizes = (7, 64, 33)
    lkf = LKF([(f"p{k}", nn.Parameter(torch.zeros(n, dtype=dtype))) for k, n in enumerate(sizes)], 64)
    for _ in range(20):
        gradients = [torch.randn(n, generator=generator, dtype=dtype) for n in sizes]
        lkf.update(gradients, torch.tensor(0.1), GOOD)
    for covariance in lkf.state_dict()["covariances"]:
        assert torch.equal(covariance, covariance.mT)
        assert bool((torch.linalg.eigvalsh(covariance.double()) > 0).all())


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that an operation returned in memory of its own."""

    def __init__(self, held):
        super().__init__()
        self.held, self.elements = {t.untyped_storage().data_ptr() for t in held}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self.held:
            self.elements = max(self.elements, made.numel())
        return made


def test_an_update_takes_memory_for_some_rows_of_a_covariance_at_a_time(monkeypatch):
    monkeypatch.setattr(lkf_module, "AT_ONCE", 1000)
    lkf = LKF([("w", nn.Parameter(torch.zeros(100)))], 100)
    with Largest(lkf.state_dict(copy=lambda t: t)["covariances"]) as largest:
        lkf.update([torch.ones(100)], torch.tensor(0.1), GOOD)
    assert largest.elements == 1000


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ([6, 4, 9, 1], [10, 10]),
        ([6, 5, 9, 1], [6, 5, 10]),
        ([25], [10, 10, 5]),
        ([3, 25, 3, 7], [3, 10, 10, 5, 10]),
        ([20, 1], [10, 10, 1]),
        ([4, 4, 4, 4, 4], [8, 8, 4]),
        ([1, 1, 10, 1], [2, 10, 1]),
    ],
)
def test_neighbors_share_blocks_and_large_parameters_are_cut(counts, sizes):
    assert block_sizes(counts, 10) == sizes


def test_an_update_called_off_changes_no_bit(golden):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    lkf.update(*measurement(golden, 0), GOOD)
    before = everything(named, lkf)
    gradients, _ = measurement(golden, 1)
    lkf.update([g * torch.nan for g in gradients], torch.tensor(torch.inf), BAD)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(named, lkf)))


def test_the_filter_solves_a_linear_problem_as_least_squares_does():
    """Without forgetting a Kalman filter is recursive least squares; with a memory near 1 it is close to it."""
    generator = torch.Generator().manual_seed(0)
    inputs, weights = torch.randn(200, 6, generator=generator).double(), torch.randn(6, generator=generator).double()
    p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    lkf = LKF([("p", p)], BLOCK)
    for x in inputs:
        lkf.update([x], x @ (weights - p.detach()), GOOD)
    assert (p.detach() - weights).abs().max() < 1e-3


def test_state_continues_to_the_last_bit(golden, tmp_path):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    for k in range(2):
        lkf.update(*measurement(golden, k), GOOD)
    torch.save(lkf.state_dict(), tmp_path / "state.pt")
    others = [(name, nn.Parameter(p.detach().clone())) for name, p in named]
    restored = LKF(others, BLOCK)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for k in range(2, 5):
        lkf.update(*measurement(golden, k), GOOD)
        restored.update(*measurement(golden, k), GOOD)
    assert all(torch.equal(a, b) for a, b in zip(everything(named, lkf), everything(others, restored)))


def test_states_that_do_not_fit_are_refused_and_change_nothing(golden):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    lkf.update(*measurement(golden, 0), GOOD)
    state = lkf.state_dict()
    fresh = LKF(parameters(golden), 12)
    before = everything([], fresh)
    with pytest.raises(CheckpointError, match=r"blocks of up to 10 weights, optimizer\.kf_blocksize makes"):
        fresh.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"it is of Adam, optimizer\.type is LKF"):
        fresh.load_state_dict({"type": "Adam", "state": {}})
    renamed = dict(state, parameters={("other" if k == "p0" else k): v for k, v in state["parameters"].items()})
    with pytest.raises(CheckpointError, match="other parameters than this model's: other, p0"):
        fresh.load_state_dict(renamed)
    assert all(torch.equal(a, b) for a, b in zip(before, everything([], fresh)))


def test_frozen_parameters_are_left_out():
    free, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    lkf = LKF([("frozen", frozen), ("free", free)], BLOCK)
    lkf.update([torch.ones(3)], torch.tensor(1.0), GOOD)
    assert list(lkf.state_dict()["parameters"]) == ["free"]
    assert torch.equal(frozen, torch.ones(2))
    assert (free > 1).all()
