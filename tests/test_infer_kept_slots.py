"""Neighbors that are kept between frames give the results of neighbors that are searched in each."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import toy_frame
from infer_models import let_slots_differ, write_run

from deepmd_ema import geometry
from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential

SAME_MATH = 1e-12
NATOMS = 12
DESCRIPTORS = {
    "by_type": {},
    "by_distance": {"model__descriptor": {"type": "se_atten", "rcut": 4.0, "rcut_smth": 0.5, "sel": 100,
                                          "neuron": [4, 8], "axis_neuron": 4, "attn_layer": 0, "seed": 1}},
    "excluded_types": {"model__descriptor__exclude_types": [[0, 1]]},
    "excluded_pairs": {"model__pair_exclude_types": [[0, 1]]},
    "few_slots": {"model__descriptor__sel": [4, 60]},
}  # fmt: skip


@pytest.fixture(scope="module", params=DESCRIPTORS)
def potential(request, tmp_path_factory):
    return Potential(write_run(tmp_path_factory.mktemp("run"), **DESCRIPTORS[request.param])[0], device="cpu")


def compare(potential, kept, coord, types, box, **more):
    """Check one frame against a fresh search."""
    found = potential.evaluate(coord, types, box, **more, kept=kept)
    fresh = potential.evaluate(coord, types, box, **more)
    for name in ("energy", "force", "virial", "atom_energy"):
        a, b = getattr(found, name), getattr(fresh, name)
        np.testing.assert_allclose(a, b, rtol=0, atol=SAME_MATH * max(1.0, np.abs(b).max()), err_msg=name)


@pytest.mark.parametrize("name", ["by_type", "by_distance"])
def test_neighbors_are_sorted_at_each_step_if_slots_have_means_of_their_own(tmp_path, name):
    """Files of DeePMD-kit may have such means; a neighbor in another slot is another energy."""
    loaded = load_model(write_run(tmp_path, **DESCRIPTORS[name])[0])
    let_slots_differ(loaded.model)
    potential, kept = Potential(loaded, device="cpu"), KeptPairs(1.0)
    rng = np.random.default_rng(3)
    coord, types, box = toy_frame(rng, NATOMS)
    for _ in range(5):
        compare(potential, kept, coord, types, box)
        coord = coord + rng.normal(scale=0.05, size=coord.shape)


@pytest.fixture
def searches(monkeypatch):
    """Number of searches of pairs with a skin."""
    made, plain = [], geometry._search
    monkeypatch.setattr(geometry, "_search", lambda *words, **more: made.append(words[2]) or plain(*words, **more))
    return lambda: sum(rcut > 4.0 for rcut in made)


def test_whatever_changes_between_two_frames_is_noticed(potential):
    rng = np.random.default_rng(4)
    coord, types, box = toy_frame(rng, NATOMS)
    kept = KeptPairs(1.0)
    compare(potential, kept, coord, types, box)
    compare(potential, kept, coord, types[::-1], box)  # with the pairs of before
    compare(potential, kept, coord, types, box)
    compare(potential, kept, coord, types, 1.01 * box)
    compare(potential, kept, coord, types, None)  # the cell has gone
    compare(potential, kept, coord + 0.01, types, None)
    compare(potential, kept, coord[1:], types[1:], box)  # an atom has gone
    compare(potential, kept, coord, types, box)
    teleported = coord.copy()
    teleported[[0, 5]] = coord[[5, 0]]
    compare(potential, kept, teleported, types, box)
    compare(potential, kept, coord + box[0], types, box)
    compare(potential, kept, 30.0 * np.arange(NATOMS)[:, None] * np.eye(3)[0], types, None)  # without neighbors
    compare(potential, kept, coord, types, 0.6 * box)  # smaller than the cutoff: atoms see their images


def test_potentials_and_lists_do_not_disturb_each_other(potential, searches):
    """The images of a band have calculators of their own with one potential."""
    rng = np.random.default_rng(6)
    frames = [toy_frame(rng, NATOMS) for _ in range(3)]
    lists = [KeptPairs(1.0) for _ in frames]
    for _ in range(3):
        for kept, frame in zip(lists, frames):
            compare(potential, kept, *frame)
    assert searches() == 3
    assert len(potential._moving) == (3 if potential._keeps_slots else 0)
    lists.clear()
    del kept
    assert not potential._moving
