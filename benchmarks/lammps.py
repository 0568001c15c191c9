"""Energies, forces, pressures, drift and steps per second of frozen models in LAMMPS, for every
descriptor.

usage: python benchmarks/lammps.py --lammps DIR --cache FOLDER [--only NAME ...] [--output PAGE]

DIR has DeePMD-kit, its LAMMPS and MPI (doc/lammps.md). Each model is trained for some hundred steps
on the water example, so that its statistics are those of data and its forces keep molecules
together, and frozen as ``.pt2`` and as ``.pth``; these files stay in FOLDER, because compiling
takes minutes. Then LAMMPS evaluates one triclinic cell of 96 atoms on one rank and on two, which is
compared with ``deepmd_ema.Potential`` of the checkpoint, goes 1,000 steps of NVE, and runs both
files in turns for times.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np

MODELS = json.loads((common.ROOT / "benchmarks" / "models.json").read_text())
# `se_atten_v2` is `se_atten` with `tebd_input_mode: strip`
MODELS["se_atten_v2"] = MODELS["se_atten, 2 layers"] | {"type": "se_atten_v2"}
TRAINED = "se_e2_a, trained"
MODELS[TRAINED] = MODELS["se_e2_a"] | {"neuron": [12, 24, 48], "axis_neuron": 8}
FILES = ("model.pt2", "model.pth")
FITTING = [60, 60, 60]
STEPS, TRAINED_STEPS = 300, 2000
MASSES = (15.999, 1.008)
NVE_STEPS, NVE_EVERY = 1000, 10
PS_PER_STEP = (
    0.0001  # these models heat up: longer steps would be too long after 0.1 ps
)
SHORT_STEPS = 20
WARM_STEPS, TIMED_STEPS, TURNS = 10, 40, 3  # the first steps of a .pth are slower
BAR = 1.6021765e6  # of an eV/angstrom^3, as LAMMPS has it; 1.602176634e6 is exact
SHEAR = np.array(
    [[1.0, 0.0, 0.0], [0.02, 1.0, 0.0], [-0.015, 0.03, 1.0]]
)  # all six pressures differ from zero

INPUT = """units metal
boundary p p p
atom_style atomic
atom_modify map yes
read_data water.data
mass 1 {masses[0]}
mass 2 {masses[1]}
pair_style deepmd {model}
pair_coeff * * O H
compute p all pressure NULL virial
thermo_style custom step pe etotal temp c_p[1] c_p[2] c_p[3] c_p[4] c_p[5] c_p[6]
thermo_modify format float %.17g
thermo {every}
dump d all custom 1000000 forces.txt id x y z fx fy fz
dump_modify d sort id format float %.17g
timestep {timestep}
velocity all create 300 1
fix 1 all nve
"""


@dataclass(frozen=True)
class Place:
    """The folder of a model and the environment of LAMMPS."""

    folder: Path
    lammps: Path


@dataclass(frozen=True)
class Run:
    """Output of a run of LAMMPS.

    Attributes:
        message: its error, or an empty string; then the others are filled.
        rows: (rows, 10) step, potential and total energy in eV, temperature in K, pressures xx yy
            zz xy xz yz in bar.
        force: (atoms, 3) of the first frame, eV/angstrom.
        ms: wall time of a step.
        cpu_ms: processor time of a step, per rank.
    """

    message: str
    rows: np.ndarray
    force: np.ndarray
    ms: float = 0.0
    cpu_ms: float = 0.0


def main() -> None:
    """Make the models, run LAMMPS and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lammps",
        metavar="DIR",
        type=Path,
        required=True,
        help="environment with lmp, dp and mpirun",
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        type=Path,
        required=True,
        help="of the models, which stay there",
    )
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=list(MODELS), help="models"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="make the models, and do not run LAMMPS"
    )
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    # what is needed first comes after minutes of compiling
    for program in ("dp",) if args.prepare else ("dp", "lmp", "mpirun"):
        if not (args.lammps / "bin" / program).exists():
            parser.error(
                f"--lammps {args.lammps}: expected bin/{program} in this environment."
            )
    sys.path.insert(0, str(common.ROOT))
    for name in args.only:
        prepare(name, args.cache / _file_name(name), args.lammps)
    if args.prepare:
        return
    rows = [
        measure(name, args.cache / _file_name(name), args.lammps) for name in args.only
    ]
    common.publish(page(rows, args.lammps), args.output)


