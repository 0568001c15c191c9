"""The potential energy surface of one frame: energies and forces of displaced atoms."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepmd_ema.data.source import Frame
from deepmd_ema.elements import SYMBOLS
from deepmd_ema.errors import UserError
from deepmd_ema.geometry import KeptPairs, find_pairs_once
from deepmd_ema.infer.potential import Prediction

Array = NDArray[np.float64]

EV_PER_KELVIN = 8.617333262e-5  # Boltzmann constant (CODATA 2018)
# (angstrom/fs)^2 of 1 eV/u: e / (u * (1e5 m/s)^2), CODATA 2018
SPEED2_PER_EV = 9.648533212e-3
SKIN = 1.0  # angstrom: neighbors are searched that far beyond the cutoff, and again when atoms have moved half of it

# u: IUPAC 2016, as in ASE; of H to Lr
_MASSES = (
    "1.008 4.0026 6.94 9.0122 10.81 12.011 14.007 15.999 18.998 20.18 22.99 24.305 26.982 28.085 30.974 32.06 "
    "35.45 39.948 39.098 40.078 44.956 47.867 50.941 51.996 54.938 55.845 58.933 58.693 63.546 65.38 69.723 72.63 "
    "74.922 78.971 79.904 83.798 85.468 87.62 88.906 91.224 92.906 95.95 97.907 101.07 102.91 106.42 107.87 "
    "112.41 114.82 118.71 121.76 127.6 126.9 131.29 132.91 137.33 138.91 140.12 140.91 144.24 144.91 150.36 "
    "151.96 157.25 158.93 162.5 164.93 167.26 168.93 173.05 174.97 178.49 180.95 183.84 186.21 190.23 192.22 "
    "195.08 196.97 200.59 204.38 207.2 208.98 208.98 209.99 222.02 223.02 226.03 227.03 232.04 231.04 238.03 "
    "237.05 244.06 243.06 247.07 247.07 251.08 252.08 257.1 258.1 259.1 262.11 "
)
MASSES = dict(zip(SYMBOLS, map(float, _MASSES.split())))


class Model(Protocol):
    """A model that is tested, such as :class:`~deepmd_ema.infer.potential.Potential`."""

    @property
    def type_map(self) -> tuple[str, ...]:
        """Names of the elements."""

    @property
    def rcut(self) -> float:
        """Cutoff radius, angstrom."""

    def evaluate(
        self,
        coord: ArrayLike,
        types: ArrayLike,
        box: ArrayLike | None = None,
        fparam: ArrayLike | None = None,
        aparam: ArrayLike | None = None,
        kept: KeptPairs | None = None,
    ) -> Prediction:
        """Return energies (F,), forces (F, N, 3) and virials (F, 9) for positions (F, N, 3)."""


class Surface:
    """A model at a frame of the data. F frames of the same N atoms.

    Args:
        model: gives the energies.
        frame: gives elements, cell, positions and parameters.

    Attributes:
        coord: (N, 3), positions of the frame, angstrom.
        box: (3, 3), cell vectors as rows, angstrom, or None.
        types: (N,), places in the type map.
        rcut: cutoff radius of the model, angstrom.
        elements: names by type.
        masses: (N,), u.

    Raises:
        UserError: if an atom is of no chemical element.
    """

    def __init__(self, model: Model, frame: Frame) -> None:
        self._model, self._frame = model, frame
        self.coord, self.box, self.types = frame.coord, frame.box, frame.atom_type
        self.rcut, self.elements = model.rcut, tuple(model.type_map)
        if unknown := sorted({self.elements[kind] for kind in self.types} - MASSES.keys()):
            raise UserError(f"type_map: {unknown[0]} has no mass; expected a symbol from H to Lr. Leave out --physics.")
        self.masses = np.array([MASSES[self.elements[kind]] for kind in self.types])
        self._kept = KeptPairs(SKIN)

    def at(self, coord: Array) -> Prediction:
        """Return the predictions at positions (F, N, 3), angstrom.

        Raises:
            UserError: if the model has no finite energy for one.
        """
        return self._evaluate(coord, None)

    def next(self, coord: Array) -> tuple[float, Array]:
        """Return energy, eV, and forces (N, 3), eV/angstrom, at positions (N, 3) that differ little from the last ones.

        Raises:
            UserError: if the model has no finite energy.
        """
        found = self._evaluate(coord[None], self._kept)
        return float(found.energy[0]), found.force[0]

    def pairs(self, coord: Array, within: float) -> tuple[NDArray[np.int64], NDArray[np.int64], Array, Array]:
        """Return each pair closer than ``within`` once: atoms i and j, vectors (P, 3) to j, distances; angstrom."""
        return find_pairs_once(coord, self.box, within)

    def _evaluate(self, coord: Array, kept: KeptPairs | None) -> Prediction:
        fparam, aparam = self._frame.fparam, self._frame.aparam
        if aparam is not None:
            aparam = np.broadcast_to(aparam, (len(coord), *aparam.shape))
        return self._model.evaluate(coord, self.types, self.box, fparam, aparam, kept)


def too_close(surface: Surface, coord: Array, least: Array) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Return the pairs that are closer than their elements may be: atoms i and j, and distances in angstrom.

    Args:
        surface: whose atoms.
        coord: (N, 3), angstrom.
        least: (T, T), least distances by the types of the two, angstrom; 0 where any distance is allowed.
    """
    i, j, _, distance = surface.pairs(coord, max(float(least.max()), 0.1))
    bad = distance < least[surface.types[i], surface.types[j]]
    return i[bad], j[bad], distance[bad]
