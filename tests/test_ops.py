"""Operations of a CPU against the reference, gathers against loops, views of a neighborhood against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from toy_models import TRICLINIC, toy_atoms

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.model.interpolation import series
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.attention import Attended, AttentionOptions
from deepmd_ema.model.ops.cpu import silu
from deepmd_ema.model.ops.environment import exponential_switch
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
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def arguments(name):
    """Return small arguments for each operation; those that it differentiates require a gradient."""
    neighborhood = batch_by_distance("triclinic", "open").within(3.0)
    num_atoms, num_slots = neighborhood.neighbor.shape
    net = Network([1, 4, 8], "tanh", timestep=False, dtype=torch.float64, seed=1)
    rows = draw(num_atoms, num_slots, 4).detach()
    s, (centre, half) = rows[..., 0], torch.tensor([0.0, 4.0], dtype=torch.float64)
    return {
        "moments": (rows, net),
        "series_sum": (rows, s, draw(16, 8, seed=4), centre, half, 8),
        "silu": (draw(num_atoms, 8), activation("silu")),
        "silut": (draw(num_atoms, 8), activation("silut:10")),
        "triple_sums": triples_arguments(),
        "attended_moments": attention_arguments(ATTENTION),
    }[name]  # fmt: skip


# the version for a CPU and the reference
OPERATIONS = {
    **{name: (getattr(CPU, name), getattr(REFERENCE, name)) for name in ("moments", "attended_moments")},
    "triple_sums": [lambda *args, ops=ops: ops.triple_sums_and_vjp(*args)[0] for ops in (CPU, REFERENCE)],
    **dict.fromkeys(("silu", "silut"), (CPU.activated, REFERENCE.activated)),
    "series_sum": (lambda *args: series._sum_in_place(*args)[0], lambda *args: series._plain_sum(*args)[0]),
}  # fmt: skip
every_operation = pytest.mark.parametrize("name", sorted(OPERATIONS))
MIN_NUMBERS = silu.MIN_NUMBERS


@pytest.fixture(autouse=True)
def _activations_are_written_out_for_few_numbers(monkeypatch):
    monkeypatch.setattr(silu, "MIN_NUMBERS", 1)


def fitting_networks():
    widths = [4, 4, 8, 16, 16, 5]
    nets = (Network(widths, "tanh", timestep=True, dtype=torch.float64, seed=k, num_out=1) for k in range(3))
    return torch.nn.ModuleList(nets)


def triples_arguments(slots=5, act="tanh"):
    """Return arguments of atoms without empty slots, with neighbors of three elements."""
    types = torch.arange(4 * slots).view(4, slots) % 3
    net = Network([1 + 2 * 3, 2, 4, 8, 8], act, timestep=False, dtype=torch.float64, seed=1)
    return draw(4, slots, slots), types, torch.ones(4, slots, dtype=torch.bool), draw(3, 3, seed=1), net


ATTENTION = AttentionOptions(gated=True, unit=True, scaling=0.3, shift=20.0, eps=1e-5)


def attention_arguments(options, slots=7, num_slots=10, width=6, hidden=5, atoms=6):
    """Return arguments of two layers, of atoms with 0, 2, 4, ... neighbors, the last one in the last slot as well."""
    mask = torch.arange(slots) < 2 * torch.arange(atoms)[:, None] % (slots + 1)
    mask[-1, -1] = True
    switch = draw(atoms, slots, seed=1).detach().abs() * mask  # its gradient is arbitrary where it is 0
    direction = (draw(atoms, slots, 3, seed=2).detach() * mask[..., None]).requires_grad_()
    sizes = (width, 3 * hidden), (3 * hidden,), (hidden, width), (width,), (width,), (width,)
    layers = [Weights(*(draw(*size, seed=10 * n + k) for k, size in enumerate(sizes))) for n in range(2)]
    counts = ((torch.arange(slots) + 1) * mask).amax(1) if slots else torch.zeros(atoms, dtype=torch.int64)
    rows = draw(atoms, slots, 4, seed=3).detach() * (torch.arange(slots) < counts[:, None])[..., None]
    pairs = draw(atoms, slots, width)
    given = Attended(rows.requires_grad_(), torch.tanh, [pairs], counts, mask, switch, direction, num_slots)
    return given, layers, options


def tensors_of(found):
    if isinstance(found, (torch.Tensor, tuple)):
        return [found] if isinstance(found, torch.Tensor) else list(found)
    return [found.value, found.jet]


def leaves_of(args):
    args = [[*vars(a).values()] if isinstance(a, Attended) else a for a in args]
    flat = [leaf for a in args for leaf in (a.parameters() if isinstance(a, torch.nn.Module) else tree_leaves(a))]
    return [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every_operation
def test_every_operation_of_a_cpu_has_the_values_and_gradients_of_the_reference(name):
    args = arguments(name)
    results = []
    for call in OPERATIONS[name]:
        found = tensors_of(call(*args))
        loss = sum((part * draw(*part.shape, seed=k).detach()).sum() for k, part in enumerate(found))
        leaves = leaves_of(args)
        results.append([*found, *(torch.autograd.grad(loss, leaves) if leaves else ())])
    for cpu, reference in zip(*results, strict=True):
        close(cpu, reference)
    with torch.no_grad():
        for cpu, part in zip(tensors_of(OPERATIONS[name][0](*args)), results[0]):
            close(cpu, part.detach())


@pytest.mark.parametrize("shares", [(4, 0, 2), (2, 2, 2), (6,)], ids=str)
@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("operations", [CPU, GPU], ids=["cpu", "gpu"])
def test_fitting_networks_have_the_values_and_gradients_of_the_reference(shares, parts, operations):
    x, nets = draw(6, 4), fitting_networks()[: len(shares)]
    results = []
    for ops in (operations, REFERENCE):
        found = ops.values_and_gradients(x, nets, shares)
        loss = sum((found[k] * draw(*found[k].shape, seed=k).detach()).sum() for k in parts)
        leaves = [x, *(p for net in nets for p in net.parameters())]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append([*found, *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads))])
    for written_out, reference in zip(*results, strict=True):
        close(written_out, reference)


def test_moments_on_a_gpu_have_the_values_and_gradients_of_the_reference():
    args, results = arguments("moments"), []
    for ops in (GPU, REFERENCE):
        found = tensors_of(ops.moments(*args))
        loss = sum((part * draw(*part.shape, seed=k).detach()).sum() for k, part in enumerate(found))
        results.append([*found, *torch.autograd.grad(loss, leaves_of(args))])
    for gpu, reference in zip(*results, strict=True):
        close(gpu, reference)


@pytest.fixture(params=["eager", "compiled"])
def gathering(request, monkeypatch):
    """Both ways to gather: a CPU reads rows and adds up in order, a graph or a GPU writes them into slots."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: request.param == "compiled")


