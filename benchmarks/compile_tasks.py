"""Graphs, seconds of compiling and memory of compiled runs with 1 to 8 tasks of one structure.

usage: python benchmarks/compile_tasks.py [--peer DIR] [--tasks 1 2 4 8] [--output PAGE]

A small se_e2_a, data of the water example. The tasks share the descriptor, or nothing. Each run is a process of its own
and starts twice, with an empty cache and with the code of the first start; beside it, with the same input and for 1 and
2 tasks, DeePMD-kit's `pt_expt`. Given are the graphs that were made, the seconds until the first row of lcurve.out,
processor time of the whole run with all child processes, and the largest memory of the process. An eager run of each
number of tasks tells what of it is not compiling. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import common

DESCRIPTOR = {
    "type": "se_e2_a",
    "sel": [24, 44],
    "rcut": 4.5,
    "rcut_smth": 0.5,
    "neuron": [4, 8, 16],
    "axis_neuron": 4,
    "type_one_side": True,
}  # DeePMD-kit compiles no other
FITTING = {"neuron": [32, 32, 32]}
WAYS = {"shared": "descriptor shared", "own": "nothing shared"}
MOST_OF_PEER = 2
STEPS = 40
COMPILED = re.compile(r"compiled graph \d+ for \w+ in ([\d.]+) s")
STARTS = ("first", "second", "eager")


def main() -> None:
    """Train, and print the page."""
    args = _arguments()
    cases = [(number, way) for number in args.tasks for way in WAYS if number > 1 or way == "shared"]
    rows = []
    for key in common.programs(args.peer):
        for number, way in cases:
            if key == "ours" or number <= MOST_OF_PEER:
                found = {start: _run(key, number, way, start, args) for start in STARTS}
                if any(found.values()):
                    rows.append(_row(key, number, way, found))
                    print(rows[-1], flush=True)
    costs = ["to the first row, s", "processor s", "memory, MiB"]
    compiled = [f"{start} start: compiling, s" for start in ("first", "second")]
    header = ["", "tasks", "", "graphs", compiled[0], *costs, compiled[1], *costs, f"eager: {costs[0]}", *costs[1:]]
    page = [
        f"# Compiling many tasks of one structure, {common.today()}",
        f"{json.dumps(DESCRIPTOR)}, two elements, fitting net {FITTING['neuron']}; {STEPS} steps of one frame of 96 "
        "atoms. Training only is compiled, as in DeePMD-kit.",
        common.table(header, rows),
        f"On {common.machine(common.programs(args.peer), args.threads, args.device)}.",
    ]
    common.publish("\n\n".join(page), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--tasks", nargs="+", type=int, default=[1, 2, 4, 8], help="numbers of tasks")
    parser.add_argument("--starts", nargs="*", default=STARTS, choices=STARTS, help="what is measured now")
    parser.add_argument("--programs", nargs="*", default=("ours", "peer"), choices=("ours", "peer"))
    parser.set_defaults(threads=1)
    return parser.parse_args()


def _row(key: str, number: int, way: str, found: dict[str, dict]) -> list[str]:
    first = found["first"]
    cells = ["dp-ema" if key == "ours" else "dp --pt-expt", str(number), WAYS[way] if number > 1 else ""]
    cells.append(f"{first['graphs']}" if key == "ours" and first else "")
    for start, one in found.items():
        compiling = f"{one['compiling']:.0f}" if key == "ours" and one else ""
        cells += ([] if start == "eager" else [compiling]) + _costs(one)
    return cells


def _costs(one: dict) -> list[str]:
    if not one:
        return [""] * 3
    return [f"{one['first_row']:.0f}", f"{one['processor']:.0f}", f"{one['memory'] / 2**20:.0f}"]


def _run(key: str, number: int, way: str, start: str, args: argparse.Namespace) -> dict:
    """Return what a run took, which is made if it is not there; nothing if it is not to be made."""
    base = args.work.resolve() / "compile_tasks" / f"{key}-{number}-{way}"
    folder, cache = base / start, base / "cache"
    file = folder / "result.json"
    if file.exists():
        return json.loads(file.read_text())
    if start not in args.starts or key not in args.programs:
        return {}
    config = _input(number, way)
    if start != "eager":
        config["training"]["enable_compile"] = True
        if key == "ours":
            config["training"]["compile_options"] = {"cache_dir": str(cache)}
            config["validating"] = {"compiled_infer": False}
    if start == "first":
        shutil.rmtree(cache, ignore_errors=True)
    common.write_input(folder, config)
    command = list(common.programs(args.peer)[key].command)
    command[1:] = ["--pt-expt"] if key == "peer" else command[1:]
    env = common.environment(args.threads, args.device) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    found = _watched([*command, "train", "input.json", "--skip-neighbor-stat"], folder, env)
    seconds = [float(match[1]) for match in COMPILED.finditer((folder / "train.log").read_text())]
    found |= {"graphs": len(seconds), "compiling": sum(seconds), "load": os.getloadavg()[0]}
    file.write_text(json.dumps(found))
    return found


def _watched(words: list[str], folder: Path, env: dict[str, str]) -> dict:
    """Run a command, and return seconds to the first row, processor time and the largest memory, bytes."""
    rows: dict[int, float] = {}
    begin, size = time.perf_counter(), 0
    with (folder / "train.log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log)
    while True:
        size = common.note_rows(folder / "lcurve.out", size, rows)
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        time.sleep(0.02)
    if status or not rows:
        raise SystemExit(f"{words} failed in {folder}:\n{(folder / 'train.log').read_text()[-3000:]}")
    return {
        "first_row": min(rows.values()) - begin,
        "processor": usage.ru_utime + usage.ru_stime,
        "memory": 1024 * usage.ru_maxrss,
    }


def _input(number: int, way: str) -> dict:
    base = common.EXAMPLE / "data"
    systems = sorted(str(folder) for folder in base.iterdir() if folder.name.startswith("train_"))
    loss = {"type": "ener", "start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1}
    rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 10}
    rest = {"numb_steps": STEPS, "disp_freq": 10, "save_freq": STEPS, "seed": 1}
    tasks = [f"task_{k}" for k in range(number)]
    data = {task: {"training_data": {"systems": [systems[k % len(systems)]], "batch_size": 1}}
            for k, task in enumerate(tasks)}  # fmt: skip
    if number == 1:
        model = {"type_map": ["O", "H"], "descriptor": DESCRIPTOR, "fitting_net": FITTING}
        return {"model": model, "loss": loss, "learning_rate": rate, "training": rest | data[tasks[0]]}
    shared = {"elements": ["O", "H"]} | ({"desc": DESCRIPTOR} if way == "shared" else {})
    part = {"type_map": "elements", "descriptor": "desc" if way == "shared" else DESCRIPTOR, "fitting_net": FITTING}
    return {
        "model": {"shared_dict": shared, "model_dict": dict.fromkeys(tasks, part)},
        "loss_dict": dict.fromkeys(tasks, loss),
        "learning_rate": rate,
        "training": rest | {"data_dict": data, "model_prob": dict.fromkeys(tasks, 1.0)},
    }


if __name__ == "__main__":
    main()
