"""The example of an infrared spectrum."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "infrared" / "infrared.py"


def test_a_dipole_that_oscillates_has_one_band_with_the_strength_of_theory():
    units = pytest.importorskip("ase.units")
    example = module_from_spec(spec := spec_from_file_location("infrared", SCRIPT))
    spec.loader.exec_module(example)
    time, omega = (
        np.arange(8000.0),
        2 * np.pi * 3400 * example.SPEED_OF_LIGHT,
    )  # fs, 1/fs
    dipole = np.stack([np.cos(omega * time), 0 * time, 0 * time], axis=1)
    wavenumber, absorption = example.spectrum(
        dipole, 1.0, volume=1000.0, temperature=300.0
    )
    assert wavenumber[absorption.argmax()] == pytest.approx(3400, abs=2)
    assert np.ptp(wavenumber[absorption > absorption.max() / 2]) == pytest.approx(
        example.WIDTH, abs=4
    )
    # mean square of the derivative times beta / (12 c^2 V epsilon_0), integrated over wavenumbers,
    # 1/m^2
    square = (units._e * 1e5 * omega) ** 2 / 2
    strength = square / (12 * units._c**2 * 1e-27 * units._eps0 * units._k * 300)
    assert absorption.sum() * wavenumber[1] == pytest.approx(1e-4 * strength, rel=0.01)
