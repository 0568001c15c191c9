"""Validation frames split off: every kind in both parts, near copies in one, the same for the same
seed and data.
"""

import numpy as np
import pytest
from helpers import toy_frame

from deepmd_ema.config.labels import FORCE
from deepmd_ema.data.source import BOX, COORD, Chunk
from deepmd_ema.data.split import FrameTable, Split, describe_frames, split_frames
from deepmd_ema.errors import DataError


def chunk_of(coords, types, box=None, force=None):
    coords = np.asarray(coords, float)
    arrays = {COORD: coords} | (
        {} if box is None else {BOX: np.tile(np.ravel(box), (len(coords), 1))}
    )
    if force is not None:
        arrays[FORCE] = np.full(coords.shape, float(force))
    return Chunk(0, np.tile(np.asarray(types), (len(coords), 1)), arrays)


def thermal(rng, number, natoms=12, jitter=0.25, pbc=True):
    """Return frames that are independent of each other, as a chunk."""
    frames = [toy_frame(rng, natoms, jitter=jitter, pbc=pbc) for _ in range(number)]
    return chunk_of([coord for coord, *_ in frames], frames[0][1], frames[0][2])


def trajectory(rng, number, period=200):
    """Return frames of atoms that oscillate: each is near to the next, and far from most others."""
    coord, types, box = toy_frame(rng)
    times = np.arange(number)[:, None, None] / period + rng.uniform(size=coord.shape)
    return chunk_of(coord + 0.2 * np.sin(2 * np.pi * times), types, box)


def table_of(*parts, num_types=2):
    """Return a table of (name of the file, chunk, kind) with one kind for the frames of a chunk."""
    table = FrameTable()
    for _, chunk, kind in parts:
        table.add([chunk], num_types, [kind] * len(chunk.types))
    return table


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_each_kind_is_split_at_the_fraction_and_a_kind_with_one_structure_is_for_training(
    rng,
):
    parts = [
        ("a", thermal(rng, n), kind)
        for kind, n in (("bulk", 60), ("surface", 20), ("only", 1), ("bulk", 40))
    ]
    split = split_frames(table_of(*parts), 0.1, 1)
    kinds = np.repeat(["bulk", "surface", "only", "bulk"], [60, 20, 1, 40])
    assert {kind: int(split.mask[kinds == kind].sum()) for kind in set(kinds)} == {
        "bulk": 10,
        "surface": 2,
        "only": 0,
    }
    assert split.lines[:3] == [
        "validation: 12 of 121 frames (fraction 0.1, seed 1)",
        "  by config_type or group: bulk 10 of 100, surface 2 of 20",
        "  in training alone: only (1 frame)",
    ]
    assert (
        np.diff(np.flatnonzero(split.mask[:60])).max() > 1
    )  # at random, not the last ones


@pytest.mark.parametrize("pbc", [True, False])
def test_a_choice_depends_on_seed_and_data_alone(rng, pbc):
    table = table_of(("a", thermal(rng, 50, pbc=pbc), ""))
    one, again, other = (split_frames(table, 0.2, seed).mask for seed in (1, 1, 2))
    assert one.sum() == other.sum() == 10
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("pbc", [True, False])
def test_copies_in_another_order_rotated_or_moved_are_in_one_part(rng, pbc):
    own = [toy_frame(rng, pbc=pbc) for _ in range(40)]
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    table = FrameTable()
    for coord, types, box in own:
        table.add([chunk_of([coord], types, box)], 2)
    for coord, types, box in own:
        order = rng.permutation(len(coord))
        moved = (coord + rng.normal(size=3))[order] @ rotation
        if box is not None:
            moved += rng.integers(-1, 2, (len(coord), 3)) @ (box @ rotation)
        table.add(
            [chunk_of([moved], types[order], None if box is None else box @ rotation)],
            2,
        )
    chosen = split_frames(table, 0.2, 3).mask
    assert chosen.sum() == 16
    assert np.array_equal(chosen[:40], chosen[40:])


def test_the_end_of_one_trajectory_is_for_validation(rng):
    chosen = split_frames(table_of(("a", trajectory(rng, 100), "")), 0.1, 1).mask
    assert np.flatnonzero(chosen).tolist() == list(range(90, 100))


def test_single_structures_of_a_composition_are_for_training_unless_they_are_many(rng):
    singles = [(str(n), thermal(rng, 1, natoms=n), "") for n in range(4, 24)]
    few = split_frames(table_of(("a", thermal(rng, 40), ""), *singles[:6]), 0.1, 1).mask
    assert (few.sum(), few[40:].sum()) == (4, 0)
    assert split_frames(table_of(*singles), 0.1, 1).mask.sum() == 2


