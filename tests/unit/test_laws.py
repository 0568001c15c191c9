"""Laws that every registered descriptor obeys, whatever its numbers, and every other way in which
it is computed.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from toy_models import (
    SECTIONS,
    TABLE,
    TRICLINIC,
    VARIANTS,
    assert_parameter_gradients,
    batch_of,
    evaluate,
    model_from_tree,
    model_section,
    more_neighbors,
    toy_atoms,
    toy_model,
)

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.data.collate import collate, pair_frame
from deepmd_ema.data.source import Frame
from deepmd_ema.interop.dp import config_from_tree, model_tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.ops.cpu import moments, silu
from deepmd_ema.model.ops.operations import GPU, REFERENCE, with_operations

SAME_MATH = 1e-11  # sums in another order
STEP, DIFFERENCES = 2e-5, 2e-7  # of central differences, angstrom; their error
GAP = 1e-6  # angstrom before and behind a cutoff
CELLS = {"triclinic": TRICLINIC, "open": None, "tiny": np.diag([3.4, 3.5, 3.6])}

every_descriptor = pytest.mark.parametrize("descriptor", sorted(DESCRIPTORS))
every_model = pytest.mark.parametrize("descriptor", [*sorted(DESCRIPTORS), *VARIANTS])

# the energy of close atoms ends at the cutoff of the descriptor, as DeePMD-kit's does
every_smooth_model = pytest.mark.parametrize(
    "descriptor", sorted({*DESCRIPTORS, *VARIANTS} - {"dpa4_bridged"})
)


def every_model_in(*cells):
    """Every descriptor in all ``cells``, and every variant, which computes the same pairs in
    another way, in one.
    """
    cases = [
        *product(sorted(DESCRIPTORS), cells),
        *((name, "triclinic") for name in VARIANTS),
    ]
    return pytest.mark.parametrize(("descriptor", "cell"), cases)


def frame(cell="triclinic", seed=0, natoms=9):
    coord, types = toy_atoms(seed, natoms)
    return coord, types, CELLS[cell]


def rotation(seed=1):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return q * np.sign(np.linalg.det(q))


def slopes(model, frames):
    """Return the central differences of the energies between the first half of ``frames`` and the
    other one.
    """
    up, down = evaluate(model, *frames)["energy"].reshape(2, -1)
    return (up - down) / (2 * STEP)


def close(a, b, tol=SAME_MATH):
    np.testing.assert_allclose(
        a, b, rtol=0, atol=tol * max(1.0, np.abs(b).max(initial=0))
    )


def test_every_registered_descriptor_has_a_small_section_for_these_tests():
    assert set(SECTIONS) == set(DESCRIPTORS)
    assert [name for name, section in SECTIONS.items() if len(section) == 1] == []


# products in frames of three axes distinguish an image in a mirror, as DeePMD-kit's do
CHIRAL = {"dpa4", "dpa4_bridged"}


# products on a grid are not exact in turned frames, so that they are no variant of all laws
GRIDS = {"node_wise_s2": True, "s2_activation": [True, True]}


def check_an_atom_without_neighbors(model):
    """Alone in its batch, it leaves the model without pairs."""
    alone = (np.zeros((1, 3)), np.array([0]), None)
    out = evaluate(model, alone)
    beside = evaluate(model, alone, frame("triclinic"))
    close(out["energy"], beside["energy"][:1])
    assert np.isfinite(out["energy"]).all()
    assert not out["force"].any()
    assert not out["virial"].any()


@every_model
def test_an_atom_without_neighbors_has_the_energy_that_it_has_in_a_larger_batch(
    descriptor,
):
    check_an_atom_without_neighbors(toy_model(descriptor)[1])


def test_products_on_a_grid_are_right_for_an_atom_without_neighbors():
    check_an_atom_without_neighbors(toy_model("dpa4", GRIDS)[1])


@every_model
def test_forces_and_virials_turn_with_the_frame(descriptor):
    _, model = toy_model(descriptor)
    frames = [frame(cell) for cell in CELLS]
    here = evaluate(model, *frames)
    for turn in [
        rotation(),
        *([] if descriptor in CHIRAL else [-rotation(2)]),
    ]:  # the second one mirrors as well
        there = evaluate(
            model,
            *(
                (c @ turn, types, None if box is None else box @ turn)
                for c, types, box in frames
            ),
        )
        close(there["energy"], here["energy"])
        close(there["force"], here["force"] @ turn)
        close(
            there["virial"].reshape(-1, 3, 3),
            turn.T @ here["virial"].reshape(-1, 3, 3) @ turn,
        )


@every_model
def test_a_frame_may_be_written_in_any_way(descriptor):
    """Atoms in any order, in any periodic image, all somewhere else, in any batch, in a cell or in
    twice the cell.
    """
    _, model = toy_model(
        descriptor, more_neighbors(model_section(descriptor)["descriptor"])
    )
    rng = np.random.default_rng(4)
    frames = [
        frame("triclinic"),
        frame("open", 1, 4),
        frame("tiny", 2, 7),
        frame("open", 3, 1),
    ]
    together, alone = evaluate(model, *frames), [evaluate(model, one) for one in frames]
    for name in ("energy", "atom_energy", "force", "virial"):
        close(together[name], np.concatenate([a[name] for a in alone]))
    close(together["energy"], np.array([a["atom_energy"].sum() for a in alone]))
    for (coord, types, box), here in zip(frames, alone):
        moved = (
            coord
            + [0.7, -9.2, 5.9]
            + rng.integers(-3, 4, coord.shape)
            @ (np.zeros((3, 3)) if box is None else box)
        )
        order = rng.permutation(len(types))
        there = evaluate(model, (moved[order], types[order], box))
        for name in ("energy", "virial"):
            close(
                there[name], here[name], 1e-10
            )  # up to 30 angstrom away, coordinates have fewer digits
        for name in ("atom_energy", "force"):
            close(there[name], here[name][order], 1e-10)
    (coord, types, box), one = frames[0], alone[0]
    two = evaluate(
        model,
        (
            np.concatenate([coord, coord + box[1]]),
            np.tile(types, 2),
            box * [[1], [2], [1]],
        ),
    )
    close(two["energy"], 2 * one["energy"])
    close(two["virial"], 2 * one["virial"])
    close(two["force"], np.tile(one["force"], (2, 1)))


@every_model_in("triclinic", "open")
def test_the_hessian_is_minus_the_derivative_of_the_forces_and_symmetric(
    descriptor, cell
):
    """Beside a frame of another size, whose coordinates move in the same passes."""
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell, natoms=4)
    moves = STEP * np.concatenate([np.eye(12), -np.eye(12)]).reshape(24, 4, 3)
    up, down = evaluate(model, *((coord + move, types, box) for move in moves))[
        "force"
    ].reshape(2, 12, 12)
    batch = batch_of(model, frame("triclinic", 1, 3), (coord, types, box))
    quiet, out = model(batch), model(batch, need_hessian=True)
    found = out["hessian"][81:].view(12, 12).numpy()
    for name, value in quiet.items():
        close(out[name].numpy(), value.numpy())
    assert np.abs(found).max() > 1e-3
    close(found, (down - up) / (2 * STEP), DIFFERENCES)
    close(found, found.T)
    close(
        found.reshape(4, 3, 12).sum(0), 0 * found[:3]
    )  # nothing changes as all atoms move together


@every_model_in(*CELLS)
def test_forces_are_the_derivative_of_the_energy(descriptor, cell):
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell, natoms=6)
    moves = STEP * np.eye(coord.size).reshape(-1, *coord.shape)
    numerical = -slopes(
        model, [(coord + move, types, box) for move in (*moves, *-moves)]
    ).reshape(coord.shape)
    found = evaluate(model, (coord, types, box))["force"]
    assert np.abs(found).max() > 1e-3
    close(found, numerical, DIFFERENCES)


@every_model_in("triclinic", "tiny")
def test_the_virial_is_minus_the_derivative_of_the_energy_by_strain(descriptor, cell):
    """Of an open frame it is positions times forces."""
    _, model = toy_model(descriptor)
    coord, types, box = frame(cell)
    strains = STEP * np.eye(9).reshape(-1, 3, 3)
    ends = [
        (coord @ (np.eye(3) + s), types, box @ (np.eye(3) + s))
        for s in (*strains, *-strains)
    ]
    numerical = -slopes(model, ends).reshape(3, 3)
    close(
        evaluate(model, (coord, types, box))["virial"].reshape(3, 3),
        numerical,
        10 * DIFFERENCES,
    )
    out = evaluate(model, (coord, types, None))
    close(out["virial"].reshape(3, 3), coord.T @ out["force"])
    close(out["force"].sum(0), np.zeros(3))


@every_smooth_model
def test_energy_and_forces_are_smooth_where_a_neighbor_crosses_the_cutoff(descriptor):
    """Two atoms apart by the cutoff: energy and force go over to those of single atoms like a cubic
    and a square.
    """
    _, model = toy_model(descriptor)
    rcut = model.layout.rcut
    far = evaluate(model, ([[0, 0, 0], [rcut + 0.1, 0, 0]], [0, 1], None))
    for gap in (1e-2, 1e-3):
        near = evaluate(model, ([[0, 0, 0], [rcut - gap, 0, 0]], [0, 1], None))
        assert abs(near["energy"] - far["energy"]).max() < 100 * gap**3
        assert abs(near["force"]).max() < 300 * gap**2
    assert abs(far["force"]).max() == 0


@every_smooth_model
def test_energy_and_forces_continue_smoothly_where_an_atom_among_others_crosses_a_cutoff(
    descriptor,
):
    """Every cutoff of the model; the atom that crosses it has nearer neighbors, and so has the one
    that it leaves.
    """
    _, model = toy_model(descriptor)
    coord, types = toy_atoms(0, 6)
    away = coord[0] - coord.mean(0)
    away /= np.linalg.norm(away)
    for cutoff in cutoffs(model):
        # as far from one atom as the cutoff, with another one beside it on the way
        ends = [
            np.vstack([coord, coord[0] + 1.3 * away, coord[0] + (cutoff + s) * away])
            for s in (-GAP, GAP)
        ]
        near, far = (evaluate(model, (c, [*types, 2, 1], None)) for c in ends)
        for name in ("energy", "atom_energy", "force"):
            assert abs(near[name] - far[name]).max() < 100 * GAP * max(
                1, abs(near["force"]).max()
            ), (cutoff, name)


def cutoffs(model):
    """Return the distances at which something ends in the model."""
    layouts = [
        model.layout,
        *(p.layout(frozenset()) for p in getattr(model.descriptor, "descriptors", [])),
    ]
    return sorted(
        {one.rcut for one in layouts}
        | {rcut for one in layouts for rcut, _ in one.inner}
    )


@every_model
def test_the_number_of_empty_slots_does_not_matter(descriptor):
    _, model = toy_model(descriptor)
    coord, types, _ = frame()
    one = Frame(coord, types.astype(np.int64), None)
    few, many = (
        collate([pair_frame(one, model.layout, round_to=slots)], model.layout)
        for slots in (1, 60)
    )
    assert sum(few.slots) < sum(many.slots)
    expected = model(few)
    for name, value in model(many).items():
        close(value.numpy(), expected[name].numpy())


@every_model
def test_float32_is_near_float64(descriptor):
    (_, double), (_, single) = (
        toy_model(descriptor, {"precision": p}, {"precision": p})
        for p in ("float64", "float32")
    )
    assert single.descriptor.dtype == torch.float32
    for cell in CELLS:
        exact, rough = evaluate(double, frame(cell)), evaluate(single, frame(cell))
        assert all(value.dtype == np.float64 for value in rough.values())
        close(rough["energy"], exact["energy"], 1e-6)
        close(rough["force"], exact["force"], 1e-5)
        close(rough["virial"], exact["virial"], 1e-5)


@every_model
def test_training_has_the_numbers_of_an_evaluation_and_twice_the_same_bits(descriptor):
    _, model = toy_model(descriptor)
    batch = batch_of(model, frame(), frame("open", 1))
    quiet, gradients = model(batch), []
    assert "virial" not in model(batch, need_virial=False)
    for _ in range(2):
        model.train().zero_grad()
        trained = model(batch)
        sum(value.square().sum() for value in trained.values()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for name, value in quiet.items():
        assert not value.requires_grad
        assert trained[name].requires_grad
        close(trained[name].detach().numpy(), value.numpy())
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@every_descriptor
@pytest.mark.parametrize("third", range(3))
def test_parameter_gradients_of_a_loss_of_all_outputs_are_right(descriptor, third):
    """Against finite differences along random directions of a third of them: the forces are
    differentiated too.
    """
    changes = [
        {},
        {"type_one_side": True},
        {"activation_function": "silu", "resnet_dt": True},
    ]
    _, model = toy_model(descriptor, changes[third])
    batch = batch_of(model, frame("triclinic", natoms=5), frame("open", 1, 4))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(v.shape, generator=generator, dtype=v.dtype)
        for name, v in model(batch).items()
    }

    def loss():
        return sum(
            (weights[name] * value).sum()
            for name, value in model(batch, create_graph=True).items()
        )

    assert_parameter_gradients(model, loss, slice(third, None, 3))


@every_model
def test_parameter_gradients_of_the_hessian_are_right(descriptor):
    """Against finite differences; torch's own layer normalisation was wrong by 1e-3 in this third
    derivative.
    """
    _, model = toy_model(descriptor)
    batch = batch_of(model, frame("triclinic", natoms=3), frame("open", 1, 2))
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(81 + 36, generator=generator, dtype=torch.float64)

    def loss(create_graph=False):
        return (
            weights
            * model(batch, create_graph=create_graph, need_hessian=True)["hessian"]
        ).sum()

    loss(create_graph=True).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    for _ in range(2):
        directions = [
            torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in used
        ]
        ends = []
        for step in (1e-5, -1e-5):
            for parameter, direction in zip(used, directions):
                parameter.data.add_(direction, alpha=step)
            ends.append(float(loss()))
            for parameter, direction in zip(used, directions):
                parameter.data.sub_(direction, alpha=step)
        expected = (ends[0] - ends[1]) / 2e-5
        found = sum(
            float((p.grad * direction).sum()) for p, direction in zip(used, directions)
        )
        assert abs(expected - found) < 5 * DIFFERENCES * max(abs(expected), 0.1)


# what may be without neighbors: frames, elements of neighbors, elements of centres, everything
LONELY = {
    "one_element": [([[0.0, 0, 0], [1.5, 0, 0], [0, 1.2, 0]], [1, 1, 1], None)],
    "no_neighbors": [([[0.0, 0, 0]], [1], None)],
    "several_without_neighbors": [
        ([[0.0, 0, 0], [40.0, 0, 0]], [0, 2], None),
        ([[0.0, 0, 0]], [1], 50 * np.eye(3)),
    ],
    "one_without_neighbors": [
        ([[0.0, 0, 0], [1.5, 0, 0]], [0, 1], None),
        ([[0.0, 0, 0]], [2], None),
    ],
}
OPTIONS = {
    "tanh": {},
    "gelu": {"activation_function": "gelu"},
    "resnet_dt": {"resnet_dt": True},
    "one_side": {"type_one_side": True},
    "one_side_gelu": {"type_one_side": True, "activation_function": "gelu"},
    "narrow": {"neuron": [2, 4], "axis_neuron": 2},
}
# with every option that the descriptors share; the variants as they are
EVERY_OPTION = [
    *product(sorted(DESCRIPTORS), sorted(OPTIONS)),
    *((name, "tanh") for name in VARIANTS),
]


# with gelu the test below has the features of these frames and their gradients
@pytest.mark.parametrize(
    ("descriptor", "option"),
    [case for case in EVERY_OPTION if not case[1].endswith("gelu")],
)
def test_frames_may_lack_elements_or_neighbors(descriptor, option):
    """A batch in which no atom had a neighbor of some element ended with "cannot reshape tensor of
    0 elements".
    """
    _, model = toy_model(descriptor, OPTIONS[option])
    for frames in LONELY.values():
        quiet = evaluate(model.eval(), *frames)
        model.train().zero_grad()
        batch = batch_of(model, *frames)
        out = model(batch)
        sum((value**2).sum() for value in out.values()).backward()
        for name, value in out.items():
            assert np.isfinite(quiet[name]).all()
            in_files = batch.in_file_order(value) if LABELS[name].per_atom else value
            close(in_files.detach().numpy(), quiet[name])
        assert all(
            p.grad is not None and torch.isfinite(p.grad).all()
            for p in model.parameters()
        )
        # beside a frame with everything, the lonely ones have the same energies
        beside = evaluate(model.eval(), *frames, frame("triclinic"))
        close(beside["energy"][: len(quiet["energy"])], quiet["energy"])


@pytest.mark.parametrize(("descriptor", "option"), EVERY_OPTION)
def test_the_written_out_gradient_is_that_of_automatic_differentiation(
    descriptor, option
):
    """Features, their vector-Jacobian product, and the parameter gradients of both, against
    ``torch.func.vjp``.
    """
    _, model = toy_model(descriptor, OPTIONS[option])
    for frames in (*LONELY.values(), [frame("triclinic"), frame("open", 1, 4)]):
        assert_gradient_is_automatic(
            model.descriptor.requires_grad_(), batch_of(model, *frames)
        )


ROUGH = {"smooth": False}
ONE_TERM = {f"update_g1_has_{term}": False for term in ("conv", "drrd", "grrg", "attn")}
SUMS_ONLY = {
    f"update_{what}": False
    for what in ("g1_has_attn", "g2_has_attn", "g2_has_g1g1", "h2")
}  # has a kernel
# options of one descriptor, as changes of its small section
OWN_OPTIONS = {
    "dpa2": [
        {"use_three_body": False},
        {"update_style": "res_avg"},
        {"update_style": "res_incr", "update_h2": False},
        {"update_residual_init": "const"},
        {"tebd_input_mode": "strip", "type_one_side": True},
        {"direct_dist": True, "attn2_has_gate": False},
        ROUGH,
        {"nlayers": 1},
        {"g1_out_conv": False, "g1_out_mlp": False, "use_sqrt_nnei": False, **ROUGH},
        {"update_g2_has_attn": False, "update_g2_has_g1g1": False},
        {**ONE_TERM, "update_g1_has_attn": True, "g1_out_mlp": False},
        {**ONE_TERM, "update_g1_has_drrd": True, "update_g1_has_grrg": True},
        {"g1_dim": 64, "use_three_body": False, "add_tebd_to_repinit_out": False},
        {"concat_output_tebd": False, "use_tebd_bias": True},
        SUMS_ONLY,
        {**SUMS_ONLY, **ROUGH, "update_style": "res_avg", "direct_dist": True},
        {"exclude_types": [[0, 1]], "env_protection": 0.05, "ln_eps": 1e-3},
    ],
    "dpa3": [
        {"update_angle": False, "nlayers": 2},
        {"smooth_edge_update": False},
        {"n_multi_edge_message": 3},
        {"a_compress_rate": 1, "a_compress_e_rate": 2},
        {"a_compress_rate": 2, "a_compress_use_split": True},
        {"update_style": "res_avg"},
        {"update_style": "res_incr"},
        {"edge_init_use_dist": True},
        {"nlayers": 1},
        {"update_residual_init": "norm", "update_residual": 0.4},
        {"sequential_update": True, "nlayers": 2},
        {"nlayers": 1, "sequential_update": True},
        {"optim_update": False},
        {"exclude_types": [[0, 1]]},
    ],
    "se_atten": [
        {"attn_dotr": False},
        {"normalize": False},
        {"temperature": 0.02},
        {"smooth_type_embedding": False},
        {
            "normalize": False,
            "attn_dotr": False,
            "smooth_type_embedding": False,
            "exclude_types": [[0, 1]],
        },
    ],
    "se_e3_tebd": [{"exclude_types": [[0, 1]]}, ROUGH],
    "se_e2_a": [
        {"exclude_types": [[0, 1]], "env_protection": 0.05},
        {"activation_function": "silut:10"},
    ],
}


@pytest.mark.parametrize("portion", [None, 7])
@pytest.mark.parametrize(
    ("descriptor", "number"),
    [(name, k) for name, of in OWN_OPTIONS.items() for k in range(len(of))],
)
def test_every_option_of_a_descriptor_has_right_derivatives_and_is_in_its_tree(
    descriptor, number, portion, monkeypatch
):
    if portion:  # and activations are written out for few numbers
        monkeypatch.setattr(moments, "NUMBERS_IN_CACHE", portion)
        monkeypatch.setattr(silu, "MIN_NUMBERS", 1)
    config, model = toy_model(descriptor, OWN_OPTIONS[descriptor][number])
    coord, types, box = frame(natoms=6)
    move, strain = (
        np.random.default_rng(3).normal(size=shape) for shape in (coord.shape, (3, 3))
    )
    grown = [(coord + s * move, np.eye(3) + s * strain) for s in (STEP, -STEP)]
    found = evaluate(model, (coord, types, box))
    by_rule = (found["force"] * move).sum() + (
        found["virial"].reshape(3, 3) * strain
    ).sum()
    close(
        by_rule,
        -slopes(model, [(c @ grow, types, box @ grow) for c, grow in grown])[0],
        10 * DIFFERENCES,
    )
    assert_gradient_is_automatic(
        model.descriptor.requires_grad_(), batch_of(model, frame(), frame("open", 1, 4))
    )
    tree = model_tree(model, config)
    again = model_from_tree(config_from_tree({"model": tree}), tree)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            again.state_dict().values(), model.state_dict().values(), strict=True
        )
    )
    one = Frame(coord, types.astype(np.int64), None)
    few, many = (
        model(collate([pair_frame(one, model.layout, round_to=slots)], model.layout))
        for slots in (1, 60)
    )
    for name, value in few.items():
        close(many[name].numpy(), value.numpy())
    out = model.train()(batch_of(model, frame(natoms=4)))
    sum(value.square().sum() for value in out.values()).backward()
    # also those that no energy depends on: ranks that average gradients wait for all of them
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters()
    )


def assert_gradient_is_automatic(part, batch):
    def results(call):
        generator = torch.Generator().manual_seed(1)
        features, vjp = call()
        weights = torch.randn(features.shape, generator=generator, dtype=features.dtype)
        grad = vjp(weights)
        further = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
        total = (features * weights).sum() + (grad * further).sum()
        return [
            features,
            grad,
            *torch.autograd.grad(
                total, list(part.parameters()), materialize_grads=True
            ),
        ]

    def automatic():
        reference = with_operations(part, REFERENCE)
        features, vjp = torch.func.vjp(
            lambda v: reference(replace(batch, vector=v))[0], batch.vector
        )
        return features, lambda grad: vjp(grad)[0]

    for ours, expected in zip(
        results(lambda: part(batch)), results(automatic), strict=True
    ):
        close(ours.detach().numpy(), expected.detach().numpy())


@every_model
def test_operations_of_a_gpu_give_the_numbers_of_a_cpu(descriptor):
    _, model = toy_model(descriptor)
    batch, results = batch_of(model.train(), frame(), frame("open", 1, 3)), []
    for one in (model, with_operations(model, GPU)):
        model.zero_grad()
        out = one(batch)
        sum(value.square().sum() for value in out.values()).backward()
        results.append([*out.values(), *(p.grad for p in model.parameters())])
    for cpu, gpu in zip(*results, strict=True):
        close(gpu.detach().numpy(), cpu.detach().numpy())


def test_attention_with_logits_too_large_for_their_exponentials_is_that_of_the_reference():
    _, model = toy_model("se_atten", {"normalize": False})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1e3 if "in_proj.weight" in name else 1.0)
    batch = batch_of(model, frame())
    found, expected = model(batch), with_operations(model, REFERENCE)(batch)
    assert all(value.isfinite().all() for value in found.values())
    close(found["force"].detach().numpy(), expected["force"].detach().numpy())


@every_descriptor
def test_equal_seeds_give_equal_models_and_leave_the_global_random_state_alone(
    descriptor,
):
    config = model_config_from_dict(
        {
            "type_map": ["O", "H", "Na"],
            "descriptor": SECTIONS[descriptor],
            "fitting_net": {"neuron": [5]},
        }
    )
    before = torch.get_rng_state()
    one, same, other = (build_model(config, seed).state_dict() for seed in (7, 7, 8))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@every_descriptor
@pytest.mark.parametrize(
    "changes",
    [{}, {"exclude_types": [[0, 1]], "tebd_input_mode": "strip", "smooth": False}],
)
def test_a_step_does_not_wait_for_the_device_and_all_tensors_are_on_it(
    descriptor, changes
):
    """On the device ``meta`` a tensor of another device, or a number that is requested, is an
    error.
    """
    net = {"dim_case_embd": 2} if changes else {}
    _, model = toy_model(
        descriptor,
        changes,
        net,
        **TABLE,
        **({"atom_exclude_types": [1]} if changes else {}),
    )
    batch = batch_of(model, frame(natoms=4), frame("open", 1, 3)).to(
        torch.device("meta")
    )
    make = torch.tensor

    def made_here(values, *args, device=None, **kwargs):
        assert device is None, "numbers of the host are copied to the device in a step"
        return make(values, *args, **kwargs)

    model.to("meta").train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", made_here)
        sum(value.square().sum() for value in model(batch).values()).backward()
    assert all(
        p.grad.device.type == "meta" for p in model.parameters() if p.requires_grad
    )
    assert model.eval()(batch, need_hessian=True)["hessian"].shape == (12**2 + 9**2,)


# ---- quantities other than energies


def turned_tensors(value, turn):
    """Return symmetric tensors (..., 9) after a turn of the frame."""
    tensors = value.reshape(-1, 3, 3)
    close(tensors, tensors.swapaxes(1, 2))
    return (turn.T @ tensors @ turn).reshape(value.shape)


def unchanged(value, turn):
    return value


# networks of other quantities: their sections, and the value after a turn of the frame
QUANTITIES = {
    "dipole": ({"type": "dipole"}, lambda value, turn: value @ turn),
    "polar": (
        {"type": "polar", "fit_diag": False, "scale": [1.0, 0.5, 2.0]},
        turned_tensors,
    ),
    "polar_diagonal": ({"type": "polar", "shift_diag": False}, turned_tensors),
    "property": (
        {"type": "property", "property_name": "gap", "intensive": True, "task_dim": 2},
        lambda value, _: value,
    ),
    "extensive": (
        {"type": "property", "property_name": "m", "distinguish_types": False},
        unchanged,
    ),
    "dos": ({"type": "dos", "numb_dos": 4}, unchanged),
}
WITH_VECTORS = [
    name
    for name in (*sorted(DESCRIPTORS), *VARIANTS)
    if getattr(
        model_config_from_dict(model_section(name)).descriptor,
        "has_equivariants",
        False,
    )
    and not name.startswith("table")
]
MAIN = ("se_e2_a", "se_atten", "dpa2", "dpa3")
every_quantity = pytest.mark.parametrize(
    ("quantity", "descriptor"),
    [
        *product(["dipole"], WITH_VECTORS),
        *product(["polar", "polar_diagonal"], MAIN),
        *product(["dos"], sorted(DESCRIPTORS)),
        *product(["property", "extensive"], ("se_e2_a", "dpa4")),
    ],
)
LEFT_OUT = [
    *product(QUANTITIES, [{"atom_exclude_types": [1]}]),
    *product(["dipole", "polar"], [{"sel_type": [0, 2]}]),
]


@torch.no_grad()
def quantity_model(quantity, descriptor="se_e2_a", more=None, **changes):
    """Return a model of a quantity with twice as many neighbors as the toy models have."""
    more = more_neighbors(model_section(descriptor)["descriptor"]) | (more or {})
    _, model = toy_model(descriptor, more, QUANTITIES[quantity][0], **changes)
    model.out_std.copy_(
        torch.linspace(0.5, 2, model.out_std.numel()).view_as(model.out_std)
    )
    return model


@every_quantity
def test_a_quantity_turns_with_the_frame_or_stays(quantity, descriptor):
    model, turns = quantity_model(quantity, descriptor), QUANTITIES[quantity][1]
    frames = [frame(cell) for cell in CELLS]
    here = evaluate(model, *frames)
    for turn in [rotation(), *([] if descriptor in CHIRAL else [-rotation(2)])]:
        there = evaluate(
            model,
            *(
                (c @ turn, types, None if box is None else box @ turn)
                for c, types, box in frames
            ),
        )
        for name in model.labels:
            assert np.abs(here[name]).max() > 1e-3
            close(there[name], turns(here[name], turn))


@every_quantity
def test_a_quantity_does_not_depend_on_how_its_frame_is_written(quantity, descriptor):
    """Atoms in any order; in twice the cell it is twice as much, or the same if it is intensive."""
    model = quantity_model(quantity, descriptor)
    (coord, types, box), order = frame(), np.random.default_rng(4).permutation(9)
    whole, atomic = model.labels
    here, there = (
        evaluate(model, (coord, types, box)),
        evaluate(model, (coord[order], types[order], box)),
    )
    close(there[whole], here[whole])
    close(there[atomic], here[atomic][order])
    is_mean = quantity == "property"
    close(here[whole][0], here[atomic].mean(0) if is_mean else here[atomic].sum(0))
    double = evaluate(
        model,
        (
            np.concatenate([coord, coord + box[1]]),
            np.tile(types, 2),
            box * [[1], [2], [1]],
        ),
    )
    close(double[whole], here[whole] if is_mean else 2 * here[whole])
    close(double[atomic], np.tile(here[atomic], (2, 1)))


@every_quantity
def test_a_quantity_is_smooth_where_an_atom_crosses_a_cutoff(quantity, descriptor):
    model, (coord, types) = quantity_model(quantity, descriptor), toy_atoms(0, 6)
    away = coord[0] - coord.mean(0)
    away /= np.linalg.norm(away)
    for cutoff in cutoffs(model):
        ends = [
            np.vstack([coord, coord[0] + 1.3 * away, coord[0] + (cutoff + s) * away])
            for s in (-GAP, GAP)
        ]
        near, far = (evaluate(model, (c, [*types, 2, 1], None)) for c in ends)
        for name in model.labels:
            assert abs(near[name] - far[name]).max() < 100 * GAP * max(
                1, abs(near[name]).max()
            ), (
                cutoff,
                name,
            )


@pytest.mark.parametrize(("quantity", "how"), LEFT_OUT)
def test_atoms_of_types_that_are_left_out_have_nothing_and_are_not_counted(
    quantity, how
):
    section = QUANTITIES[quantity][0]
    _, part = (
        toy_model("se_e2_a", {}, section | how)
        if "sel_type" in how
        else toy_model("se_e2_a", {}, section, **how)
    )
    _, all_types = toy_model("se_e2_a", {}, section)
    (coord, types, box), (whole, atomic) = frame(), part.labels
    found, expected = (
        evaluate(model, (coord, types, box)) for model in (part, all_types)
    )
    counted, (value,) = expected[atomic][types != 1], found[whole]
    close(found[atomic][types != 1], counted)
    assert not found[atomic][types == 1].any()
    close(value, counted.mean(0) if quantity == "property" else counted.sum(0))


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_parameter_gradients_of_a_quantity_are_right(quantity):
    model = quantity_model(
        quantity, more={"type_one_side": True}
    )  # a third of the networks
    batch, generator = (
        batch_of(model, frame("triclinic", natoms=5), frame("open", 1, 4)),
        torch.Generator().manual_seed(1),
    )
    weights = {
        n: torch.randn(v.shape, generator=generator, dtype=v.dtype)
        for n, v in model(batch).items()
    }
    assert_parameter_gradients(
        model,
        lambda: sum(
            (weights[n] * model(batch, create_graph=True)[n]).sum()
            for n in model.labels
        ),
    )
