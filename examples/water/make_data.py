"""Make the data of this example: liquid water sampled with a classical model, labelled with
GFN1-xTB.

Every trajectory is one job: its own seed, its own start and its own box. OpenMM samples it, tblite
labels it, and the result is kept in the work folder, so an interrupted run goes on where it
stopped. Training and validation frames never share a trajectory.

    pip install dp-ema[examples]
    python make_data.py --output data --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

# one thread per process: --workers is the only parallelism, and the sums inside the labels keep
# their order
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

if TYPE_CHECKING:
    import openmm

TYPE_MAP = ("O", "H")
NUM_MOLECULES = 32
MOLAR_MASS = 18.015  # g/mol
AVOGADRO = 0.602214076  # molecules/mol times 1e-24 cm3/angstrom3
DENSITY_RANGE = (
    0.94,
    1.06,
)  # g/cm3, drawn once per trajectory so that the virials span both signs of pressure

# SPC/Fw (Wu, Tepper, Voth 2006) for charges and Lennard-Jones; its bonds are 0.055 angstrom too
# long for GFN1-xTB. The bond and angle below are those for which the liquid has the mean O-H length
# (0.974 angstrom) and H-O-H angle (105 degrees) of GFN1-xTB relaxed liquid; the force constants are
# the second derivatives of the GFN1-xTB monomer.
CHARGE_H = 0.41  # e
SIGMA_O = 0.3165492  # nm
EPSILON_O = 0.6501696  # kJ/mol
BOND_LENGTH = 0.0957  # nm
BOND_STIFFNESS = 469885.0  # kJ/mol/nm2
BOND_ANGLE = 109.4  # degrees
ANGLE_STIFFNESS = 319.4  # kJ/mol/rad2
CUTOFF = 0.47  # nm, less than half of the smallest box

TIME_STEP_PS = 0.0005
FRICTION_PER_PS = 2.0
EQUILIBRATION_PS = 10.0
SPACING_PS = 2.0
# tblite's multiplier of its thresholds; the default 1.0 changes a virial by 1e-5 of its value
SCF_ACCURACY = 0.1


@dataclass(frozen=True)
class Job:
    """One independent trajectory: where its frames go and everything that decides them."""

    subset: str
    temperature: int
    index: int
    num_frames: int
    seed: int

    @property
    def name(self) -> str:
        """A file name that is unique among the jobs and changes with what decides the frames."""
        return f"{self.subset}_{self.temperature}K_{self.index}_n{self.num_frames}_s{self.seed}"


def main() -> None:
    """Make all trajectories that are not in the work folder yet, then write the systems."""
    args = parse_args()
    jobs = plan_jobs(args)
    args.work.mkdir(parents=True, exist_ok=True)
    todo = [job for job in jobs if not (args.work / f"{job.name}.npz").exists()]
    total = sum(job.num_frames for job in jobs)
    print(
        f"{len(jobs)} trajectories, {total} frames; {len(todo)} trajectories to make",
        flush=True,
    )
    with ProcessPoolExecutor(args.workers) as pool:
        pending = {pool.offer(run_job, job, args.work): job for job in todo}
        for done, future in enumerate(as_completed(pending), start=1):
            print(
                f"[{done}/{len(todo)}] {pending[future].name}: {future.result():.2f} s per label",
                flush=True,
            )
    write_all(jobs, args.work, args.output)


def parse_args() -> argparse.Namespace:
    """Return the command line; the defaults are those of the data beside this script."""
    parser = argparse.ArgumentParser(
        description="Make the water data: classical sampling, GFN1-xTB labels."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("data"), help="folder for the systems"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("work"),
        help="folder for finished trajectories",
    )
    parser.add_argument(
        "--temperatures",
        type=int,
        nargs="+",
        default=[300, 350, 400, 450, 500],
        help="in kelvin",
    )
    parser.add_argument(
        "--train-trajectories", type=int, default=6, help="per temperature"
    )
    parser.add_argument(
        "--train-frames", type=int, default=12, help="per training trajectory"
    )
    parser.add_argument(
        "--validation-trajectories", type=int, default=2, help="per temperature"
    )
    parser.add_argument(
        "--validation-frames", type=int, default=6, help="per validation trajectory"
    )
    parser.add_argument(
        "--seed", type=int, default=20, help="seed of the whole data set"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes, one thread each"
    )
    return parser.parse_args()


def plan_jobs(args: argparse.Namespace) -> list[Job]:
    """Return the trajectories of both subsets, each with a seed of its own."""
    jobs = []
    for number, (subset, num_trajectories, num_frames) in enumerate(
        [
            ("train", args.train_trajectories, args.train_frames),
            ("validation", args.validation_trajectories, args.validation_frames),
        ]
    ):
        for temperature in args.temperatures:
            for index in range(num_trajectories):
                stream = np.random.SeedSequence([args.seed, number, temperature, index])
                seed = int(stream.generate_state(1)[0] % 2**31)
                jobs.append(Job(subset, temperature, index, num_frames, seed))
    return jobs


def run_job(job: Job, work: Path) -> float:
    """Sample and label one trajectory, store it in `work`, and return the seconds per label."""
    coords, box_length = sample(job)
    start = time.perf_counter()
    frames = [label(coord, box_length) for coord in coords]
    seconds = (time.perf_counter() - start) / len(frames)
    arrays = {key: np.array([frame[key] for frame in frames]) for key in frames[0]}
    part = work / f"{job.name}.part.npz"
    np.savez(part, seconds_per_label=seconds, **arrays)
    os.replace(part, work / f"{job.name}.npz")
    return seconds


def sample(job: Job) -> tuple[np.ndarray, float]:
    """Return frames `SPACING_PS` apart, (frames, atoms, 3), angstrom, and the length of their cubic
    box, angstrom.
    """
    import openmm
    from openmm import unit

    rng = np.random.default_rng(job.seed)
    density = rng.uniform(*DENSITY_RANGE)
    box_length = float((NUM_MOLECULES * MOLAR_MASS / (AVOGADRO * density)) ** (1 / 3))
    integrator = openmm.LangevinMiddleIntegrator(
        job.temperature, FRICTION_PER_PS, TIME_STEP_PS
    )
    integrator.setRandomNumberSeed(
        job.seed % 2**30 + 1
    )  # 0 would ask OpenMM for a seed from the clock
    # Reference is deterministic, and for 96 atoms twice as fast as the CPU platform on one thread
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(flexible_water(box_length / 10), integrator, platform)
    context.setPositions(random_start(rng, box_length) / 10)
    openmm.LocalEnergyMinimizer.minimize(context, 10.0, 500)
    context.setVelocitiesToTemperature(job.temperature, job.seed % 2**30 + 1)
    integrator.step(round(EQUILIBRATION_PS / TIME_STEP_PS))
    frames = []
    for _ in range(job.num_frames):
        integrator.step(round(SPACING_PS / TIME_STEP_PS))
        positions = context.getState(getPositions=True).getPositions(asNumpy=True)
        frames.append(
            wrap_molecules(
                np.asarray(positions.value_in_unit(unit.angstrom)), box_length
            )
        )
    return np.array(frames), box_length


def flexible_water(box_length: float) -> openmm.System:
    """Return the OpenMM system of `NUM_MOLECULES` flexible water molecules in a cubic box, length
    in nm.
    """
    import openmm

    system = openmm.System()
    system.setDefaultPeriodicBoxVectors(*(np.eye(3) * box_length))
    nonbonded, bonds, angles = (
        openmm.NonbondedForce(),
        openmm.HarmonicBondForce(),
        openmm.HarmonicAngleForce(),
    )
    nonbonded.setNonbondedMethod(
        openmm.NonbondedForce.CutoffPeriodic
    )  # with reaction field
    nonbonded.setCutoffDistance(CUTOFF)
    for oxygen in range(0, 3 * NUM_MOLECULES, 3):
        first, second = oxygen + 1, oxygen + 2
        system.addParticle(15.999)
        nonbonded.addParticle(-2 * CHARGE_H, SIGMA_O, EPSILON_O)
        for hydrogen in (first, second):
            system.addParticle(1.008)
            nonbonded.addParticle(CHARGE_H, 0.1, 0.0)
            bonds.addBond(oxygen, hydrogen, BOND_LENGTH, BOND_STIFFNESS)
        angles.addAngle(first, oxygen, second, np.radians(BOND_ANGLE), ANGLE_STIFFNESS)
        for pair in ((oxygen, first), (oxygen, second), (first, second)):
            nonbonded.addException(*pair, 0.0, 1.0, 0.0)
    for force in (nonbonded, bonds, angles):
        system.addForce(force)
    return system


def random_start(rng: np.random.Generator, box_length: float) -> np.ndarray:
    """Return randomly turned molecules on randomly chosen sites of a grid, (atoms, 3), angstrom."""
    from ase.build import molecule

    side = int(np.ceil(NUM_MOLECULES ** (1 / 3)))
    sites = rng.permutation(side**3)[:NUM_MOLECULES]
    centers = (
        (np.stack(np.unravel_index(sites, (side,) * 3), axis=1) + 0.5)
        * box_length
        / side
    )
    positions = []
    for center in centers:
        water = molecule("H2O")
        water.rotate(rng.uniform(0, 360), rng.normal(size=3))
        positions.append(water.positions + center)
    return np.concatenate(positions)


def wrap_molecules(coord: np.ndarray, box_length: float) -> np.ndarray:
    """Return the coordinates, (atoms, 3), with every oxygen inside the box and its hydrogens beside
    it, angstrom.
    """
    molecules = coord.reshape(-1, 3, 3)
    return (molecules - box_length * np.floor(molecules[:, :1] / box_length)).reshape(
        -1, 3
    )


def label(coord: np.ndarray, box_length: float) -> dict[str, np.ndarray]:
    """Return one frame in DeePMD arrays: coord, box (angstrom), energy (eV), force (eV/angstrom),
    virial (eV).

    virial_ab = -dE/dstrain_ab = -volume * stress_ab   (stress: ASE's sign, positive under tension)
    """
    from ase import Atoms
    from tblite.ase import TBLite

    atoms = Atoms(
        "OH2" * NUM_MOLECULES, positions=coord, cell=[box_length] * 3, pbc=True
    )
    atoms.calc = TBLite(method="GFN1-xTB", accuracy=SCF_ACCURACY, verbosity=0)
    return {
        "coord": coord.reshape(-1),
        "box": atoms.cell.array.reshape(-1),
        "energy": np.float64(atoms.get_potential_energy()),
        "force": atoms.get_forces().reshape(-1),
        "virial": -atoms.get_volume() * atoms.get_stress(voigt=False).reshape(-1),
    }


def write_all(jobs: list[Job], work: Path, output: Path) -> None:
    """Write one training system per temperature, one validation system for all, and how they were
    made.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(
            "validation" if job.subset == "validation" else f"train_{job.temperature}K",
            [],
        ).append(job)
    seconds = []
    for name, members in groups.items():
        loaded = [dict(np.load(work / f"{job.name}.npz")) for job in members]
        seconds += [float(arrays.pop("seconds_per_label")) for arrays in loaded]
        write_system(
            output / name,
            {key: np.concatenate([a[key] for a in loaded]) for key in loaded[0]},
        )
        print(f"{output / name}: {sum(job.num_frames for job in members)} frames")
    made_by = {
        "versions": {
            package: version(package)
            for package in ("ase", "numpy", "openmm", "tblite")
        },
        "seconds_per_label": round(float(np.mean(seconds)), 3),
        "trajectories": {
            name: [job.name for job in members] for name, members in groups.items()
        },
    }
    (output / "made_by.json").write_text(json.dumps(made_by, indent=1) + "\n")


def write_system(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a `deepmd/npy` system of one set, all arrays in float64."""
    (folder / "set.000").mkdir(parents=True, exist_ok=True)
    types = [TYPE_MAP.index(symbol) for symbol in ("O", "H", "H") * NUM_MOLECULES]
    (folder / "type.raw").write_text("\n".join(map(str, types)) + "\n")
    (folder / "type_map.raw").write_text("\n".join(TYPE_MAP) + "\n")
    for key, values in arrays.items():
        np.save(folder / "set.000" / f"{key}.npy", values.astype(np.float64))


if __name__ == "__main__":
    main()