@pytest.mark.parametrize("name", ["silu", "silut"])
def test_activations_have_the_second_derivatives_of_the_reference(name):
    (x, function), results = arguments(name), []
    weight = draw(*x.shape, seed=7)
    for ops in (CPU, REFERENCE):
        _, vjp = torch.func.vjp(lambda x, ops=ops: ops.activated(torch.tanh(x * weight), function), x)
        (grad,) = vjp(draw(*x.shape, seed=8).detach())
        results.append([grad, *torch.autograd.grad((grad * draw(*x.shape, seed=9).detach()).sum(), [x, weight])])
    for cpu, reference in zip(*results, strict=True):
        close(cpu, reference)
    assert torch.autograd.gradgradcheck(lambda x: CPU.activated(x, function), (draw(2, 3),))


def attended_forces(ops, options, **sizes):
    """Return features of attention, their gradient by vectors, and what both depend on."""
    given, layers, _ = attention_arguments(options, **sizes)
    (pre,), mask = given.inputs, given.mask
    vector, mixer = draw(*pre.shape[:2], 3, seed=4).detach(), draw(3, pre.shape[2], seed=5)
    there = (given.rows != 0).detach()

    def features(vector):
        distance = vector.norm(dim=-1)
        switch = torch.where(mask, (2 - distance).clamp(0, 1).square(), 0)
        direction = vector / distance[..., None] * mask[..., None]
        rows = torch.cat([switch[..., None], vector], -1) * there

        def embed(pre, vector):
            return pre + torch.tanh(vector @ mixer)

        moved = replace(
            given, rows=rows, embed=embed, inputs=[pre, vector], switch=switch, direction=direction
        )  # fmt: skip
        return ops.attended_moments(moved, layers, options)

    out, vjp = torch.func.vjp(features, vector)
    return out, vjp, [mixer, *tree_leaves(layers)]