def prepare(name: str, folder: Path, lammps: Path) -> None:
    """Train a model and freeze it; files that are there are kept."""
    env = common.environment(1, "cpu")
    ours = common.programs(None)["ours"]
    config = common.bare(common.read_input(common.EXAMPLE / "input.json", None))
    config["model"] |= {
        "descriptor": copy.deepcopy(MODELS[name]),
        "fitting_net": {"neuron": FITTING, "seed": 1},
    }
    config = common.with_precision(config, "float64")
    config["training"] |= {"numb_steps": TRAINED_STEPS if name == TRAINED else STEPS}
    checkpoint = folder / "model.ckpt.pt"
    if not checkpoint.exists():
        common.write_input(folder, config)
        common.run_text(ours, folder, env, "train", "input.json")
    freeze = ["freeze", "-c", str(checkpoint), "-o"]
    if not (folder / "model.pt2").exists():
        common.run_text(
            ours, folder, env, *freeze, str(folder / "model.pt2"), "--device", "cpu"
        )
    if not (folder / "model.pth").exists():
        common.run_text(
            ours,
            folder,
            env,
            *freeze,
            str(folder / "model.pth"),
            "--dp",
            str(lammps / "bin" / "dp"),
        )
    print(f"{name}: ready", file=sys.stderr, flush=True)


