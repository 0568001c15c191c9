"""Which wrong units and signs `dp-ema check` finds, and whether it is quiet about right ones: sets x traps.

Every set exists twice: frames of one trajectory, and frames that have nothing to do with each other. Those of the
examples are real (xTB, in files of this repository; as they were recorded, and shuffled); the others are made here:
metals by the EMT of ASE, semiconductors, salts, oxides and molecules by tblite if it is installed. A trap changes the
files as a user does who forgets a factor.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import ROOT

from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.source import ReadSpec
from deepmd_ema.families.se_e2_a.section import SeE2AConfig

BOHR, HARTREE, KCAL, KJ, GPA = 0.52917721, 27.211386, 23.060548, 96.485332, 160.21766
LABELS = ("energy", "force", "virial")
# what a trap changes -> beginnings of lines which say that it cannot be told
UNTOLD = {
    "energy": ("  cannot be told: energies",),
    "force": ("  cannot be told: forces",),
    "virial": ("  cannot be told: virials",),
    "coord": ("  cannot be told: lengths",),
    "both": ("  cannot be told: a unit common", "  cannot be told: forces"),
}
KINDS = ("correlated", "independent")
FRAMES, RUN_UP, EVERY = 30, 40, 3  # of a set; steps of 1 fs before the first frame and between two


def scaled(**factors: float) -> Callable[[dict[str, Any]], None]:
    """Return a trap that multiplies arrays by numbers."""

    def change(arrays: dict[str, Any]) -> None:
        for name, factor in factors.items():
            if name in arrays:
                arrays[name] = arrays[name] * factor

    return change


def stress(factor: float) -> Callable[[dict[str, Any]], None]:
    """Return a trap that writes a stress in the place of the virial; 1 eV/angstrom^3 has ``factor`` of its units."""

    def change(arrays: dict[str, Any]) -> None:
        if "virial" in arrays:
            volume = np.abs(np.linalg.det(arrays["box"].reshape(-1, 3, 3)))[:, None]
            arrays["virial"] = -factor * arrays["virial"] / volume

    return change


# name -> (what is done to the files, words that the warning must have for the trap to be named, label it needs)
TRAPS: dict[str, tuple[Callable[[dict[str, Any]], None], tuple[str, ...], str]] = {
    "E hartree": (scaled(energy=1 / HARTREE), ("energies look like Hartree",), "energy"),
    "E kcal/mol": (scaled(energy=KCAL), ("energies look like kcal/mol",), "energy"),
    "E kJ/mol": (scaled(energy=KJ), ("energies look like kJ/mol",), "energy"),
    "F hartree/bohr": (scaled(force=BOHR / HARTREE), ("forces look like Hartree/bohr",), "force"),
    "F kcal/mol": (scaled(force=KCAL), ("forces look like kcal/mol/angstrom",), "force"),
    "F kJ/mol": (scaled(force=KJ), ("forces look like kJ/mol/angstrom",), "force"),
    "F sign": (scaled(force=-1), ("forces have the wrong sign",), "force"),
    "E, F kcal/mol": (
        scaled(energy=KCAL, force=KCAL, virial=KCAL),
        ("kcal/mol and kcal/mol/angstrom",),
        "both",
    ),
    "E, F kJ/mol": (scaled(energy=KJ, force=KJ, virial=KJ), ("kJ/mol and kJ/mol/angstrom",), "both"),
    "E, F hartree": (
        scaled(energy=1 / HARTREE, force=BOHR / HARTREE, virial=1 / HARTREE),
        ("Hartree and Hartree/bohr",),
        "both",
    ),
    "x bohr": (scaled(coord=1 / BOHR, box=1 / BOHR), ("lengths look like bohr",), "coord"),
    "all atomic": (
        scaled(coord=1 / BOHR, box=1 / BOHR, energy=1 / HARTREE, force=BOHR / HARTREE, virial=1 / HARTREE),
        ("lengths look like bohr", "Hartree and Hartree/bohr"),
        "coord",
    ),
    "V sign": (scaled(virial=-1), ("virials have the wrong sign",), "virial"),
    "V GPa A^3": (scaled(virial=GPA), ("virials look like GPa * angstrom^3",), "virial"),
    "V kbar A^3": (scaled(virial=10 * GPA), ("virials look like kbar * angstrom^3",), "virial"),
    "V stress eV/A^3": (stress(1), ("a stress in eV/angstrom^3",), "virial"),
    "V stress GPa": (stress(GPA), ("a stress in GPa",), "virial"),
}


def made_sets() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], float]]:
    """Return name -> (atoms, calculator, temperature) of the sets that can be made here."""
    from ase.build import bulk, molecule
    from ase.calculators.emt import EMT

    def alloy() -> Any:
        atoms = bulk("Ag", cubic=True) * (2, 2, 2)
        # in another arrangement than one after the other, and not of one symmetry
        atoms.set_chemical_symbols(np.random.default_rng(5).permutation(["Ag", "Au"] * (len(atoms) // 2)).tolist())
        return atoms

    sets: dict[str, tuple[Callable[[], Any], Callable[[], Any], float]] = {
        "Cu (EMT)": (lambda: bulk("Cu", cubic=True) * (2, 2, 2), EMT, 900),
        "Al (EMT)": (lambda: bulk("Al", cubic=True) * (2, 2, 2), EMT, 600),
        "Cu 2,500 K (EMT)": (lambda: bulk("Cu", cubic=True) * (2, 2, 2), EMT, 2500),
        "AgAu (EMT)": (alloy, EMT, 600),
    }
    try:
        from tblite.ase import TBLite
    except ImportError:
        return sets

    def xtb(method: str) -> Callable[[], Any]:
        return lambda: TBLite(method=method, verbosity=0, electronic_temperature=1000)

    crystals = {"Si": (5.43, 600), "Ge": (5.66, 300), "C diamond": (3.57, 1500)}
    salts = {"NaCl": (5.64, 500), "MgO": (4.21, 900)}
    for name, (a, temperature) in crystals.items():
        element = name.split()[0]
        sets[name] = (lambda e=element, a=a: bulk(e, "diamond", a=a) * (2, 2, 2), xtb("GFN1-xTB"), temperature)
    for name, (a, temperature) in salts.items():
        sets[name] = (
            lambda n=name, a=a: bulk(n, "rocksalt", a=a, cubic=True) * (2, 1, 1),
            xtb("GFN1-xTB"),
            temperature,
        )
    names = {"ethanol": ("CH3CH2OH", 500), "benzene": ("C6H6", 300), "Si2H6": ("Si2H6", 500), "CF3CN": ("CF3CN", 500)}
    for name, (formula, temperature) in names.items():
        sets[name] = (lambda f=formula: molecule(f), xtb("GFN2-xTB"), temperature)
    return sets


def trajectory(atoms: Any, temperature: float, seed: int, step: float = 1.0) -> Iterator[Any]:
    """Yield the atoms at frames of a trajectory."""
    from ase import units
    from ase.md.langevin import Langevin
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

    rng = np.random.default_rng(seed)
    atoms.rattle(0.03, seed=seed)
    MaxwellBoltzmannDistribution(atoms, temperature_K=2 * temperature, rng=rng)
    run = Langevin(atoms, step * units.fs, temperature_K=temperature, friction=0.01 / units.fs, rng=rng)
    run.run(RUN_UP)
    for _ in range(FRAMES):
        run.run(EVERY)
        yield atoms


def rattled(atoms: Any, temperature: float, seed: int) -> Iterator[Any]:
    """Yield the atoms at frames that have nothing to do with each other: strained cells, atoms off their sites."""
    rng = np.random.default_rng(seed)
    sites, cell = atoms.get_positions(), atoms.cell.array.copy()
    width = 0.04 * np.sqrt(temperature / 300)
    for _ in range(FRAMES):
        atoms.set_positions(sites)
        if atoms.pbc.any():
            atoms.set_cell(cell, scale_atoms=False)
            atoms.set_cell(cell @ (np.eye(3) + rng.normal(0, 0.01, (3, 3))), scale_atoms=True)
        atoms.positions += rng.normal(0, width * rng.uniform(0.7, 1.3), sites.shape)
        yield atoms


def record(frames: Iterator[Any]) -> dict[str, Any]:
    """Return the arrays of a system."""
    rows: dict[str, list[Any]] = {}
    for atoms in frames:
        row = {"coord": atoms.get_positions(), "energy": atoms.get_potential_energy(), "force": atoms.get_forces()}
        if atoms.pbc.any():
            virial = -atoms.get_stress(voigt=False) * atoms.get_volume()
            row |= {"box": atoms.cell.array.copy(), "virial": virial}
        for name, value in row.items():
            rows.setdefault(name, []).append(np.ravel(value))
        symbols = atoms.get_chemical_symbols()
    return {name: np.array(values) for name, values in rows.items()} | {"symbols": np.array(symbols)}


def make(work: Path, only: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, kind and arrays of every set that is made here; those made before are read."""
    from data_check_new import Recipe, new_sets

    work.mkdir(parents=True, exist_ok=True)
    recipes = {name: Recipe(*made) for name, made in made_sets().items()} | new_sets()
    for name, recipe in recipes.items():
        if only and name not in only:
            continue
        for kind, frames in zip(KINDS, (partial(trajectory, step=recipe.step), recipe.independent or rattled)):
            file = work / f"{re.sub('[^A-Za-z0-9]+', '_', name)}.{kind}.npz"
            if not file.exists():
                start, one = time.perf_counter(), recipe.atoms()
                one.calc = recipe.calculator()
                np.savez(file, **record(frames(one, recipe.temperature, 7)))
                print(f"made {file} in {time.perf_counter() - start:.0f} s", flush=True)
            with np.load(file) as stored:
                yield name, kind, dict(stored)


