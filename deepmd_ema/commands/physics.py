"""``dp-ema test --physics``: dynamics, bond scans and the cutoff of a model, with limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.elements import MASSES
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import UserError
from deepmd_ema.geometry import KeptPairs, UniquePairs, find_pairs_once
from deepmd_ema.infer.evaluate import ErrorReport
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential, Prediction
from deepmd_ema.report.table import Column, Table, render
from deepmd_ema.text import counted
from deepmd_ema.utils import even_places

# N atoms, T types, P points of a scan

Array = NDArray[np.float64]

MAX_DRIFT = 1e-3  # eV/atom/ps
MAX_SPREAD = 1e-3  # eV/atom: a fortieth of the kinetic energy of an atom at 300 K
MIN_TIME = 1.0  # ps of dynamics: a shorter run shows neither a drift nor a failure
# times the shortest distance in the data: the energy of nearer atoms was not learned
MIN_DISTANCE_RATIO = 0.75
MAX_ENERGY_JUMP = 1e-4  # eV; energies of a hundred atoms in float32 are rounded to 1e-5
MAX_FORCE_JUMP = 1e-3  # eV/angstrom
# eV/angstrom: that rounding over the 4e-3 angstrom of the difference quotient is 2.5e-3
MAX_FORCE_ERROR = 5e-3
MAX_FRAMES = 200  # evenly of all systems, for the shortest distances

FRICTION = 0.01  # 1/fs, of the thermostat: it couples within 0.1 ps
CHECK_EVERY = 10  # steps between two searches for pairs that are too close
MAX_FORCE = 100.0  # eV/angstrom: forces of vibrations are about 1
# times the temperature of the thermostat: the kinetic energy of 9 degrees of freedom is above it
# with probability 1e-6
MAX_HEAT = 5.0
# angstrom: neighbors are searched that far beyond the cutoff, and again when atoms have moved half
# of it
SKIN = 1.0
EV_PER_KELVIN = 8.617333262e-5  # Boltzmann constant (CODATA 2018)
# (angstrom/fs)^2 of 1 eV/u: e / (u * (1e5 m/s)^2), CODATA 2018
SPEED2_PER_EV = 9.648533212e-3

BOND_POINTS = 81
BOND_REACH = 1.25  # a bond is stretched to this times its length in the frame
MIN_BARRIER = 1e-3  # eV: lower barriers between extrema are not counted
# angstrom, on either side of the cutoff: over it the force along a stiff bond (50 eV/angstrom^2)
# changes by 1e-4
CUTOFF_GAP = 1e-6
# angstrom, of the difference quotient; its error, h^2 / 6 times the third derivative (300
# eV/angstrom^3), is 2e-4
CUTOFF_STEP = 2e-3
CUTOFF_SEARCH = 0.5  # angstrom, beyond the cutoff


@dataclass(frozen=True)
class PhysicsOptions:
    """Settings of the dynamics.

    Attributes:
        temperature: of the run without thermostat, K; the other one has twice as much.
        time_step: fs; None: 0.5 with hydrogen, otherwise 1.
        md_steps: of each of the two runs; None: 1 ps.
        seed: of velocities and noise.
    """

    temperature: float = 300.0
    time_step: float | None = None
    md_steps: int | None = None
    seed: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        quantity: what was measured.
        value: in ``unit``; None if there is none.
        unit: of value and limit.
        limit: for people.
        ok: whether the limit is kept; None where nothing was measured.
        note: more about it.
    """

    quantity: str
    value: float | None
    unit: str = ""
    limit: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Dynamics:
    """A run of molecular dynamics.

    Attributes:
        time: until the failure, or the end, ps.
        failure: its cause, or empty.
        drift: slope of the total energy, eV/atom/ps; nan if the run failed.
        spread: RMS deviation of the total energy from the straight line, eV/atom; nan if the run
            failed.
    """

    time: float
    failure: str
    drift: float
    spread: float


@dataclass(frozen=True)
class BondScan:
    """Energies of a pair of elements by their distance.

    Attributes:
        elements: names.
        distance: (P,), angstrom.
        energy: (P,), eV.
        extrema: number of minima and maxima beyond the one minimum of a bond.
    """

    elements: tuple[str, str]
    distance: Array
    energy: Array
    extrema: int


