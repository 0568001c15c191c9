"""Comparison of a student with its teacher, from dynamics of both: rows of quantity, unit, teacher,
student.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.io import write
from ase.neighborlist import neighbor_list
from matplotlib import pyplot as plt
from numpy.typing import NDArray

Array = NDArray[np.float64]
Runs = dict[
    tuple[float, str], list[Atoms]
]  # frames of dynamics by temperature (K) and cell
Row = tuple[str, str, str, str]

EVERY = 10  # steps between two frames
BLOCKS, STUDENT_T = 5, 2.78  # intervals of 95 % from the means of five parts of a run
EDGES = np.arange(0, 8.01, 0.05)  # angstrom, of the radial distribution
MIDDLES, PEAK_WIDTH = (EDGES[1:] + EDGES[:-1]) / 2, 0.4
MAX_FRAMES = 300  # of a radial distribution
LIMITS = (
    "The student is at best as accurate as its teacher, for this composition near these "
    "temperatures and densities.\n"
)
LAMMPS = """units metal
read_data student.data
pair_style deepmd student.pt2
pair_coeff * * {elements}
velocity all create {kelvin:g} 1
fix 1 all npt temp {kelvin:g} {kelvin:g} 0.1 iso 0 0 1
timestep {step:g}
thermo 100
run 10000
"""
GRAM_PER_CM3 = 1.66053907  # of u/angstrom^3


def time_step(atoms: Atoms) -> float:
    """Return the time step of dynamics, fs."""
    return 0.5 if "H" in atoms.symbols else 2.0


def picoseconds(runs: Runs) -> float:
    """Return the time of all dynamics."""
    return sum(
        EVERY * (len(frames) - 1) * time_step(frames[0]) / 1000
        for frames in runs.values()
    )


def interval(
    values: Array, of: Callable[[Array], Any] = np.asarray
) -> tuple[Array, Array]:
    """Return the mean of ``of`` a series without its first fifth, and half of its 95 % interval;
    nan if it is short.
    """
    if len(values) < 2 * BLOCKS:  # a dynamics that failed at once
        values = np.full((2 * BLOCKS, *values.shape[1:]), np.nan)
    parts = np.array_split(values[len(values) // 5 :], BLOCKS)
    blocks = np.stack([of(part.mean(0)) for part in parts])
    return blocks.mean(0), STUDENT_T * blocks.std(0, ddof=1) / BLOCKS**0.5


def errors(tests: list[Atoms], first: list[Atoms], second: list[Atoms]) -> list[Row]:
    """Return errors of the first of two students on frames with labels.

    RMSE beside the standard deviation of the labels; the largest force error of a frame, which 5 %
    of the frames exceed, beside the same of the disagreement of the students.
    """
    forces = [
        np.array([frame.get_forces() for frame in frames])
        for frames in (tests, first, second)
    ]
    differences = (forces[1] - forces[0], np.std(forces[1:], axis=0))
    largest = [
        f"{1e3 * np.percentile(np.linalg.norm(each, axis=2).max(1), 95):.3g}"
        for each in differences
    ]
    rows = [
        (
            "largest force error of a frame, at 95 % (disagreement)",
            "meV/Å",
            "",
            "{} ({})".format(*largest),
        )
    ]
    scales = (
        ("energy", "meV/atom", 1e3 / len(tests[0])),
        ("forces", "meV/Å", 1e3),
        ("stress", "GPa", 1 / units.GPa),
    )
    for name, unit, scale in scales:
        labels, ours = (
            scale * np.array([frame.calc.results[name] for frame in frames])
            for frames in (tests, first)
        )
        rmse = np.sqrt(np.mean((ours - labels) ** 2))
        rows.append(
            (
                f"{name}: standard deviation, RMSE",
                unit,
                f"{labels.std():.3g}",
                f"{rmse:.3g}",
            )
        )
    return rows


def density(runs: list[list[Atoms]], kelvin: float) -> str:
    """Return the density at zero pressure, g/cm3, and its interval, from the pressures at three
    volumes.

    That of the middle one is corrected by its pressure over the bulk modulus between the others.
    """
    volumes, pressures = [frames[0].get_volume() for frames in runs], []
    for frames, volume in zip(runs, volumes):
        stress = np.array([frame.get_stress()[:3].mean() for frame in frames])
        pressures.append(interval(len(frames[0]) * units.kB * kelvin / volume - stress))
    means, halves = np.transpose(pressures)
    small, same, large = (
        means
        + np.random.default_rng(1).standard_t(BLOCKS - 1, (1000, 3))
        * halves
        / STUDENT_T
    ).T
    at_zero = volumes[1] * np.exp(
        same * np.log(volumes[2] / volumes[0]) / (small - large)
    )
    low, middle, high = np.percentile(
        GRAM_PER_CM3 * runs[0][0].get_masses().sum() / at_zero, [2.5, 50, 97.5]
    )
    outside = means.min() > 0 or means.max() < 0
    return (
        f"{middle:.3f} ± {(high - low) / 2:.3f}{' (extrapolated)' if outside else ''}"
    )


def radial(frames: list[Atoms]) -> Array:
    """Return the radial distribution of all pairs in each of some frames, (F, R)."""
    shells = (
        4 / 3 * np.pi * np.diff(EDGES**3) * len(frames[0]) ** 2 / frames[0].get_volume()
    )
    some = frames[:: -(-len(frames) // MAX_FRAMES)]
    return np.array(
        [
            np.histogram(neighbor_list("d", frame, EDGES[-1]), EDGES)[0] / shells
            for frame in some
        ]
    )


def averages(teacher: Runs, student: Runs, picture: Path) -> list[Row]:
    """Return time of a step, densities and radial distributions, and draw the latter."""
    both, rows = (teacher, student), []
    times = [
        sum(
            frames[-1].info["seconds"] - frames[0].info["seconds"]
            for frames in runs.values()
        )
        / (picoseconds(runs) or np.nan)  # nan where all dynamics have a single frame
        for runs in both
    ]  # of the first frame: also loading
    atoms = next(iter(teacher.values()))[0]
    per_step = [f"{1e3 * time * time_step(atoms) / len(atoms):.3g}" for time in times]
    rows.append(
        (f"time of an atom and step (ratio {times[0] / times[1]:.0f})", "µs", *per_step)
    )
    rows.append(
        (
            "dynamics for the following rows",
            "ps",
            *(f"{picoseconds(runs):.3g}" for runs in both),
        )
    )
    failed = (
        str(sum(frames[-1].info["failed"] for frames in runs.values())) for runs in both
    )
    rows.append((f"failed dynamics, of {len(teacher)}", "", *failed))
    kelvins = list(dict.fromkeys(kelvin for kelvin, _ in teacher))
    figure, axes = plt.subplots(
        1,
        len(kelvins),
        figsize=(4 * len(kelvins), 3),
        layout="constrained",
        squeeze=False,
    )
    for kelvin, axis in zip(kelvins, axes[0]):
        cells = [
            [frames for (key, _), frames in runs.items() if key == kelvin]
            for runs in both
        ]
        rows.append(
            (
                f"density at zero pressure, {kelvin:g} K",
                "g/cm3",
                *(density(runs, kelvin) for runs in cells),
            )
        )
        series = [radial(runs[kelvin, "same"]) for runs in both]
        means, halves = zip(*map(interval, series))
        # a slow teacher has too few frames for an average: the peak is then that of the student
        shown = means[0] if np.isfinite(means[0]).all() else means[1]
        near = np.abs(MIDDLES - MIDDLES[shown.argmax()]) < PEAK_WIDTH
        for what, unit, of in (
            (
                "distance",
                "Å",
                lambda g, near=near: np.average(MIDDLES[near], weights=g[near]),
            ),
            ("height", "", lambda g, near=near: g[near].max()),
        ):
            peaks = (
                "{:.3f} ± {:.3f}".format(*interval(values, of)) for values in series
            )
            rows.append((f"highest peak of g(r), {kelvin:g} K: {what}", unit, *peaks))
        for mean, half, name in zip(means, halves, ("teacher", "student")):
            axis.fill_between(MIDDLES, mean - half, mean + half, alpha=0.3)
            axis.plot(MIDDLES, mean, "-" if name == "teacher" else "--", label=name)
        axis.set(
            title=f"{kelvin:g} K",
            xlabel="distance (Å)",
            ylabel="g(r)",
            xlim=(1, EDGES[-1]),
        )
    axes[0, 0].legend()
    figure.savefig(picture)
    return rows


def physics(found: dict[str, Any]) -> list[Row]:
    """Return rows of `dp-ema test --physics`."""
    rows = []
    for row in found["rows"]:
        value = "-" if row["value"] is None else f"{row['value']:.3g}"
        rows.append(
            (
                f"{row['quantity']}, limit {row['limit'].replace('|x|', 'abs(x)')}",
                row["unit"],
                "",
                value,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return a table in Markdown, and what it does not say."""
    head = (("quantity", "unit", "teacher", "student"), ("---",) * 4)
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows)) + "\n" + LIMITS


def write_lammps(folder: Path, atoms: Atoms, kelvin: float) -> None:
    """Write an input of LAMMPS, with its structure, for the student of this folder."""
    elements = sorted(set(atoms.symbols))
    write(
        folder / "student.data",
        atoms,
        format="lammps-data",
        specorder=elements,
        masses=True,
    )
    values = {
        "elements": " ".join(elements),
        "kelvin": kelvin,
        "step": time_step(atoms) / 1000,
    }
    (folder / "in.lammps").write_text(LAMMPS.format(**values))