def examples(only: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, kind and arrays of the examples: in the order of the files, and shuffled."""
    for folder in sorted((ROOT / "examples").glob("*/data/*/set.000")):
        system = folder.parent
        name = f"{system.parents[1].name} {system.name}"
        if (only and name not in only) or not system.name.startswith("train"):
            continue
        arrays: dict[str, Any] = {file.stem: np.load(file) for file in sorted(folder.glob("*.npy"))}
        names = np.array((system / "type_map.raw").read_text().split())
        arrays |= {"symbols": names[np.loadtxt(system / "type.raw", dtype=int)], "names": names}
        order = np.random.default_rng(3).permutation(len(arrays["coord"]))
        yield name, "as recorded", arrays
        yield name, "shuffled", {k: a if k in ("symbols", "names") else a[order] for k, a in arrays.items()}


def write(path: Path, arrays: dict[str, Any]) -> list[str]:
    """Write arrays as a system and return its elements."""
    names = arrays["names"].tolist() if "names" in arrays else sorted(set(arrays["symbols"].tolist()))
    folder = path / "set.000"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npy"):
        old.unlink()
    (path / "type_map.raw").write_text("\n".join(names) + "\n")
    np.savetxt(path / "type.raw", [names.index(one) for one in arrays["symbols"]], fmt="%d")
    (path / "nopbc").unlink(missing_ok=True)
    if "box" not in arrays:
        (path / "nopbc").touch()
    for name, array in arrays.items():
        if name not in ("symbols", "names"):
            np.save(folder / f"{name}.npy", array.ravel() if name == "energy" else array)
    return names


def judge(path: Path, arrays: dict[str, Any]) -> tuple[list[str], list[str], list[str], float]:
    """Return the warnings about units and signs, other warnings and problems, what cannot be told, and the seconds."""
    names = write(path, arrays)
    start = time.perf_counter()
    systems = open_systems([str(path)], ReadSpec(names, LABELS))
    report = check_systems(
        systems, [], names, SeE2AConfig(rcut=5.0, sel="auto"), LABELS[: 3 if "virial" in arrays else 2]
    )
    warnings = [w for w in report.warnings if w in report.units.warnings or "are they in kcal/mol" in w]
    # copies are not the question here
    others = [w for w in report.warnings if w not in warnings and "copies of another" not in w] + report.problems
    return warnings, others, report.units.lines()[1:], time.perf_counter() - start


def verdict(
    warnings: Sequence[str], others: Sequence[str], untold: Sequence[str], words: Sequence[str], label: str
) -> str:
    """Return one cell of the table."""
    text = " ".join(warnings)
    if not warnings:
        said = any(line.startswith(UNTOLD[label]) for line in untold)
        return "told otherwise" if others else "not told" if said else "**missed**"
    return "found" if all(word in text for word in words) else "found, other name"


def rows(sets: Iterator[tuple[str, str, dict[str, Any]]], work: Path, say: Callable[[str], None]) -> list[list[str]]:
    """Return a row for each set: name, kind, right data, and every trap."""
    out = []
    for name, kind, arrays in sets:
        warnings, others, untold, seconds = judge(work / "system", arrays)
        right = "**false alarm**" if warnings else "quiet"
        say(f"{name}, {kind}: {right} ({seconds:.2f} s) {warnings} {others} {untold}")
        cells = [name, kind, right]
        for trap, (change, words, label) in TRAPS.items():
            if {"both": "energy"}.get(label, label) not in arrays:
                cells.append("")
                continue
            changed = dict(arrays)
            change(changed)
            seen = judge(work / "system", changed)[:3]
            cells.append(verdict(*seen, words, label))
            if cells[-1] != "found":
                say(f"  {trap}: {cells[-1]}: {seen}")
        out.append(cells)
    return out


def page(table: list[list[str]], command: str) -> str:
    """Return the page."""
    cells = [cell for row in table for cell in row[3:] if cell]
    told = {
        word: sum(cell.startswith(word) for cell in cells)
        for word in ("found", "not told", "**missed**", "told otherwise")
    }
    other = sum(cell == "found, other name" for cell in cells)
    alarms = sum(row[2] != "quiet" for row in table)
    head = [
        f"# Wrong units and signs that the check of data finds ({time.strftime('%Y-%m-%d')})",
        "",
        f"`{command}`",
        "",
        f"{len(table)} sets, {len(cells)} traps: {told['found']} found ({other} of them under another name), "
        f"{told['**missed**']} missed, {told['not told']} not told (and `dp-ema check` says that it cannot), "
        f"{told['told otherwise']} told otherwise (as an error or another warning). "
        f"{alarms} false alarms on right data. Empty: the set has no such label.",
        "",
    ]
    titles = ["set", "frames", "right data", *TRAPS]
    body = [f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *table]]
    return "\n".join([*head, *body, ""])


def main() -> None:
    """Make the sets, put the traps on them, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the sets; those in it are used again")
    parser.add_argument("--only", nargs="+", default=[], metavar="SET", help="names of sets")
    parser.add_argument("--no-made", action="store_true", help="the examples only")
    parser.add_argument("--output", type=Path, help="write the page here as well")
    args = parser.parse_args()
    table = rows(examples(args.only), args.work, print)
    if not args.no_made:
        table += rows(make(args.work / "sets", args.only), args.work, print)
    only = "".join(f" {name!r}" if " " in name else f" {name}" for name in args.only)
    text = page(table, f"python benchmarks/data_check.py --work FOLDER{' --only' * bool(only)}{only}")
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