def test_an_element_of_validation_frames_is_in_training_frames(rng):
    coord, types, box = zip(*(toy_frame(rng) for _ in range(2)))
    with_third = np.where(np.arange(len(types[0])) == 0, 2, types[0])
    rare = [("b", chunk_of([coord[k]], with_third, box[k]), "bulk") for k in range(2)]
    table = table_of(("a", thermal(rng, 10), "bulk"), *rare, num_types=3)
    chosen = [split_frames(table, 0.5, seed).mask[10:].sum() for seed in range(40)]
    assert set(chosen) == {0, 1}


@pytest.mark.parametrize("pbc", [True, False])
def test_frames_whose_elements_are_exchanged_are_no_copies(rng, pbc):
    coord, types, box = toy_frame(rng, pbc=pbc)
    assert 0 < types.sum() < len(types)
    exchanged = types.copy()
    first, second = np.flatnonzero(types == 0)[0], np.flatnonzero(types == 1)[0]
    exchanged[[first, second]] = 1, 0
    one, other = (
        describe_frames(chunk_of([coord], of, box), 2)[0] for of in (types, exchanged)
    )
    assert np.linalg.norm(one - other) > 0.01
    same = describe_frames(chunk_of([coord[::-1]], types[::-1], box), 2)[0]
    assert np.linalg.norm(one - same) < 1e-5


def test_parts_whose_forces_differ_by_two_are_reported(rng):
    coord, types, box = zip(*(toy_frame(rng) for _ in range(10)))
    parts = [
        ("a", chunk_of([coord[k]], types[k], box[k], force=1.0 + 9 * (k == 4)), "")
        for k in range(10)
    ]
    found = [split_frames(table_of(*parts), 0.1, seed) for seed in range(60)]
    for split in found:
        assert any(split.findings()) == bool(split.mask[4] or (~split.mask)[4])
    with_strong = next(split for split in found if split.mask[4])
    assert (
        with_strong.lines[-1]
        == "  force RMS (eV/angstrom): 1 in training, 10 in validation"
    )
    assert str(next(with_strong.findings())).startswith(
        "force RMS is 1 eV/angstrom in training and 10 in validation: their errors"
    )


def test_the_choice_never_changes_between_versions(rng):
    """A restart with a newer version must train on the frames that the run was trained on.

    The numbers are ``split_frames(...).chosen`` of the version before.
    """
    first, second = thermal(rng, 20), thermal(rng, 20)
    by_file = table_of(("a", first, ""), ("b", second, ""))
    by_kind = table_of(("a", first, "bulk"), ("b", second, "surface"))
    assert split_frames(by_file, 0.2, 1).chosen == [11, 14, 16, 17, 24, 28, 32, 33]
    assert split_frames(by_kind, 0.2, 1).chosen == [2, 8, 9, 10, 29, 33, 37, 38]


def test_numbers_of_a_strained_cell_change_by_the_rms_displacement_of_its_atoms():
    """Thresholds in angstrom are then those of displacements, whatever moves the atoms."""
    atoms, edge, strain, tolerance = 100, 9.0, 1e-3, 1e-3
    coord = np.zeros((2, atoms, 3))
    coord[:, :, 0] = edge * np.outer([1, 1 + strain], np.arange(atoms) / atoms)
    cells = np.diag([edge] * 3) * np.array([np.ones(3), [1 + strain, 1, 1]])[:, None]
    one, other = (
        describe_frames(chunk_of([coord[k]], np.zeros(atoms, int), cells[k]), 1)[
            0
        ].astype(float)
        for k in range(2)
    )
    lengths = slice(-6, -3)  # of the three edges
    displacement = np.std(coord[1] - coord[0], axis=0)
    np.testing.assert_allclose(
        (other - one)[lengths], displacement, atol=tolerance * edge * strain
    )


@pytest.mark.parametrize(("ratio", "is_reported"), [(1.9, False), (2.1, True)])
def test_forces_of_two_parts_may_differ_by_less_than_two(ratio, is_reported):
    for force_rms in ([1.0, ratio], [ratio, 1.0]):
        assert any(Split(10, [1], [], force_rms).findings()) == is_reported


def test_frames_that_leave_a_part_empty_are_refused(rng):
    coord, types, box = toy_frame(rng)
    with pytest.raises(
        DataError,
        match=r"20 frames of 1 different structure leave none for one of the parts",
    ):
        split_frames(table_of(("a", chunk_of([coord] * 20, types, box), "")), 0.1, 1)
