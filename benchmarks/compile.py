"""What compiling costs, and what it is worth to a validation batch, for every descriptor.

usage: python benchmarks/compile.py [--kinds se_e2_a ...] [--stage cost forward ...] [--output PAGE]

The models are in compile.json; the data are frames of water, doubled to 192 atoms, one frame per batch. Results are
kept in --work and not measured again; each stage may be run at another time:

- ``cost``: a process of its own with an empty cache makes the graphs of a model, for training and for validation; wall
  time, and processor time with all child processes, beside the number of operations of an eager step.
- ``forward``: a model in evaluation mode, eagerly and by its graph, in turns in one process.

The time of compiled training steps beside eager ones and DeePMD-kit's: `speed.py --programs eager compiled pt pt_expt`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import common

MODELS = common.ROOT / "benchmarks" / "compile.json"
FITTING = {"neuron": [120, 120, 120], "resnet_dt": True}
STAGES = ("cost", "forward")


def main() -> None:
    """Measure what is asked for, and print the page of all that is known; or be one of the measured processes."""
    args = _arguments()
    if args.one is not None:
        print(json.dumps({"cost": _cost, "forward": _forward}[args.stage[0]](args.one, args)))
        return
    models = json.loads(MODELS.read_text())
    kinds = args.kinds or list(models)
    found = {}
    for kind in kinds:
        for stage in STAGES:
            file = _folder(args, kind) / f"{stage}.json"
            if stage in args.stage and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                result = _in_a_process(stage, kind, args)
                file.write_text(json.dumps(result | {"load": os.getloadavg()[0]}))
                print(kind, stage, result, flush=True)
            if file.exists():
                found[kind, stage] = json.loads(file.read_text())
    common.publish(_page(found, kinds, args), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--kinds", nargs="+", help="names in compile.json; all if not given")
    parser.add_argument("--stage", nargs="*", default=list(STAGES), choices=STAGES, help="what is measured now")
    parser.add_argument("--precision", default="float64", choices=("float64", "float32"))
    parser.add_argument("--turns", type=int, default=7, help="of each way to evaluate a model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.set_defaults(threads=1)
    return parser.parse_args()


def _folder(args: argparse.Namespace, kind: str) -> Path:
    name = kind.replace(", ", "-").replace(" ", "_")
    return args.work.resolve() / "compile" / f"{args.precision}-{args.threads}" / name


# --- processes that make and run a graph


def _in_a_process(stage: str, kind: str, args: argparse.Namespace) -> dict:
    words = [sys.executable, __file__, "--stage", stage, "--one", kind, "--precision", args.precision, "--threads",
             str(args.threads), "--work", str(args.work), "--turns", str(args.turns)]  # fmt: skip
    env = common.environment(args.threads, args.device)
    done = subprocess.run(words, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _cost(kind: str, args: argparse.Namespace) -> dict:
    """Return what the graph of training takes, what it is made of, and how far its numbers are from eager ones."""
    model, batch = _model_and_batch(kind, args)
    operations = _operations(model.train(), batch)
    compiler = _compiler(kind, args)
    training = _traced(compiler, model, batch)
    pairs = zip(_numbers(partial(compiler, model), model, batch), _numbers(model, model, batch))
    difference = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)
    return {"operations": operations, "training": training, "difference": difference}


def _operations(model, batch) -> int:
    """Return the number of operations of an eager step in plain torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from deepmd_ema.model.filled import fill
    from deepmd_ema.model.kernels.twin import plain_kernels

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    with plain_kernels(), Counter() as counter:
        _numbers(model, model, fill(batch, model.layout).batch)
    return counter.count


def _numbers(call, model, batch) -> list:
    """Return what is predicted, and the gradient of something like a loss by every parameter."""
    import torch

    out = call(batch)
    total = out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()
    parameters = list(model.parameters())
    return [*(value.detach() for value in out.values()),
            *torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)]  # fmt: skip


def _traced(compiler, model, batch) -> dict:
    """Make the graph of a model, and return the wall and the processor time, and whether the code was in the cache."""
    wall, cpu = time.perf_counter(), common.cpu_seconds(os.getpid())
    compiler.trace(model, batch)
    found = {"wall": time.perf_counter() - wall, "cpu": common.cpu_seconds(os.getpid()) - cpu}
    return found | {"cached": any(graph.cached for graph in compiler.graphs)}


