"""Errors and times of training beside DeePMD-kit: one small model of each kind, the same input, several seeds.

usage: python benchmarks/beside_peer.py --peer DIR [--kinds dpa2 ...] [--seeds 1 2 3] [--output PAGE]

The models are in beside_peer.json, each with its number of steps; the learning rate decays over them. One process of
each program trains all of them, one after the other; both run at the same time, so that both see the same load. The
time of a step is that between rows of lcurve.out: wall time, and processor time with all child processes. One judge:
`dp-ema test` reads the checkpoints of both and gives the errors on the validation frames; `dp --pt test` judges the
first model of DeePMD-kit again. Runs that have their result in --work are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common

MODELS = common.ROOT / "benchmarks" / "beside_peer.json"
FITTING = {"neuron": [60, 60, 60], "resnet_dt": True}
LEARNING_RATE = {"type": "exp", "start_lr": 2e-3, "stop_lr": 1e-4}
NUM_DECAYS = 50  # steps of the staircase of the learning rate
LOSS = {"type": "ener", "start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1}
NUM_ROWS = 10
POLL_S = 0.1
# in a process of either program: trains in every folder; a whole start for each run would take longer than the run
TRAIN_ALL = """
import gc, os, sys
from importlib import import_module
main, backend = import_module(sys.argv[1]).main, sys.argv[2].split()
for run in sys.argv[3:]:
    folder, *options = run.split("|")
    os.chdir(folder)
    if main([*backend, "train", "input.json", "--skip-neighbor-stat", *options]):
        sys.exit(f"failed in {folder}")
    gc.collect()
    open("done", "w").close()
