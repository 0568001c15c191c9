"""Do compiled runs at every zero_stage train what an eager run at stage 0 trains, and do they restart bitwise?

    python benchmarks/compiled_stages.py
    python benchmarks/compiled_stages.py --cold 0 1 2 3 --output page.md

Two tasks share a descriptor and have a fitting network each; one has frames of 5 atoms without virials, the other of
9 atoms. An EMA and a power average are tracked, with full validation. 20 steps on 2 processes: eager at stage 0,
compiled at stages 0 to 3; the compiled runs restart from step 10 with their own code in the cache and, at the stages
named by ``--cold``, with an empty cache. Every run is made by processes that are new. Then restarts elsewhere: stage 3
on from stage 0, and one process on from stage 3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path

from common import ROOT, RUNS, machine, programs, publish, table, today
from restart_matrix import PARTS, differing, rows_after, show, tensors_of

sys.path.insert(0, str(ROOT / "tests"))

STEPS, HALF = 20, 10
GLOBAL_BATCH = 4
LIMIT_S = 1200
PROMISED = 1e-10  # relative difference to the eager run
FILES = ("model", "model_ema", "model_p05")  # the live weights with their moments, and the model files of averages


def main() -> None:
    """Make all runs and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--cold", nargs="*", type=int, default=[0, 3], help="stages that also restart without a cache")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--work", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    work = args.work / "compiled_stages"
    shutil.rmtree(work, ignore_errors=True)
    write_data(work)
    began = time.perf_counter()
    eager = train(work / "eager", 0, 2, None)
    rows, failed = [], []
    for stage in args.stages:
        whole = train(work / f"stage{stage}", stage, 2, args.backend, work / "cache")
        found = compared(whole, eager)
        restarts = {"warm": train(work / f"warm{stage}", stage, 2, args.backend, work / "cache", whole)}
        if stage in args.cold:
            restarts["cold"] = train(work / f"cold{stage}", stage, 2, args.backend, work / f"cache{stage}", whole)
        unlike = {name: other_bits(whole, folder) for name, folder in restarts.items()}
        rows.append([str(stage), *map(show, found.values()), *(said(unlike.get(name)) for name in ("warm", "cold")),
                     graphs_of(whole), graphs_of(restarts.get("cold", restarts["warm"]))])  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        failed += [f"stage {stage}: {name} differs by {value:.1e}" for name, value in found.items() if value > PROMISED]
        failed += [f"stage {stage}, {name} restart: {names[:3]}" for name, names in unlike.items() if names]
    elsewhere = []
    for origin, stage, ranks in [(0, 3, 2), (3, 0, 1)]:
        if origin in args.stages:
            start = work / f"stage{origin}"
            end = train(work / f"from{origin}", stage, ranks, args.backend, work / "cache", start)
            found = compared(end, start)
            elsewhere.append([f"stage {origin}, 2 processes", f"stage {stage}, {ranks}", *map(show, found.values())])
            failed += [f"{elsewhere[-1][:2]}: {n} {v:.1e}" for n, v in found.items() if v > PROMISED]
    publish("\n".join(page(args.backend, rows, elsewhere, time.perf_counter() - began)), args.output)
    if failed:
        raise SystemExit("not as promised: " + "; ".join(failed))


