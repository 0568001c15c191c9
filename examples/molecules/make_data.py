"""Make the data of this example: eight small molecules in vacuum, sampled and labelled with
GFN2-xTB.

Every trajectory is one job with a seed of its own; tblite drives the dynamics and gives the labels.
The result is kept in the work folder, so an interrupted run goes on where it stopped. Training and
validation frames never share a trajectory. Molecules of different size share a `deepmd/npy/mixed`
system: the smaller ones end in virtual atoms.

    pip install dp-ema[examples]
    python make_data.py --output data --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
    from ase import Atoms

TYPE_MAP = ("C", "H", "N", "O")
VIRTUAL = -1  # type of an atom that only fills a frame up to the length of its system
# system -> its molecules, by their names in ase.build.molecule; a system is as long as its largest
# molecule
SYSTEMS = {
    "small": ("CH3OH", "H3CNH2", "HCOOH", "CH3COOH"),
    "large": ("CH3CH2OH", "CH3OCH3", "CH3CONH2", "C3H8"),
}

TIME_STEP_FS = 0.5
FRICTION_PER_FS = 0.01
EQUILIBRATION_FS = 500.0
SPACING_FS = 100.0
SCF_ACCURACY = 0.1  # tblite's multiplier of its thresholds


@dataclass(frozen=True)
class Job:
    """One independent trajectory: where its frames go and everything that decides them."""

    subset: str
    system: str
    molecule: str
    temperature: int
    num_frames: int
    seed: int

    @property
    def name(self) -> str:
        """A file name that is unique among the jobs and changes with what decides the frames."""
        return f"{self.subset}_{self.molecule}_{self.temperature}K_n{self.num_frames}_s{self.seed}"


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
                f"[{done}/{len(todo)}] {pending[future].name}: {future.result():.1f} s",
                flush=True,
            )
    write_all(jobs, args.work, args.output)


def parse_args() -> argparse.Namespace:
    """Return the command line; the defaults are those of the data beside this script."""
    parser = argparse.ArgumentParser(
        description="Make the molecule data: GFN2-xTB dynamics and labels."
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
        "--temperatures", type=int, nargs="+", default=[300, 450, 600], help="in kelvin"
    )
    parser.add_argument(
        "--train-frames", type=positive, default=20, help="per molecule and temperature"
    )
    parser.add_argument(
        "--validation-frames",
        type=positive,
        default=5,
        help="per molecule and temperature",
    )
    parser.add_argument(
        "--seed", type=int, default=20, help="seed of the whole data set"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes, one thread each"
    )
    return parser.parse_args()


def positive(text: str) -> int:
    """Return the number of frames, refusing less than one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} frames: expected 1 or more")
    return int(text)


def plan_jobs(args: argparse.Namespace) -> list[Job]:
    """Return one trajectory per subset, molecule and temperature, each with a seed of its own."""
    jobs = []
    subsets = [("train", args.train_frames), ("validation", args.validation_frames)]
    for number, (subset, num_frames) in enumerate(subsets):
        for system, molecules in SYSTEMS.items():
            for molecule in molecules:
                for temperature in args.temperatures:
                    stream = np.random.SeedSequence(
                        [args.seed, number, temperature, *molecule.encode()]
                    )
                    seed = int(stream.generate_state(1)[0] % 2**31)
                    jobs.append(
                        Job(subset, system, molecule, temperature, num_frames, seed)
                    )
    return jobs


