"""Energy differences between near frames against the work of their forces and virials, which is exact physics.

Along a path on which atoms move by u and the cell by a strain e the energy changes by -F u - W e, with the mean of both
ends (trapezoidal rule). The rule has no error in a harmonic potential: frames of a crystal far apart in time serve as
well as those of a trajectory, whatever the bonds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepmd_ema.data.source import Frame
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.sorting import Array

# largest displacement of an atom (angstrom) and strain of two frames; nearer ones are compared first
_LEVELS = ((0.3, 0.03), (0.6, 0.06), (1.0, 0.1))
_MIN_STRAIN = 1e-6  # of rounding
_MIN_WORK = 1e-6  # eV, RMS; forces that are zero by symmetry do less
# Smallest partial correlations. Of the right data in benchmarks/results/2026-11-23-units.md, the ratios with them are
# 0.85 to 1.2 and 0.84 to 1.14; ratios of liquids and molecules farther apart fall with the correlation.
_MIN_WORK_CORRELATION, _MIN_STRAIN_CORRELATION = 0.95, 0.9
_MIN_FRAMES = 8  # in the pairs; unrelated numbers of so many frames reach 0.9 once in 500 times


class PathRatios(NamedTuple):
    """Ratios that are 1 where units and signs are right; None without near frames.

    Attributes:
        energy: energy differences over the work of the forces.
        virial: virials over those that the energies of strained cells give.
    """

    energy: float | None = None
    virial: float | None = None


def path_ratios(frames: Sequence[Frame]) -> PathRatios:
    """Return ratios from all pairs of near frames with the same atoms in the same order.

    Args:
        frames: with forces; those without an energy say nothing.
    """
    groups: dict[tuple[bytes, bool], list[Frame]] = {}
    for frame in frames:
        if ENERGY in frame.labels:
            groups.setdefault((frame.atom_type.tobytes(), frame.box is None), []).append(frame)
    found = [_pairs(group) for group in groups.values() if len(group) > 1]
    if not found:
        return PathRatios()
    shift = np.cumsum([0, *(len(group) for group in groups.values() if len(group) > 1)])
    pairs = np.concatenate([one + np.array([k, k, 0, 0, 0, 0, 0]) for one, k in zip(found, shift)])
    energy = virial = None
    best_energy, best_virial = _MIN_WORK_CORRELATION, _MIN_STRAIN_CORRELATION
    for max_step, max_strain in _LEVELS:
        use = (pairs[:, 5] < max_step) & (pairs[:, 6] < max_strain) & np.isfinite(pairs[:, 2:5]).all(axis=1)
        if len(np.unique(pairs[use, :2])) < _MIN_FRAMES:
            continue
        rise, by_force, by_strain = pairs[use, 2:5].T
        slope, correlation = _partial(rise, by_force, by_strain)
        if abs(correlation) > best_energy:
            energy, best_energy = slope, abs(correlation)
        slope, correlation = _partial(rise, by_strain, by_force)
        if abs(correlation) > best_virial:
            virial, best_virial = 1 / slope, abs(correlation)
    return PathRatios(energy, virial)


def _pairs(frames: Sequence[Frame]) -> Array:
    """Return (pairs, 7): two frames, energy difference, work of forces and virials, displacement, strain; eV, angstrom.

    Works of frames without virials in different cells are NaN.
    """
    coord = np.stack([frame.coord for frame in frames])
    force = np.stack([frame.labels[FORCE].reshape(-1, 3) for frame in frames])
    energy = np.array([float(frame.labels[ENERGY]) for frame in frames])
    virial = np.stack([np.reshape(frame.labels.get(VIRIAL, np.full(9, np.nan)), (3, 3)) for frame in frames])
    box = np.stack([frame.box for frame in frames if frame.box is not None]) if frames[0].box is not None else None
    rows = []
    for k in range(len(frames) - 1):
        if box is None:
            step, turn = _turned(coord[k], coord[k + 1 :])
            strain = np.zeros_like(turn)
        else:
            step, strain, turn = _strained(coord, box, k)
        by_force = -0.5 * ((force[k] + force[k + 1 :] @ turn) * step).sum(axis=(1, 2))
        size = np.abs(strain).max(axis=(1, 2))
        other = turn.transpose(0, 2, 1) @ virial[k + 1 :] @ turn
        by_strain = -0.5 * ((virial[k] + other) * strain).sum(axis=(1, 2))
        by_strain[size < _MIN_STRAIN] = 0.0
        rise = energy[k + 1 :] - energy[k]
        first, second = np.full(len(rise), k), np.arange(k + 1, len(frames))
        longest = np.linalg.norm(step, axis=2).max(axis=1)
        rows.append(np.stack([first, second, rise, by_force, by_strain, longest, size], axis=1))
    return np.concatenate(rows)


def _turned(coord: Array, others: Array) -> tuple[Array, Array]:
    """Return displacements to the open frames ``others`` (M, N, 3), turned onto ``coord``, and (M, 3, 3) rotations."""
    start = coord - coord.mean(axis=0)
    ends = others - others.mean(axis=1, keepdims=True)
    left, _, right = np.linalg.svd(ends.transpose(0, 2, 1) @ start)  # Kabsch 1976
    left[:, :, 2] *= np.linalg.det(left @ right)[:, None]  # a rotation, no reflection
    turn = left @ right
    return ends @ turn - start, turn


def _strained(coord: Array, box: Array, k: int) -> tuple[Array, Array, Array]:
    """Return displacements in the mean cell, strains, and (M, 3, 3) turns of the frames after ``k`` onto this one.

    A turned or mirrored frame has the same energy. What is left of the change of its cell is symmetric and positive
    definite, so that the mean cell is not singular.
    """
    left, _, right = np.linalg.svd(np.linalg.solve(box[k], box[k + 1 :]))
    turn = (left @ right).transpose(0, 2, 1)  # of the polar decomposition
    other = box[k + 1 :] @ turn
    middle = 0.5 * (box[k] + other)
    step = coord[k + 1 :] @ np.linalg.inv(box[k + 1 :]) - coord[k] @ np.linalg.inv(box[k])
    step -= np.round(step)
    step -= np.round(step - step[:, :1])  # a shift of all atoms by half a cell rounds either way
    step -= step.mean(axis=1, keepdims=True)
    return step @ middle, np.linalg.solve(middle, other - box[k]), turn


def _partial(rise: Array, one: Array, other: Array) -> tuple[float, float]:
    """Return slope and correlation of ``rise`` with ``one``, after what ``other`` explains is taken out of both."""
    scale = float(other @ other)
    if scale > 0:
        rise, one = (values - other * float(values @ other) / scale for values in (rise, one))
    size = float(one @ one) * float(rise @ rise)
    if float(one @ one) < _MIN_WORK**2 * len(one) or size <= 0:
        return 0.0, 0.0
    common = float(one @ rise)
    return common / float(one @ one), common / math.sqrt(size)
