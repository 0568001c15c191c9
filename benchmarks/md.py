"""Energy drift and steps per second of an NVE run of water in ASE: compiled and plain files, here
and in DeePMD-kit.

usage: python benchmarks/md.py MODEL [--peer DIR] [--pt2 FILE] [--steps N] [--block N] [--threads N]
                               [--output PAGE]

MODEL, a checkpoint of the water example, is frozen to a ``.dp`` and a ``.pt2`` file. 192 atoms
start from a frame of the example with velocities of 300 K and go N steps of 0.5 fs, in every
calculator from the same state: ``deepmd_ema`` with both files, and, given DeePMD-kit's environment
DIR, its own calculator with the same ``.pt2`` and with the ``.pth`` that ``dp convert-backend``
makes of the ``.dp``. Each runs in a process of its own and in blocks that take turns, so that the
load of the machine is the same for all; CPU time of a block is counted. The drift is the slope of a
line through the total energies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np

FS_PER_STEP = 0.5
OURS, PEER = "deepmd_ema.calculator", "deepmd.calculator"
# what each process runs: it answers every line of its input with the times and the total energies
# of a block
CHILD = """
import json, sys, time
import numpy as np
job = json.loads(sys.stdin.readline())
answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
import torch
torch.set_num_threads(job["threads"])
from ase import Atoms, units
from ase.md.verlet import VelocityVerlet
from {module} import DP
atoms = Atoms(job["symbols"], job["coord"], cell=job["cell"], pbc=True)
atoms.set_velocities(np.array(job["velocity"]))
atoms.calc = DP(job["file"], **job["options"])
run = VelocityVerlet(atoms, 0.5 * units.fs)
atoms.get_forces()
for line in sys.stdin:
    if job["again"]:
        atoms.set_positions(job["coord"])
        atoms.set_velocities(np.array(job["velocity"]))
        atoms.get_forces()
    start, wall, energies = time.process_time(), time.perf_counter(), []
    for _ in range(int(line)):
        run.run(1)
        energies.append(atoms.get_total_energy())
    spent = time.process_time() - start, time.perf_counter() - wall
    print(json.dumps([*spent, energies]), file=answers, flush=True)
"""


def main() -> None:
    """Freeze, run and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint of water")
    parser.add_argument("--peer", metavar="DIR", help="DeePMD-kit's environment")
    parser.add_argument("--pt2", type=Path, help="a .pt2 of the model, made before")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    parser.add_argument("--block", type=int, default=20, help="steps of a block")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    runs = _start(args)
    times: dict[str, list[float]] = {name: [] for name in runs}
    energies: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.steps // args.block):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            block = runs[name].block(args.block)
            times[name].append(block.cpu)
            energies[name] += block.energies
    for run in runs.values():
        run.end()
    rows = [_row(name, times, energies) for name in runs]
    header = [
        "calculator",
        "ms/step, median (fastest)",
        "steps/s",
        "speed",
        "drift, meV/atom/ps",
        "spread, meV/atom",
        "energy after the run, difference in eV",
    ]
    import torch

    lines = [
        f"# NVE of water with frozen models, {common.today()}",
        "",
        f"`python benchmarks/md.py MODEL{' --peer DIR' * bool(args.peer)} --steps {args.steps}`",
        "",
        f"192 atoms, 300 K at the start, {args.steps} steps of {FS_PER_STEP} fs in blocks of "
        f"{args.block} that take turns, {args.threads} thread(s), CPU time. Model: "
        f"{_summary(args.model)}.",
        f"Speed: of the median to that of the first row. torch {torch.__version__}.",
        "",
    ]
    common.publish("\n".join([*lines, common.table(header, rows)]), args.output)


def _start(args) -> dict[str, MdRun]:
    """Return the runs by the names of their calculators, after their first step."""
    sys.path.insert(0, str(common.ROOT))
    from deepmd_ema.commands.freeze import freeze
    from deepmd_ema.infer.load import load_model

    common.RUNS.mkdir(exist_ok=True)
    plain = freeze(load_model(args.model), common.RUNS / "nve.dp").path
    compiled = (
        args.pt2
        or freeze(load_model(args.model), common.RUNS / "nve.pt2", device="cpu").path
    )
    jobs = {
        "dp-ema, .dp": (OURS, plain, sys.executable),
        "dp-ema, .pt2": (OURS, compiled, sys.executable),
    }
    if args.peer is not None:
        folder = Path(args.peer).resolve() / "bin"
        other = plain.with_suffix(".pth")
        subprocess.run(
            [folder / "dp", "convert-backend", plain, other],
            check=True,
            capture_output=True,
        )
        jobs["DeePMD-kit, .pth"] = (PEER, other, str(folder / "python"))
        jobs["DeePMD-kit, the same .pt2"] = (PEER, compiled, str(folder / "python"))
    runs = {}
    for name, job in jobs.items():
        runs[name] = MdRun(*job, common.RUNS / f"{len(runs)}.log", args.threads, "cpu")
        runs[name].block(1)  # the first steps are slower
    return runs


