"""``dp-ema test --physics``: quantities beside the errors, in one table with the limits that they must keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema.data.source import Frame, FrameSource
from deepmd_ema.errors import UserError, counted
from deepmd_ema.geometry import find_pairs_once
from deepmd_ema.infer.evaluate import first_frames, open_labelled
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.physics.dynamics import Conservation, Run, Stability, energy_conservation, time_step_of, time_to_failure
from deepmd_ema.physics.scans import BondScan, CutoffScan, scan_bonds, scan_cutoff
from deepmd_ema.physics.surface import Array, Model, Surface
from deepmd_ema.report.table import Column, Table, render

MAX_DRIFT = 1e-3  # eV/atom/ps
MIN_TIME = 1.0  # ps of dynamics: a shorter run shows neither a drift nor a failure
MAX_SPREAD = 1e-3  # eV/atom: a fortieth of the kinetic energy of an atom at 300 K
MIN_DISTANCE_RATIO = 0.75  # of the shortest distance in the data: nearer, an energy was not learned
MAX_ENERGY_JUMP = 1e-4  # eV; energies of a hundred atoms in float32 are rounded to 1e-5
MAX_FORCE_JUMP = 1e-3  # eV/angstrom
MAX_FORCE_ERROR = 5e-3  # eV/angstrom: that rounding over the 4e-3 angstrom of the difference quotient is 2.5e-3
MAX_FRAMES = 200  # of all systems, evenly, of which distances are taken


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
        limit: for people; empty where nothing is required.
        ok: whether the limit is kept; None where nothing is required, or nothing was measured.
        note: more about it.
    """

    quantity: str
    value: float | None
    unit: str = ""
    limit: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class PhysicsReport:
    """Results of all tests of a model at frames of the data.

    Attributes:
        source: system and number of the frame of dynamics and scans.
        run: without thermostat.
        conservation: run without thermostat.
        stability: run at twice the temperature.
        bonds: one scan for each pair of elements.
        cutoff: smoothness at the cutoff, or None.
    """

    source: tuple[str, int]
    run: Run
    conservation: Conservation
    stability: Stability
    bonds: Sequence[BondScan]
    cutoff: CutoffScan | None

    @property
    def rows(self) -> list[Row]:
        """The lines of the table."""
        return [*self._dynamics(), *self._scans()]

    @property
    def failed(self) -> list[Row]:
        """The lines whose limit is not kept."""
        return [row for row in self.rows if row.ok is False]

    def text(self) -> str:
        """Return the table."""
        rows = [
            [row.quantity, "-" if row.value is None else f"{row.value:.4g}", row.unit, row.limit, _VERDICTS[row.ok],
             row.note] for row in self.rows
        ]  # fmt: skip
        names = ("quantity", "value", "unit", "limit", "", "note")
        columns = [Column(name, "", "s" if name == "value" else "") for name in names]
        title = f"# physics of the model, at frame {self.source[1]} of {self.source[0]}"
        number = len(self.failed)
        verdict = f"{counted(number, 'limit')} not kept" if number else "all limits are kept"
        if self._is_short:
            verdict += f"; the dynamics are too short for a verdict, which takes {MIN_TIME:g} ps: raise --md-steps"
        return "\n".join([*render(Table(title, columns, rows), "# "), f"# {verdict}"])

    def document(self) -> dict[str, Any]:
        """Return everything as values of JSON, with None in place of nan."""
        return {
            "frame": list(self.source),
            "run": asdict(self.run),
            "rows": [asdict(row) for row in self.rows],
            "bonds": [
                {"elements": b.elements, "distance": b.distance.tolist(), "energy": b.energy.tolist()}
                for b in self.bonds
            ],
        }

    @property
    def _is_short(self) -> bool:
        return self.run.time_step * self.run.steps < 1e3 * MIN_TIME - 1e-9

    def _dynamics(self) -> Iterator[Row]:
        nve, hot, run = self.conservation, self.stability, self.run
        about = f"{nve.time:g} ps from {run.temperature:g} K by {run.time_step:g} fs"
        about = f"failed after {nve.time:g} ps: {nve.failure}" if nve.failure else about
        drift, spread = (None if nve.failure else 1e3 * value for value in (nve.drift, nve.spread))
        cases = (nve.failure, abs(nve.drift) <= MAX_DRIFT), (nve.failure, nve.spread <= MAX_SPREAD), (hot.failure, True)
        # a failure is one in any case
        kept = [False if failure else None if self._is_short else ok for failure, ok in cases]
        yield Row("NVE energy drift", drift, "meV/atom/ps", f"|x| <= {1e3 * MAX_DRIFT:g}", kept[0], about)
        yield Row("NVE energy spread", spread, "meV/atom", f"<= {1e3 * MAX_SPREAD:g}", kept[1])
        limit = f">= {1e-3 * run.time_step * run.steps:g}"
        name = f"time to failure at {2 * run.temperature:g} K"
        yield Row(name, hot.time, "ps", limit, kept[2], hot.failure or "no failure")

    def _scans(self) -> Iterator[Row]:
        for bond in self.bonds:
            about = f"{bond.distance[0]:.2f} to {bond.distance[-1]:.2f} Å"
            name = f"extrema beyond one well, {'-'.join(bond.elements)}"
            yield Row(name, bond.extrema, "", "0", not bond.extrema, about)
        if self.cutoff is None:
            yield Row("jumps at the cutoff", None, note="no pair of atoms")
            return
        about, cut = f"{'-'.join(self.cutoff.elements)} passes the cutoff", self.cutoff
        yield Row("energy jump at the cutoff", 1e3 * cut.energy_jump, "meV", *_below(cut.energy_jump, MAX_ENERGY_JUMP),
                  about)  # fmt: skip
        yield Row("force jump at the cutoff", 1e3 * cut.force_jump, "meV/Å", *_below(cut.force_jump, MAX_FORCE_JUMP))
        yield Row("force less -dE/dr there", 1e3 * cut.force_error, "meV/Å", *_below(cut.force_error, MAX_FORCE_ERROR))