def run_job(job: Job, work: Path) -> float:
    """Run one trajectory, store its frames in `work`, and return the seconds it took."""
    from ase import units
    from ase.build import molecule
    from ase.md.langevin import Langevin
    from tblite.ase import TBLite

    start = time.perf_counter()
    rng = np.random.RandomState(job.seed)  # ASE's dynamics takes the legacy generator
    atoms = molecule(job.molecule)
    atoms.calc = TBLite(method="GFN2-xTB", accuracy=SCF_ACCURACY, verbosity=0)
    momentum_widths = np.sqrt(atoms.get_masses() * units.kB * job.temperature)
    atoms.set_momenta(rng.normal(size=(len(atoms), 3)) * momentum_widths[:, None])
    dynamics = Langevin(
        atoms,
        TIME_STEP_FS * units.fs,
        temperature_K=job.temperature,
        friction=FRICTION_PER_FS / units.fs,
        # fixing it is not quite NVT for few atoms; the drift is removed from the frames
        fixcm=False,
        rng=rng,
    )
    dynamics.run(round(EQUILIBRATION_FS / TIME_STEP_FS))
    frames = []
    for _ in range(job.num_frames):
        dynamics.run(round(SPACING_FS / TIME_STEP_FS))
        frames.append(label(atoms))
    arrays = {key: np.array([frame[key] for frame in frames]) for key in frames[0]}
    seconds = time.perf_counter() - start
    part = work / f"{job.name}.part.npz"
    np.savez(part, **arrays)
    os.replace(part, work / f"{job.name}.npz")
    return seconds


def label(atoms: Atoms) -> dict[str, np.ndarray]:
    """Return one frame: types, coord (angstrom, center of mass at 0), energy (eV), force
    (eV/angstrom).

    The labels come from a fresh calculator, so they do not depend on the history of the trajectory.
    """
    from tblite.ase import TBLite

    frame = atoms.copy()
    frame.positions -= frame.get_center_of_mass()
    frame.calc = TBLite(method="GFN2-xTB", accuracy=SCF_ACCURACY, verbosity=0)
    return {
        "real_atom_types": np.array(
            [TYPE_MAP.index(symbol) for symbol in frame.symbols]
        ),
        "coord": frame.positions,
        "energy": np.float64(frame.get_potential_energy()),
        "force": frame.get_forces(),
    }


def write_all(jobs: list[Job], work: Path, output: Path) -> None:
    """Write one mixed system per subset and size, and how they were made."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(f"{job.subset}_{job.system}", []).append(job)
    for name, members in groups.items():
        loaded = [dict(np.load(work / f"{job.name}.npz")) for job in members]
        length = max(arrays["real_atom_types"].shape[1] for arrays in loaded)
        padded = [pad(arrays, length) for arrays in loaded]
        write_system(
            output / name,
            {key: np.concatenate([a[key] for a in padded]) for key in padded[0]},
            length,
        )
        print(
            f"{output / name}: {sum(job.num_frames for job in members)} frames of {length} atoms"
        )
    made_by = {
        "versions": {
            package: version(package) for package in ("ase", "numpy", "tblite")
        },
        "trajectories": {
            name: [job.name for job in members] for name, members in groups.items()
        },
    }
    (output / "made_by.json").write_text(json.dumps(made_by, indent=1) + "\n")


def pad(arrays: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Return the frames with `length` atoms each: virtual atoms at the end, at the origin, without
    force.
    """
    num_frames, num_atoms = arrays["real_atom_types"].shape
    missing = length - num_atoms
    return {
        "real_atom_types": np.pad(
            arrays["real_atom_types"], ((0, 0), (0, missing)), constant_values=VIRTUAL
        ),
        "coord": np.pad(arrays["coord"], ((0, 0), (0, missing), (0, 0))).reshape(
            num_frames, -1
        ),
        "energy": arrays["energy"],
        "force": np.pad(arrays["force"], ((0, 0), (0, missing), (0, 0))).reshape(
            num_frames, -1
        ),
    }


def write_system(folder: Path, arrays: dict[str, np.ndarray], length: int) -> None:
    """Write a `deepmd/npy/mixed` system of one set with open boundaries; floats in float64."""
    shutil.rmtree(folder / "set.000", ignore_errors=True)
    (folder / "set.000").mkdir(parents=True)
    (folder / "nopbc").touch()
    (folder / "type.raw").write_text(
        "0\n" * length
    )  # only its length counts in a mixed system
    (folder / "type_map.raw").write_text("\n".join(TYPE_MAP) + "\n")
    for key, values in arrays.items():
        dtype = np.int32 if key == "real_atom_types" else np.float64
        np.save(folder / "set.000" / f"{key}.npy", values.astype(dtype))


if __name__ == "__main__":
    main()
