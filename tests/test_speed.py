"""Counting of operations, and reading of times, in the benchmark of speed."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.operations import CPU

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


def test_products_inside_written_out_functions_are_counted_as_explicit(scripts):
    atoms, slots, widths = 5, 7, (4, 8, 16)
    net = Network((1, *widths), "tanh", timestep=False, dtype=torch.float64, seed=1)
    rows = torch.rand(atoms, slots, 4, dtype=torch.float64)
    with scripts("speed_bound").Operations() as seen:
        moments = CPU.moments(rows, net)
        grad = torch.ones_like(moments.value, requires_grad=True)
        total = moments.value.sum() + moments.vjp(grad).square().sum()
        total.backward()
    pairs, last = atoms * slots, widths[-1]
    # values and derivatives: each of the two later layers forward, and backward to its input and its weights
    layers = sum(2 * (2 * pairs) * a * b for a, b in itertools.pairwise(widths))
    contraction = 2 * pairs * 4 * last
    # of the moments: forward and to the net; of the vjp: values and derivatives, forward and backward to both factors
    assert seen.flops == 3 * layers + 2 * contraction + 3 * 2 * contraction


def test_views_are_no_operations(scripts):
    with scripts("speed_bound").Operations() as seen:
        a, b = torch.ones(6, 4), torch.ones(4)
        before = seen.number
        a.T.reshape(4, 6)[1:].unsqueeze(0)
        views = seen.number - before
        a + b
        a.add_(b)
    assert (views, seen.number - before) == (0, 2)


def test_what_is_done_after_a_step_is_found_in_the_time_before_or_after_its_row(scripts):
    for lag in (0, 1):
        now, rows = 0.0, {}
        for step in range(1, 15):
            now += 0.5 + 2.0 * ((step - lag) % 4 == 0)
            rows[step] = now
        assert scripts("speed")._extra(rows, 4) == pytest.approx((2.0, 0.5))