_VERDICTS = {True: "ok", False: "FAILED", None: ""}


def measure_physics(
    model: str | Path,
    systems: Sequence[str | Path],
    options: PhysicsOptions | None = None,
    num_frames: int = 0,
    use_average: bool = False,
    average: str | None = None,
    head: str | None = None,
    device: str | None = None,
    rglob_patterns: Sequence[str] | None = None,
) -> PhysicsReport:
    """Return the physics of a model; the first frame of the first system is that of dynamics and scans.

    Args:
        model: a ``.pt`` checkpoint or a frozen file.
        systems: systems, or folders searched for systems.
        options: of the dynamics.
        num_frames: frames of each system, from its first; 0 takes all.
        use_average: takes the averaged weights of a training checkpoint.
        average: which average, when there are several; implies ``use_average``.
        head: which model of a file that holds several.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        UserError: if the model or the data cannot be read, or an element has no mass.
    """
    loaded = load_model(model, use_average=use_average, average=average, head=head)
    opened = open_labelled(systems, loaded.config, (), rglob_patterns)
    frames = spread_frames(opened, first_frames(opened, num_frames))
    return physics_of(Potential(loaded, device), frames, options or PhysicsOptions())


def physics_of(model: Model, frames: Sequence[Frame], options: PhysicsOptions) -> PhysicsReport:
    """Return the physics of a model at the first of some frames; of all of them distances are taken."""
    shortest = shortest_distances(frames, len(model.type_map), model.rcut)
    least = MIN_DISTANCE_RATIO * np.where(np.isfinite(shortest), shortest, 0.0)
    surface = Surface(model, frames[0])
    time_step = options.time_step or time_step_of(surface)
    steps = math.ceil(1e3 * MIN_TIME / time_step) if options.md_steps is None else options.md_steps
    run = Run(options.temperature, time_step, steps, options.seed)
    return PhysicsReport(
        frames[0].source,
        run,
        energy_conservation(surface, least, run),
        time_to_failure(surface, least, replace(run, temperature=2 * run.temperature)),
        scan_bonds(surface, shortest, MIN_DISTANCE_RATIO),
        scan_cutoff(surface),
    )


def shortest_distances(frames: Sequence[Frame], num_types: int, within: float) -> Array:
    """Return (T, T) shortest distances by the types of two atoms, angstrom; inf where none is below ``within``."""
    shortest = np.full((num_types, num_types), math.inf)
    for frame in frames:
        i, j, _, distance = find_pairs_once(frame.coord, frame.box, within)
        np.minimum.at(shortest, (frame.atom_type[i], frame.atom_type[j]), distance)
    return np.minimum(shortest, shortest.T)


def spread_frames(systems: Sequence[FrameSource], chosen: Sequence[range]) -> list[Frame]:
    """Return frames of all systems, evenly, of those ``chosen`` of each; the first is that of the first system."""
    every = [(system, number) for system, numbers in zip(systems, chosen) for number in numbers]
    if not every:
        raise UserError("--physics: there is no frame. Give systems with -s.")
    places = np.unique(np.linspace(0, len(every) - 1, min(MAX_FRAMES, len(every))).round().astype(int))
    return [system.frame(number) for system, number in (every[place] for place in places)]


def _below(value: float, most: float) -> tuple[str, bool]:
    """Return the text of a limit in thousandths, and whether a value keeps it."""
    return f"<= {1e3 * most:g}", value <= most
