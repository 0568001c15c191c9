"""From an extended XYZ file to molecular dynamics in ASE, command by command, beside the example input of DeePMD-kit.

usage: python benchmarks/afternoon.py --train FILE --test FILE --work DIR [--hours 0.1] [--peer DIR] [--output PAGE]

The commands are those of doc/getting_started.md: init, check, train, report, freeze, test, and dynamics with the frozen
file. With --peer, DeePMD-kit trains its examples/water/se_e2_a (given by --peer-input) with the elements and frames of
the file and ``sel: auto``, with as many steps, over which its learning rate decays, as fit into the time of ``train``.
Threads are those that each program takes by itself. Errors are those on --test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from common import Program, Watched, machine, programs, publish, read_errors, table, today, train, write_input

PROBE = 50, 200  # steps of a short run of the peer
MD = """
import sys, time
from ase import units
from ase.io import read
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
import numpy as np
from deepmd_ema.calculator import DP
frames, model, steps = read(sys.argv[1], ":"), sys.argv[2], int(sys.argv[3])
atoms = frames[0]
atoms.calc = DP(model)
rng = np.random.default_rng(1)
MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=rng)
Stationary(atoms)
Langevin(atoms, 0.5 * units.fs, temperature_K=300, friction=0.01 / units.fs, rng=rng).run(steps // 5)
began, energies, dynamics = time.perf_counter(), [], VelocityVerlet(atoms, 0.5 * units.fs)
dynamics.attach(lambda: energies.append(atoms.get_total_energy()), interval=10)
dynamics.run(steps)
took = time.perf_counter() - began
drift = np.polyfit(np.arange(len(energies)) * 5e-3, energies, 1)[0] / len(atoms)
distances = [found[np.triu_indices(len(found), 1)] for found in (f.get_all_distances() for f in [*frames, atoms])]
print(f"{steps / took:.0f} steps/s, drift {1e3 * drift:.3g} meV/atom/ps, temperature {atoms.get_temperature():.0f} K, "
      f"shortest distance {distances[-1].min():.2f} (in the data {min(d.min() for d in distances[:-1]):.2f}) angstrom")
"""


def main() -> None:
    """Run the commands and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="extended XYZ file with training frames")
    parser.add_argument("--test", type=Path, required=True, help="extended XYZ file with other frames")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--hours", type=float, default=0.1, help="time of training (0.1)")
    parser.add_argument("--md-steps", type=int, default=20000, help="steps of 0.5 fs (20000)")
    parser.add_argument("--peer", metavar="DIR", help="virtual environment of DeePMD-kit; without it only we run")
    parser.add_argument("--peer-input", type=Path, help="examples/water/se_e2_a/input_torch.json of DeePMD-kit")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    data, test = (str(shutil.copy(file, work)) for file in (args.train, args.test))
    found = programs(args.peer)
    ours = found["ours"]
    dp_ema = list(ours.command)
    took: dict[str, float] = {}
    printed: dict[str, str] = {}
    commands = {
        "init": [*dp_ema, "init", data, "--hours", f"{args.hours:g}"],
        "check": [*dp_ema, "check", "input.yaml", "--time"],
        "train": [*dp_ema, "train", "input.yaml"],
        "report": [*dp_ema, "report"],
        "freeze": [*dp_ema, "freeze", "--use-ema", "-o", "model.pt2"],
        "test": [*dp_ema, "test", "-m", "model.pt2", "-s", test],
        "dynamics": [sys.executable, "-c", MD, data, "model.pt2", str(args.md_steps)],
    }
    for name, command in commands.items():
        began = time.perf_counter()
        printed[name] = _call(work, command)
        took[name] = time.perf_counter() - began
        print(f"{name}: {took[name]:.0f} s", flush=True)
    live = _call(work, [*dp_ema, "test", "-m", "model.ckpt.pt", "-s", test])
    errors = {"dp-ema, averaged": printed["test"], "dp-ema, live": live}
    lines = [["`" + " ".join(["dp-ema", *command[3:]]).replace(f"{work}/", "") + "`", f"{took[name]:.0f} s"]
             for name, command in commands.items() if name != "dynamics"]  # fmt: skip
    lines.append(
        [
            f"dynamics, {args.md_steps:,} steps of 0.5 fs after {args.md_steps // 5:,} of Langevin",
            f"{took['dynamics']:.0f} s",
        ]
    )
    notes = [
        f"`check --time` announced: {_line(printed['check'], 'Time: ')}",
        f"Dynamics: {printed['dynamics'].strip()}.",
    ]
    if args.peer:
        steps, seconds = _train_peer(work, data, args, found["peer"], ours, took["train"])
        notes.append(f"DeePMD-kit: {steps:,} steps in {seconds:.0f} s.")
        errors["DeePMD-kit, its example input"] = _call(work, [*dp_ema, "test", "-m", "peer/model.ckpt.pt", "-s", test])
    rows = [[name, *(f"{1000 * value:.3g}" for value in read_errors(text).values())] for name, text in errors.items()]
    page = [
        f"# From {args.train.name} to molecular dynamics, {today()}",
        f"Command: `python benchmarks/afternoon.py --hours {args.hours:g}`. Machine: "
        f"{machine(found, os.cpu_count(), 'cpu')}.",
        "```\n" + printed["init"].strip() + "\n```",
        table(["command", "wall time"], lines),
        "\n\n".join(notes),
        f"RMSE on {args.test.name}:",
        table(["weights", "energy, meV/atom", "force, meV/angstrom"], rows),
    ]
    publish("\n\n".join(page), args.output)


def _call(folder: Path, command: list[str]) -> str:
    """Return the output of a command; a failure ends the benchmark and shows it."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}\n{done.stdout}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def _line(text: str, start: str) -> str:
    return next(line.removeprefix(start) for line in text.splitlines() if line.startswith(start))


def _train_peer(
    work: Path, data: str, args: argparse.Namespace, peer: Program, ours: Program, seconds: float
) -> tuple[int, float]:
    """Train the example of DeePMD-kit for a time; return its steps and seconds."""
    values = yaml.safe_load((work / "input.yaml").read_text())
    _call(work, [*ours.command, "convert", data, "folders", "--validation", "0.1"])
    config: dict[str, Any] = json.loads(args.peer_input.read_text())
    config["model"]["type_map"] = values["model"]["type_map"]
    config["model"]["descriptor"]["sel"] = "auto"
    config["training"]["training_data"]["systems"] = [str(work / "folders/train")]
    config["training"]["validation_data"]["systems"] = [str(work / "folders/validation")]
    del config["training"]["stat_file"]
    probe = _run_peer(work, config, peer, PROBE[1], PROBE[0])
    step = (probe.rows[PROBE[1]] - probe.rows[PROBE[0]]) / (PROBE[1] - PROBE[0])
    steps = int((seconds - (probe.rows[PROBE[0]] - probe.start)) / step) + PROBE[0]
    run = _run_peer(work, config, peer, steps, max(1, steps // 10))
    return steps, run.end - run.start


def _run_peer(work: Path, config: dict[str, Any], peer: Program, steps: int, often: int) -> Watched:
    training = config["training"] | {"numb_steps": steps, "disp_freq": often, "save_freq": steps}
    write_input(work / "peer", config | {"training": training})
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    return train(peer, work / "peer", env)


if __name__ == "__main__":
    main()
