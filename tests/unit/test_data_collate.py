"""Batches against brute force: order of atoms, slots, truncation, exclusion, images, reverse slots,
labels.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers import toy_frame, toy_labels

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data.collate import collate, pair_frame
from deepmd_ema.data.source import Frame
from deepmd_ema.geometry import KeptPairs, find_pairs

RCUT = 4.0
LAYOUT = NeighborLayout(RCUT, (30, 30, 30), 3)


def make_frame(seed, natoms=12, pbc=True, index=0, **labels):
    rng = np.random.default_rng(seed)
    coord, types, box = toy_frame(rng, natoms, 3, pbc)
    types = rng.permutation(types)
    energy, force, virial, _ = toy_labels(coord, types, box)
    values = {"energy": np.array(energy), "force": force} | (
        {"virial": virial} if pbc else {}
    )
    return Frame(coord, types, box, values | labels, source=("toy", index))


FRAMES = [
    make_frame(0),
    make_frame(1, 7, pbc=False, index=1),
    make_frame(2, 1, index=2),
    make_frame(3, 20, index=3),
]


def expected_neighbors(frame, atom, layout):
    """For one atom: per section the list of (neighbor, vector) by distance, truncated, then without
    excluded pairs.
    """
    pairs = find_pairs(frame.coord, frame.box, layout.rcut)
    vector = pairs.vector(frame.coord, frame.box)
    mine = np.flatnonzero(pairs.i == atom)
    mine = sorted(mine, key=lambda p: np.linalg.norm(vector[p]))[: sum(layout.sel)]
    sections = range(layout.num_types) if layout.by_type else [None]
    out = []
    for k, kind in enumerate(sections):
        chosen = [
            p for p in mine if kind is None or frame.atom_type[pairs.j[p]] == kind
        ]
        chosen = sorted(chosen, key=lambda p: np.linalg.norm(vector[p]))[
            : layout.sel[k]
        ]
        kinds = [
            (int(frame.atom_type[atom]), int(frame.atom_type[pairs.j[p]]))
            for p in chosen
        ]
        kept = [
            p for p, k in zip(chosen, kinds) if not {k, k[::-1]} & layout.excluded_pairs
        ]
        out.append([(pairs.j[p], vector[p]) for p in kept])
    return out


def check_batch(batch, frames, layout):
    starts = np.cumsum([0, *[f.num_atoms for f in frames]])
    flat_atom = batch.atom_order.numpy()
    row_of = np.empty(starts[-1], int)
    row_of[flat_atom] = np.arange(starts[-1])
    assert sorted(flat_atom) == list(range(starts[-1]))
    offsets = np.cumsum([0, *batch.slots])
    for row in range(starts[-1]):
        k = int(batch.atom_frame[row])
        frame, atom = frames[k], flat_atom[row] - starts[k]
        assert batch.atom_type[row] == frame.atom_type[atom]
        np.testing.assert_array_equal(batch.coord[row], frame.coord[atom])
        for section, wanted in enumerate(expected_neighbors(frame, atom, layout)):
            here = slice(offsets[section], offsets[section + 1])
            neighbor, vector = (
                batch.neighbor[row, here].numpy(),
                batch.vector[row, here].numpy(),
            )
            assert neighbor[: len(wanted)].tolist() == [
                row_of[starts[k] + j] for j, _ in wanted
            ]
            for slot, (_, expected) in enumerate(wanted):
                np.testing.assert_allclose(vector[slot], expected, atol=1e-12)
            assert (neighbor[len(wanted) :] == row).all()
            np.testing.assert_array_equal(
                np.linalg.norm(vector[len(wanted) :], axis=1), 2 * layout.rcut
            )


LAYOUTS = {
    "by_type": LAYOUT,
    "truncated": NeighborLayout(RCUT, (3, 5, 2), 3),
    "excluded": NeighborLayout(
        RCUT, (30, 4, 30), 3, excluded_pairs=frozenset({(0, 1), (2, 2)})
    ),
    "one_section": NeighborLayout(RCUT, (60,), 3, by_type=False),
    "one_section_truncated_and_excluded": NeighborLayout(
        RCUT, (9,), 3, by_type=False, excluded_pairs=frozenset({(1, 0)})
    ),
    "more_types": NeighborLayout(RCUT, (20,) * 6, 6),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chosen", [[3, 0], [0, 1, 2, 3], [1]])
def test_every_slot_holds_what_a_brute_force_search_says(name, chosen):
    frames = [FRAMES[k] for k in chosen]
    check_batch(collate(frames, LAYOUTS[name]), frames, LAYOUTS[name])


@pytest.mark.parametrize("chosen", [[0], [0, 1, 2, 3]])
def test_reverse_slots_name_each_use_of_an_atom_once_in_order(chosen):
    batch = collate([FRAMES[k] for k in chosen], LAYOUTS["truncated"])
    natoms, slots = batch.neighbor.shape
    filled = torch.linalg.norm(batch.vector, dim=-1) < RCUT
    for row in range(natoms):
        uses = (
            torch.nonzero(((batch.neighbor == row) & filled).ravel()).ravel().tolist()
        )
        mine = [r for r in batch.reverse[row].tolist() if r != natoms * slots]
        assert mine == uses
        assert batch.reverse[row].tolist()[: len(mine)] == mine


def test_slots_are_trimmed_rounded_up_and_never_above_sel():
    frames, round_to = [FRAMES[0], FRAMES[3]], 4
    layout = NeighborLayout(RCUT, (30, 10, 3), 3)
    most = np.zeros(3, int)
    for frame in frames:
        pairs = find_pairs(frame.coord, frame.box, RCUT)
        for atom in range(frame.num_atoms):
            most = np.maximum(
                most,
                np.bincount(frame.atom_type[pairs.j[pairs.i == atom]], minlength=3),
            )
    expected = [
        min(sel, -(-min(n, sel) // round_to) * round_to)
        for n, sel in zip(most, layout.sel)
    ]
    assert collate(
        [pair_frame(f, layout, round_to=round_to) for f in frames], layout
    ).slots == tuple(expected)


def test_prepared_frames_and_kept_pairs_make_the_same_batch():
    plain = collate(FRAMES, LAYOUT)
    kept = collate([pair_frame(f, LAYOUT, KeptPairs(0.7).find) for f in FRAMES], LAYOUT)
    for name in ("neighbor", "vector", "reverse", "coord", "atom_order"):
        torch.testing.assert_close(
            getattr(plain, name), getattr(kept, name), rtol=0, atol=0
        )


def test_labels_follow_their_atoms_and_missing_ones_are_not_found():
    batch = collate(FRAMES, LAYOUT, labels=["atom_energy"])
    torch.testing.assert_close(
        batch.in_file_order(batch.labels["force"]),
        torch.from_numpy(np.concatenate([f.labels["force"] for f in FRAMES])),
    )
    assert batch.has_label["virial"].tolist() == [1, 0, 1, 1]
    assert batch.labels["virial"].shape == (4, 9)
    assert (batch.labels["virial"][1] == 0).all()
    assert batch.has_label["atom_energy"].tolist() == [0, 0, 0, 0]
    assert batch.labels["atom_energy"].shape == (40,)
    assert batch.labels["energy"].shape == (4,)
    assert batch.periodic.tolist() == [True, False, True, True]
    assert (batch.box[1] == 0).all()
    assert batch.frames == (("toy", 0), ("toy", 1), ("toy", 2), ("toy", 3))


@pytest.mark.parametrize("name", LAYOUTS)
def test_molecules_paired_together_are_bitwise_those_paired_one_by_one(name):
    molecules = [
        make_frame(k, size, pbc=False, index=k)
        for k, size in enumerate((9, 1, 12, 9, 64, 2))
    ]
    line = Frame(
        np.arange(12.0).reshape(4, 3),
        np.array([0, 2, 2, 1]),
        labels={"energy": np.array(1.0)},
    )  # ties
    frames = [*molecules, line]
    together = collate(frames, LAYOUTS[name], ["energy", "force", "virial"])
    one_by_one = collate(
        [pair_frame(f, LAYOUTS[name]) for f in frames],
        LAYOUTS[name],
        ["energy", "force", "virial"],
    )
    assert together.frames == one_by_one.frames
    for item in (item for item in fields(together) if item.name != "frames"):
        torch.testing.assert_close(
            getattr(together, item.name), getattr(one_by_one, item.name), rtol=0, atol=0
        )


@pytest.mark.parametrize("cells", [1000, 100_000])
def test_atoms_may_be_many_cells_outside_of_theirs(cells):
    """All images between the outermost were counted: 3 GB at 150 cells, and more than there is at
    1,000.
    """
    frame = make_frame(0)
    moves = np.random.default_rng(0).integers(-cells, cells + 1, frame.coord.shape)
    far = Frame(frame.coord + moves @ frame.box, frame.atom_type, frame.box)
    here, there = collate([frame], LAYOUT), collate([far], LAYOUT)
    torch.testing.assert_close(there.neighbor, here.neighbor)
    torch.testing.assert_close(
        there.vector, here.vector, rtol=0, atol=1e-13 * max(10, cells)
    )
    torch.testing.assert_close(there.reverse, here.reverse)
