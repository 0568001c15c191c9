"""How long a checkpoint holds up training, in steps, and how much memory the run takes with and without checkpoints.

A run saves every so many steps. The stall of a save is what the steps from one save to the next take together beyond as
many steps that have no save near them. A second checkout can be measured alternately with this one.

    python benchmarks/save_stall.py --other ../before --output benchmarks/results/$(date +%F)-save_stall.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

# name: width of the embedding and of the fitting network
MODELS = {"0.02 M parameters": ([8, 16], 32), "1.0 M parameters": ([25, 50, 100], 240)}
AVERAGES = {"no average": 0, "one average": 1, "three averages": 3}
SAVES, EVERY, QUIET_AFTER = 8, 48, 36  # saves of a run, steps between two, steps after a save that may be slower


def main() -> None:
    """Measure every case, in turn for each checkout, and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout, measured beside this one")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case and checkout")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--averages", nargs="+", choices=AVERAGES, default=["one average"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    common.add_common_options(parser)
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(run_here(json.loads(args.run), args.device)))
        return
    trees = {"this": common.ROOT} | ({"other": args.other.resolve()} if args.other else {})
    rows = []
    for model in args.models:
        for averages in args.averages:
            found: dict[str, list[dict]] = {name: [] for name in trees}
            for number in range(args.rounds):
                for name in sorted(trees, reverse=bool(number % 2)):
                    found[name].append(run_apart(trees[name], model, averages, args))
            rows += [[model, averages, name, *cells(each)] for name, each in found.items()]
    header = ["model", "averages", "checkout", "step", "stall per save", "in steps", "its range", "written per save",
              "peak memory"]  # fmt: skip
    page = [f"# What a checkpoint costs a training run, {common.today()}", "",
            common.machine(common.programs(None), args.threads, args.device), "",
            f"Water example, batch 1, float64, {SAVES} saves of {EVERY} steps, {args.rounds} runs of each; medians of "
            "all saves, with the range of the runs' medians.", "", common.table(header, rows)]  # fmt: skip
    common.publish("\n".join(page), args.output)


def run_apart(tree: Path, model: str, averages: str, args: argparse.Namespace) -> dict:
    """Return what :func:`run_here` returns in a process of its own, with the package of ``tree``."""
    config = common.with_numeric_sel(common.bare(common.read_input(args.input, args.data)))
    neuron, width = MODELS[model]
    config["model"]["descriptor"]["neuron"] = neuron
    config["model"]["fitting_net"]["neuron"] = [width] * 3
    more = [{"name": f"a{k}", "decay": 1 - 0.1**k} for k in range(1, 1 + AVERAGES[averages])]
    config["training"] |= {"numb_steps": SAVES * EVERY, "save_freq": EVERY, "disp_freq": 10**6, "averaging": more}
    env = common.environment(args.threads, args.device) | {"PYTHONPATH": str(tree)}
    words = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(config), "--device", args.device]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def run_here(config: dict, device: str) -> dict:
    """Train and return seconds of a step without saves, stalls by save, bytes of a save and peak memory in bytes."""
    from deepmd_ema.train.loop.trainer import Callback
    from deepmd_ema.train.run import run_training

    ends: list[float] = []

    class Watch(Callback):
        def after_step(self, trainer) -> None:
            ends.append(time.perf_counter())

    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "input.json").write_text(json.dumps(config))
        os.chdir(folder)
        run_training("input.json", device=device, callback=Watch())
        size = sum(p.stat().st_size for p in folder.glob(f"model*-{SAVES * EVERY}.pt"))
    finally:
        shutil.rmtree(folder)
    steps = [end - begin for begin, end in itertools.pairwise(ends)]  # steps[i] is step i + 2
    quiet = [s for i, s in enumerate(steps) if (i + 2) % EVERY > QUIET_AFTER]
    step = statistics.median(quiet)
    # from the step that saves on; the last save of a run is waited for in any case
    windows = [steps[i : i + QUIET_AFTER] for i in range(EVERY - 2, len(steps) - EVERY, EVERY)]
    stalls = [sum(window) - QUIET_AFTER * step for window in windows]
    return {"step": step, "stalls": stalls, "bytes": size,
            "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}  # fmt: skip


def cells(runs: list[dict]) -> list[str]:
    """Return what the runs of one case have found, as cells of its row."""
    step = statistics.median(run["step"] for run in runs)
    stall = statistics.median(s for run in runs for s in run["stalls"])
    each = [statistics.median(run["stalls"]) / run["step"] for run in runs]
    memory = statistics.median(run["memory"] for run in runs)
    return [f"{1000 * step:.1f} ms", f"{1000 * stall:.1f} ms", f"{stall / step:.2f}",
            f"{min(each):.2f} to {max(each):.2f}", f"{runs[0]['bytes'] / 1e6:.1f} MB",
            f"{memory / 1e6:.0f} MB"]  # fmt: skip


if __name__ == "__main__":
    main()
