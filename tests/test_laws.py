"""Laws that every registered descriptor obeys, whatever its numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_models import MORE_NEIGHBORS, SECTIONS, TRICLINIC, batch_of, evaluate, toy_atoms, toy_model

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.labels import LABELS
from deepmd_ema.model.build import DESCRIPTORS, build_model
from deepmd_ema.model.kernels.twin import plain_kernels

SAME_MATH = 1e-11  # sums in another order
DIFFERENCES = 2e-7  # central differences of step 1e-4
CELLS = {"triclinic": TRICLINIC, "open": None, "tiny": np.diag([3.4, 3.5, 3.6])}

every_descriptor = pytest.mark.parametrize("descriptor", sorted(DESCRIPTORS))
every_cell = pytest.mark.parametrize("cell", sorted(CELLS))


def frame(cell="triclinic", seed=0, natoms=9):
    coord, types = toy_atoms(seed, natoms)
    return coord, types, CELLS[cell]


def rotation(seed=1):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return q * np.sign(np.linalg.det(q))


def close(a, b, tol=SAME_MATH):
    np.testing.assert_allclose(a, b, rtol=0, atol=tol * max(1.0, np.abs(b).max(initial=0)))


def test_every_registered_descriptor_has_a_small_section_for_these_tests():
    assert set(SECTIONS) == set(DESCRIPTORS)


@every_descriptor
@every_cell
def test_energy_and_forces_do_not_change_under_translation(descriptor, cell):
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell)
    here = evaluate(model, (coord, types, box))
    there = evaluate(model, (coord + np.array([0.7, -31.2, 5.9]), types, box))
    for name in ("energy", "atom_energy", "force", "virial"):
        close(there[name], here[name], 1e-9)  # 31 angstrom away, coordinates have fewer digits


@every_descriptor
@every_cell
def test_forces_and_virials_turn_with_the_frame(descriptor, cell):
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell)
    turn = rotation()
    here = evaluate(model, (coord, types, box))
    there = evaluate(model, (coord @ turn, types, None if box is None else box @ turn))
    close(there["energy"], here["energy"])
    close(there["force"], here["force"] @ turn)
    close(there["virial"].reshape(3, 3), turn.T @ here["virial"].reshape(3, 3) @ turn)


@every_descriptor
def test_the_order_of_atoms_does_not_matter(descriptor):
    _, model = toy_model(descriptor)
    coord, types, box = frame()
    order = np.random.default_rng(2).permutation(len(types))
    here, there = evaluate(model, (coord, types, box)), evaluate(model, (coord[order], types[order], box))
    close(there["energy"], here["energy"])
    close(there["atom_energy"], here["atom_energy"][order])
    close(there["force"], here["force"][order])


@every_descriptor
def test_two_copies_of_a_cell_have_twice_the_energy(descriptor):
    _, model = toy_model(descriptor, MORE_NEIGHBORS.get(descriptor))
    coord, types, box = frame()
    double = box.copy()
    double[1] *= 2
    one = evaluate(model, (coord, types, box))
    two = evaluate(model, (np.concatenate([coord, coord + box[1]]), np.tile(types, 2), double))
    close(two["energy"], 2 * one["energy"])
    close(two["virial"], 2 * one["virial"])
    close(two["force"], np.tile(one["force"], (2, 1)))


@every_descriptor
@pytest.mark.parametrize("cell", ["triclinic", "open"])
def test_the_hessian_is_minus_the_derivative_of_the_forces_and_symmetric(descriptor, cell):
    """Beside a frame of another size, whose coordinates move in the same passes."""
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell, natoms=4)
    step, numerical = 1e-4, np.zeros((12, 12))
    for place in range(12):
        moved = [coord.flatten(), coord.flatten()]
        moved[0][place] += step
        moved[1][place] -= step
        up, down = evaluate(model, *((c.reshape(-1, 3), types, box) for c in moved))["force"].reshape(2, 12)
        numerical[place] = -(up - down) / (2 * step)
    both = model(batch_of(model, frame("triclinic", 1, 3), (coord, types, box)), need_hessian=True)["hessian"]
    found = both[81:].view(12, 12).numpy()
    assert np.abs(found).max() > 1e-3
    close(found, numerical, DIFFERENCES)
    close(found, found.T)
    close(found.reshape(4, 3, 12).sum(0), 0 * found[:3])  # nothing changes as all atoms move together


@every_descriptor
@every_cell
def test_forces_are_the_derivative_of_the_energy(descriptor, cell):
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell, natoms=6)
    step, numerical = 1e-4, np.zeros_like(coord)
    for place in np.ndindex(coord.shape):
        moved = [coord.copy(), coord.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        up, down = evaluate(model, *((c, types, box) for c in moved))["energy"]
        numerical[place] = -(up - down) / (2 * step)
    found = evaluate(model, (coord, types, box))["force"]
    assert np.abs(found).max() > 1e-3
    close(found, numerical, DIFFERENCES)


@every_descriptor
@pytest.mark.parametrize("cell", ["triclinic", "tiny"])
def test_the_virial_is_minus_the_derivative_of_the_energy_by_strain(descriptor, cell):
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell)
    step, numerical = 1e-4, np.zeros((3, 3))
    for place in np.ndindex(3, 3):
        strain = np.zeros((3, 3))
        strain[place] = step
        up, down = (evaluate(model, (coord @ (np.eye(3) + s), types, box @ (np.eye(3) + s)))["energy"][0]
                    for s in (strain, -strain))  # fmt: skip
        numerical[place] = -(up - down) / (2 * step)
    close(evaluate(model, (coord, types, box))["virial"].reshape(3, 3), numerical, 10 * DIFFERENCES)


@every_descriptor
def test_the_virial_of_an_open_frame_is_positions_times_forces(descriptor):
    _, model = toy_model(descriptor)
    coord, types, _ = frame()
    out = evaluate(model, (coord, types, None))
    close(out["virial"].reshape(3, 3), coord.T @ out["force"])
    close(out["force"].sum(0), np.zeros(3))


@every_descriptor
def test_energy_and_forces_are_smooth_where_a_neighbor_crosses_the_cutoff(descriptor):
    """Two atoms apart by the cutoff: energy and force go over to those of single atoms like a cubic and a square."""
    _, model = toy_model(descriptor)
    rcut = model.layout.rcut
    far = evaluate(model, ([[0, 0, 0], [rcut + 0.1, 0, 0]], [0, 1], None))
    for gap in (1e-2, 1e-3):
        near = evaluate(model, ([[0, 0, 0], [rcut - gap, 0, 0]], [0, 1], None))
        assert abs(near["energy"] - far["energy"]).max() < 100 * gap**3
        assert abs(near["force"]).max() < 300 * gap**2
    assert abs(far["force"]).max() == 0


@every_descriptor
def test_a_batch_gives_what_its_frames_give_alone(descriptor):
    _, model = toy_model(descriptor)
    frames = [frame("triclinic"), frame("open", 1, 4), frame("tiny", 2, 7), frame("open", 3, 1)]
    together = evaluate(model, *frames)
    alone = [evaluate(model, f) for f in frames]
    for name in ("energy", "atom_energy", "force", "virial"):
        close(together[name], np.concatenate([a[name] for a in alone]))


@every_descriptor
def test_float32_is_near_float64(descriptor):
    (_, double), (_, single) = (
        toy_model(descriptor, {"precision": p}, {"precision": p}) for p in ("float64", "float32")
    )
    assert single.dtype == torch.float32
    for cell in CELLS:
        exact, rough = evaluate(double, frame(cell)), evaluate(single, frame(cell))
        assert all(value.dtype == np.float64 for value in rough.values())
        close(rough["energy"], exact["energy"], 1e-6)
        close(rough["force"], exact["force"], 1e-5)
        close(rough["virial"], exact["virial"], 1e-5)


@every_descriptor
def test_evaluation_and_training_mode_give_the_same_numbers(descriptor):
    _, model = toy_model(descriptor)
    batch = batch_of(model, frame(), frame("open", 1))
    quiet, trained = model(batch, need_hessian=True), model.train()(batch, need_hessian=True)
    for name, value in quiet.items():
        assert not value.requires_grad
        assert trained[name].requires_grad
        close(trained[name].detach().numpy(), value.numpy())
    assert "virial" not in model(batch, need_virial=False)
    for name, value in model.eval()(batch).items():
        close(value.numpy(), quiet[name].numpy())


@every_descriptor
@pytest.mark.parametrize("changes", [{}, {"type_one_side": True}, {"activation_function": "silu", "resnet_dt": True}])
def test_parameter_gradients_of_a_loss_of_all_outputs_are_right(descriptor, changes):
    """Against finite differences along random directions of each parameter: the forces are differentiated too."""
    _, model = toy_model(descriptor, changes)
    batch = batch_of(model, frame("triclinic", natoms=5), frame("open", 1, 4))
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(v.shape, generator=generator, dtype=v.dtype) for name, v in model(batch).items()}

    def loss():
        return sum((weights[name] * value).sum() for name, value in model(batch, create_graph=True).items())

    total = loss()
    model.zero_grad()
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                ends.append(float(loss()))
                parameter.sub_(direction, alpha=step)
        expected = (ends[0] - ends[1]) / 2e-5
        assert abs(expected - float((parameter.grad * direction).sum())) < 1e-6 * max(1.0, abs(expected)), name


@every_descriptor
@pytest.mark.parametrize("changes", [{}, {"activation_function": "gelu", "type_one_side": True}])
def test_parameter_gradients_of_the_hessian_are_right(descriptor, changes):
    """Against finite differences; torch's own layer normalisation was wrong by 1e-3 in this third derivative."""
    _, model = toy_model(descriptor, changes)
    batch = batch_of(model, frame("triclinic", natoms=3), frame("open", 1, 2))
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(81 + 36, generator=generator, dtype=torch.float64)

    def loss(create_graph=False):
        return (weights * model(batch, create_graph=create_graph, need_hessian=True)["hessian"]).sum()

    loss(create_graph=True).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    for _ in range(2):
        directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in used]
        ends = []
        for step in (1e-5, -1e-5):
            for parameter, direction in zip(used, directions):
                parameter.data.add_(direction, alpha=step)
            ends.append(float(loss()))
            for parameter, direction in zip(used, directions):
                parameter.data.sub_(direction, alpha=step)
        expected = (ends[0] - ends[1]) / 2e-5
        found = sum(float((p.grad * direction).sum()) for p, direction in zip(used, directions))
        assert abs(expected - found) < DIFFERENCES * max(abs(expected), 0.1)


