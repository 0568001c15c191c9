"""Choices of ``dp-ema init`` for sets of different kinds, and errors beside those of the input of
before.

usage: python benchmarks/init_recipes.py --sources DIR --work DIR [--seconds 180] [--sets NAME ...]
                                         [--beside OPTIMIZER] [--output PAGE]

--sources holds the clones that init_sets.py names. The old input is the hand-written one of before:
Adam with an exponential decay, in float64. With --beside it is that of init with another optimizer
and rate: SOAP, or AdamWScheduleFree at a constant rate. Both train the same frames, with the same
validation frames and seed, for the same time: as many steps as fit into --seconds of the processor
by a short run of both. The two runs are made at the same time, so that they see the same load of
the machine. On a core that does nothing else --seconds 180 are --hours 0.05 of init. What is in
--work is not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import environment, machine, note_rows, programs, publish, read_errors, table, today
from init_sets import SETS

INIT, OLD, SOAP, FREE = "init", "old default", "SOAP", "AdamWScheduleFree"
OPTIMIZERS: dict[str, dict[str, Any]] = {SOAP: {}, FREE: {"adam_beta1": 0.98, "r": 4}}
LIVE, AVERAGED = "live", "averaged"
COMMAND = [sys.executable, "-m", "deepmd_ema"]
PROBE = 10, 40  # steps of a short run between which the time of a step is measured
POLL_S = 0.05  # how closely lcurve.out is watched
VALIDATIONS = 4  # in a run; their time is not counted
UNITS = "meV/atom, meV/angstrom, meV/angstrom^3"


def main() -> None:
    """Train what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sources", type=Path, required=True, help="folder with the clones of init_sets.py"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--seconds", type=float, default=180, help="processor time of each run (180)"
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="which sets (all)"
    )
    parser.add_argument(
        "--beside", choices=(OLD, *OPTIMIZERS), default=OLD, help=f"the other input ({OLD})"
    )
    parser.add_argument(
        "--rate", type=float, default=0.03, help="learning rate of the other optimizer (0.03)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of both runs (1)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (1)")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.sources, args.work = args.sources.resolve(), args.work.resolve()
    for name in args.sets:
        _train_both(args, name)
    publish(_page(args), args.output)


def _train_both(args: argparse.Namespace, name: str) -> None:
    """Propose and train, unless that was done."""
    folders = {recipe: _folder(args, name, recipe) for recipe in (INIT, args.beside)}
    if all((folder / "result.json").exists() for folder in folders.values()):
        return
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    data = SETS[name].write(args.sources, args.work / "data" / name)
    _, short = _propose(folders[INIT], data, PROBE[0], args)
    values = {INIT: short, args.beside: _other(short, args)}
    probes = {
        recipe: _with_steps(one, PROBE[1], often=PROBE[0]) | {"validating": {}}
        for recipe, one in values.items()
    }
    rows = {recipe: run.rows for recipe, run in _train_together(folders, probes, args).items()}
    steps = {
        recipe: int(args.seconds * (PROBE[1] - PROBE[0]) / (cpu[PROBE[1]] - cpu[PROBE[0]]))
        for recipe, cpu in rows.items()
    }
    printed, values[INIT] = _propose(folders[INIT], data, steps[INIT], args)
    if args.beside != OLD:
        values[args.beside] = _other(
            _propose(folders[INIT], data, steps[args.beside], args)[1], args
        )
    values = {recipe: _with_steps(one, steps[recipe]) for recipe, one in values.items()}
    for recipe, run in _train_together(folders, values, args).items():
        average = "schedule_free" if recipe == FREE else "ema"
        errors = {
            LIVE: _errors(folders[recipe], data, "", args),
            AVERAGED: _errors(folders[recipe], data, f"_{average}", args),
        }
        result = {
            "printed": printed,
            "values": values[recipe],
            "wall_s": run.wall,
            "cpu_s": run.cpu,
            "errors": errors,
        }
        (folders[recipe] / "result.json").write_text(json.dumps(result, indent=2))
        print(
            f"{name}, {recipe}: {steps[recipe]} steps, {run.wall:.0f} s, CPU {run.cpu:.0f} s, "
            f"{errors}",
            flush=True,
        )


