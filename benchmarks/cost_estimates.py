"""The time and memory that ``dp-ema check --time`` announces, beside those of the run: ten runs of different models.

usage: python benchmarks/cost_estimates.py --work DIR [--seconds 40] [--runs NAME ...] [--output PAGE]

Each input is measured as `check --time` does it, gets as many steps as fill --seconds by that, and is trained. Times
are those of the processor, in both, so that other programs on the machine do not count: on one thread of a machine that
does nothing else they are those of the clock. What is in --work is not done again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, environment, machine, programs, publish, read_input, table, today

from deepmd_ema.training.estimate import Cost

EVENTS = 5  # validations and checkpoints of a run
SECONDS_OF_THE_PROCESSOR = "import time\ntime.perf_counter = time.process_time\n"  # sitecustomize.py
MEASURE = """
import json, time
from dataclasses import asdict
from deepmd_ema.config import load_config
from deepmd_ema.training.estimate import measure_steps
time.perf_counter = lambda: 0.0  # the process that is measured begins with 0
print(json.dumps(asdict(measure_steps(load_config("input.json"), "cpu"))))
"""
SMALL = {"neuron": [25, 50, 100], "axis_neuron": 16}
RATE = {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-4}


def _water(**descriptor: Any) -> dict[str, Any]:
    config = read_input(ROOT / "examples/water/input.json", None)
    config["learning_rate"] = RATE
    config["model"]["descriptor"] |= descriptor
    return config


def _molecules(**descriptor: Any) -> dict[str, Any]:
    config = read_input(ROOT / "examples/molecules/input.json", None)
    config["learning_rate"] = RATE
    config["model"]["descriptor"] |= descriptor
    return config


def _unvalidated(config: dict[str, Any]) -> dict[str, Any]:
    config.pop("validating")
    config["training"].pop("validation_data")
    return config


def _with_descriptor(config: dict[str, Any], descriptor: dict[str, Any], fitting: dict[str, Any]) -> dict[str, Any]:
    config["model"] |= {"descriptor": descriptor, "fitting_net": fitting}
    return config


def _batch(config: dict[str, Any], size: int | str) -> dict[str, Any]:
    config["training"]["training_data"]["batch_size"] = size
    return config


def _muon(config: dict[str, Any]) -> dict[str, Any]:
    config["optimizer"] = {"type": "HybridMuon", "lr_adjust": 100, "weight_decay": 0}
    return config


def _two_tasks() -> dict[str, Any]:
    water, molecules = _water(), _molecules()
    elements = molecules["model"]["type_map"]
    model = {"type_map": "elements", "descriptor": "dpa", "fitting_net": {"neuron": [120, 120, 120]}}
    descriptor = {"type": "se_atten_v2", "rcut": 6.0, "rcut_smth": 0.5, "sel": "auto", "attn_layer": 0, **SMALL}
    config = copy.deepcopy(water)
    config["model"] = {
        "shared_dict": {"elements": elements, "dpa": descriptor},
        "model_dict": {"water": model, "molecules": model},
    }
    config["loss_dict"] = {"water": water["loss"], "molecules": molecules["loss"]}
    del config["loss"]
    parts = ("training_data", "validation_data")
    config["training"]["data_dict"] = {
        name: {part: one["training"][part] for part in parts}
        for name, one in (("water", water), ("molecules", molecules))
    }
    for part in parts:
        del config["training"][part]
    return config


ATTENTION_FREE = {"type": "se_atten_v2", "rcut": 6.0, "rcut_smth": 0.5, "sel": "auto", "attn_layer": 0, **SMALL}
FLOAT32 = {"precision": "float32"}
LARGE = {"neuron": [32, 64, 128]}
RUNS = {
    "water, se_e2_a, float64, batch 1, validation": lambda: _water(),
    "water, se_e2_a, float32, batch 1": lambda: _unvalidated(_water(**FLOAT32)),
    "water, se_e2_a, float64, batch 8": lambda: _batch(_unvalidated(_water()), 8),
    "water, se_e2_a of size L, float32, batch 4, HybridMuon, validation": lambda: _muon(
        _batch(_with_descriptor(_water(), _water(**FLOAT32, **LARGE)["model"]["descriptor"], {"neuron": [240] * 3}), 4)
    ),
    "molecules, se_e2_a, float64, batch auto:64, validation": lambda: _molecules(),
    "molecules, se_e2_a, float32, batch auto, HybridMuon, validation": lambda: _muon(
        _batch(_molecules(**FLOAT32), "auto")
    ),
    "water, se_atten_v2, float32, batch 1, validation": lambda: _with_descriptor(
        _water(), ATTENTION_FREE | FLOAT32, {"neuron": [120] * 3} | FLOAT32
    ),
    "molecules, dpa4c, float32, batch auto, validation": lambda: _with_descriptor(
        _batch(_molecules(), "auto"),
        {"type": "dpa4c", "rcut": 6.0, "lmax": 2, "n_radial": 16, "channels": 16} | FLOAT32,
        {"type": "dpa4_ener", "neuron": [96]} | FLOAT32,
    ),
    "molecules, se_e2_r, float64, batch auto": lambda: _unvalidated(
        _with_descriptor(
            _batch(_molecules(), "auto"),
            {"type": "se_e2_r", "rcut": 6.0, "rcut_smth": 0.5, "sel": "auto", "neuron": [10, 20, 40]},
            {"neuron": [60] * 3},
        )
    ),
    "water and molecules, two tasks, se_atten_v2, float64, validation": _two_tasks,
}


def main() -> None:
    """Measure what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seconds", type=float, default=40, help="processor time of each run (40)")
    parser.add_argument("--runs", type=int, nargs="+", default=list(range(len(RUNS))), help="numbers of runs (all)")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.work = args.work.resolve()
    clock = args.work / "clock"
    clock.mkdir(parents=True, exist_ok=True)
    (clock / "sitecustomize.py").write_text(SECONDS_OF_THE_PROCESSOR)
    rows = [
        _row(name, _result(args, number, make))
        for number, (name, make) in enumerate(RUNS.items())
        if number in args.runs
    ]
    head = ["run", "steps", "s announced", "s", "ratio", "GB announced", "GB", "ratio"]
    page = [
        f"# Announced and real cost of ten runs, {today()}",
        f"Command: `python benchmarks/cost_estimates.py --seconds {args.seconds:g}`. Machine: "
        f"{machine(programs(None), 1, 'cpu')}.",
        table(head, rows),
    ]
    publish("\n\n".join(page), args.output)