def test_gradients_of_attention_requested_several_times_add_up():
    """Two vector-Jacobian products of one evaluation in one loss, and one that was requested and left."""
    results = []
    for ops in (CPU, REFERENCE):
        out, vjp, leaves = attended_forces(ops, ATTENTION)
        given = draw(*out.shape, seed=8)
        first, second = vjp(given)[0].square().sum(), vjp(torch.tanh(out))[0].sin().sum()
        torch.autograd.grad(first, [given], retain_graph=True)  # does not come to the layers
        results.append(torch.autograd.grad(first + second, [given, *leaves]))
    for cpu, reference in zip(*results, strict=True):
        torch.testing.assert_close(cpu, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("gathering")
def test_gather_and_sum_can_be_differentiated_twice():
    neighborhood = batch_by_distance("open", natoms=4).within(2.5)

    def messages(node, weight):
        pair = gather_neighbors(node, neighborhood.neighbor, neighborhood.reverse) * weight
        return torch.tanh(sum_over_reverse(torch.tanh(pair), neighborhood.neighbor, neighborhood.reverse) + pair.sum(1))

    args = draw(4, 2), draw(*neighborhood.neighbor.shape, 2, seed=1)
    assert torch.autograd.gradcheck(messages, args)
    assert torch.autograd.gradgradcheck(messages, args)


@pytest.mark.usefixtures("gathering")
def test_sums_over_neighbors_do_not_depend_on_the_number_of_threads():
    """They add up the slots in which an atom is a neighbor, always in one order: a restart is bitwise."""
    neighbor = torch.randint(64, (512, 40), generator=torch.Generator().manual_seed(0))
    order = neighbor.flatten().argsort(stable=True)
    slots = order.split(neighbor.flatten().bincount(minlength=64).tolist())
    reverse = torch.nn.utils.rnn.pad_sequence(list(slots), batch_first=True, padding_value=neighbor.numel())
    node, grad = torch.zeros(64, 32, requires_grad=True), torch.randn(512, 40, 32) * 1e3
    gradients, sums = [], []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 7, 7):
            torch.set_num_threads(number)
            gradients += torch.autograd.grad(gather_neighbors(node, neighbor, reverse), node, grad)
            sums.append(sum_over_reverse(grad, neighbor, reverse))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for found in (gradients, sums) for other in found[1:])


@pytest.mark.parametrize("cells", [["triclinic"], ["tiny", "open"], ["open"]])
@pytest.mark.parametrize(("rcut", "most"), [(4.0, None), (3.0, None), (4.0, 5), (2.2, 5), (3.0, 500), (0.1, 7)])
def test_a_view_holds_the_nearest_neighbors_within_its_cutoff(cells, rcut, most):
    batch = batch_by_distance(*cells)
    neighborhood = batch.within(rcut, most)
    num_atoms, total = batch.neighbor.shape
    width = total if most is None else min(most, total)
    assert neighborhood.neighbor.shape == (num_atoms, width)
    torch.testing.assert_close(neighborhood.vector, batch.vector[:, :width], rtol=0, atol=0)
    distance = torch.linalg.vector_norm(batch.vector, dim=-1)
    uses = [[] for _ in range(num_atoms)]
    for i in range(num_atoms):
        wanted = [k for k in range(total) if distance[i, k] < rcut][:most]
        assert torch.nonzero(neighborhood.mask[i]).ravel().tolist() == wanted == list(range(len(wanted)))
        assert neighborhood.neighbor[i, neighborhood.mask[i]].tolist() == batch.neighbor[i, wanted].tolist()
        for k in wanted:
            uses[int(batch.neighbor[i, k])].append(i * width + k)
    assert (neighborhood.neighbor[~neighborhood.mask] == num_atoms).all()
    for j, slots in enumerate(uses):
        assert [r for r in neighborhood.reverse[j].tolist() if r != num_atoms * width] == slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponential_switch_has_a_derivative_however_early_it_begins(dtype):
    """Its inner exponential overflows, and 0 times infinity is not a number."""
    r = torch.linspace(0.05, 9.0, 100, dtype=dtype).requires_grad_()
    value = exponential_switch(r, 8.0, 0.1)
    (slope,) = torch.autograd.grad(value.sum(), r)
    assert value[0] > 0.9
    assert (value[r > 0.2] < 1e-8).all()
    assert torch.isfinite(slope).all()
    assert (slope <= 0).all()
    at_end = exponential_switch(torch.tensor([8.0, 8.5, 100.0], dtype=dtype), 8.0, 7.0)
    assert at_end[0] > 0
    assert (at_end == at_end[0]).all()