def _train_together(
    folders: dict[str, Path], values: dict[str, dict[str, Any]], args: argparse.Namespace
) -> dict[str, Run]:
    """Train the inputs at the same time, and return the runs."""
    with ThreadPoolExecutor(len(folders)) as pool:
        runs = pool.map(lambda recipe: _train(folders[recipe], values[recipe], args), folders)
        return dict(zip(folders, runs))


def _propose(
    folder: Path, data: str, steps: int, args: argparse.Namespace
) -> tuple[str, dict[str, Any]]:
    """Return the output of ``init`` and the input."""
    (folder / "input.yaml").unlink(missing_ok=True)
    printed = _call(folder, args, "init", data, "--steps", str(steps))
    values = yaml.safe_load((folder / "input.yaml").read_text())
    values["training"]["seed"] = args.seed
    return printed, values


def _with_steps(values: dict[str, Any], steps: int, often: int | None = None) -> dict[str, Any]:
    """Return an input with a number of steps, of which the validations and checkpoints are evenly
    spaced.
    """
    often = often or max(1, steps // VALIDATIONS)
    training = values["training"] | {"numb_steps": steps, "save_freq": often, "disp_freq": often}
    validating = values.get("validating", {})
    return values | {
        "training": training,
        "validating": validating and validating | {"validation_freq": often},
    }


@dataclass(frozen=True)
class Run:
    """Seconds of a run, seconds of the processor, and those at each row of lcurve.out."""

    wall: float
    cpu: float
    rows: dict[int, float]


def _train(folder: Path, values: dict[str, Any], args: argparse.Namespace) -> Run:
    """Train in a folder."""
    (folder / "input.json").write_text(json.dumps(values, indent=2))
    lcurve, log = folder / "lcurve.out", folder / "train.log"
    lcurve.unlink(missing_ok=True)
    size, rows, began = 0, {}, time.perf_counter()
    with log.open("w") as out:
        words, env = [*COMMAND, "train", "input.json"], environment(args.threads, "cpu")
        process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=out, env=env)
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            seen: dict[int, float] = {}
            size = note_rows(lcurve, size, seen)
            rows |= {step: _processor_seconds(process.pid) for step in seen if step not in rows}
            time.sleep(POLL_S)
    if status:
        raise SystemExit(f"{folder}: {log.read_text()[-3000:]}")
    return Run(time.perf_counter() - began, used.ru_utime + used.ru_stime, rows)


def _processor_seconds(pid: int) -> float:
    """Return the seconds of the processor that a running process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _call(folder: Path, args: argparse.Namespace, *words: str) -> str:
    """Return the output of a command."""
    env = environment(args.threads, "cpu")
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{folder}: {' '.join(words)}\n{done.stderr}")
    return done.stdout + done.stderr


def _folder(args: argparse.Namespace, name: str, recipe: str) -> Path:
    return args.work / name / recipe.replace(" ", "_")


def _old_input(values: dict[str, Any]) -> dict[str, Any]:
    """Return a hand-written input, with the data of a proposed one."""
    loss = {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1}
    if "start_pref_v" in values["loss"]:
        loss |= {"start_pref_v": 0.02, "limit_pref_v": 1}
    descriptor = {
        "type": "se_e2_a",
        "rcut": 6.0,
        "rcut_smth": 0.5,
        "neuron": [25, 50, 100],
        "axis_neuron": 16,
    }
    kept = ("training_data", "validation_fraction", "seed")
    return {
        "model": {
            "type_map": values["model"]["type_map"],
            "descriptor": descriptor | {"type_one_side": True},
            "fitting_net": {"neuron": [120, 120, 120]},
        },
        "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-6},
        "loss": loss,
        "training": {key: values["training"][key] for key in kept if key in values["training"]}
        | {"enable_ema": True},
        "validating": values.get("validating", {}),
    }


def _other(values: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the input beside a proposed one: the old one, or with another optimizer, whose rate
    falls by as much.
    """
    if args.beside == OLD:
        return _old_input(values)
    schedule = values["learning_rate"]
    decay = 1 if args.beside == FREE else schedule["stop_lr"] / schedule["start_lr"]
    own = {"optimizer": {"type": args.beside, "weight_decay": 0, **OPTIMIZERS[args.beside]}}
    return (
        values
        | own
        | {"learning_rate": schedule | {"start_lr": args.rate, "stop_lr": args.rate * decay}}
    )