def measure(name: str, folder: Path, lammps: Path) -> dict:
    """Return the numbers of a model, which are kept in its folder."""
    known = folder / "lammps.json"
    if known.exists():
        return json.loads(known.read_text())
    sys.path.insert(0, str(common.ROOT))
    from deepmd_ema import Potential

    kinds, coord, cell = frame()
    ours = Potential(str(folder / "model.ckpt.pt"), device="cpu").evaluate(
        coord, kinds, cell
    )
    stress = np.reshape(ours.virial, (3, 3)) / np.linalg.det(cell) * BAR
    pressure = stress[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
    found: dict = {"name": name}
    place = Place(folder, lammps)
    for file in FILES:
        one = run_lammps(
            place, file, [NVE_STEPS] if file == FILES[0] else [SHORT_STEPS]
        )
        two = run_lammps(place, file, [SHORT_STEPS], ranks=2)
        no_map = run_lammps(place, file, [0], has_map=False)
        found[file] = {"one": one.message, "two": two.message, "no_map": no_map.message}
        if one.message:
            continue
        found[file] |= {
            "energy": relative(one.rows[0, 1], ours.energy),
            "force": relative(one.force, ours.force),
            "pressure": relative(one.rows[0, 4:], pressure),
        }
        if not no_map.message:
            found[file]["force_no_map"] = relative(no_map.force, one.force)
        if not two.message:
            here = np.searchsorted(one.rows[:, 0], SHORT_STEPS)
            found[file]["force_two"] = relative(two.force, one.force)
            found[file]["energy_two"] = relative(two.rows[-1, 2], one.rows[here, 2])
        if file == FILES[0]:
            found[file] |= drift(one.rows, len(kinds))
    times: dict[str, list[Run]] = {file: [] for file in FILES}
    for turn in range(TURNS):
        for file in list(times)[:: 1 if turn % 2 == 0 else -1]:
            times[file].append(run_lammps(place, file, [WARM_STEPS, TIMED_STEPS]))
    for file, runs in times.items():
        found[file] |= {"ms": [r.ms for r in runs], "cpu_ms": [r.cpu_ms for r in runs]}
    known.write_text(json.dumps(found, indent=1))
    print(f"{name}: measured", file=sys.stderr, flush=True)
    return found


def frame() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return types (N,), coordinates (N, 3) and cell (3, 3) of a sheared frame of the example."""
    folder = common.EXAMPLE / "data" / "validation"
    kinds = np.loadtxt(folder / "type.raw", dtype=int)
    coord = np.load(folder / "set.000" / "coord.npy")[0].reshape(-1, 3).astype(float)
    cell = np.load(folder / "set.000" / "box.npy")[0].reshape(3, 3).astype(float)
    return kinds, coord @ SHEAR, cell @ SHEAR


def write_data(path: Path) -> None:
    """Write the frame as a data file of LAMMPS."""
    kinds, coord, cell = frame()
    sides = [f"0 {cell[k, k]:.17g} {'xyz'[k]}lo {'xyz'[k]}hi" for k in range(3)]
    tilts = f"{cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g} xy xz yz"
    atoms = [
        f"{k + 1} {kind + 1} {x:.17g} {y:.17g} {z:.17g}"
        for k, (kind, (x, y, z)) in enumerate(zip(kinds, coord))
    ]
    head = [
        "water",
        "",
        f"{len(kinds)} atoms",
        "2 atom types",
        "",
        *sides,
        tilts,
        "",
        "Atoms # atomic",
        "",
    ]
    path.write_text("\n".join([*head, *atoms, ""]))


def run_lammps(
    place: Place, model: str, steps: list[int], ranks: int = 1, has_map: bool = True
) -> Run:
    """Run LAMMPS from the frame; the times are those of the last of several ``steps``."""
    folder, lammps = place.folder, place.lammps
    write_data(folder / "water.data")
    text = INPUT.format(
        model=model, every=NVE_EVERY, timestep=PS_PER_STEP, masses=MASSES
    )
    text = text if has_map else text.replace("atom_modify map yes\n", "")
    (folder / "in.lammps").write_text(text + "".join(f"run {n}\n" for n in steps))
    launcher = [str(lammps / "bin" / "mpirun"), "-np", str(ranks)] if ranks > 1 else []
    env = common.environment(1, "cpu")
    env.pop("PYTHONPATH")
    done = subprocess.run(
        [*launcher, str(lammps / "bin" / "lmp"), "-in", "in.lammps"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    # at the end of several ranks printed lines may be lost
    out = (
        done.stdout
        + done.stderr
        + (folder / "log.lammps").read_text() * (done.returncode != 0)
    )
    if done.returncode or "ERROR" in out:
        said = re.search(
            r"(?:DeePMD-kit Error|ERROR[^:]*): (?!DeePMD)(.*?)(?: \(/project|$)",
            out,
            flags=re.M,
        )
        return Run(
            said[1] if said else f"exit code {done.returncode}",
            np.empty(0),
            np.empty(0),
        )
    numbers = [
        line.split()
        for line in out.splitlines()
        if re.match(r"\s+\d+(\s+[-+.\de]+){9}\s*$", line)
    ]
    seconds, share = (
        float(re.findall(p, out)[-1])
        for p in (r"Loop time of (\S+) on", r"([\d.]+)% CPU use")
    )
    force = np.loadtxt(folder / "forces.txt", skiprows=9, max_rows=len(frame()[0]))[
        :, 4:
    ]
    ms = 1000 * seconds / max(1, steps[-1])
    return Run("", np.array(numbers, float), force, ms, ms * share / 100)


def relative(one: np.ndarray, two: np.ndarray) -> float:
    """Return the largest difference, relative to the largest number."""
    return float(np.abs(np.subtract(one, two)).max() / np.abs(two).max())


def drift(rows: np.ndarray, num_atoms: int) -> dict[str, float]:
    """Return the slope of a line through the total energies and what is left, meV/atom, and the
    last temperature.
    """
    ps, energy = rows[:, 0] * PS_PER_STEP, 1000 * rows[:, 2] / num_atoms
    line = np.polyfit(ps, energy, 1)
    return {
        "drift": line[0],
        "spread": float((energy - np.polyval(line, ps)).std()),
        "temperature": rows[-1, 3],
    }


def page(found: list[dict], lammps: Path) -> str:
    """Return the page."""
    kinds = len(frame()[0])
    code = "import torch; print(torch.__version__)"
    torch_there = subprocess.run(
        [lammps / "bin" / "python", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    import torch

    lines = [
        f"# Frozen models in LAMMPS, {common.today()}",
        "",
        "`python benchmarks/lammps.py --lammps DIR --cache FOLDER`",
        "",
        f"LAMMPS 22 Jul 2025 and DeePMD-kit 3.2.0 with torch {torch_there.stdout.strip()} (DIR); "
        f"`.pt2` compiled with torch {torch.__version__}. Each model: its section of "
        f"`benchmarks/models.json` (or `MODELS` of the program), fitting net {FITTING}, float64, "
        f"{STEPS} steps of the water example ({TRAINED_STEPS} of `{TRAINED}`). One triclinic cell "
        f"of {kinds} atoms of water; one thread per rank, CPU.",
        "",
    ]
    for title, part in (
        ("Numbers", _numbers),
        ("NVE", _nve),
        ("Ranks and the atom map", _ranks),
        ("Time", _time),
    ):
        lines += [f"## {title}", "", *part(found), ""]
    return "\n".join(lines)


def _numbers(found: list[dict]) -> list[str]:
    text = (
        "Largest difference between LAMMPS and `deepmd_ema.Potential` of the checkpoint, relative "
        "to the largest number. Pressure: the six components without the kinetic part, 1 "
        f"eV/angstrom^3 = {BAR:.8g} bar as LAMMPS has it, 8e-8 less than the exact number."
    )
    header = [
        "model",
        *(
            f"`{s}` {q}"
            for s in (".pt2", ".pth")
            for q in ("energy", "force", "pressure")
        ),
    ]
    rows = [
        [
            m["name"],
            *(
                _number(m[file].get(q))
                for file in FILES
                for q in ("energy", "force", "pressure")
            ),
        ]
        for m in found
    ]
    return [text, "", common.table(header, rows)]


def _nve(found: list[dict]) -> list[str]:
    text = (
        f"`.pt2`, {NVE_STEPS} steps of {1000 * PS_PER_STEP} fs from 300 K. Such models hold "
        "molecules together for a short time only and heat up. The drift is the slope of a line "
        "through the total energies, the spread their standard deviation from it."
    )
    header = [
        "model",
        "drift, meV/atom/ps",
        "spread, meV/atom",
        "temperature at the end, K",
    ]
    rows = [
        [
            m["name"],
            f"{m[FILES[0]]['drift']:+.4f}",
            f"{m[FILES[0]]['spread']:.4f}",
            f"{m[FILES[0]]['temperature']:.0f}",
        ]
        for m in found
    ]
    return [text, "", common.table(header, rows)]


def _ranks(found: list[dict]) -> list[str]:
    text = (
        "Largest relative difference of the forces of the first step on two ranks from those on "
        f"one, of the total energy after {SHORT_STEPS} steps, and of the forces without "
        "`atom_modify map yes` on one rank. Letters: messages of LAMMPS below."
    )
    messages: list[str] = []

    def cell(results: dict, run: str, number: str) -> str:
        if not results[run]:
            return _number(results.get(number))
        if results[run] not in messages:
            messages.append(results[run])
        return "refused (" + "abcdef"[messages.index(results[run])] + ")"

    header = [
        "model",
        *(
            f"`{s}` {q}"
            for s in (".pt2", ".pth")
            for q in ("two ranks", "after steps", "no map")
        ),
    ]
    columns = (("two", "force_two"), ("two", "energy_two"), ("no_map", "force_no_map"))
    rows = [
        [m["name"], *(cell(m[file], *names) for file in FILES for names in columns)]
        for m in found
    ]
    said = [f'- ({"abcdef"[k]}) "{message}"' for k, message in enumerate(messages)]
    return [text, "", common.table(header, rows), "", *said]


def _time(found: list[dict]) -> list[str]:
    text = (
        f"Median of {TURNS} runs of {TIMED_STEPS} steps after {WARM_STEPS}, both files in turns, "
        "one rank. CPU time of the process; the machine was shared with other work, so that wall "
        "times say little."
    )
    header = [
        "model",
        "`.pt2`, ms/step",
        "`.pth`, ms/step",
        "`.pt2`, steps/s",
        "times as fast (range)",
    ]
    rows = []
    for m in found:
        one, two = (m[file]["cpu_ms"] for file in FILES)
        fast, slow = statistics.median(one), statistics.median(two)
        rows.append(
            [
                m["name"],
                f"{fast:.1f}",
                f"{slow:.1f}",
                f"{1000 / fast:.0f}",
                common.format_ratio(two, one),
            ]
        )
    return [text, "", common.table(header, rows)]


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "_")


if __name__ == "__main__":
    main()
