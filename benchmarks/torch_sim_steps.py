"""NVE steps per second of 1, 8 and 64 systems: together in torch-sim, and one after the other in ASE.

usage: python benchmarks/torch_sim_steps.py MODEL [--system DIR] [--steps N] [--rounds N] [--output PAGE]

The systems are frames of a labelled system (default: water of the example) with velocities of 300 K; a step is 0.5 fs.
In ASE each has a calculator of its own, which shares the potential. Both take turns; the time of a round is CPU time of
the process, with one thread, after the first steps, in which neighbors are searched. Energies of both after the last
step are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import common
import numpy as np

SIZES = (1, 8, 64)
STEP_PS, KELVIN = 0.0005, 300.0


def main() -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument(
        "--system", default=str(Path(__file__).parents[1] / "examples" / "water" / "data" / "validation")
    )
    parser.add_argument("--steps", type=int, default=20, help="of a round (20)")
    parser.add_argument("--rounds", type=int, default=3, help="of each program, in turns (3)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    from deepmd_ema import Potential

    potential = Potential(args.model, device="cpu")
    frames = frames_of(args.system, max(SIZES))
    rows = [
        f"# {len(frames[0])} atoms per system",
        "",
        "| systems | torch-sim, ms/step of all | ASE, ms/step of all | ASE / torch-sim | largest difference, eV |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in SIZES:
        runs = {"torch-sim": in_torch_sim(potential, frames[:size]), "ASE": in_ase(potential, frames[:size])}
        times = {name: [] for name in runs}
        for run in runs.values():
            run(2)
        for _ in range(args.rounds):
            for name, run in runs.items():
                start = time.process_time()
                run(args.steps)
                times[name].append(1e3 * (time.process_time() - start) / args.steps)
        difference = np.abs(runs["torch-sim"](0) - runs["ASE"](0)).max()
        rows.append(
            f"| {size} | {statistics.median(times['torch-sim']):.2f} | {statistics.median(times['ASE']):.2f} | "
            f"{common.format_ratio(times['ASE'], times['torch-sim'])} | {difference:.1e} |"
        )
    common.publish("\n".join([*rows, "", common.machine(common.programs(None), 1, "cpu")]) + "\n", args.output)


def frames_of(system: str, count: int) -> list:
    """Return frames as ASE's atoms with velocities, again from the first where there are too few."""
    import ase
    from ase import units

    folder = Path(system)
    types = np.loadtxt(folder / "type.raw", dtype=int)
    names = (folder / "type_map.raw").read_text().split()
    sets = sorted(folder.glob("set.*"))
    coords = np.concatenate([np.load(path / "coord.npy") for path in sets]).reshape(-1, len(types), 3)
    is_open = (folder / "nopbc").exists()
    boxes = None if is_open else np.concatenate([np.load(path / "box.npy") for path in sets]).reshape(-1, 3, 3)
    rng, found = np.random.default_rng(0), []
    for k in range(count):
        frame = k % len(coords)
        atoms = ase.Atoms(
            [names[t] for t in types], coords[frame], cell=None if is_open else boxes[frame], pbc=not is_open
        )
        if is_open:
            atoms.center(vacuum=8.0)
            atoms.pbc = False
        scale = np.sqrt(KELVIN * units.kB / atoms.get_masses())[:, None]
        atoms.set_velocities(rng.normal(size=atoms.positions.shape) * scale)
        found.append(atoms)
    return found


def in_torch_sim(potential, frames):
    """Return a function that takes a number of steps of all frames together and returns their potential energies."""
    import torch
    import torch_sim as ts
    from ase import units

    from deepmd_ema.torch_sim import DPModel

    model = DPModel(potential)
    dt = torch.tensor(STEP_PS * ts.units.MetalUnits.time, dtype=torch.float64)
    start, move = ts.nve(model=model, dt=dt, kT=torch.tensor(KELVIN * units.kB, dtype=torch.float64))
    state = start(ts.io.atoms_to_state(frames, model.device, model.dtype))
    # the same velocities as in ASE, in eV, u and angstrom as both programs have them
    state.momenta = torch.as_tensor(np.concatenate([atoms.get_momenta() for atoms in frames]))
    box = [state]

    def run(steps):
        for _ in range(steps):
            box[0] = move(box[0])
        return box[0].energy.numpy()

    return run


def in_ase(potential, frames):
    """Return the same function for frames that are moved one after the other in ASE."""
    from ase import units
    from ase.md.verlet import VelocityVerlet

    from deepmd_ema.calculator import DP

    copies = [atoms.copy() for atoms in frames]
    for atoms in copies:
        atoms.calc = DP(potential)
    runs = [VelocityVerlet(atoms, STEP_PS * 1e3 * units.fs) for atoms in copies]

    def run(steps):
        for one in runs if steps else ():
            one.run(steps)
        return np.array([atoms.get_potential_energy() for atoms in copies])

    return run


if __name__ == "__main__":
    main()