def write_data(work: Path) -> None:
    """Write training and validation frames of both tasks."""
    from helpers import write_system

    for k, task in enumerate(("molecule", "crystal")):
        for number in (1, 2):
            system = work / "data" / f"{task}{number}"
            write_system(system, frames=12 // number, natoms=5 + 4 * k, seed=10 * k + number, virial=bool(k))


def input_of(data: Path, stage: int, ranks: int, backend: str | None, cache: Path | None) -> dict:
    """Return the input of a run; ``backend`` None is an eager one."""
    tasks = ("molecule", "crystal")
    descriptor = {"type": "se_e2_r", "sel": [14, 14], "rcut": 3.5, "rcut_smth": 0.5, "neuron": [2, 4],
                  "precision": "float64"}  # fmt: skip
    net = {"neuron": [4], "precision": "float64"}
    model = {"type_map": "elements", "descriptor": "radial", "fitting_net": net}

    def frames(number: int) -> dict[str, dict]:
        return {task: {"systems": [str(data / f"{task}{number}")], "batch_size": GLOBAL_BATCH // ranks}
                for task in tasks}  # fmt: skip

    train, valid = frames(1), frames(2)
    training = {
        "data_dict": {task: {"training_data": train[task], "validation_data": valid[task]} for task in tasks},
        "model_prob": {"molecule": 0.6, "crystal": 0.4}, "numb_steps": STEPS, "save_freq": HALF, "disp_freq": 2,
        "disp_avg": True, "seed": 3, "gradient_max_norm": 5.0, "zero_stage": stage, "enable_ema": True,
        "ema_decay": 0.9, "enable_compile": backend is not None,
        "averaging": [{"name": "p05", "type": "power", "sigma_rel": 0.05, "full_validation": True, "lcurve": True}],
    }  # fmt: skip
    if backend is not None:
        training["compile_options"] = {"backend": backend, "cache_dir": str(cache)}
    return {
        "model": {
            "shared_dict": {"elements": ["O", "H"], "radial": descriptor},
            "model_dict": dict.fromkeys(tasks, model),
        },
        "learning_rate": {"start_lr": 0.01, "stop_lr": 0.001},
        "loss_dict": {"crystal": {"start_pref_v": 1, "limit_pref_v": 1}},
        "validating": {"full_validation": True, "ema_full_validation": True, "validation_freq": HALF // 2},
        "training": training,
    }  # fmt: skip


def train(
    folder: Path, stage: int, ranks: int, backend: str | None, cache: Path | None = None, origin: Path | None = None
) -> Path:
    """Train in ``folder``, from the middle of the run in ``origin`` if given, and return the folder."""
    from parallel_runs import run_ranks

    folder.mkdir()
    (folder / "input.json").write_text(json.dumps(input_of(folder.parent / "data", stage, ranks, backend, cache)))
    how: dict = {}
    if origin is not None:
        how = {"restart": str(origin / f"model.ckpt-{HALF}.pt"), "allow_config_change": True}
    began = time.perf_counter()
    ended = run_ranks(ranks, train_here_compiled, str(folder), how, limit=LIMIT_S)
    (folder / "log").write_text(ended[0].log)
    print(f"{folder.name}: {time.perf_counter() - began:.0f} s, {graphs_of(folder)}", file=sys.stderr, flush=True)
    return folder


def train_here_compiled(folder: str, how: dict) -> dict:
    """Train in ``folder`` as one rank, although parts of torch that inductor loads are deprecated in torch itself."""
    from parallel_runs import train_here

    warnings.simplefilter("default")
    return train_here(folder, how)


def compared(folder: Path, other: Path) -> dict[str, float]:
    """Return the largest relative difference of two runs: weights, moments, averages, and numbers of the tables."""
    ends = [contents(where) for where in (folder, other)]
    found = {part: max(relative(ends[0][name][key], ends[1][name][key]) for name, key in places)
             for part, places in PLACES.items()}  # fmt: skip
    for kind in ("lcurve*.out", "val*.log"):
        names = sorted(path.name for path in other.glob(kind))
        assert names, kind
        assert names == sorted(path.name for path in folder.glob(kind)), kind
        rows = [
            [[row.split() for row in rows_after(where / name, HALF)] for name in names] for where in (folder, other)
        ]
        found[kind] = largest_of_tables(*rows)
    return found


PLACES = {part: [("model", key) for key in keys] for part, keys in PARTS.items()}
PLACES["averages"] += [(name, "model") for name in FILES[1:]]


def contents(folder: Path) -> dict[str, dict]:
    """Return the content of the last files of a run."""
    import torch

    return {name: torch.load(folder / f"{name}.ckpt-{STEPS}.pt", weights_only=True) for name in FILES}


def relative(left: object, right: object) -> float:
    """Return the largest difference of any two numbers, relative to the largest number of their tensor."""
    sides = [dict(tensors_of(side, ".")) for side in (left, right)]
    assert sides[0].keys() == sides[1].keys()
    worst = 0.0
    for name, value in sides[0].items():
        a, b = value.double().nan_to_num(), sides[1][name].double().nan_to_num()
        if a.numel() and (scale := float(b.abs().max())) > 0:
            worst = max(worst, float((a - b).abs().max()) / scale)
        else:
            assert bool((a == b).all()), name
    return worst


def largest_of_tables(left: list, right: list) -> float:
    """Return the largest relative difference of the numbers of tables, which have a few digits only."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        for row, other in zip(a, b, strict=True):
            for x, y in zip(row, other, strict=True):
                if x != y:
                    worst = max(worst, abs(float(x) - float(y)) / abs(float(y)))
    return worst


def other_bits(whole: Path, restarted: Path) -> list[str]:
    """Return what is not the same in an unbroken run and in its restart: tensors, counters, rows of tables."""
    ends = [contents(where) for where in (whole, restarted)]
    found = [f"{name}{place}" for name in FILES for place in differing(ends[0][name], ends[1][name])]
    tables = sorted(path.name for kind in ("lcurve*.out", "val*.log") for path in whole.glob(kind))
    return found + [name for name in tables if rows_after(whole / name, HALF) != rows_after(restarted / name, HALF)]


def said(unlike: list[str] | None) -> str:
    """Return how a restart ended, for the page."""
    return "not made" if unlike is None else f"{len(unlike)} differ" if unlike else "the same bits"


def graphs_of(folder: Path) -> str:
    """Return what the log of a run says of its graphs at last."""
    lines = [line for line in (folder / "log").read_text().splitlines() if line.startswith("compiled: ")]
    return lines[-1].removeprefix("compiled: ") if lines else "no graphs"


def page(backend: str, rows: list[list[str]], elsewhere: list[list[str]], seconds: float) -> list[str]:
    """Return the lines of the page."""
    differences = ["weights", "moments", "averages", "learning curves", "validation logs"]
    return [
        f"# Compiled runs at every zero_stage, {today()}", "",
        f"Two tasks, shared `se_e2_r`, 2 processes, {STEPS} steps, float64, `{backend}`. Largest difference to the "
        "eager run at stage 0, relative to the largest number of the tensor (tables: as printed; `=`: the same); "
        f"whether a restart from step {HALF} in new processes ends with the same bits (weights, moments, averages, "
        "counters, rows of all tables), with the code in the cache (warm) and with an empty cache (cold); graphs.", "",
        table(["stage", *differences, "warm", "cold", "graphs before the first step", "of the last restart"], rows), "",
        "Restarts elsewhere, the largest difference to the run that was not interrupted:", "",
        table(["checkpoint of", "continued at", *differences], elsewhere), "",
        f"{seconds:.0f} s on {machine(programs(None), 1, 'cpu')}.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
