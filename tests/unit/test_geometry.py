"""Neighbor search and statistics against brute force, for every kind of cell."""

import numpy as np
import pytest

from deepmd_ema import geometry
from deepmd_ema.geometry import KeptPairs, find_pairs, frame_faults, neighbor_statistics

RCUT = 4.37  # no lattice distance of the cells below
TRICLINIC = np.array([[3.1, 0, 0], [1.0, 3.3, 0], [-1.2, 0.5, 4.1]])
LEFT_HANDED = np.array([[0, 3.1, 0], [3.3, 0, 0], [0, 0, 4.1]])


def brute_pairs(coord, box, rcut, reach=9):
    steps = np.arange(-reach, reach + 1) if box is not None else np.zeros(1, int)
    shifts = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(
        -1, 3
    )
    moved = shifts @ (box if box is not None else np.eye(3))
    found = {}
    for i in range(len(coord)):
        for j in range(len(coord)):
            distance = np.linalg.norm(coord[j] + moved - coord[i], axis=1)
            for k in np.flatnonzero(distance < rcut):
                if i != j or shifts[k].any():
                    found[(i, j, *shifts[k].tolist())] = distance[k]
    return found


@pytest.mark.parametrize(
    "box",
    [None, np.eye(3) * 12.0, np.eye(3) * 5.1, TRICLINIC, LEFT_HANDED, np.eye(3) * 2.9],
    ids=["open", "large", "small", "triclinic", "left_handed", "smaller_than_rcut"],
)
@pytest.mark.parametrize("natoms", [1, 2, 7])
@pytest.mark.parametrize("most", [geometry._MAX_DENSE_DISTANCES, 0.0])
def test_pairs_are_those_of_a_brute_force_search(box, natoms, most, monkeypatch):
    """By either kind of search; sorted by atom, then distance."""
    monkeypatch.setattr(geometry, "_MAX_DENSE_DISTANCES", most)
    coord = np.random.default_rng(natoms).uniform(
        -6, 8, (natoms, 3)
    )  # many atoms lie outside of the cell
    coord[0] = 0.0  # on a corner of the cell
    pairs = find_pairs(coord, box, RCUT)
    found = list(zip(pairs.i.tolist(), pairs.j.tolist(), *pairs.shift.T.tolist()))
    expected = brute_pairs(coord, box, RCUT)
    assert len(found) == len(set(found))
    assert set(found) == set(expected)
    distance = np.linalg.norm(pairs.vector(coord, box), axis=1)
    np.testing.assert_allclose(distance, [expected[key] for key in found], atol=1e-12)
    assert (np.lexsort((distance.round(12), pairs.i)) == np.arange(len(found))).all()


@pytest.fixture
def searches(monkeypatch):
    """The cutoffs of the searches that are made."""
    made = []
    plain = geometry._search
    monkeypatch.setattr(
        geometry,
        "_search",
        lambda *words, **more: made.append(words[2]) or plain(*words, **more),
    )
    return made


@pytest.mark.parametrize(
    "box", [None, TRICLINIC, np.eye(3) * 12.0], ids=["open", "triclinic", "large"]
)
def test_kept_pairs_are_those_of_a_search_while_the_atoms_move(box, searches):
    rng = np.random.default_rng(2)
    coord, kept = rng.uniform(-6, 8, (7, 3)), KeptPairs(0.6)
    for _ in range(60):
        found = kept.find(coord, box, RCUT)
        by_kept = len(searches)
        fresh = find_pairs(coord, box, RCUT)
        del searches[by_kept:]
        for name in ("i", "j", "shift"):
            np.testing.assert_array_equal(getattr(found, name), getattr(fresh, name))
        assert found.nearest == pytest.approx(fresh.nearest, abs=1e-14)
        coord = coord + rng.normal(scale=0.03, size=coord.shape)
    assert 2 <= len(searches) <= 30


def test_statistics_are_those_of_the_brute_force_pairs():
    rng = np.random.default_rng(5)
    frames = [
        (rng.uniform(0, 5, (n, 3)), box, np.arange(n) % 3)
        for n, box in [(6, TRICLINIC), (9, None), (1, None)]
    ]
    statistics = neighbor_statistics(iter(frames), RCUT, 4)
    most, total, nearest, per_frame = np.zeros(4, int), 0, np.full((4, 4), np.inf), []
    for coord, box, types in frames:
        pairs = brute_pairs(coord, box, RCUT)
        counts = np.zeros((len(types), 4), int)
        for (i, j, *_), r in pairs.items():
            counts[i, types[j]] += 1
            nearest[types[i], types[j]] = min(nearest[types[i], types[j]], r)
        most, total = (
            np.maximum(most, counts.max(axis=0)),
            max(total, counts.sum(axis=1).max()),
        )
        per_frame.append(min(pairs.values(), default=np.inf))
    assert statistics.max_neighbors == tuple(most)
    assert statistics.max_total == total
    np.testing.assert_allclose(statistics.nearest, nearest)
    np.testing.assert_allclose(statistics.frame_min, per_frame)
    assert statistics.min_distance == pytest.approx(min(per_frame))
    coord, box, types = frames[1]
    i, j = statistics.frame_pair[1]
    assert np.linalg.norm(coord[i] - coord[j]) == pytest.approx(per_frame[1])


def spread_atoms(width, start=0.0):
    """Return positions of two atoms, one at ``start`` on each axis, the other farther along x."""
    return start + np.outer([0, 1], [width, 0, 0])


# positions and cell of a frame that is at a bound where the factor is 1, and beyond it where it is
# larger
BOUNDS = {
    "is so small that an atom has": lambda factor: (
        np.zeros((100, 3)),
        np.eye(3) * (100 * 4 / 3 * np.pi * RCUT**3 / (1e4 * factor)) ** (1 / 3),
    ),
    "images of it lie within": lambda factor: (
        spread_atoms(0.0),
        np.diag([2 * RCUT * 9 / (1e5 * factor), 1e3, 1e3]),
    ),
    "an edge of the cell is": lambda factor: (
        spread_atoms(0.0),
        np.diag([1e5 * factor, 10, 10]),
    ),
    "the cell has no volume": lambda factor: (
        spread_atoms(0.0),
        np.array([[9e4, 0, 0], [9e4, 0.09 / factor, 0], [0, 0, 10]]),
    ),
    "the atoms of this open system are": lambda factor: (
        spread_atoms(1e5 * factor),
        None,
    ),
    "a position of": lambda factor: (spread_atoms(0.0, start=1e6 * factor), None),
}


@pytest.mark.parametrize("words", BOUNDS)
def test_frames_of_no_atoms_are_reported_beyond_their_bounds(words):
    for factor, is_reported in ((0.95, False), (1.05, True)):
        coord, box = BOUNDS[words](factor)
        faults = frame_faults(
            coord[None],
            None if box is None else box[None],
            np.array([len(coord)]),
            RCUT,
        )
        assert any(words in fault for fault in faults.values()) == is_reported, factor
        assert bool(faults) == is_reported