def _forward(kind: str, args: argparse.Namespace) -> dict:
    """Return seconds of turns of a model in evaluation mode, eagerly and compiled, and what its graph takes."""
    model, batch = _model_and_batch(kind, args)
    compiler = _compiler(kind, args)
    validation = _traced(compiler, model.eval(), batch)
    calls = {"eager": model, "compiled": partial(compiler, model)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.turns + 1):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            count, start = 0, time.perf_counter()
            while count < 3 or time.perf_counter() < start + 0.5:
                calls[name](batch)
                count += 1
            if turn:
                times[name].append((time.perf_counter() - start) / count)
    return {"times": times, "validation": validation}


def _compiler(kind: str, args: argparse.Namespace):
    from deepmd_ema.config.schema.training import CompileConfig
    from deepmd_ema.model.compile import Compiler

    return Compiler(CompileConfig(cache_dir=str(_folder(args, kind) / "cache")))


def _model_and_batch(kind: str, args: argparse.Namespace):
    import numpy as np
    import torch

    from deepmd_ema.config import model_config_from_dict
    from deepmd_ema.data.collate import collate
    from deepmd_ema.data.source import Frame
    from deepmd_ema.model.build import build_model

    torch.set_num_threads(args.threads)
    config = _config(kind, args)
    model = build_model(model_config_from_dict(config["model"]), 1)
    system = Path(config["training"]["training_data"]["systems"][0])
    coord, box = (np.load(system / "set.000" / f"{name}.npy")[0].reshape(-1, 3) for name in ("coord", "box"))
    return model, collate([Frame(coord, np.loadtxt(system / "type.raw", dtype=np.int64), box)], model.layout)


def _config(kind: str, args: argparse.Namespace) -> dict:
    """Return an input that both programs read: of a model, one frame of 192 atoms per step."""
    config = common.bare(common.read_input(args.input, args.data))
    training = config["training"]
    system = args.work.resolve() / "compile" / "water-192"
    if not system.exists():
        common.write_repeated(Path(training["training_data"]["systems"][0]), system, (2, 1, 1))
    training |= {"numb_steps": 10**7, "training_data": {"systems": [str(system)], "batch_size": 1}}
    config["learning_rate"] = {"type": "exp", "start_lr": 1e-4, "stop_lr": 1e-5, "decay_steps": 10**5}
    config["model"] |= {"descriptor": json.loads(MODELS.read_text())[kind], "fitting_net": dict(FITTING)}
    return common.with_precision(config, args.precision)


# --- the page


def _page(found: dict, kinds: list[str], args: argparse.Namespace) -> str:
    parts = [f"# Compiled and eager steps, {common.today()}"]
    for title, make in (("Forward only", _forward_rows), ("Compiling", _cost_rows)):
        header, rows = make(found, kinds)
        if rows:
            parts += [f"## {title}", common.table(header, rows)]
    loads = [value["load"] for value in found.values()]
    parts.append(
        f"Water, 192 atoms, one frame per batch, {args.precision}; load of the machine {min(loads):.1f} to "
        f"{max(loads):.1f}.  \nOn {common.machine(common.programs(args.peer), args.threads, args.device)}."
    )
    return "\n\n".join(parts)


def _forward_rows(found: dict, kinds: list[str]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for kind in kinds:
        if (kind, "forward") in found:
            times = found[kind, "forward"]["times"]
            cells = [f"{1000 * statistics.median(times[name]):.1f}" for name in ("eager", "compiled")]
            rows.append([kind, *cells, common.ratio_in_words(times["eager"], times["compiled"])])
    return ["", "eager, ms", "compiled, ms", "eager / compiled"], rows


def _cost_rows(found: dict, kinds: list[str]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for kind in kinds:
        if (kind, "cost") not in found:
            continue
        one, validation = found[kind, "cost"], found.get((kind, "forward"), {}).get("validation", {"cached": True})
        cells = [f"{one['training'][clock]:.0f}" for clock in ("cpu", "wall")]
        cells += ["", ""] if validation["cached"] else [f"{validation[clock]:.0f}" for clock in ("cpu", "wall")]
        per_operation = 1000 * one["training"]["cpu"] / one["operations"]
        rows.append([kind, f"{one['operations']}", *cells, f"{per_operation:.0f}", f"{one['difference']:.0e}",
                     f"{one['load']:.1f}"])  # fmt: skip
    header = ["", "operations of a step", "training, processor s", "wall s", "validation, processor s", "wall s",
              "training, processor ms per operation", "largest difference from eager", "load"]  # fmt: skip
    return header, rows


if __name__ == "__main__":
    main()
