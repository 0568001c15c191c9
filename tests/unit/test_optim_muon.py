"""AdaMuon and HybridMuon: DeePMD-kit's numbers, singular values near one, steps skipped, state by
name.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deepmd_ema.config.schema import optim as sections
from deepmd_ema.optim.build import build_optimizer, guarded_step
from deepmd_ema.optim.muon import route

GOLDEN = Path(__file__).parents[1] / "golden" / "optim"
CASES = json.loads((GOLDEN / "cases.json").read_text())
# Updates of Adam and AdaMuon are made in float32. The last place of a change by the learning rate,
# 1e-3, is 1.2e-10, and there are four steps. CPUs differ there: torch takes square roots by MKL,
# which does not round them correctly.
IN_SINGLE = 5e-10
# Directions are made in bfloat16, with 2**-8 of an element as the last place. CPUs add up the
# products of a matrix in different orders; where a sum lies between two numbers of bfloat16, the
# order decides which one it becomes. One such element of `large` changes by 1e-3 * 2**-8 times a
# scale of up to 3.2, which is 1.3e-5. DeePMD-kit itself is as far from its golden numbers on
# another machine, and so is its Gram path, in float16 and compiled, from ours.
IN_HALF = 2e-5
LR = 1e-3
KINDS = ["AdaMuon", "HybridMuon"]


def parameters(dtype=torch.float64):
    """Return the parameters of the golden file before the first step, and the gradients of each
    step.
    """
    with np.load(GOLDEN / "steps.npz") as file:
        arrays = {name: torch.tensor(file[name]) for name in file.files}
    start = {
        name[2:]: nn.Parameter(value.to(dtype, copy=True))
        for name, value in arrays.items()
        if name.startswith("w/")
    }
    steps = 1 + max(
        int(name.rpartition("/")[2]) for name in arrays if name.startswith("g/")
    )
    return (
        start,
        [
            {name: arrays[f"g/{name}/{k}"].to(dtype) for name in start}
            for k in range(steps)
        ],
        arrays,
    )


def take(optimizer, named, gradients, lr=LR, found_inf=0.0):
    for name, p in named.items():
        p.grad = gradients[name].clone()
    for group in optimizer.param_groups:
        group["lr"] = lr
    guarded_step(optimizer, torch.tensor(found_inf, dtype=torch.float64))


def way_of(case, name, p):
    """Return ``muon``, ``adam`` or ``adamw``: how a parameter is updated in a case."""
    kind, options = CASES[case]
    if kind == "HybridMuon":
        return route(name, tuple(p.shape), options.get("muon_mode", "slice"))
    return "muon" if kind == "AdaMuon" and p.ndim > 1 else "adam"


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_deepmd_kit(case):
    kind, options = CASES[case]
    (start, _, golden), (named, gradients, _) = parameters(), parameters()
    optimizer = build_optimizer(getattr(sections, f"{kind}Config")(**options), named)
    for step in gradients:
        take(optimizer, named, step)
    for name, p in start.items():
        tolerance = IN_HALF if way_of(case, name, p) == "muon" else IN_SINGLE
        theirs = golden[f"{case}/{name}"]
        assert (theirs - p.detach()).abs().max().item() > 10 * tolerance
        assert (theirs - named[name].detach()).abs().max().item() < tolerance, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_gradient_or_with_zeros_stays_finite(kind):
    named, gradients, _ = parameters(torch.float32)
    optimizer = build_optimizer(
        getattr(sections, f"{kind}Config")(weight_decay=0.0), named
    )
    before = {name: p.detach().clone() for name, p in named.items()}
    take(
        optimizer,
        named,
        {name: torch.zeros_like(g) for name, g in gradients[0].items()},
    )
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    for p in named.values():
        p.grad = None
    guarded_step(optimizer, torch.tensor(0.0))
    assert all(torch.equal(p, before[name]) for name, p in named.items())