@dataclass(frozen=True)
class PhysicsReport:
    """Results of all tests of a model at frames of the data.

    Attributes:
        source: system and number of the frame of dynamics and scans.
        run: temperature of the run without thermostat (K), time_step (fs), steps and seed of the
            dynamics.
        rows: the lines of the table.
        bonds: one scan for each pair of elements.
        is_short: whether the dynamics are too short for a verdict, unless they fail.
    """

    source: tuple[str, int]
    run: Mapping[str, float]
    rows: Sequence[Row]
    bonds: Sequence[BondScan]
    is_short: bool

    @property
    def failed(self) -> list[Row]:
        """The lines whose limit is not kept."""
        return [row for row in self.rows if row.ok is False]

    def text(self) -> str:
        """Return the table."""
        verdicts = {True: "ok", False: "FAILED", None: ""}
        rows = [
            [row.quantity, row.value, row.unit, row.limit, verdicts[row.ok], row.note]
            for row in self.rows
        ]
        names = ("quantity", "value", "unit", "limit", "", "note")
        columns = [Column(name, "", ".4g" if name == "value" else "") for name in names]
        title = f"# physics of the model, at frame {self.source[1]} of {self.source[0]}"
        number = len(self.failed)
        verdict = (
            f"{counted(number, 'limit')} not kept" if number else "all limits are kept"
        )
        if self.is_short:
            verdict += (
                f"; the dynamics are too short for a verdict, which takes {MIN_TIME:g} ps: raise "
                "--md-steps"
            )
        return "\n".join([*render(Table(title, columns, rows), "# "), f"# {verdict}"])

    def document(self) -> dict[str, Any]:
        """Return everything as values of JSON, with None in place of nan."""
        bonds = [
            {
                "elements": b.elements,
                "distance": b.distance.tolist(),
                "energy": b.energy.tolist(),
            }
            for b in self.bonds
        ]
        rows = [asdict(row) for row in self.rows]
        return {
            "frame": list(self.source),
            "run": dict(self.run),
            "rows": rows,
            "bonds": bonds,
        }


def measure_physics(
    model: str | Path,
    errors: ErrorReport,
    options: PhysicsOptions,
    use_average: bool = False,
    average: str | None = None,
    head: str | None = None,
    device: str | None = None,
) -> PhysicsReport:
    """Return the physics of a model at frames whose errors were measured.

    Dynamics and scans begin at the first frame.

    Args:
        model: a ``.pt`` checkpoint or a frozen file.
        errors: of the model.
        options: of the dynamics.
        use_average: takes the averaged weights of a training checkpoint.
        average: which average, when there are several; implies ``use_average``.
        head: which model of a file that holds several.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.

    Raises:
        UserError: if the model or the data cannot be read, or an element has no mass.
    """
    loaded = load_model(model, use_average, average, head)
    loaded.require_energies("--physics")
    places = even_places(len(errors.frames), MAX_FRAMES)
    sources = [errors.frames[place].source for place in places]
    frames = [errors.systems[system].frame(frame) for system, frame in sources]
    return physics_of(Potential(loaded, device), frames, options)


def physics_of(
    model: Potential, frames: Sequence[Frame], options: PhysicsOptions
) -> PhysicsReport:
    """Return the physics of a model at the first of some frames.

    Distances below which an energy was not learned are those of all frames.
    """
    shortest = shortest_distances(frames, len(model.type_map), model.rcut)
    least = MIN_DISTANCE_RATIO * np.where(np.isfinite(shortest), shortest, 0.0)
    surface = Surface(model, frames[0])
    temperature = options.temperature
    seed = options.seed
    bonds = scan_bonds(surface, shortest, MIN_DISTANCE_RATIO)
    at_cutoff = scan_cutoff(surface)
    # hydrogen and deuterium vibrate in about 10 fs
    time_step = options.time_step or (0.5 if surface.masses.min() < 3 else 1.0)
    steps = (
        math.ceil(1e3 * MIN_TIME / time_step)
        if options.md_steps is None
        else options.md_steps
    )
    is_short = (
        time_step * steps < 1e3 * MIN_TIME - 1e-9
    )  # a product may be rounded down
    cold = run_dynamics(surface, least, temperature, time_step, steps, seed)
    about = f"{cold.time:g} ps from {temperature:g} K by {time_step:g} fs"
    about = f"failed after {cold.time:g} ps: {cold.failure}" if cold.failure else about
    rows = []
    for name, value, unit, limit, most, note in (
        ("drift", cold.drift, "meV/atom/ps", "|x| <= ", MAX_DRIFT, about),
        ("spread", cold.spread, "meV/atom", "<= ", MAX_SPREAD, ""),
    ):
        # a run that is too short has no verdict, unless it fails
        ok: bool | None = None if is_short else abs(value) <= most
        shown: float | None = 1e3 * value
        if cold.failure:
            ok = False
            shown = None
        rows.append(
            Row(f"NVE energy {name}", shown, unit, f"{limit}{1e3 * most:g}", ok, note)
        )
    hot = run_dynamics(
        surface, least, 2 * temperature, time_step, steps, seed, FRICTION
    )
    ok = None if is_short else True
    if hot.failure:
        ok = False
    name = f"time to failure at {2 * temperature:g} K"
    limit = f">= {1e-3 * time_step * steps:g}"
    rows.append(Row(name, hot.time, "ps", limit, ok, hot.failure or "no failure"))
    for bond in bonds:
        about = f"{bond.distance[0]:.2f} to {bond.distance[-1]:.2f} Å"
        name = f"extrema beyond one well, {'-'.join(bond.elements)}"
        rows.append(Row(name, bond.extrema, "", "0", not bond.extrema, about))
    run = {
        "temperature": temperature,
        "time_step": time_step,
        "steps": steps,
        "seed": seed,
    }
    return PhysicsReport(frames[0].source, run, [*rows, *at_cutoff], bonds, is_short)