"""
ENTRY = {"ours": ("deepmd_ema.cli", ""), "peer": ("deepmd.main", "--pt")}

Result = dict[str, float]


def main() -> None:
    """Train, judge, and print the tables."""
    args = _arguments()
    found = common.programs(args.peer)
    env = common.environment(args.threads, args.device)
    models = json.loads(MODELS.read_text())
    base = args.work / "beside_peer"
    inputs = {
        (kind, seed): _config(models[kind], seed, args) for seed in args.seeds for kind in args.kinds or list(models)
    }
    if not args.no_train:
        with ThreadPoolExecutor(len(found)) as pool:
            for run in [pool.submit(_train_all, key, program, base, env, inputs) for key, program in found.items()]:
                run.result()
    systems = common.read_input(args.input, args.data)["training"]["validation_data"]["systems"]
    results: dict[tuple[str, str], dict[int, Result]] = {}
    for (kind, seed), config in inputs.items():
        folders = {key: _folder(base, kind, seed, key) for key in found}
        for key, folder in folders.items() if all(_is_done(f, config) for f in folders.values()) else ():
            times = json.loads((folder / "times.json").read_text())
            results.setdefault((kind, key), {})[seed] = times | _judged(folder, env, found["ours"], systems)
    if not results:
        raise SystemExit(f"{base}: no run is finished; leave out --no-train.")
    judges = []
    if args.peer:
        kind, first = next((kind, min(seeds)) for (kind, key), seeds in results.items() if key == "peer")
        folder = _folder(base, kind, first, "peer")
        judges = [f"{p.name}: {json.dumps(_judged(folder, env, p, systems))}" for p in found.values()]
    common.publish(_page(results, models, judges, args), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.set_defaults(threads=1)
    parser.add_argument("--kinds", nargs="+", help="some of the models of beside_peer.json")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--precision", default="float32", choices=("float32", "float64"))
    parser.add_argument("--no-train", action="store_true", help="only report what both programs have finished")
    return parser.parse_args()


def _config(model: dict, seed: int, args: argparse.Namespace) -> dict:
    """Return the input of a model: the example's data, one frame per batch, no validation on the way."""
    config = common.bare(common.read_input(args.input, args.data))
    config["model"] |= {"descriptor": model["descriptor"], "fitting_net": FITTING}
    config["learning_rate"] = LEARNING_RATE | {"decay_steps": max(1, model["steps"] // NUM_DECAYS)}
    config["loss"] = LOSS
    config["training"] |= {"numb_steps": model["steps"], "disp_freq": model["steps"] // NUM_ROWS}
    return common.with_seed(common.with_precision(config, args.precision), seed)


def _folder(base: Path, kind: str, seed: int, key: str) -> Path:
    return base / f"{kind}-{seed}-{key}".replace(", ", "_").replace(" ", "_")


def _train_all(
    key: str, program: common.Program, base: Path, env: dict[str, str], inputs: dict[tuple[str, int], dict]
) -> None:
    """Train every input with one program, in the order given, and write the times of each run beside it."""
    todo = []
    for (kind, seed), config in inputs.items():
        folder = _folder(base, kind, seed, key)
        if not _is_done(folder, config):
            common.write_input(folder, config)
            todo.append((folder, config))
    if not todo:
        return
    log = base / f"{key}.log"
    command = train_all_command(key, program, [str(folder) for folder, _ in todo])
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as run:
        for folder, config in todo:
            times = _watch(run, folder, config["training"]["disp_freq"])
            if not (folder / "done").exists():
                raise SystemExit(f"{program.name} failed in {folder}:\n{log.read_text()[-3000:]}")
            (folder / "times.json").write_text(json.dumps(times))
            print(folder.name, json.dumps(times), flush=True)


def _is_done(folder: Path, config: dict) -> bool:
    return (folder / "times.json").exists() and json.loads((folder / "input.json").read_text()) == config


def train_all_command(key: str, program: common.Program, runs: list[str]) -> list[str]:
    """Return the command that trains in each of ``runs``: a folder, and options of ``train`` after bars."""
    return [program.python, "-c", TRAIN_ALL, *ENTRY[key], *runs]


def _watch(run: subprocess.Popen, folder: Path, interval: int) -> Result:
    """Return the milliseconds of a step, start left out, when the training in ``folder`` is done."""
    rows: dict[int, float] = {}
    cpu: dict[int, float] = {}
    size = 0
    while run.poll() is None and not (folder / "done").exists():
        size = common.note_rows(folder / "lcurve.out", size, rows)
        if len(cpu) < len(rows):
            now = common.cpu_seconds(run.pid)
            cpu |= {step: now for step in rows if step not in cpu}
        time.sleep(POLL_S)
    steps = [step for step in cpu if step >= interval]
    num_steps = max(steps, default=0) - min(steps, default=0)
    if not num_steps:
        return {}
    return {name: 1000 * (at[max(steps)] - at[min(steps)]) / num_steps for name, at in (("cpu", cpu), ("wall", rows))}


def _judged(folder: Path, env: dict, judge: common.Program, systems: list[str]) -> Result:
    """Return the errors of a trained model on all validation frames, by the test command of ``judge``."""
    done = folder / f"errors-{judge.command[-1]}.json"
    if not done.exists():
        (folder / "systems.txt").write_text("\n".join(systems) + "\n")
        text = common.run_text(judge, folder, env, "test", "-m", "model.ckpt.pt", "-f", "systems.txt")
        done.write_text(json.dumps(common.read_errors(text)))
    return json.loads(done.read_text())


def _page(results: dict[tuple[str, str], dict[int, Result]], models: dict, judges: list[str], args) -> str:
    found = common.programs(args.peer)
    kinds = list(dict.fromkeys(kind for kind, _ in results))
    words = {"energy": "energy RMSE, meV/atom", "force": "force RMSE, meV/angstrom", "cpu": "processor time, ms/step",
             "wall": "wall time, ms/step"}  # fmt: skip
    parts = [
        f"# Training beside DeePMD-kit, {common.today()}",
        f"{args.precision}, one frame per batch; in brackets each seed, before them their median; "
        "the ratio is that of the medians, below 1 where dp-ema is better, the spread that between least and most of "
        "the seeds of DeePMD-kit over its median. Errors are those of `dp-ema test` on all validation frames of the "
        f"input.  \nOn {common.machine(found, args.threads, args.device)}.",
    ]
    for name, title in words.items():
        scale = 1000 if name in common.ERROR_LINES else 1
        rows = []
        for kind in kinds:
            values = {key: [scale * result[name] for result in results[kind, key].values()] for key in found}
            medians = {key: statistics.median(numbers) for key, numbers in values.items()}
            seeds = ", ".join(map(str, results[kind, "ours"]))
            row = [kind, str(models[kind]["steps"]), seeds, *(_cell(values[key]) for key in found)]
            if "peer" in found:
                row.append(f"{medians['ours'] / medians['peer']:.3f}")
                row.append(f"{(max(values['peer']) - min(values['peer'])) / medians['peer']:.0%}")
            rows.append(row)
        header = [
            "model",
            "steps",
            "seeds",
            *(p.name for p in found.values()),
            *["ratio", "spread"] * ("peer" in found),
        ]
        parts += [f"## {title.capitalize()}", common.table(header, rows)]
    if judges:
        parts.append(f"The first model of DeePMD-kit by both judges (eV/atom, eV/angstrom): {'; '.join(judges)}.")
    return "\n\n".join(parts)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({', '.join(f'{value:.4g}' for value in values)})"


if __name__ == "__main__":
    main()
