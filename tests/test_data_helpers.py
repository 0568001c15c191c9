"""The toy potential behind the tests' labels: its forces and virials are derivatives of its energy."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import toy_frame, toy_labels

STEP = 1e-5  # angstrom


@pytest.mark.parametrize("pbc", [True, False])
def test_toy_forces_are_minus_the_slope_of_the_energy(pbc):
    coord, types, box = toy_frame(np.random.default_rng(1), 9, 3, pbc)
    force = toy_labels(coord, types, box)[1]
    for axis in range(3):
        move = np.zeros_like(coord)
        move[4, axis] = STEP
        slope = (toy_labels(coord + move, types, box)[0] - toy_labels(coord - move, types, box)[0]) / (2 * STEP)
        assert force[4, axis] == pytest.approx(-slope, abs=1e-7)


def test_toy_virial_is_minus_the_slope_of_the_energy_under_strain():
    coord, types, box = toy_frame(np.random.default_rng(2), 9, 3)
    virial = toy_labels(coord, types, box)[2].reshape(3, 3)
    for a, b in [(0, 0), (1, 0), (2, 1)]:
        plus, minus = np.eye(3), np.eye(3)
        plus[a, b] += STEP
        minus[a, b] -= STEP
        rise = toy_labels(coord @ plus, types, box @ plus)[0] - toy_labels(coord @ minus, types, box @ minus)[0]
        assert virial[a, b] == pytest.approx(-rise / (2 * STEP), abs=1e-6)


def test_toy_virial_of_an_open_system_is_the_sum_of_positions_times_forces():
    coord, types, _ = toy_frame(np.random.default_rng(3), 7, 2, pbc=False)
    _, force, virial, atom_energy = toy_labels(coord, types)
    np.testing.assert_allclose(virial.reshape(3, 3), np.einsum("na,nb->ab", coord, force), atol=1e-12)
    assert atom_energy.sum() == pytest.approx(toy_labels(coord, types)[0])
