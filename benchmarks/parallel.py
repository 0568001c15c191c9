"""Bytes per rank at each zero_stage, and steps per second on several ranks with the share of
communication.

usage: python benchmarks/parallel.py memory [--ranks 4] [--width 2400] [--output PAGE]
       python benchmarks/parallel.py speed [--ranks 1 2] [--steps 60] [--output PAGE]

`memory` makes a model of at least 20 million parameters in float32, takes two training steps, and
counts the bytes of the tensors that a rank holds: parameters, gradients after a backward pass,
moments, averages; beside them what theory says, P bytes per whole copy and P / ranks per shared
one. `speed` times training steps of the water example with the same frames per rank, and the same
steps with torch's profiler for the share of exchange between ranks. Each case is launched by
torchrun on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import common

STAGES = (0, 1, 2, 3)
KINDS = ("parameters", "gradients", "moments", "average")


def main() -> None:
    """Run every case and print the table, or be a rank of one."""
    args = _arguments()
    if args.rank_of is not None:
        _be_a_rank(args)
        return
    page = {"memory": _memory, "speed": _speed}[args.what](args)
    common.publish(page, args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("memory", "speed"))
    common.add_common_options(parser)
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="numbers of ranks (memory: 4; speed: 1 2)"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument(
        "--width",
        type=int,
        default=2400,
        help="memory: neurons of each layer of the fitting nets",
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="speed: steps that are timed"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="speed: interleaved launches of each case"
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _memory(args: argparse.Namespace) -> str:
    config = common.with_precision(
        common.with_numeric_sel(common.read_input(args.input, args.data)), "float32"
    )
    config = common.bare(config)
    config["model"]["fitting_net"]["neuron"] = [args.width] * 3
    narrow = {"decay": 0.999, "dtype": "float32"}  # as wide as the weights
    averages = [{"name": "ema", **narrow}]
    config["training"] |= {"averaging": averages, "numb_steps": 2, "disp_freq": 100}
    ranks = args.ranks or [4]
    rows = []
    for number in ranks:
        for stage in args.stages:
            found = _launch(args, config, stage, number, f"memory-{number}-{stage}")
            held = [max(f["bytes"][kind] for f in found) for kind in KINDS]
            whole = found[0]["whole"]
            theory = _theory(whole, stage, number)
            cells = [f"{h / 1e6:.1f} ({t / 1e6:.1f})" for h, t in zip(held, theory)]
            cells.append(f"{sum(held) / 1e6:.1f} ({sum(theory) / 1e6:.1f})")
            rows.append([str(number), str(stage), *cells])
            print(" | ".join(rows[-1]), flush=True)
    text = (
        f"{found[0]['numel']:,} trained parameters in float32, {whole / 1e6:.1f} MB for one copy; "
        "Adam with two moments, one average. MB that the fullest rank holds between two steps, "
        "gradients after a backward pass; what theory says in brackets.  \nOn "
        f"{common.machine(common.programs(None), 1, 'cpu')}."
    )
    header = ["ranks", "zero_stage", *KINDS, "together"]
    return "\n\n".join(
        [f"# Bytes per rank, {common.today()}", text, common.table(header, rows)]
    )


def _theory(whole: int, stage: int, ranks: int) -> tuple[float, float, float, float]:
    """Return bytes of parameters, gradients, moments and average of one rank (arXiv:1910.02054,
    section 5).
    """
    part = whole / ranks
    return (
        part if stage > 1 else whole,
        part if stage > 1 else whole,
        2 * (part if stage > 0 else whole),
        part if stage > 1 else whole,
    )


def _speed(args: argparse.Namespace) -> str:
    config = common.bare(
        common.with_numeric_sel(common.read_input(args.input, args.data))
    )
    config["training"] |= {"enable_ema": True, "numb_steps": 10**6, "disp_freq": 10**6}
    cases = [(n, s) for n in args.ranks or [1, 2] for s in args.stages]
    times: dict[tuple[int, int], list[dict]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for number, stage in cases:
            times[number, stage] += _launch(
                args, config, stage, number, f"speed-{number}-{stage}"
            )
    rows = []
    for (number, stage), found in times.items():
        seconds = statistics.median(f["seconds"] for f in found)
        exchange = statistics.median(f["exchange"] for f in found)
        frames = number / seconds
        rows.append(
            [
                str(number),
                str(stage),
                f"{1 / seconds:.1f}",
                f"{frames:.1f}",
                f"{100 * exchange:.0f} %",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    text = (
        "Water example, one frame of 96 atoms per rank and step, float64; median over "
        f"{args.rounds} interleaved launches of {args.steps} steps each, after 10 to warm up. "
        "Exchange: share of a step's time in collectives and in waiting for the other ranks in "
        "them, by torch's profiler.  \nOn "
        f"{common.machine(common.programs(None), args.threads, args.device)}."
    )
    header = ["ranks", "zero_stage", "steps/s", "frames/s", "exchange"]
    return "\n\n".join(
        [
            f"# Steps per second on several ranks, {common.today()}",
            text,
            common.table(header, rows),
        ]
    )


def _launch(
    args: argparse.Namespace, config: dict, stage: int, number: int, name: str
) -> list[dict]:
    """Run one case and return what each rank has found."""
    config = json.loads(json.dumps(config))
    config["training"]["zero_stage"] = stage
    folder = args.work / name
    common.write_input(folder, config)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={number}",
        __file__,
        args.what,
        "--rank-of",
        str(folder),
        "--steps",
        str(args.steps),
        "--device",
        args.device,
    ]
    env = common.environment(
        args.threads if number == 1 else max(1, args.threads // number), args.device
    )
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(number)]


def _be_a_rank(args: argparse.Namespace) -> None:
    from deepmd_ema.config import load_config
    from deepmd_ema.distributed.launch import find_launch
    from deepmd_ema.distributed.world import open_world
    from deepmd_ema.training.prepare import prepare
    from deepmd_ema.training.trainer import Trainer
    from deepmd_ema.training.weights import Start

    config, start = load_config("input.json"), Start()
    with open_world(args.device, find_launch()) as world:
        trainer = Trainer(prepare(config, start, world), start, world)
        found = {"memory": _bytes_of, "speed": _times_of}[args.what](trainer, args)
        trainer.tasks.close()
    (args.rank_of / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def _bytes_of(trainer, args: argparse.Namespace) -> dict:
    """Return the bytes of what this rank holds after two steps."""
    for _ in range(2):
        trainer.advance()
    (task,) = trainer.tasks
    step = trainer.take_step
    trained = [p for p in task.models.parameters() if p.requires_grad]
    own = getattr(step._optimizer, "optim", step._optimizer)
    moments = [t for state in own.state.values() for t in state.values() if t.dim()]
    whole = sum(p.numel() * p.element_size() for p in trained)
    return {
        "numel": sum(p.numel() for p in trained),
        "whole": whole,
        "bytes": {
            "parameters": _local_bytes(trained),
            "gradients": _local_bytes([p.grad for p in trained]),
            "moments": _local_bytes(moments),
            "average": trainer.bank["ema"].num_bytes,
        },
    }


def _local_bytes(tensors: list) -> int:
    """Return the bytes of the storages behind ``tensors`` on this process, each counted once."""
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local
        }.values()
    )


def _times_of(trainer, args: argparse.Namespace) -> dict:
    """Return the median seconds of a step, and the share of it that went into exchange with other
    ranks.
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(10):
        trainer.advance()
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        trainer.advance()
        seconds.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        for _ in range(10):
            trainer.advance()
        whole = time.perf_counter() - began
    waiting = (
        sum(
            e.cpu_time_total
            for e in profiled.key_averages()
            if e.key.startswith(("gloo:", "nccl:"))
        )
        / 1e6
    )
    return {
        "seconds": statistics.median(seconds),
        "exchange": min(1.0, waiting / whole),
    }


if __name__ == "__main__":
    main()
