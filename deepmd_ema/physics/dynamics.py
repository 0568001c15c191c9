"""Molecular dynamics of a frame: conservation of energy, and how long a hot run lasts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepmd_ema.errors import UserError
from deepmd_ema.physics.surface import EV_PER_KELVIN, SPEED2_PER_EV, Array, Surface, too_close

FRICTION = 0.01  # 1/fs, of the thermostat: it couples within 0.1 ps
CHECK_EVERY = 10  # steps between two searches for pairs that are too close
MAX_FORCE = 100.0  # eV/angstrom: those of vibrations are about 1
# times the temperature of the thermostat: the kinetic energy of 9 degrees of freedom is above it with probability 1e-6
MAX_HEAT = 5.0


@dataclass(frozen=True)
class Run:
    """A run of molecular dynamics.

    Attributes:
        temperature: K.
        time_step: fs.
        steps: number of steps.
        seed: of velocities and noise.
    """

    temperature: float
    time_step: float
    steps: int
    seed: int


@dataclass(frozen=True)
class State:
    """One step of a run.

    Attributes:
        coord: (N, 3), angstrom.
        potential: eV.
        kinetic: eV.
        max_force: length of the largest force on an atom, eV/angstrom.
    """

    coord: Array
    potential: float
    kinetic: float
    max_force: float


@dataclass(frozen=True)
class Conservation:
    """Conservation of the energy in a run without thermostat.

    Attributes:
        drift: slope of the total energy, eV/atom/ps; nan if the run failed.
        spread: RMS deviation of the total energy from the straight line, eV/atom; nan if the run failed.
        time: length of the run, ps.
        failure: why it ended early, or empty.
    """

    drift: float
    spread: float
    time: float
    failure: str = ""


@dataclass(frozen=True)
class Stability:
    """Length of a run until it fails.

    Attributes:
        time: until the failure, or the end, ps.
        failure: what failed, or empty.
    """

    time: float
    failure: str = ""


def time_step_of(surface: Surface) -> float:
    """Return the time step of a run, fs: 0.5 with hydrogen, otherwise 1."""
    return 0.5 if surface.masses.min() < 3 else 1.0


def energy_conservation(surface: Surface, least: Array, run: Run) -> Conservation:
    """Return drift and spread of the total energy by velocity Verlet, without thermostat.

    A straight line is fitted to the energies: drift = slope of E(t) / N, spread = RMS of the residuals / N. Velocities
    are drawn for the temperature, which changes as the frame relaxes.

    Args:
        surface: model and frame.
        least: (T, T), least distances of pairs by type, angstrom.
        run: its temperature is that of the first velocities.
    """
    energies: list[float] = []
    stability = _run_until_failure(surface, least, run, 0.0, math.inf, energies)
    if stability.failure:
        return Conservation(math.nan, math.nan, stability.time, stability.failure)
    number = len(surface.coord)
    time = 1e-3 * run.time_step * np.arange(len(energies))
    slope, offset = np.polyfit(time, energies, 1)
    rest = np.array(energies) - (slope * time + offset)
    return Conservation(float(slope) / number, float(np.sqrt(np.mean(rest**2))) / number, stability.time)


def time_to_failure(surface: Surface, least: Array, run: Run) -> Stability:
    """Return the time that a run with a thermostat lasts, by Langevin dynamics (BAOAB).

    A run fails when an energy is not finite, a pair is closer than ``least``, a force is above ``MAX_FORCE``, or the
    kinetic temperature is above ``MAX_HEAT`` times that of the thermostat. Arguments are as for
    :func:`energy_conservation`.
    """
    return _run_until_failure(surface, least, run, FRICTION, MAX_HEAT * run.temperature, [])


def _run_until_failure(
    surface: Surface, least: Array, run: Run, friction: float, hottest: float, energies: list[float]
) -> Stability:
    """Return the time that a run lasts, and add the total energy of each step to ``energies``."""
    step = 0
    try:
        for step, now in enumerate(_trajectory(surface, run, friction)):
            energies.append(now.potential + now.kinetic)
            if failure := _failure(surface, now, least if step % CHECK_EVERY == 0 else None, hottest):
                return Stability(1e-3 * run.time_step * step, failure)
    except UserError:  # two atoms in one place, or numbers that are not finite
        return Stability(1e-3 * run.time_step * (step + 1), "no finite energy")
    return Stability(1e-3 * run.time_step * step)


def _failure(surface: Surface, now: State, least: Array | None, hottest: float) -> str:
    temperature = 2 * now.kinetic / (_freedom(surface) * EV_PER_KELVIN)
    if now.max_force > MAX_FORCE:
        return f"force {now.max_force:.0f} eV/Å"
    if temperature > hottest:
        return f"{temperature:.0f} K"
    if least is not None:
        i, j, distance = too_close(surface, now.coord, least)
        if len(i):
            nearest = int(np.argmin(distance))
            names = sorted(surface.elements[surface.types[atom[nearest]]] for atom in (i, j))
            return f"{'-'.join(names)} at {distance[nearest]:.2f} Å"
    return ""


def _freedom(surface: Surface) -> int:
    """Return the degrees of freedom: the center of mass rests at first."""
    return max(3, 3 * len(surface.coord) - 3)


def _trajectory(surface: Surface, run: Run, friction: float) -> Iterator[State]:
    """Yield the frame and every step after it.

    BAOAB (Leimkuhler and Matthews, Appl. Math. Res. Express 2013, 34): half a kick, half a drift, friction and noise,
    half a drift, half a kick. Without friction this is velocity Verlet.
    """
    temperature, time_step = run.temperature, run.time_step
    random, masses = np.random.default_rng(run.seed), surface.masses[:, None]
    thermal = np.sqrt(EV_PER_KELVIN * temperature / masses * SPEED2_PER_EV)  # angstrom/fs
    velocity = thermal * random.standard_normal(surface.coord.shape)
    velocity -= (masses * velocity).sum(0) / masses.sum()
    if (found := _kinetic(masses, velocity)) > 0:
        velocity *= math.sqrt(0.5 * _freedom(surface) * EV_PER_KELVIN * temperature / found)
    keep = math.exp(-friction * time_step)
    coord = surface.coord.copy()
    energy, force = surface.next(coord)
    yield State(coord, energy, _kinetic(masses, velocity), _largest(force))
    for _ in range(run.steps):
        velocity = velocity + 0.5 * time_step * SPEED2_PER_EV * force / masses
        coord = coord + 0.5 * time_step * velocity
        if friction:
            noise = random.standard_normal(coord.shape)
            velocity = keep * velocity + math.sqrt(1 - keep**2) * thermal * noise
        coord = coord + 0.5 * time_step * velocity
        energy, force = surface.next(coord)
        velocity = velocity + 0.5 * time_step * SPEED2_PER_EV * force / masses
        yield State(coord, energy, _kinetic(masses, velocity), _largest(force))


def _kinetic(masses: Array, velocity: Array) -> float:
    """Return the kinetic energy, eV, of masses (N, 1), u, and velocities (N, 3), angstrom/fs."""
    return float(0.5 * (masses * velocity**2).sum() / SPEED2_PER_EV)


def _largest(force: Array) -> float:
    return float(np.linalg.norm(force, axis=1).max())
