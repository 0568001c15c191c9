"""AdaMuon and HybridMuon: DeePMD-kit's numbers, singular values near one, steps skipped, state by name."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same
from torch import nn

from deepmd_ema.config.schema import optim as sections
from deepmd_ema.optim.build import build_optimizer, guarded_step, load_optimizer_state, optimizer_state
from deepmd_ema.optim.muon import CONVERGED, MUON, gram_newton_schulz, newton_schulz, route, view_shape

GOLDEN = Path(__file__).parent / "golden" / "optim"
CASES = json.loads((GOLDEN / "cases.json").read_text())
PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
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


def everything(optimizer, named):
    return {
        "state": optimizer_state(optimizer, named),
        "weights": {name: p.detach().clone() for name, p in named.items()},
    }


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


def orthogonal(matrices, coefficients):
    """Return orthogonal factors in bfloat16, by the operations of DeePMD-kit: on one machine the same bits as ours."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(torch.bfloat16)
    x = x / x.norm(dim=(1, 2), keepdim=True)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def way_of(case, name, p):
    """Return ``muon``, ``adam`` or ``adamw``: how a parameter is updated in a case."""
    kind, options = CASES[case]
    if kind == "HybridMuon":
        return route(name, tuple(p.shape), options.get("muon_mode", "slice"))
    return "muon" if kind == "AdaMuon" and p.ndim > 1 else "adam"


def after_adam(w, gradients, group, decay, eps):
    """Return a parameter after all steps of Adam, by its formula in float64."""
    b1, b2 = group["adam_beta1"], group["adam_beta2"]
    rate = LR / group["lr_adjust"] if group["lr_adjust"] > 0 else LR
    mean = square = torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        mean, square = mean.lerp(g, 1 - b1), square.lerp(g * g, 1 - b2)
        w = w * (1 - rate * decay) - rate * mean / (1 - b1**t) / ((square / (1 - b2**t)).sqrt() + eps)
    return w


def after_muon(w, gradients, group, shape, kind):
    """Return a parameter after all steps of a kind of Muon, by the formulas in the docstrings, in float64.

    Directions of HybridMuon are scaled in bfloat16.
    """
    count, rows, columns = shape
    momentum, lengths = group["momentum"], max(1.0, rows / columns) ** 0.5
    scale = lengths if group["lr_adjust"] > 0 else group["lr_adjust_coeff"] * max(rows, columns) ** 0.5
    mean = square = torch.zeros(shape, dtype=w.dtype)
    score = torch.full((count,), 0.5, dtype=w.dtype)
    for g in (g.reshape(shape) for g in gradients):
        mean = mean.lerp(g, 1 - momentum)
        update = g.lerp(mean, momentum)
        if kind == "AdaMuon":
            factor = orthogonal(update.sign(), MUON).double()
            square = momentum * square + (1 - momentum) * factor**2
            change = factor / (square.sqrt() + 1e-8)
            change = change / change.norm() * 0.2 * (rows * columns) ** 0.5 * scale
        else:
            change = orthogonal(update, CONVERGED) * scale
        if group.get("magma_muon"):
            cosine = torch.cosine_similarity(mean.flatten(1), g.flatten(1))
            low, high = (1 / (1 + np.exp(-x / 2)) for x in (-1, 1))
            score = 0.9 * score + 0.1 * (torch.sigmoid(cosine / 2) - low) / (high - low)
            change = change * (0.1 + 0.9 * score).to(change.dtype)[:, None, None]
        w = (1 - LR * group["weight_decay"]) * w - LR * change.double().reshape(w.shape)
    return w


def expected(case, name):
    """Return a parameter after all steps of a case without the Gram path."""
    kind, options = CASES[case]
    group = vars(getattr(sections, f"{kind}Config")(**options))
    start, steps, _ = parameters()
    w, gradients = start[name].detach(), [step[name] for step in steps]
    way = way_of(case, name, w)
    if way != "muon":
        decay, eps = group["weight_decay"] * (way == "adamw"), 1e-20 if kind == "HybridMuon" else 1e-8
        return after_adam(w, gradients, group, decay, eps)
    shape = view_shape(tuple(w.shape), group["muon_mode"]) if kind == "HybridMuon" else (1, len(w), w[0].numel())
    return after_muon(w, gradients, group, shape, kind)


WITHOUT_GRAM = [case for case, (kind, options) in CASES.items()
                if kind == "AdaMuon" or (kind == "HybridMuon" and not options.get("enable_gram", True))]  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_GRAM)
def test_updates_are_those_of_the_formulas(case):
    start = parameters()[0]
    assert farthest(case, {name: expected(case, name) for name in start}, start) < IN_SINGLE


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_deepmd_kit(case):
    start, _, golden = parameters()
    theirs = {name: golden[f"{case}/{name}"] for name in start}
    for name, p in start.items():
        tolerance = IN_HALF if way_of(case, name, p) == "muon" else IN_SINGLE
        assert (theirs[name] - p.detach()).abs().max().item() > 10 * tolerance
        assert farthest(case, theirs, [name]) < tolerance, name


@pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
@pytest.mark.timeout(600)
def test_updates_are_those_that_deepmd_kit_makes_on_this_machine(tmp_path):
    command = [Path(PEER) / "bin" / "python", GOLDEN / "make.py", tmp_path / "steps.npz"]
    subprocess.run(command, check=True, timeout=590, stdout=sys.stderr)
    start = parameters()[0]
    with np.load(tmp_path / "steps.npz") as file:
        for case in CASES:
            theirs = {name: file[f"{case}/{name}"] for name in start}
            assert farthest(case, theirs, start) < (IN_SINGLE if case in WITHOUT_GRAM else IN_HALF), case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_called_off_changes_no_bit(kind, steps_before):
    named, gradients, _ = parameters()
    optimizer = build_optimizer(getattr(sections, f"{kind}Config")(), named)
    for k in range(steps_before):
        take(optimizer, named, gradients[k])
    before = everything(optimizer, named)
    bad = {name: torch.full_like(g, torch.nan) for name, g in gradients[0].items()}
    take(optimizer, named, bad, found_inf=1.0)
    assert_same(before, everything(optimizer, named))
    with torch.no_grad():
        optimizer._update_unless(torch.tensor(True))  # as where the flag is on a GPU
    assert_same(before, everything(optimizer, named))
    reference, _, _ = parameters()
    other = build_optimizer(getattr(sections, f"{kind}Config")(), reference)
    for k in range(3):
        take(other, reference, gradients[k])
        if k >= steps_before:
            take(optimizer, named, gradients[k])
    assert_same(everything(other, reference), everything(optimizer, named))


@pytest.mark.parametrize("kind", KINDS)
def test_state_by_name_continues_to_the_last_bit(kind, tmp_path):
    named, gradients, _ = parameters()
    optimizer = build_optimizer(getattr(sections, f"{kind}Config")(), named)
    for k in range(2):
        take(optimizer, named, gradients[k])
    torch.save(optimizer_state(optimizer, named), tmp_path / "state.pt")
    other = copy.deepcopy(named)
    restored = build_optimizer(getattr(sections, f"{kind}Config")(), other)
    load_optimizer_state(restored, other, torch.load(tmp_path / "state.pt", weights_only=True))
    for k in range(2, 4):
        take(optimizer, named, gradients[k])
        take(restored, other, gradients[k])
    assert_same(everything(optimizer, named), everything(restored, other))


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


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_follows_the_learning_rate_of_the_groups(kind):
    moved = []
    for lr in (1e-3, 3e-3):
        named, gradients, golden = parameters()
        take(build_optimizer(getattr(sections, f"{kind}Config")(), named), named, gradients[0], lr)
        moved.append({name: p.detach() - golden[f"w/{name}"] for name, p in named.items()})
    for name, change in moved[0].items():
        torch.testing.assert_close(moved[1][name], 3 * change, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_the_minimum_of_a_matrix_problem(kind):
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    p = nn.Parameter(torch.zeros_like(wanted))
    optimizer = build_optimizer(getattr(sections, f"{kind}Config")(weight_decay=0.0), {"p": p})
    for k in range(400):
        take(optimizer, {"p": p}, {"p": p.detach() - wanted}, lr=0.3 * (1 - k / 400))
    assert (p.detach() - wanted).abs().max() < 0.05


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


@pytest.mark.parametrize("method", [newton_schulz, gram_newton_schulz])
def test_a_matrix_of_zeros_stays_zero(method):
    assert not method(torch.zeros(1, 3, 4)).any()


@pytest.mark.parametrize(
    ("name", "shape", "mode", "expected"),
    [
        ("layers.0.weight", (3, 4), "slice", "muon"),
        ("layers.0.weight", (1, 4), "slice", "adam"),
        ("layers.0.bias", (3, 4), "slice", "adam"),
        ("net.oldBiases.12", (3, 4), "slice", "adam"),
        ("net.Adam_matrix", (3, 4), "slice", "adam"),
        ("adam_net.matrix", (3, 4), "slice", "muon"),
        ("net.adamw_vector", (4,), "slice", "adamw"),
        ("cube", (2, 3, 4), "slice", "muon"),
        ("cube", (2, 3, 4), "2d", "adamw"),
        ("thin", (3, 1, 4), "2d", "muon"),
    ],
)
def test_who_goes_to_muon_is_said_by_name_and_shape(name, shape, mode, expected):
    assert route(name, shape, mode) == expected


def test_arrays_are_taken_for_matrices_by_the_mode():
    assert view_shape((2, 3, 1, 4, 5), "slice") == (6, 4, 5)
    assert view_shape((2, 3, 1, 4, 5), "flat") == (1, 24, 5)
    assert view_shape((3, 4), "2d") == (1, 3, 4)
