"""Properties of a crystal by finite differences: relaxed positions, phonons at Gamma, elastic constants."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.data.source import Frame
from deepmd_ema.labels import FORCE
from deepmd_ema.physics.surface import SPEED2_PER_EV, Array, Surface

MAX_ATOMS = 64  # 6 N evaluations for the force constants
MAX_LABEL_FORCE = 0.05  # eV/angstrom: a frame of a relaxed structure
MAX_GAP = 5.0  # angstrom between two layers of atoms: a wider one is a vacuum
RELAXED = 1e-3  # eV/angstrom
RELAX_STEPS = 300
DISPLACEMENT = 0.01  # angstrom
STRAIN = 2e-3
GPA_PER_EV = 160.2176634  # GPa of 1 eV/angstrom^3
WAVENUMBERS_PER_THZ = 33.35640952  # 1/cm
VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))


@dataclass(frozen=True)
class Crystal:
    """Properties of a relaxed periodic structure.

    Attributes:
        source: system and number of the frame.
        residual: largest force after the relaxation, eV/angstrom.
        moved: longest displacement by it, angstrom.
        frequencies: (3 N - 3,), at Gamma, THz, ascending; negative for an imaginary one.
        elastic: (6, 6) elastic constants with relaxed atoms, GPa, in the order xx, yy, zz, yz, xz, xy.
    """

    source: tuple[str, int]
    residual: float
    moved: float
    frequencies: Array
    elastic: Array


def is_crystal(frame: Frame) -> bool:
    """Whether a frame is that of a relaxed periodic structure: small forces in the data, no vacuum, few atoms."""
    force = frame.labels.get(FORCE)
    if frame.box is None or force is None or frame.num_atoms > MAX_ATOMS:
        return False
    return float(np.abs(force).max()) <= MAX_LABEL_FORCE and _widest_gap(frame.coord, frame.box) <= MAX_GAP


def describe_crystal(surface: Surface, source: tuple[str, int]) -> Crystal:
    """Return phonons and elastic constants of a frame whose atoms are relaxed by the model first, at its cell."""
    coord, residual = relax(surface)
    constants = force_constants(surface, coord)
    moved = float(np.linalg.norm(coord - surface.coord, axis=1).max())
    return Crystal(
        source, residual, moved, frequencies(constants, surface.masses), elastic_constants(surface, coord, constants)
    )


def relax(surface: Surface) -> tuple[Array, float]:
    """Return positions (N, 3), angstrom, and the largest force on an atom, eV/angstrom, after FIRE.

    FIRE: Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006), with its parameters; masses are 1 and steps are at most
    0.1 angstrom.
    """
    coord = surface.coord.copy()
    velocity = np.zeros_like(coord)
    step, mixing, downhill = 0.1, 0.1, 0
    _, force = surface.next(coord)
    for _ in range(RELAX_STEPS):
        if _largest(force) <= RELAXED:
            break
        if (force * velocity).sum() > 0:
            velocity = (1 - mixing) * velocity + mixing * force * np.linalg.norm(velocity) / np.linalg.norm(force)
            downhill += 1
            if downhill > 5:
                step, mixing = min(1.1 * step, 1.0), 0.99 * mixing
        else:
            velocity, step, mixing, downhill = np.zeros_like(coord), 0.5 * step, 0.1, 0
        velocity = velocity + step * force
        move = step * velocity
        coord = coord + move * min(1.0, 0.1 / max(_largest(move), 1e-12))
        _, force = surface.next(coord)
    return coord, _largest(force)


def force_constants(surface: Surface, coord: Array) -> Array:
    """Return the second derivatives of the energy at Gamma, (3 N, 3 N), eV/angstrom^2, by central differences.

    Phi[a, b] = -(F_b(x_a + h) - F_b(x_a - h)) / (2 h), made symmetric; translations are projected out.
    """
    size = coord.size
    moves = DISPLACEMENT * np.eye(size).reshape(size, *coord.shape)
    ahead, behind = (surface.at(coord + sign * moves).force.reshape(size, size) for sign in (1, -1))
    found = -(ahead - behind) / (2 * DISPLACEMENT)
    rest = np.eye(size) - _translations(np.ones(len(coord)))
    return rest @ (0.5 * (found + found.T)) @ rest


def frequencies(constants: Array, masses: Array) -> Array:
    """Return (3 N - 3,) frequencies, THz, ascending, without the translations; negative for imaginary ones.

    omega^2 are the eigenvalues of Phi[a, b] / sqrt(m_a m_b).

    Args:
        constants: (3 N, 3 N), eV/angstrom^2.
        masses: (N,), u.
    """
    roots = np.sqrt(np.repeat(masses, 3))
    rest = np.eye(len(roots)) - _translations(np.sqrt(masses))
    values, vectors = np.linalg.eigh(rest @ (constants / np.outer(roots, roots)) @ rest)
    # those with the largest part of a translation are left out, however soft another one is
    share = ((_translations(np.sqrt(masses)) @ vectors) ** 2).sum(0)
    kept = np.sort(np.argsort(share)[: len(values) - 3])
    return 1e3 * np.sign(values[kept]) * np.sqrt(np.abs(values[kept]) * SPEED2_PER_EV) / (2 * math.pi)


def elastic_constants(surface: Surface, coord: Array, constants: Array) -> Array:
    """Return (6, 6) elastic constants, GPa: derivatives of the stress by the strain, with relaxed atoms.

    C = d sigma / d epsilon - Lambda^T Phi^+ Lambda / V, Lambda = dF / d epsilon at fixed fractional positions: Wu,
    Vanderbilt and Hamann, Phys. Rev. B 72, 035105 (2005). Both derivatives are central differences over ``STRAIN``.
    The cell is that of the frame: its stress is not relaxed.

    Args:
        surface: model and frame.
        coord: (N, 3), relaxed positions, angstrom.
        constants: (3 N, 3 N) force constants, eV/angstrom^2.
    """
    assert surface.box is not None
    strained = [np.eye(3) + sign * STRAIN * _unit_strain(k) for k in range(6) for sign in (1, -1)]
    boxes = np.stack([surface.box @ strain for strain in strained])
    found = surface.at(np.stack([coord @ strain for strain in strained]), boxes)
    volumes = np.abs(np.linalg.det(boxes))
    stress = -found.virial.reshape(-1, 3, 3) / volumes[:, None, None]
    stress = np.stack([0.5 * (stress[:, a, b] + stress[:, b, a]) for a, b in VOIGT], 1)
    clamped = ((stress[::2] - stress[1::2]) / (2 * STRAIN)).T
    response = ((found.force[::2] - found.force[1::2]) / (2 * STRAIN)).reshape(6, -1).T
    volume = abs(np.linalg.det(surface.box))
    relaxed = clamped - response.T @ np.linalg.pinv(constants, rcond=1e-6, hermitian=True) @ response / volume
    return GPA_PER_EV * 0.5 * (relaxed + relaxed.T)


def _unit_strain(k: int) -> Array:
    """Return the (3, 3) strain of the component ``k``; shear is in engineering notation, twice the tensor."""
    strain = np.zeros((3, 3))
    a, b = VOIGT[k]
    strain[a, b] += 0.5
    strain[b, a] += 0.5
    return strain


def _translations(weights: Array) -> Array:
    """Return the (3 N, 3 N) projector on displacements of all atoms by ``weights`` (N,) times one vector."""
    unit = np.kron((weights / np.linalg.norm(weights))[:, None], np.eye(3))
    projector: NDArray[np.float64] = unit @ unit.T
    return projector


def _widest_gap(coord: Array, box: Array) -> float:
    """Return the widest gap between layers of atoms along a cell vector, angstrom."""
    inverse = np.linalg.inv(box)
    heights = 1 / np.linalg.norm(inverse, axis=0)
    places = np.sort((coord @ inverse) % 1.0, axis=0)
    gaps = np.diff(np.concatenate([places, places[:1] + 1]), axis=0)
    return float((gaps.max(0) * heights).max())


def _largest(vectors: Array) -> float:
    return float(np.linalg.norm(vectors, axis=1).max())
