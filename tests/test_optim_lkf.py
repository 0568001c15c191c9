"""The Kalman filter: DeePMD-kit's numbers, blocks, updates skipped, state, and what a step measures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deepmd_ema.errors import CheckpointError
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


def test_updates_are_those_of_deepmd_kit_also_after_one_called_off_and_from_a_saved_state(golden, tmp_path):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    for k in range(2):
        lkf.update(*measurement(golden, k), GOOD)
    before = everything(named, lkf)
    lkf.update([g * torch.nan for g in measurement(golden, 2)[0]], torch.tensor(torch.inf), BAD)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(named, lkf)))
    torch.save(lkf.state_dict(), tmp_path / "state.pt")
    others = [(name, nn.Parameter(p.detach().clone())) for name, p in named]
    restored = LKF(others, BLOCK)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for k in range(2, 5):
        lkf.update(*measurement(golden, k), GOOD)
        restored.update(*measurement(golden, k), GOOD)
    assert all(torch.equal(a, b) for a, b in zip(everything(named, lkf), everything(others, restored)))
    for (name, p), start, after in zip(named, numbered(golden, "filter/w/"), numbered(golden, "filter/after/")):
        assert (p.detach() - start).abs().max() > 1e4 * PEER
        assert (p.detach() - after).abs().max() < PEER, name


def test_covariances_stay_symmetric_to_the_last_bit():
    generator, dtype = torch.Generator().manual_seed(2), torch.float32
    sizes = (7, 64, 33)
    lkf = LKF([(f"p{k}", nn.Parameter(torch.zeros(n, dtype=dtype))) for k, n in enumerate(sizes)], 64)
    for _ in range(20):
        gradients = [torch.randn(n, generator=generator, dtype=dtype) for n in sizes]
        lkf.update(gradients, torch.tensor(0.1), GOOD)
    for covariance in lkf.state_dict()["covariances"]:
        assert torch.equal(covariance, covariance.mT)
        assert bool((torch.linalg.eigvalsh(covariance.double()) > 0).all())


@pytest.mark.parametrize(
    ("counts", "sizes"), [([6, 5, 9, 1], [6, 5, 10]), ([3, 25, 3, 7], [3, 10, 10, 5, 10]), ([1, 1, 10, 1], [2, 10, 1])]
)
def test_neighbors_share_blocks_and_large_parameters_are_cut(counts, sizes):
    assert block_sizes(counts, 10) == sizes


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
