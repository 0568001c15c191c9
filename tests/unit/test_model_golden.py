"""Models of DeePMD-kit give its energies, forces and virials here."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_models import batch_of

from deepmd_ema.data.collate import collate, pair_frame
from deepmd_ema.data.source import Frame
from deepmd_ema.interop.dp import read_dp

GOLDEN = Path(__file__).parents[1] / "golden"  # made_by: see golden/README.md
SAME_MATH = 1e-10
MODELS = (
    "se_e2_a",
    "se_e2_a_two_side",
    "se_e2_a_excluded",
    "se_e2_r",
    "dpa1",
    "dpa1_strip",
    "dpa1_v2",
    "se_e3_tebd",
    "dpa3",
    "dpa3_dynamic",
    "dpa2",
    "dpa2_direct",
    "hybrid",
    "hybrid_cutoffs",
    "se_e3_tebd_strip",
    "dpa1_electrons",
    "zbl",
    "se_e3",
    "linear",
)
SYSTEMS = ("triclinic", "molecule", "grid")


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    config, model, _ = read_dp(GOLDEN / f"{request.param}.dp")
    return config, model, np.load(GOLDEN / f"{request.param}.npz")


def frames_of(name, fitting):
    """Return the frames of a system with the parameters that make_golden.py gave them."""
    with np.load(GOLDEN / "systems.npz") as systems:
        coord, types, box = (
            systems[f"{name}_{key}"] for key in ("coord", "type", "box")
        )
    frames, atoms = coord.shape[:2]
    fparam = 0.1 * np.arange(frames * fitting.numb_fparam).reshape(frames, -1)
    aparam = 0.01 * np.arange(frames * atoms * fitting.numb_aparam).reshape(
        frames, atoms, -1
    )
    return [
        Frame(
            x.reshape(-1, 3),
            types.astype(np.int64),
            box[k].reshape(3, 3) if box.size else None,
            fparam=fparam[k] if fparam.size else None,
            aparam=aparam[k] if aparam.size else None,
        )
        for k, x in enumerate(coord)
    ]


def swap_equal_distances(batch, rcut, swaps):
    """Return the vectors with the pairs of images at equal distances of each section swapped where
    ``swaps`` says.
    """
    vector, distance = batch.vector.clone(), batch.vector.norm(dim=-1)
    for atom, row in enumerate(distance):
        same = ((row[1:] - row[:-1]).abs() < 1e-9) & (row[1:] < rcut)
        for swap, k in zip(swaps, torch.nonzero(same)[:, 0].tolist()):
            if swap:
                vector[atom, [k, k + 1]] = batch.vector[atom, [k + 1, k]]
    return vector


def with_order_of_the_peer(model, batch, atom_energy):
    """Return ``batch`` with images at equal distances in the order that gives the peer's atomic
    energies best.
    """
    orders = [
        swap_equal_distances(batch, model.layout.rcut, s)
        for s in itertools.product((False, True), repeat=3)
    ]
    wrong = torch.stack(
        [
            (model(replace(batch, vector=v))["atom_energy"] - atom_energy).abs()
            for v in orders
        ]
    )
    best = wrong.argmin(0)
    return replace(
        batch,
        vector=torch.stack([orders[k][atom] for atom, k in enumerate(best.tolist())]),
    )


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("training", [False, True])
def test_numbers_are_those_of_deepmd_kit(golden, system, training):
    config, model, expected = golden
    batch = collate(frames_of(system, config.fitting_net), model.layout)
    if system == "triclinic":
        theirs = torch.from_numpy(expected[f"{system}_atom_energy"]).reshape(-1)[
            batch.atom_order
        ]
        batch = with_order_of_the_peer(model, batch, theirs)
    out = model(batch, create_graph=training)
    for name in ("energy", "atom_energy", "force", "virial"):
        value = (
            batch.in_file_order(out[name])
            if name in ("atom_energy", "force")
            else out[name]
        )
        reference = expected[f"{system}_{name}"]
        found = value.detach().numpy().reshape(reference.shape)
        assert np.abs(found - reference).max() <= SAME_MATH * np.abs(reference).max(), (
            name
        )


def test_the_slots_of_a_batch_do_not_matter(golden):
    """The empty slots up to ``sel`` count whether a batch holds them or not."""
    config, model, _ = golden
    frames = frames_of("molecule", config.fitting_net)
    few = collate(frames, model.layout)
    many = collate(
        [
            pair_frame(frame, model.layout, round_to=max(model.layout.sel))
            for frame in frames
        ],
        model.layout,
    )
    assert sum(few.slots) < sum(many.slots) == sum(model.layout.sel)
    for name, value in model(few).items():
        torch.testing.assert_close(model(many)[name], value, rtol=1e-12, atol=1e-12)


def test_the_bias_of_an_excluded_type_does_not_count():
    _, model, _ = read_dp(GOLDEN / "se_e2_a_excluded.dp")
    batch = batch_of(model, ([[0.0, 0, 0]], [2], None), fparam=np.array([0.3]))
    assert model(batch)["energy"].item() == 0
