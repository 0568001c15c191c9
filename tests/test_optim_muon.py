"""AdaMuon: DeePMD-kit's numbers, singular values near one, steps called off on the device, state by name."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same
from torch import nn

from deepmd_ema import config as sections
from deepmd_ema.optim.build import build_optimizer, guarded_step, load_optimizer_state_by_name, optimizer_state_by_name
from deepmd_ema.optim.muon import newton_schulz

GOLDEN = Path(__file__).parent / "golden" / "optim"
CASES = json.loads((GOLDEN / "cases.json").read_text())
PEER = 1e-10
CPU = torch.device("cpu")
KINDS = ["AdaMuon"]


def parameters(dtype=torch.float64):
    """Return the parameters of the golden file before the first step, and the gradients of each step."""
    with np.load(GOLDEN / "steps.npz") as file:
        arrays = {name: torch.tensor(file[name]) for name in file.files}
    start = {
        name[2:]: nn.Parameter(value.to(dtype, copy=True)) for name, value in arrays.items() if name.startswith("w/")
    }
    steps = 1 + max(int(name.rpartition("/")[2]) for name in arrays if name.startswith("g/"))
    return start, [{name: arrays[f"g/{name}/{k}"].to(dtype) for name in start} for k in range(steps)], arrays


def take(optimizer, named, gradients, lr=1e-3, found_inf=0.0):
    for name, p in named.items():
        p.grad = gradients[name].clone()
    for group in optimizer.param_groups:
        group["lr"] = lr
    guarded_step(optimizer, torch.tensor(found_inf, dtype=torch.float64))


def everything(optimizer, named):
    return {
        "state": optimizer_state_by_name(optimizer, named),
        "weights": {name: p.detach().clone() for name, p in named.items()},
    }


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_deepmd_kit(case):
    kind, options = CASES[case]
    named, gradients, golden = parameters()
    optimizer = build_optimizer(getattr(sections, kind)(**options), named, CPU)
    for step in gradients:
        take(optimizer, named, step)
    for name, p in named.items():
        moved = (p.detach() - golden[f"w/{name}"]).abs().max().item()
        assert moved > 1e4 * PEER
        assert (p.detach() - golden[f"{case}/{name}"]).abs().max().item() < PEER, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_called_off_changes_no_bit(kind, steps_before):
    named, gradients, _ = parameters()
    optimizer = build_optimizer(getattr(sections, kind)(), named, CPU)
    for k in range(steps_before):
        take(optimizer, named, gradients[k])
    before = everything(optimizer, named)
    bad = {name: torch.full_like(g, torch.nan) for name, g in gradients[0].items()}
    take(optimizer, named, bad, found_inf=1.0)
    assert_same(before, everything(optimizer, named))
    twin, _, _ = parameters()
    other = build_optimizer(getattr(sections, kind)(), twin, CPU)
    for k in range(3):
        take(other, twin, gradients[k])
        if k >= steps_before:
            take(optimizer, named, gradients[k])
    assert_same(everything(other, twin), everything(optimizer, named))


@pytest.mark.parametrize("kind", KINDS)
def test_state_by_name_continues_to_the_last_bit(kind, tmp_path):
    named, gradients, _ = parameters()
    optimizer = build_optimizer(getattr(sections, kind)(), named, CPU)
    for k in range(2):
        take(optimizer, named, gradients[k])
    torch.save(optimizer_state_by_name(optimizer, named), tmp_path / "state.pt")
    other = copy.deepcopy(named)
    restored = build_optimizer(getattr(sections, kind)(), other, CPU)
    load_optimizer_state_by_name(restored, other, torch.load(tmp_path / "state.pt", weights_only=True))
    for k in range(2, 4):
        take(optimizer, named, gradients[k])
        take(restored, other, gradients[k])
    assert_same(everything(optimizer, named), everything(restored, other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_gradient_or_with_zeros_stays_finite(kind):
    named, gradients, _ = parameters(torch.float32)
    optimizer = build_optimizer(getattr(sections, kind)(weight_decay=0.0), named, CPU)
    before = {name: p.detach().clone() for name, p in named.items()}
    take(optimizer, named, {name: torch.zeros_like(g) for name, g in gradients[0].items()})
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    for p in named.values():
        p.grad = None
    guarded_step(optimizer, torch.tensor(0.0))
    assert all(torch.equal(p, before[name]) for name, p in named.items())


@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_the_minimum_of_a_matrix_problem(kind):
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    p = nn.Parameter(torch.zeros_like(wanted))
    optimizer = build_optimizer(getattr(sections, kind)(weight_decay=0.0), {"p": p}, CPU)
    for k in range(400):
        take(optimizer, {"p": p}, {"p": p.detach() - wanted}, lr=0.3 * (1 - k / 400))
    assert (p.detach() - wanted).abs().max() < 0.05


@pytest.mark.parametrize("shape", [(4, 4), (3, 17), (40, 8)])
def test_newton_schulz_brings_singular_values_near_one_and_keeps_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    out = newton_schulz(matrix).double()
    aligned = (u.T @ out @ vh.T).diagonal()
    assert aligned.min() > 0.6
    assert aligned.max() < 1.3
    assert (out - u @ torch.diag(aligned) @ vh).norm() < 0.1 * out.norm()


def test_newton_schulz_of_zeros_is_zero():
    assert not newton_schulz(torch.zeros(3, 4)).any()