def _row(name: str, found: dict[str, float]) -> list[str]:
    time_ratio, memory_ratio = found["announced_s"] / found["real_s"], found["announced_bytes"] / found["real_bytes"]
    return [
        name,
        f"{found['steps']:,}",
        f"{found['announced_s']:.0f}",
        f"{found['real_s']:.0f}",
        f"{time_ratio:.2f}",
        f"{found['announced_bytes'] / 1e9:.2f}",
        f"{found['real_bytes'] / 1e9:.2f}",
        f"{memory_ratio:.2f}",
    ]


def _result(args: argparse.Namespace, number: int, make: Any) -> dict[str, Any]:
    """Return announced and real seconds and bytes, measured now unless that was done."""
    folder = args.work / f"{number}"
    file = folder / "result.json"
    if file.exists():
        return json.loads(file.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = make()
    _write(folder, config, 1000)
    env = environment(1, "cpu")
    timed = env | {"PYTHONPATH": os.pathsep.join([str(args.work / "clock"), env["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=folder, env=timed, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    cost = Cost(**json.loads(done.stdout.splitlines()[-1]))
    steps = EVENTS * int(
        (args.seconds - cost.start - EVENTS * (cost.validation + cost.checkpoint)) / cost.step / EVENTS
    )
    _write(folder, config, steps)
    announced = replace(cost, num_steps=steps, validations=EVENTS * (cost.validations > 0), checkpoints=EVENTS)
    began = time.perf_counter()
    with (folder / "train.log").open("w") as log:
        words = [sys.executable, "-m", "deepmd_ema", "train", "input.json"]
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((folder / "train.log").read_text()[-3000:])
    result = {
        "steps": steps,
        "cost": vars(cost),
        "announced_s": announced.total,
        "real_s": used.ru_utime + used.ru_stime,
        "wall_s": time.perf_counter() - began,
        "announced_bytes": cost.memory,
        "real_bytes": 1024 * used.ru_maxrss,
    }
    file.write_text(json.dumps(result, indent=2))
    print(number, result, flush=True)
    return result


def _write(folder: Path, config: dict[str, Any], steps: int) -> None:
    often = max(1, steps // EVENTS)
    training = config["training"] | {"numb_steps": steps, "save_freq": often, "disp_freq": max(1, steps // 20)}
    config = config | {"training": training}
    if "validating" in config:
        config["validating"] = config["validating"] | {"validation_freq": often}
    (folder / "input.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
