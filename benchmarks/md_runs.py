"""Molecular dynamics of water in ASE in processes that take blocks of steps in turn."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np

OURS, PEER = "deepmd_ema.calculator", "deepmd.calculator"
# what each process runs: it answers every line of its input with the times and the total energies of a block
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


@dataclass(frozen=True)
class Block:
    """Steps that a run has gone: processor and wall seconds of one step, and the total energies in eV."""

    cpu: float
    wall: float
    energies: list[float]


class MdRun:
    """A process with a calculator; it stands still between two blocks.

    Args:
        module: whose class ``DP`` is the calculator.
        file: its model.
        python: that has the module.
        log: where it writes what libraries print.
        threads: of torch.
        device: ``cpu`` or ``cuda``.
        options: more arguments of the calculator.
        again: whether each block starts from the first frame: models that are hardly trained heat up.
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
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True, env=env
            )
        self._log = log
        atoms = water()
        self._write({
            "symbols": atoms.get_chemical_symbols(), "coord": atoms.get_positions().tolist(),
            "cell": np.array(atoms.cell).tolist(), "velocity": atoms.get_velocities().tolist(),
            "threads": threads, "file": str(file), "options": options or {},
            "again": again,
        })  # fmt: skip

    def block(self, steps: int) -> Block:
        """Go ``steps`` steps.

        Raises:
            SystemExit: if the process has ended.
        """
        self._write(steps)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a calculator ended with an error:\n{self._log.read_text()[-2000:]}")
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
    atoms = Atoms(["OH"[kind] for kind in kinds], coord, cell=cell, pbc=True).repeat((2, 1, 1))
    speed = np.sqrt(300 * units.kB / atoms.get_masses())[:, None]
    atoms.set_velocities(speed * np.random.default_rng(0).normal(size=(len(atoms), 3)))
    return atoms