def _errors(folder: Path, data: str, suffix: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the last RMSE on the validation frames, or those on all frames where there are none,
    in units of meV.
    """
    log = folder / f"val{suffix}.log"
    if log.exists():
        row = [line for line in log.read_text().splitlines() if not line.startswith("#")][
            -1
        ].split()
        found = dict(zip(("energy", "force", "stress"), map(float, row[2::2])))
    else:
        text = _call(folder, args, "test", "-m", f"model{suffix}.ckpt.pt", "-s", data)
        found = {name: 1000 * value for name, value in read_errors(text).items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _page(args: argparse.Namespace) -> str:
    results = {
        (name, recipe): json.loads(file.read_text())
        for name in args.sets
        for recipe in (INIT, args.beside)
        if (file := _folder(args, name, recipe) / "result.json").exists()
    }
    chosen, errors = [], []
    for name in args.sets:
        if (name, INIT) not in results:
            continue
        one = results[name, INIT]
        chosen.append([name, SETS[name].about, *_choices(one)])
        for recipe in (INIT, args.beside):
            if (name, recipe) in results:
                found = results[name, recipe]
                steps = found["values"]["training"]["numb_steps"]
                live, ema = (
                    " / ".join(f"{v:.3g}" for v in found["errors"][w].values())
                    for w in (LIVE, AVERAGED)
                )
                errors.append(
                    [
                        name,
                        recipe,
                        f"{steps:,}",
                        f"{found['wall_s']:.0f}, {found['cpu_s']:.0f}",
                        live,
                        ema,
                    ]
                )
    head = [
        "set",
        "system",
        "kind",
        "model",
        "rate, lr_adjust",
        "prefactors e, f, v",
        "steps",
        "validation frames",
    ]
    return "\n\n".join(
        [
            f"# `dp-ema init` on sets of different kinds, {today()}",
            f"Command: `python benchmarks/init_recipes.py --seconds {args.seconds:g}`. Machine: "
            f"{machine(programs(None), args.threads, 'cpu')}.",
            table(head, chosen),
            f"RMSE on the validation frames at the end, energy / force / stress ({UNITS}):",
            table(["set", "input", "steps", "s: wall, CPU", LIVE, AVERAGED], errors),
        ]
    )


def _choices(result: dict[str, Any]) -> list[str]:
    """Return cells with what ``init`` chose."""
    values = result["values"]
    kind = re.search(r"Data: (\w+)", result["printed"])[1]
    loss, training = values["loss"], values["training"]
    prefactors = [
        f"{loss[f'start_pref_{letter}']:g}" if f"start_pref_{letter}" in loss else "-"
        for letter in "efv"
    ]
    rate = f"{values['learning_rate']['start_lr']:g}, {values['optimizer']['lr_adjust']:g}"
    frames = "0.1" if "validation_fraction" in training else "none"
    return [
        kind,
        values["model"]["descriptor"]["type"],
        rate,
        ", ".join(prefactors),
        f"{training['numb_steps']:,}",
        frames,
    ]


if __name__ == "__main__":
    main()
