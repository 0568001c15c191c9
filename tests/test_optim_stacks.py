"""Parameters as vectors and matrices in stacks: every entry comes back, and directions do not depend on the stack."""

import pytest
import torch
from torch import nn

from deepmd_ema.optim import guarded
from deepmd_ema.optim.guarded import ParameterVector, batches
from deepmd_ema.optim.muon import gram_newton_schulz, newton_schulz
from deepmd_ema.optim.stacks import MAX_FILL_WORK, Stacks

CPU = torch.device("cpu")
SHAPES = [(1, 12, 24), (1, 24, 12), (3, 5, 7), (1, 24, 24), (1, 1, 30), (2, 24, 24), (1, 12, 24)]
IN_BFLOAT16 = 0.02  # of entries of at most 1, after five steps whose sums are in another order
IN_FLOAT32 = 1e-4


def is_square(rows, columns):
    return rows == columns


def entries(shapes, seed=0):
    size = sum(count * rows * columns for count, rows, columns in shapes)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fill", [False, True])
def test_every_entry_of_a_matrix_comes_back_from_its_stack(fill):
    stacks = Stacks(SHAPES, is_square, CPU, fill)
    first, second = entries(SHAPES), entries(SHAPES, 1)
    for vector, found in zip((first, second), stacks.stack([first, second])):
        assert torch.equal(stacks.flatten(found), vector)
        assert sum(t.square().sum() for t in found) == pytest.approx(vector.square().sum())  # the rest is 0
    numbers = torch.cat(stacks.matrices)
    assert torch.equal(numbers[stacks.order], torch.arange(sum(count for count, _, _ in SHAPES)))


def test_small_matrices_of_one_kind_share_a_stack_and_lie_with_the_longer_side_as_columns():
    found = Stacks(SHAPES, is_square, CPU, fill=True).stacks
    assert [(s.kind, s.rows, s.columns, s.count) for s in found] == [(True, 24, 24, 3), (False, 12, 30, 7)]
    alone = Stacks(SHAPES, is_square, CPU, fill=False).stacks
    assert [(s.rows, s.columns, s.members) for s in alone[:2]] == [(12, 24, [0, 6]), (24, 12, [1])]


def test_filling_up_costs_less_than_its_bound():
    shapes = [(1, 1600, 240), (4, 240, 240), (8, 25, 50), (8, 50, 100)]
    found = Stacks(shapes, lambda *_: None, CPU, fill=True).stacks
    needed = [count * min(r, c) ** 2 * max(r, c) for count, r, c in shapes]
    assert [s.members for s in found] == [[0], [1], [3, 2]]
    for stack in found:
        assert stack.work - sum(needed[i] for i in stack.members) <= MAX_FILL_WORK


@pytest.mark.parametrize(("method", "error"), [(newton_schulz, IN_BFLOAT16), (gram_newton_schulz, IN_FLOAT32)])
def test_directions_do_not_depend_on_the_stack(method, error):
    found = []
    for fill in (False, True):
        stacks = Stacks(SHAPES, lambda *_: None, CPU, fill)
        (given,) = stacks.stack([entries(SHAPES)])
        found.append(stacks.flatten([method(t) for t in given]).float())
    torch.testing.assert_close(*found, rtol=0, atol=error)


@torch.no_grad()
def test_a_vector_changes_weights_and_states_in_their_memory_unless_skipped():
    parameters = [nn.Parameter(torch.arange(float(n))) for n in (3, 2)]
    states = {p: {"count": torch.zeros(()), "mean": torch.ones(len(p), dtype=torch.float64)} for p in parameters}
    vector = ParameterVector(parameters, states)
    for skip, expected in ((torch.tensor(True), 0.0), (torch.tensor(False), 1.0)):
        before = vector.read()
        vector.write({key: value + 1 for key, value in vector.split(before).items()}, before, skip)
        for p in parameters:
            assert torch.equal(p, torch.arange(float(len(p))) + expected)
            assert states[p]["count"] == expected
            assert torch.equal(states[p]["mean"], torch.ones(len(p)).double() + expected)
    assert vector.per_entry(torch.tensor([5.0, 7.0])).tolist() == [5, 5, 5, 7, 7]
    assert torch.equal(vector.norms(torch.tensor([3.0, 4.0, 0.0, 6.0, 8.0])), torch.tensor([5.0, 10.0]))


def test_parameters_are_batched_by_kind_and_precision_up_to_a_size(monkeypatch):
    monkeypatch.setitem(guarded.BATCH_ENTRIES, "cpu", 10)
    sizes = [4, 4, 30, 4, 4]
    parameters = [torch.zeros(n) for n in sizes] + [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)]
    found = [[len(p) for p in batch] for batch in batches(parameters, lambda p: p.ndim)]
    assert sorted(found) == [[2], [4], [4, 4], [4, 4], [30]]
