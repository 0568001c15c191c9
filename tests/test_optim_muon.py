"""AdaMuon and HybridMuon: DeePMD-kit's numbers, singular values near one, steps skipped, state by name."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deepmd_ema.config.schema import optim as sections
from deepmd_ema.optim.build import build_optimizer, guarded_step
from deepmd_ema.optim.muon import CONVERGED, gram_newton_schulz, newton_schulz, route

GOLDEN = Path(__file__).parent / "golden" / "optim"
CASES = json.loads((GOLDEN / "cases.json").read_text())
# Updates of Adam and AdaMuon are made in float32. The last place of a change by the learning rate, 1e-3, is 1.2e-10,
# and there are four steps. CPUs differ there: torch takes square roots by MKL, which does not round them correctly.
IN_SINGLE = 5e-10
# Directions are made in bfloat16, with 2**-8 of an element as the last place. CPUs add up the products of a matrix in
# different orders; where a sum lies between two numbers of bfloat16, the order decides which one it becomes. One such
# element of `large` changes by 1e-3 * 2**-8 times a scale of up to 3.2, which is 1.3e-5. DeePMD-kit itself is as far
# from its golden numbers on another machine, and so is its Gram path, in float16 and compiled, from ours.
IN_HALF = 2e-5
LR = 1e-3
KINDS = ["AdaMuon", "HybridMuon"]


def parameters(dtype=torch.float64):
    """Return the parameters of the golden file before the first step, and the gradients of each step."""
    with np.load(GOLDEN / "steps.npz") as file:
        arrays = {name: torch.tensor(file[name]) for name in file.files}
    start = {
        name[2:]: nn.Parameter(value.to(dtype, copy=True)) for name, value in arrays.items() if name.startswith("w/")
    }
    steps = 1 + max(int(name.rpartition("/")[2]) for name in arrays if name.startswith("g/"))
    return start, [{name: arrays[f"g/{name}/{k}"].to(dtype) for name in start} for k in range(steps)], arrays


def take(optimizer, named, gradients, lr=LR, found_inf=0.0):
    for name, p in named.items():
        p.grad = gradients[name].clone()
    for group in optimizer.param_groups:
        group["lr"] = lr
    guarded_step(optimizer, torch.tensor(found_inf, dtype=torch.float64))


def updated(case):
    """Return the parameters after all steps of a case."""
    kind, options = CASES[case]
    named, gradients, _ = parameters()
    optimizer = build_optimizer(getattr(sections, f"{kind}Config")(**options), named)
    for step in gradients:
        take(optimizer, named, step)
    return {name: p.detach() for name, p in named.items()}


def farthest(case, theirs, names):
    """Return the largest difference of our parameters after all steps from ``theirs``."""
    ours = updated(case)
    return max((ours[name] - torch.as_tensor(theirs[name])).abs().max().item() for name in names)


def way_of(case, name, p):
    """Return ``muon``, ``adam`` or ``adamw``: how a parameter is updated in a case."""
    kind, options = CASES[case]
    if kind == "HybridMuon":
        return route(name, tuple(p.shape), options.get("muon_mode", "slice"))
    return "muon" if kind == "AdaMuon" and p.ndim > 1 else "adam"


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_deepmd_kit(case):
    start, _, golden = parameters()
    theirs = {name: golden[f"{case}/{name}"] for name in start}
    for name, p in start.items():
        tolerance = IN_HALF if way_of(case, name, p) == "muon" else IN_SINGLE
        assert (theirs[name] - p.detach()).abs().max().item() > 10 * tolerance
        assert farthest(case, theirs, [name]) < tolerance, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_gradient_or_with_zeros_stays_finite(kind):
    named, gradients, _ = parameters(torch.float32)
    optimizer = build_optimizer(getattr(sections, f"{kind}Config")(weight_decay=0.0), named)
    before = {name: p.detach().clone() for name, p in named.items()}
    take(optimizer, named, {name: torch.zeros_like(g) for name, g in gradients[0].items()})
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    for p in named.values():
        p.grad = None
    guarded_step(optimizer, torch.tensor(0.0))
    assert all(torch.equal(p, before[name]) for name, p in named.items())


SHAPES = [(4, 4), (3, 17), (40, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("method", "low", "high"),
    [(newton_schulz, 0.6, 1.3), (partial(newton_schulz, coefficients=CONVERGED), 0.97, 1.03),
     (gram_newton_schulz, 0.83, 1.15)],
    ids=["muon", "converged", "gram"],
)  # fmt: skip
def test_singular_values_come_near_one_and_directions_stay(shape, method, low, high):
    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for matrix, out in zip(matrices, method(matrices).double()):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        aligned = (u.T @ out @ vh.T).diagonal()
        assert low < aligned.min()
        assert aligned.max() < high
        assert (out - u @ torch.diag(aligned) @ vh).norm() < 0.1 * out.norm()


@pytest.mark.parametrize(
    ("name", "shape", "mode", "expected"),
    [
        ("layers.0.weight", (3, 4), "slice", "muon"), ("layers.0.weight", (1, 4), "slice", "adam"),
        ("net.oldBiases.12", (3, 4), "slice", "adam"), ("net.Adam_matrix", (3, 4), "slice", "adam"),
        ("net.adamw_vector", (4,), "slice", "adamw"), ("cube", (2, 3, 4), "slice", "muon"),
        ("cube", (2, 3, 4), "2d", "adamw"), ("thin", (3, 1, 4), "2d", "muon"),
    ],
)  # fmt: skip
def test_who_goes_to_muon_is_said_by_name_and_shape(name, shape, mode, expected):
    assert route(name, shape, mode) == expected
