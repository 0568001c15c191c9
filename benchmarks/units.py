"""Which wrong units and signs `dp-ema check` finds in five kinds of matter, and whether it is quiet on right data.

The sets are public calculations (folders below --data, see `sets`), the examples, and a few made here by potentials
with published parameters. Each is taken as recorded, and as 60 frames in random order.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
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

BOHR, HARTREE, KCAL, GPA = 0.52917721, 27.211386, 23.060548, 160.21766
LABELS = ("energy", "force", "virial")
Frame = dict[str, Any]  # symbols, coord, box or None, energy, force, virial or None; eV and angstrom
MAX_FRAMES, NUM_SHUFFLED = 240, 60


def read_deepmd(*folders: Path, names: str = "") -> Iterator[Frame]:
    """Yield the frames of deepmd/npy folders."""
    for folder in folders:
        elements = names.split() or (folder / "type_map.raw").read_text().split()
        plain = np.loadtxt(folder / "type.raw", dtype=int)
        for part in sorted(folder.glob("set.*")):
            arrays = {file.stem: np.load(file) for file in part.glob("*.npy")}
            for k in range(len(arrays["coord"])):
                one = {n: arrays[n][k].reshape(-1, 3) for n in ("coord", "force", "box", "virial") if n in arrays}
                if (folder / "nopbc").exists():
                    one.pop("box", None)
                types = arrays["real_atom_types"][k] if "real_atom_types" in arrays else plain
                one |= {name: one[name][types >= 0] for name in ("coord", "force")}
                symbols = [elements[t] for t in types[types >= 0]]
                yield {"box": None, "virial": None, **one, "symbols": symbols, "energy": arrays["energy"].ravel()[k]}


def read_ase(*files: Path) -> Iterator[Frame]:
    """Yield the frames of files that ASE reads."""
    from ase.io import iread

    for file in files:
        for atoms in iread(file, ":", format="vasp-out" if "OUTCAR" in file.name else None):
            found = atoms.calc.results
            if len(atoms) > 1:
                periodic = bool(atoms.pbc.all())
                stress = atoms.get_stress(voigt=False) if periodic and "stress" in found else None
                yield {
                    "symbols": list(atoms.symbols),
                    "coord": atoms.positions,
                    "box": atoms.cell.array if periodic else None,
                    "energy": found.get("free_energy", found["energy"]),
                    "force": found["forces"],
                    "virial": -atoms.get_volume() * stress if stress is not None else None,
                }


def read_mlearn(*files: Path) -> Iterator[Frame]:
    """Yield the frames of mlearn, whose stresses are those of VASP: kbar, of opposite sign, xx yy zz xy yz xz."""
    for file in files:
        for one in json.loads(file.read_text()):
            box = np.array(one["structure"]["lattice"]["matrix"])
            xx, yy, zz, xy, yz, xz = np.array(one["outputs"]["virial_stress"]) / (10 * GPA) * abs(np.linalg.det(box))
            yield {
                "symbols": [site["species"][0]["element"] for site in one["structure"]["sites"]],
                "coord": np.array([site["xyz"] for site in one["structure"]["sites"]]),
                "box": box,
                "energy": one["outputs"]["energy"],
                "force": np.array(one["outputs"]["forces"]),
                "virial": np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]),
            }


def make(name: str, work: Path) -> Iterator[Frame]:
    """Yield the frames of a set of `data_check`, made once."""
    from data_check import KINDS
    from data_check import make as made

    for _, kind, arrays in made(work, [name]):
        if kind == KINDS[0]:
            for k, energy in enumerate(arrays["energy"].ravel()):
                rows = {n: arrays[n][k].reshape(-1, 3) for n in ("coord", "force", "box", "virial") if n in arrays}
                yield {"box": None, "virial": None, **rows, "symbols": arrays["symbols"].tolist(), "energy": energy}


def sets(data: Path, work: Path) -> dict[tuple[str, str], Callable[[], Iterator[Frame]]]:
    """Return what reads each set, by kind of matter and name."""
    examples, mlearn, botnet, deepmd = ROOT / "examples", data / "mlearn", data / "botnet", data / "dk/examples"
    out: dict[tuple[str, str], Callable[[], Iterator[Frame]]] = {
        ("molecules", "3BPA, mixed T (BOTNet)"): partial(read_ase, botnet / "dataset_3BPA/train_mixedT.xyz"),
        ("molecules", "acetylacetone 600 K (BOTNet)"): partial(read_ase, botnet / "dataset_acac/train_600K.xyz"),
        ("molecules", "ethanol, methanol (BOTNet)"): partial(read_ase, botnet / "dataset_ethanol/train_eth_meth.xyz"),
        ("molecules", "CH4O2 reactive (DeePMD-kit)"): partial(read_deepmd, deepmd / "nopbc/data/C1H4O2"),
        ("molecules", "molecules (examples, xTB)"): partial(read_deepmd, examples / "molecules/data/train_large"),
        ("liquids", "water PBE0 (DeePMD-kit)"): partial(read_deepmd, deepmd / "water/data/data_0"),
        ("liquids", "water 400 K (examples, xTB)"): partial(read_deepmd, examples / "water/data/train_400K"),
        ("liquids", "NaCl 2,500 K (Fumi-Tosi)"): partial(make, "NaCl 2,500 K (Fumi-Tosi)", work),
    }
    for element in ("Li", "Mo", "Cu", "Ni", "Si", "Ge"):
        kind = "covalent solids" if element in ("Si", "Ge") else "metals"
        files = [file for what in ("training", "test") if (file := mlearn / f"{element}_{what}.json").exists()]
        for file in files:
            out[kind, f"{element} {file.stem.partition('_')[2]} (mlearn)"] = partial(read_mlearn, file)
    out |= {
        ("metals", "AgAu (EMT)"): partial(make, "AgAu (EMT)", work),
        ("covalent solids", "GeTe (DeePMD-kit)"): partial(read_deepmd, deepmd / "nvnmd/data"),
        ("covalent solids", "Si 3,000 K (Tersoff)"): partial(make, "Si 3,000 K (Tersoff)", work),
        ("ionic solids", "NiO (DeePMD-kit)"): partial(
            read_deepmd, *(deepmd / f"spin/data_reformat/data_{k}" for k in range(2))
        ),
        ("ionic solids", "TiO2 (DeePMD-kit)"): partial(read_deepmd, deepmd / "population/data"),
        ("ionic solids", "OUTCAR files (SevenNet)"): partial(
            read_ase, *sorted((data / "seven/example_inputs/data").glob("label_*/OUTCAR_*"))
        ),
        ("ionic solids", "NaCl (Fumi-Tosi)"): partial(make, "NaCl (Fumi-Tosi)", work),
        ("ionic solids", "MgO (Lewis-Catlow)"): partial(make, "MgO (Lewis-Catlow)", work),
    }
    return out


def factors(energy: float = 1, force: float = 1, virial: float = 1, stress: float = 0) -> Callable[[Frame], Frame]:
    """Return a trap that multiplies labels, or writes a stress with ``stress`` of its units in eV/angstrom^3."""

    def change(one: Frame) -> Frame:
        scale = virial if not stress or one["box"] is None else -stress / abs(np.linalg.det(one["box"]))
        other = one["virial"] * scale if one["virial"] is not None else None
        return one | {"energy": one["energy"] * energy, "force": one["force"] * force, "virial": other}

    return change


# name -> (what is done, words of the warning)
TRAPS: dict[str, tuple[Callable[[Frame], Frame], str]] = {
    "E kcal/mol": (factors(energy=KCAL), "energies"),
    "F kcal/mol": (factors(force=KCAL), "forces"),
    "E, F kcal/mol": (factors(KCAL, KCAL, KCAL), "forces"),
    "E hartree": (factors(energy=1 / HARTREE), "energies"),
    "F hartree/bohr": (factors(force=BOHR / HARTREE), "forces"),
    "E, F hartree": (factors(1 / HARTREE, BOHR / HARTREE, 1 / HARTREE), "forces"),
    "F sign": (factors(force=-1), "sign"),
    "V sign": (factors(virial=-1), "virials"),
    "V kbar": (factors(virial=10 * GPA), "virials"),
    "V GPa": (factors(virial=GPA), "virials"),
    "V = stress, eV/A^3": (factors(stress=1), "virials"),
    "V = stress, kbar": (factors(stress=10 * GPA), "virials"),
    "V = stress, GPa": (factors(stress=GPA), "virials"),
}


def write(path: Path, frames: list[Frame]) -> None:
    """Write frames as extended XYZ."""
    with path.open("w") as file:
        for one in frames:
            numbers = {"Lattice": one["box"], "virial": one["virial"].T if one["virial"] is not None else None}
            head = "".join(
                f'{n}="{" ".join(map(repr, a.ravel().tolist()))}" ' for n, a in numbers.items() if a is not None
            )
            file.write(
                f"{len(one['symbols'])}\n{head}energy={float(one['energy'])!r} "
                "Properties=species:S:1:pos:R:3:force:R:3\n"
            )
            for symbol, *row in zip(one["symbols"], *one["coord"].T.tolist(), *one["force"].T.tolist()):
                file.write(f"{symbol} {' '.join(map(repr, row))}\n")


def judge(path: Path, frames: list[Frame]) -> list[str]:
    """Return the warnings about units and signs."""
    write(path, frames)
    names = sorted({symbol for one in frames for symbol in one["symbols"]})
    systems = open_systems([str(path)], ReadSpec(names, LABELS))
    report = check_systems(systems, [], names, SeE2AConfig(rcut=3.0, sel="auto"), LABELS, 0.1)
    assert report.units is not None, report.problems
    return [w.split(": ", 1)[1] for w in report.warnings if w in report.units.warnings or "in kcal/mol" in w]


def rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row for each set, as recorded and in random order."""
    for (kind, name), read in sets(args.data, args.work).items():
        if args.only and name not in args.only:
            continue
        every = list(read())
        step = max(1, len(every) // MAX_FRAMES)
        order = np.random.default_rng(3).permutation(len(every))[:NUM_SHUFFLED]
        for how, frames in (
            ("as recorded", every[::step] if step > 3 else every[:MAX_FRAMES]),
            ("shuffled", [every[k] for k in order]),
        ):
            started = time.perf_counter()
            right = judge(args.work / "units.extxyz", frames)
            print(f"{name}, {how}: {right or 'quiet'} ({time.perf_counter() - started:.1f} s)", flush=True)
            cells = [kind, name, how, str(len(frames)), "**false**" if right else "quiet"]
            for trap, (change, word) in TRAPS.items() if not args.right_only else ():
                if trap.startswith("V") and all(one["virial"] is None for one in frames):
                    cells.append("")
                    continue
                found = judge(args.work / "units.extxyz", [change(one) for one in frames])
                cells.append(
                    "found" if any(word in text for text in found) else "found, otherwise" if found else "missed"
                )
                print(f"  {trap}: {cells[-1]}: {found}", flush=True)
            yield cells


def main() -> None:
    """Put the traps on the sets and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with mlearn/, botnet/, dk/, seven/")
    parser.add_argument("--work", type=Path, required=True, help="folder for sets that are made")
    parser.add_argument("--only", nargs="+", default=[], metavar="SET", help="names of sets")
    parser.add_argument("--right-only", action="store_true", help="without traps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    table = list(rows(args))
    count = {
        word: sum(cell == word for row in table for cell in row[5:]) for word in ("found", "found, otherwise", "missed")
    }
    print(f"{len(table)} rows, {sum(row[4] != 'quiet' for row in table)} false; traps: {count}\n")
    for line in [["kind", "set", "frames", "number", "right data", *TRAPS], ["---"] * (5 + len(TRAPS)), *table]:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