def _row(
    name: str, times: dict[str, list[float]], energies: dict[str, list[float]]
) -> list[str]:
    mine, reference = np.array(energies[name]), next(iter(energies.values()))
    ps = np.arange(len(mine)) * FS_PER_STEP / 1000
    slope = np.polyfit(ps, mine, 1)[0]
    median, first = (
        statistics.median(times[which]) for which in (name, next(iter(times)))
    )
    speed = f"{1e3 * median:.1f} ({1e3 * min(times[name]):.1f})"
    moved = f"{mine[-1] - reference[-1]:.1e}"
    numbers = (
        f"{1 / median:.1f}",
        f"{first / median:.2f}",
        f"{1e3 * slope / 192:+.4f}",
        f"{1e3 * mine.std() / 192:.4f}",
    )
    return [name, speed, *numbers, moved]


def _summary(model: Path) -> str:
    from deepmd_ema.infer.load import load_model

    loaded = load_model(model)
    return f"{loaded.config.descriptor.summary()}, {loaded.info.describe()}"


@dataclass(frozen=True)
class Block:
    """Steps that a run has gone: processor and wall seconds of one step, and the total energies in
    eV.
    """

    cpu: float
    wall: float
    energies: list[float]


class MdRun:
    """A process with a calculator; it waits between two blocks.

    Args:
        module: whose class ``DP`` is the calculator.
        file: its model.
        python: that has the module.
        log: where it writes what libraries print.
        threads: of torch.
        device: ``cpu`` or ``cuda``.
        options: more arguments of the calculator.
        again: whether each block starts from the first frame: models that are hardly trained heat
            up.
    """

    def __init__(
        self,
        module: str,
        file: Path,
        python: str,
        log: Path,
        threads: int,
        device: str,
        options: dict | None = None,
        again: bool = False,
    ) -> None:
        env = common.environment(threads, device)
        if module == PEER:
            env.pop("PYTHONPATH")
        command = [python, "-c", CHILD.replace("{module}", module)]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=env,
            )
        self._log = log
        atoms = water()
        self._write(
            {
                "symbols": atoms.get_chemical_symbols(),
                "coord": atoms.get_positions().tolist(),
                "cell": np.array(atoms.cell).tolist(),
                "velocity": atoms.get_velocities().tolist(),
                "threads": threads,
                "file": str(file),
                "options": options or {},
                "again": again,
            }
        )

    def block(self, steps: int) -> Block:
        """Go ``steps`` steps.

        Raises:
            SystemExit: if the process has ended.
        """
        self._write(steps)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"a calculator ended with an error:\n{self._log.read_text()[-2000:]}"
            )
        cpu, wall, energies = json.loads(answer)
        return Block(cpu / steps, wall / steps, energies)

    def end(self) -> None:
        """Let the process end."""
        self._process.stdin.close()
        self._process.wait()

    def _write(self, value: Any) -> None:
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


def water():
    """Return 192 atoms, a frame of the example beside itself, with velocities of 300 K."""
    from ase import Atoms, units

    folder = common.EXAMPLE / "data" / "validation"
    kinds = np.loadtxt(folder / "type.raw", dtype=int)
    coord = np.load(folder / "set.000" / "coord.npy")[0].reshape(-1, 3).astype(float)
    cell = np.load(folder / "set.000" / "box.npy")[0].reshape(3, 3).astype(float)
    atoms = Atoms(["OH"[kind] for kind in kinds], coord, cell=cell, pbc=True).repeat(
        (2, 1, 1)
    )
    speed = np.sqrt(300 * units.kB / atoms.get_masses())[:, None]
    atoms.set_velocities(speed * np.random.default_rng(0).normal(size=(len(atoms), 3)))
    return atoms


if __name__ == "__main__":
    main()
