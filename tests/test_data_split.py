"""Validation frames split off: every kind in both parts, near copies in one, the same for the same seed and data."""

import numpy as np
import pytest
from helpers import toy_frame

from deepmd_ema.data.source import BOX, COORD, Chunk
from deepmd_ema.data.split import FrameTable, describe_frames, split_frames
from deepmd_ema.errors import DataError
from deepmd_ema.labels import FORCE


def chunk_of(coords, types, box=None, force=None):
    coords = np.asarray(coords, float)
    arrays = {COORD: coords} | ({} if box is None else {BOX: np.tile(np.ravel(box), (len(coords), 1))})
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
        table.add([chunk], num_types, [kind] * chunk.num_frames)
    return table


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_each_kind_is_split_at_the_fraction_and_a_kind_with_one_structure_is_for_training(rng):
    parts = [("a", thermal(rng, n), kind) for kind, n in (("bulk", 60), ("surface", 20), ("only", 1), ("bulk", 40))]
    split = split_frames(table_of(*parts), 0.1, 1)
    kinds = np.repeat(["bulk", "surface", "only", "bulk"], [60, 20, 1, 40])
    assert {kind: int(split.chosen[kinds == kind].sum()) for kind in set(kinds)} == {
        "bulk": 10,
        "surface": 2,
        "only": 0,
    }
    assert split.lines[:3] == [
        "validation: 12 of 121 frames (fraction 0.1, seed 1)",
        "  by config_type or group: bulk 10 of 100, surface 2 of 20",
        "  in training alone: only (1 frame)",
    ]
    assert np.diff(np.flatnonzero(split.chosen[:60])).max() > 1  # at random, not the last ones


@pytest.mark.parametrize("pbc", [True, False])
def test_a_choice_depends_on_seed_and_data_alone(rng, pbc):
    table = table_of(("a", thermal(rng, 50, pbc=pbc), ""))
    one, again, other = (split_frames(table, 0.2, seed).chosen for seed in (1, 1, 2))
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
        table.add([chunk_of([moved], types[order], None if box is None else box @ rotation)], 2)
    chosen = split_frames(table, 0.2, 3).chosen
    assert chosen.sum() == 16
    assert np.array_equal(chosen[:40], chosen[40:])


def test_the_end_of_one_trajectory_is_for_validation(rng):
    chosen = split_frames(table_of(("a", trajectory(rng, 100), "")), 0.1, 1).chosen
    assert np.flatnonzero(chosen).tolist() == list(range(90, 100))


def test_of_several_trajectories_whole_ones_are_for_validation(rng):
    for kind in ("", "md"):
        table = table_of(*((str(k), trajectory(rng, 60), kind) for k in range(20)))
        chosen = split_frames(table, 0.1, 1).chosen.reshape(20, 60)
        assert chosen.sum() == 120
        assert chosen.any(axis=1).sum() == 2


def test_frames_of_one_trajectory_that_are_far_apart_are_split_at_random(rng):
    chosen = split_frames(table_of(("a", thermal(rng, 100), "")), 0.1, 1).chosen
    assert chosen.sum() == 10
    assert np.diff(np.flatnonzero(chosen)).max() > 1


def test_single_structures_of_a_composition_are_for_training_unless_they_are_many(rng):
    singles = [(str(n), thermal(rng, 1, natoms=n), "") for n in range(4, 24)]
    few = split_frames(table_of(("a", thermal(rng, 40), ""), *singles[:5]), 0.1, 1).chosen
    assert (few.sum(), few[40:].sum()) == (4, 0)
    assert split_frames(table_of(*singles), 0.1, 1).chosen.sum() == 2


def test_a_frame_with_an_element_that_no_other_has_is_for_training(rng):
    odd = chunk_of([toy_frame(rng)[0]], np.full(12, 2), toy_frame(rng)[2])
    for seed in range(20):
        parts = [("a", odd if k == 3 else thermal(rng, 1, natoms=4 + k), "") for k in range(20)]
        assert not split_frames(table_of(*parts, num_types=3), 0.4, seed).chosen[3]


def test_parts_whose_forces_differ_by_two_are_reported(rng):
    coord, types, box = zip(*(toy_frame(rng) for _ in range(10)))
    parts = [("a", chunk_of([coord[k]], types[k], box[k], force=1.0 + 9 * (k == 4)), "") for k in range(10)]
    found = [split_frames(table_of(*parts), 0.1, seed) for seed in range(60)]
    for split in found:
        assert (split.warnings != []) == bool(split.chosen[4] or (~split.chosen)[4])
    with_strong = next(split for split in found if split.chosen[4])
    assert with_strong.lines[-1] == "  force RMS (eV/angstrom): 1 in training, 10 in validation"
    assert with_strong.warnings[0].startswith(
        "force RMS is 1 eV/angstrom in training and 10 in validation: their errors"
    )


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_forces_that_are_not_finite_are_left_to_the_check_of_the_data(rng, fault):
    """The user saw a warning that the RMS is nan, and only then the error with file and frame."""
    coord, types, box = zip(*(toy_frame(rng) for _ in range(10)))
    parts = [("a", chunk_of([coord[k]], types[k], box[k], force=fault if k == 4 else 1.0), "") for k in range(10)]
    split = split_frames(table_of(*parts), 0.2, seed=1)
    assert split.chosen.sum() == 2
    assert not [line for line in (*split.lines, *split.warnings) if "force RMS" in line]


def test_frames_that_leave_a_part_empty_are_refused(rng):
    coord, types, box = toy_frame(rng)
    with pytest.raises(DataError, match=r"20 frames of 1 different structure leave none for one of the parts"):
        split_frames(table_of(("a", chunk_of([coord] * 20, types, box), "")), 0.1, 1)


def test_frames_of_several_sizes_in_one_chunk_are_described_as_alone(rng):
    frames = [toy_frame(rng, natoms) for natoms in (6, 9)]
    alone = [describe_frames(chunk_of([coord], types, box))[0] for coord, types, box in frames]
    coords, types = np.zeros((2, 9, 3)), np.full((2, 9), -1)
    for k, (coord, own, _) in enumerate(frames):
        coords[k, : len(coord)], types[k, : len(own)] = coord, own
    together = describe_frames(Chunk(0, types, {COORD: coords, BOX: np.stack([box.ravel() for *_, box in frames])}))
    assert together == pytest.approx(np.stack(alone), abs=1e-6)