# what may be without neighbors: frames, elements of neighbors, elements of centres, everything
LONELY = {
    "one_element": [([[0.0, 0, 0], [1.5, 0, 0], [0, 1.2, 0]], [1, 1, 1], None)],
    "no_neighbors": [([[0.0, 0, 0]], [1], None)],
    "several_without_neighbors": [([[0.0, 0, 0], [40.0, 0, 0]], [0, 2], None), ([[0.0, 0, 0]], [1], 50 * np.eye(3))],
    "one_without_neighbors": [([[0.0, 0, 0], [1.5, 0, 0]], [0, 1], None), ([[0.0, 0, 0]], [2], None)],
}
OPTIONS = {
    "tanh": {},
    "gelu": {"activation_function": "gelu"},
    "resnet_dt": {"resnet_dt": True},
    "one_side": {"type_one_side": True},
    "one_side_gelu": {"type_one_side": True, "activation_function": "gelu"},
    "narrow": {"neuron": [2, 4], "axis_neuron": 2},
}
every_option = pytest.mark.parametrize("option", sorted(OPTIONS))


@every_descriptor
@every_option
@pytest.mark.parametrize("frames", sorted(LONELY))
def test_frames_may_lack_elements_or_neighbors(descriptor, option, frames):
    """A batch in which no atom had a neighbor of some element ended with "cannot reshape tensor of 0 elements"."""
    _, model = toy_model(descriptor, OPTIONS[option])
    quiet = evaluate(model, *LONELY[frames])
    model.train()
    batch = batch_of(model, *LONELY[frames])
    out = model(batch)
    sum((value**2).sum() for value in out.values()).backward()
    for name, value in out.items():
        assert np.isfinite(quiet[name]).all()
        in_files = batch.in_file_order(value) if LABELS[name].per_atom else value
        close(in_files.detach().numpy(), quiet[name])
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    # beside a frame with everything, the lonely ones have the same energies
    beside = evaluate(model.eval(), *LONELY[frames], frame("triclinic"))
    close(beside["energy"][: len(quiet["energy"])], quiet["energy"])


