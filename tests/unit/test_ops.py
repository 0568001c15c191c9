"""Activations of a CPU, sums over neighbors, views of a neighborhood and switches, each against its
definition.
"""

import numpy as np
import pytest
import torch
from toy_models import TRICLINIC, toy_atoms

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.ops.cpu import silu
from deepmd_ema.model.ops.environment import exponential_switch_and_derivative
from deepmd_ema.model.ops.gather import gather_neighbors, sum_over_reverse
from deepmd_ema.model.ops.operations import CPU, GPU, REFERENCE

RCUT = 4.0
LAYOUT = NeighborLayout(RCUT, (60,), 3, by_type=False)
CELLS = {"triclinic": TRICLINIC, "open": None, "tiny": np.diag([3.4, 3.5, 3.6])}


def batch_by_distance(*cells, natoms=9):
    frames = []
    for seed, cell in enumerate(cells):
        coord, types = toy_atoms(seed, natoms - seed)
        frames.append(Frame(coord, types, CELLS[cell]))
    return collate(frames, LAYOUT)


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=["eager", "compiled"])
def gathering(request, monkeypatch):
    """Both ways to gather: a CPU reads rows and adds up in order, a graph or a GPU writes them into
    slots.
    """
    monkeypatch.setattr(
        torch.compiler, "is_compiling", lambda: request.param == "compiled"
    )


@pytest.mark.parametrize("name", ["silu", "silut:1"])
def test_activations_have_the_second_derivatives_of_the_reference(name, monkeypatch):
    monkeypatch.setattr(silu, "MIN_NUMBERS", 1)  # written out for few numbers too
    x, function, results = draw(12, 8), activation(name), []
    weight = draw(*x.shape, seed=7)
    for ops in (CPU, REFERENCE):
        _, vjp = torch.func.vjp(
            lambda x, ops=ops: ops.activated(torch.tanh(x * weight), function), x
        )
        (grad,) = vjp(draw(*x.shape, seed=8).detach())
        results.append(
            [
                grad,
                *torch.autograd.grad(
                    (grad * draw(*x.shape, seed=9).detach()).sum(), [x, weight]
                ),
            ]
        )
    for cpu, reference in zip(*results, strict=True):
        close(cpu, reference)
    assert torch.autograd.gradgradcheck(
        lambda x: CPU.activated(x, function), (draw(2, 3),)
    )


def test_functions_of_a_gpu_have_the_second_derivatives_of_the_reference():
    x, rows, weight, bias = (
        draw(5, 4, 8),
        draw(5, 4, 3, seed=1),
        draw(8, seed=2),
        draw(8, seed=3),
    )
    cases = {
        "symmetrized": lambda ops: (
            lambda x, rows: ops.symmetrized(x, rows, 3),
            (x, rows),
        ),
        "normalised": lambda ops: (
            lambda x: ops.normalised(x, weight, bias, 1e-5),
            (x,),
        ),
        "activated": lambda ops: (lambda x: ops.activated(x, activation("silu")), (x,)),
    }
    for case in cases.values():
        results = []
        for ops in (GPU, REFERENCE):
            function, inputs = case(ops)
            value, vjp = torch.func.vjp(function, *inputs)
            grads = vjp(draw(*value.shape, seed=8).detach())
            total = sum(
                (grad * draw(*grad.shape, seed=9).detach()).sum() for grad in grads
            )
            results.append([value, *grads, *torch.autograd.grad(total, inputs)])
        for gpu, reference in zip(*results, strict=True):
            close(gpu, reference)


@pytest.mark.usefixtures("gathering")
def test_sums_over_neighbors_do_not_depend_on_the_number_of_threads():
    """They add up the slots in which an atom is a neighbor, always in one order: a restart is
    bitwise.
    """
    neighbor = torch.randint(64, (512, 40), generator=torch.Generator().manual_seed(0))
    order = neighbor.flatten().argsort(stable=True)
    slots = order.split(neighbor.flatten().bincount(minlength=64).tolist())
    reverse = torch.nn.utils.rnn.pad_sequence(
        list(slots), batch_first=True, padding_value=neighbor.numel()
    )
    node, grad = torch.zeros(64, 32, requires_grad=True), torch.randn(512, 40, 32) * 1e3
    gradients, sums = [], []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 7, 7):
            torch.set_num_threads(number)
            gradients += torch.autograd.grad(
                gather_neighbors(node, neighbor, reverse), node, grad
            )
            sums.append(sum_over_reverse(grad, neighbor, reverse))
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(found[0], other)
        for found in (gradients, sums)
        for other in found[1:]
    )


@pytest.mark.parametrize("cells", [["triclinic"], ["tiny", "open"], ["open"]])
@pytest.mark.parametrize(
    ("rcut", "most"),
    [(4.0, None), (3.0, None), (4.0, 5), (2.2, 5), (3.0, 500), (0.1, 7)],
)
def test_a_view_holds_the_nearest_neighbors_within_its_cutoff(cells, rcut, most):
    batch = batch_by_distance(*cells)
    neighborhood = batch.within(rcut, most)
    num_atoms, total = batch.neighbor.shape
    width = total if most is None else min(most, total)
    assert neighborhood.neighbor.shape == (num_atoms, width)
    torch.testing.assert_close(
        neighborhood.vector, batch.vector[:, :width], rtol=0, atol=0
    )
    distance = torch.linalg.vector_norm(batch.vector, dim=-1)
    uses = [[] for _ in range(num_atoms)]
    for i in range(num_atoms):
        wanted = [k for k in range(total) if distance[i, k] < rcut][:most]
        assert (
            torch.nonzero(neighborhood.mask[i]).ravel().tolist()
            == wanted
            == list(range(len(wanted)))
        )
        assert (
            neighborhood.neighbor[i, neighborhood.mask[i]].tolist()
            == batch.neighbor[i, wanted].tolist()
        )
        for k in wanted:
            uses[int(batch.neighbor[i, k])].append(i * width + k)
    assert (neighborhood.neighbor[~neighborhood.mask] == num_atoms).all()
    for j, slots in enumerate(uses):
        assert [
            r for r in neighborhood.reverse[j].tolist() if r != num_atoms * width
        ] == slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponential_switch_has_a_derivative_however_early_it_begins(dtype):
    """Its inner exponential overflows, and 0 times infinity is not a number."""
    r = torch.linspace(0.05, 9.0, 100, dtype=dtype).requires_grad_()
    value, slope = exponential_switch_and_derivative(r, 8.0, 0.1)
    close(slope, torch.autograd.grad(value.sum(), r)[0])
    assert value[0] > 0.9
    assert (value[r > 0.2] < 1e-8).all()
    assert torch.isfinite(slope).all()
    assert (slope <= 0).all()
    at_end, _ = exponential_switch_and_derivative(
        torch.tensor([8.0, 8.5, 100.0], dtype=dtype), 8.0, 7.0
    )
    assert at_end[0] > 0
    assert (at_end == at_end[0]).all()