def shortest_distances(frames: Sequence[Frame], num_types: int, within: float) -> Array:
    """Return (T, T) shortest distances by the types of two atoms, angstrom.

    They are infinite where none is below ``within``.
    """
    shortest = np.full((num_types, num_types), math.inf)
    for frame in frames:
        pairs = find_pairs_once(frame.coord, frame.box, within)
        types = (frame.atom_type[pairs.i], frame.atom_type[pairs.j])
        np.minimum.at(shortest, types, pairs.distance)
    return np.minimum(shortest, shortest.T)


class Surface:
    """The potential energy surface of a model at a frame: energies and forces of displaced atoms.

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

    def __init__(self, model: Potential, frame: Frame) -> None:
        self._model = model
        self._frame = frame
        self.coord = frame.coord
        self.box = frame.box
        self.types = frame.atom_type
        self.rcut = model.rcut
        self.elements = tuple(model.type_map)
        if unknown := sorted(
            {self.elements[kind] for kind in self.types} - MASSES.keys()
        ):
            raise UserError(
                f"type_map: {unknown[0]} has no mass; expected a symbol from H to Lr. Leave out "
                "--physics."
            )
        self.masses = np.array([MASSES[self.elements[kind]] for kind in self.types])

    def at(self, coord: Array, history: KeptPairs | None = None) -> Prediction:
        """Return the predictions at positions (P, N, 3), angstrom.

        A history has the neighbor pairs of positions before them.

        Raises:
            UserError: if the model has no finite energy for one.
        """
        aparam = self._frame.aparam
        if aparam is not None:
            aparam = np.broadcast_to(aparam, (len(coord), *aparam.shape))
        return self._model.evaluate(
            coord, self.types, self.box, self._frame.fparam, aparam, history
        )

    def moved(self, atom: int, axis: Array, shifts: Array) -> Array:
        """Return positions (P, N, 3), with one atom moved along ``axis`` by ``shifts`` (P,)."""
        coord = np.repeat(self.coord[None], len(shifts), axis=0)
        coord[:, atom] += shifts[:, None] * axis
        return coord

    def too_close(self, coord: Array, least: Array) -> UniquePairs:
        """Return pairs that are closer than their elements may be.

        Args:
            coord: (N, 3), angstrom.
            least: (T, T), least distances by the types of the two, angstrom; 0 where any distance
                is allowed.
        """
        pairs = find_pairs_once(coord, self.box, max(float(least.max()), 0.1))
        bad = pairs.distance < least[self.types[pairs.i], self.types[pairs.j]]
        return UniquePairs(*(array[bad] for array in pairs))


def run_dynamics(
    surface: Surface,
    least: Array,
    temperature: float,
    time_step: float,
    steps: int,
    seed: int,
    friction: float = 0.0,
) -> Dynamics:
    """Run molecular dynamics until it fails.

    The integrator is velocity Verlet, or with friction Langevin dynamics (BAOAB). A run fails when
    an energy is not finite, a pair is closer than ``least``, a force is above ``MAX_FORCE``, or,
    with a thermostat, the kinetic temperature is above ``MAX_HEAT`` times its own. A straight line
    is fitted to the total energies E(t): drift is its slope over N, spread the RMS of the residuals
    over N. Without friction the temperature changes as the frame relaxes.

    ``least`` (T, T) is in angstrom, by type, ``temperature`` in K, ``time_step`` in fs,
    ``friction`` in 1/fs.
    """
    energies: list[float] = []
    step = 0
    failure = ""
    freedom = max(3, 3 * len(surface.coord) - 3)  # the center of mass rests at first
    try:
        for step, (coord, potential, force, kinetic) in enumerate(
            trajectory(surface, temperature, time_step, steps, seed, friction)
        ):
            energies.append(potential + kinetic)
            largest = np.linalg.norm(force, axis=1).max()
            heat = 2 * kinetic / (freedom * EV_PER_KELVIN)
            if largest > MAX_FORCE:
                failure = f"force {largest:.0f} eV/Å"
            elif friction and heat > MAX_HEAT * temperature:
                failure = f"{heat:.0f} K"
            elif step % CHECK_EVERY == 0:
                close = surface.too_close(coord, least)
                if len(close.distance):
                    nearest = int(np.argmin(close.distance))
                    names = sorted(
                        surface.elements[surface.types[atom[nearest]]]
                        for atom in (close.i, close.j)
                    )
                    failure = f"{'-'.join(names)} at {close.distance[nearest]:.2f} Å"
            if failure:
                break
    except UserError:  # two atoms in one place, or numbers that are not finite
        step = step + 1
        failure = "no finite energy"
    drift = spread = math.nan
    if not failure:
        time = 1e-3 * time_step * np.arange(len(energies))
        slope, offset = np.polyfit(time, energies, 1)
        residual = np.array(energies) - (slope * time + offset)
        drift = float(slope) / len(surface.coord)
        spread = float(np.sqrt(np.mean(residual**2))) / len(surface.coord)
    return Dynamics(1e-3 * time_step * step, failure, drift, spread)


def trajectory(
    surface: Surface,
    temperature: float,
    time_step: float,
    steps: int,
    seed: int,
    friction: float,
) -> Iterator[tuple[Array, float, Array, float]]:
    """Yield positions (N, 3), potential energy, forces (N, 3) and kinetic energy, step by step.

    The first are those of the frame. BAOAB (Leimkuhler and Matthews, Appl. Math. Res. Express 2013,
    34): half a kick, half a drift, friction and noise, half a drift, half a kick. Without friction
    this is velocity Verlet. Units are angstrom and eV.
    """
    random = np.random.default_rng(seed)
    masses = surface.masses[:, None]
    keep = math.exp(-friction * time_step)  # part of a velocity that friction leaves
    history = KeptPairs(SKIN)
    thermal = np.sqrt(
        EV_PER_KELVIN * temperature / masses * SPEED2_PER_EV
    )  # angstrom/fs
    velocity = thermal * random.standard_normal(surface.coord.shape)
    velocity -= (masses * velocity).sum(0) / masses.sum()
    # the drawn velocities are scaled to the temperature exactly; a single atom rests
    kinetic = 0.5 * (masses * velocity**2).sum() / SPEED2_PER_EV
    if kinetic > 0:
        freedom = max(3, 3 * len(surface.coord) - 3)
        velocity *= math.sqrt(0.5 * freedom * EV_PER_KELVIN * temperature / kinetic)
    coord = surface.coord.copy()
    force = np.zeros_like(surface.coord)
    for step in range(steps + 1):
        if step:
            velocity = velocity + 0.5 * time_step * SPEED2_PER_EV * force / masses
            coord = coord + 0.5 * time_step * velocity
            if friction:
                noise = random.standard_normal(coord.shape)
                velocity = keep * velocity + math.sqrt(1 - keep**2) * thermal * noise
            coord = coord + 0.5 * time_step * velocity
        prediction = surface.at(coord[None], history)
        energy = float(prediction.energy[0])
        force = prediction.force[0]
        if step:
            velocity = velocity + 0.5 * time_step * SPEED2_PER_EV * force / masses
        yield (
            coord,
            energy,
            force,
            float(0.5 * (masses * velocity**2).sum() / SPEED2_PER_EV),
        )


def scan_bonds(surface: Surface, shortest: Array, fraction: float) -> list[BondScan]:
    """Return a scan of each pair of elements that are neighbors in the frame.

    The method is BSCT (arXiv:2602.04861). The nearest pair of these elements is taken. One of its
    atoms is moved along the line between them, from ``fraction`` of the shortest distance of these
    elements in the data to ``BOND_REACH`` times that of the pair; all others rest. The scan ends
    before another pair is closer than ``fraction`` of the shortest distance of its elements.

    Args:
        surface: model and frame.
        shortest: (T, T), shortest distances of the data by types, angstrom; inf without any.
        fraction: of the shortest distances.
    """
    pairs = find_pairs_once(surface.coord, surface.box, surface.rcut)
    i, j = pairs.i, pairs.j
    movable = i != j  # an image of an atom moves with it
    kinds = np.sort(np.stack([surface.types[i], surface.types[j]], 1), axis=1)
    least = fraction * np.where(np.isfinite(shortest), shortest, 0.0)
    scans = []
    for first_type, second_type in np.unique(kinds[movable], axis=0):
        candidates = np.flatnonzero(
            movable & (kinds == (first_type, second_type)).all(1)
        )
        nearest = candidates[np.argmin(pairs.distance[candidates])]
        length = pairs.distance[nearest]
        axis = pairs.vector[nearest] / length
        begin = fraction * min(shortest[first_type, second_type], length)
        reach = np.linspace(begin, BOND_REACH * length, BOND_POINTS)
        moved = surface.moved(j[nearest], axis, reach - length)
        pair = {int(i[nearest]), int(j[nearest])}
        # the points around that of the frame that can be reached with no other pair too close
        start = int(np.argmin(np.abs(reach - length)))
        blocked = []
        for point in range(len(reach)):
            if point != start:
                close = surface.too_close(moved[point], least)
                if any({int(a), int(b)} != pair for a, b in zip(close.i, close.j)):
                    blocked.append(point)
        first = max([point + 1 for point in blocked if point < start], default=0)
        end = min([point for point in blocked if point > start], default=len(reach))
        energy = surface.at(moved[first:end]).energy
        minima, maxima = count_extrema(energy, MIN_BARRIER)
        names = (surface.elements[first_type], surface.elements[second_type])
        scans.append(
            BondScan(names, reach[first:end], energy, max(0, minima - 1) + maxima)
        )
    return scans


def scan_cutoff(surface: Surface) -> list[Row]:
    """Return jumps of the surface where the pair that is nearest to the cutoff passes it.

    E+ and E- are the energies ``CUTOFF_GAP`` outside and inside, and their jump is E+ - E- + 2 gap
    F, with F the force on the moved atom along the line. The jump of the force is the largest
    change of that on an atom. The force error is |F + (E(r + h) - E(r - h)) / (2 h)|, h =
    ``CUTOFF_STEP``.
    """
    pairs = find_pairs_once(surface.coord, surface.box, surface.rcut + CUTOFF_SEARCH)
    i, j = pairs.i, pairs.j
    distance = pairs.distance
    movable = np.flatnonzero(i != j)
    if not len(movable):
        return [Row("jumps at the cutoff", None, note="no pair of atoms")]
    pair = movable[np.argmin(np.abs(distance[movable] - surface.rcut))]
    axis = pairs.vector[pair] / distance[pair]
    to_cutoff = surface.rcut - distance[pair]
    shifts = to_cutoff + np.array(
        [-CUTOFF_STEP, -CUTOFF_GAP, 0.0, CUTOFF_GAP, CUTOFF_STEP]
    )
    at = surface.at(surface.moved(j[pair], axis, shifts))
    along = float(at.force[2, j[pair]] @ axis)
    jump = float(at.energy[3] - at.energy[1]) + 2 * CUTOFF_GAP * along
    change = float(np.linalg.norm(at.force[3] - at.force[1], axis=1).max())
    slope = float(at.energy[4] - at.energy[0]) / (2 * CUTOFF_STEP)
    names = [surface.elements[surface.types[atom[pair]]] for atom in (i, j)]
    return [
        Row(name, 1e3 * value, unit, f"<= {1e3 * most:g}", value <= most, note)
        for name, value, unit, most, note in (
            (
                "energy jump at the cutoff",
                abs(jump),
                "meV",
                MAX_ENERGY_JUMP,
                f"{'-'.join(names)} passes the cutoff",
            ),
            ("force jump at the cutoff", change, "meV/Å", MAX_FORCE_JUMP, ""),
            (
                "force less -dE/dr there",
                abs(slope + along),
                "meV/Å",
                MAX_FORCE_ERROR,
                "",
            ),
        )
    ]


def count_extrema(energy: Array, barrier: float) -> tuple[int, int]:
    """Return the numbers of minima and maxima of energies (P,).

    An extremum counts if energies on both sides differ from it by more than ``barrier``.
    """
    minima = maxima = 0
    trend = 0  # 1 while energies rise, -1 while they fall, 0 before the first barrier
    low = high = float(energy[0])
    for value in map(float, energy[1:]):
        low = min(low, value)
        high = max(high, value)
        if trend <= 0 and value - low > barrier:
            minima = minima + (trend < 0)
            trend = 1
            high = value
        elif trend >= 0 and high - value > barrier:
            maxima = maxima + (trend > 0)
            trend = -1
            low = value
    return minima, maxima