@every_descriptor
@every_option
@pytest.mark.parametrize("frames", [*sorted(LONELY), "full"])
def test_the_written_out_gradient_is_that_of_automatic_differentiation(descriptor, option, frames):
    """Features, their vector-Jacobian product, and the parameter gradients of both, against ``torch.func.vjp``."""
    _, model = toy_model(descriptor, OPTIONS[option])
    batch = batch_of(model, *LONELY.get(frames, [frame("triclinic"), frame("open", 1, 4)]))
    part = model.descriptor.requires_grad_()

    def results(call):
        generator = torch.Generator().manual_seed(1)
        features, vjp = call()
        weights = torch.randn(features.shape, generator=generator, dtype=features.dtype)
        grad = vjp(weights)
        further = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
        total = (features * weights).sum() + (grad * further).sum()
        return [features, grad, *torch.autograd.grad(total, list(part.parameters()), materialize_grads=True)]

    def automatic():
        with plain_kernels():
            features, vjp = torch.func.vjp(lambda v: part(replace(batch, vector=v))[0], batch.vector)
            return features, lambda grad: vjp(grad)[0]

    for ours, expected in zip(results(lambda: part(batch)), results(automatic), strict=True):
        close(ours.detach().numpy(), expected.detach().numpy())


@every_descriptor
def test_an_atom_without_neighbors_has_no_force(descriptor):
    _, model = toy_model(descriptor)
    out = evaluate(model, ([[0.0, 0, 0]], [1], None), ([[0.0, 0, 0]], [1], 50 * np.eye(3)))
    assert abs(out["force"]).max() == 0
    assert abs(out["virial"]).max() == 0
    close(out["energy"][:1], out["energy"][1:])


@every_descriptor
def test_types_without_atoms_change_nothing_but_get_gradients(descriptor):
    _, model = toy_model(descriptor)
    coord, types, box = frame()
    types = np.ones_like(types)
    model.train()
    out = model(batch_of(model, (coord, types, box)))
    (out["energy"].sum() + out["force"].square().sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@every_descriptor
def test_two_runs_give_the_same_bits(descriptor):
    _, model = toy_model(descriptor)
    model.train()
    batch = batch_of(model, frame(), frame("open", 1))

    def gradients():
        model.zero_grad()
        out = model(batch)
        (out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


@every_descriptor
def test_equal_seeds_give_equal_models_and_leave_the_global_random_state_alone(descriptor):
    config = model_config_from_dict({"type_map": ["O", "H", "Na"], "descriptor": SECTIONS[descriptor],
                                     "fitting_net": {"neuron": [5]}})  # fmt: skip
    before = torch.get_rng_state()
    one, same, other = (build_model(config, seed).state_dict() for seed in (7, 7, 8))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
