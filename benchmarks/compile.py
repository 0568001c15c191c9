"""What `torch.compile` makes of a model, and whether eager steps are as fast as in an older version.

usage: python benchmarks/compile.py [--base DIR] [--output PAGE]

First part: `torch.compile(run, dynamic=True)` for 1 and 3 models of one structure over batches of different sizes:
graph breaks, graphs, seconds, and the largest difference of a parameter gradient from eager. Second part: time of
forward and backward of one batch of water, eager here, eager in the checkout --base, and compiled here (with inductor
among --backends); the processes take turns, and the ratio is the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

BATCHES = [
    [(6, 9)],
    [(5, 12)],
    [(7, 8)],
    [(6, 9), (4, 4)],
    [(3, 8), (9, 5)],
    [(8, 12), (2, 5), (4, 7)],
    [(1, 6)],
    [(0, 6)],
]
WATER = Path("examples/water/data/train_300K")


def main() -> None:
    """Measure and print the page, or be one of the processes that take turns."""
    args = _arguments()
    if args.turns:
        _take_turns(args)
        return
    import common

    page = [f"# Compiled and eager steps, {common.today()}"]
    rows = [row for number in args.models for row in _compile_rows(number, args)]
    page.append(
        f"`torch.compile(run, dynamic=True, backend=...)`, se_e2_a, neuron {args.neuron}, two elements, "
        "both sides; breaks and graphs are cumulative."
    )
    header = ["backend", "models", "frames", "atoms by type", "slots", "breaks", "graphs", "s", "gradient error"]
    page.append(common.table(header, rows))
    if args.base is not None:
        page += ["## Time of a step", _step_table(args)]
    page.append(f"On {common.machine(common.programs(None), args.threads, 'cpu')}.")
    common.publish("\n\n".join(page), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="a checkout of an older version to compare eager steps with")
    parser.add_argument("--backends", nargs="*", default=["aot_eager", "inductor"])
    parser.add_argument("--models", nargs="+", type=int, default=[1, 3], help="models of one structure")
    parser.add_argument("--neuron", nargs="+", type=int, default=[4, 8, 16], help="of the embedding in the first part")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--turns", choices=("eager", "inductor"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _compile_rows(number: int, args: argparse.Namespace) -> list[list[str]]:
    import torch
    from torch._dynamo.utils import counters

    from deepmd_ema.model.energy import run

    rows = []
    for backend in args.backends:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(run, dynamic=True, backend=backend)
        models = [_model(args.neuron, [16, 16], [40, 80], 4, seed) for seed in range(number)]
        for model in models:
            for counts in BATCHES:
                batch = _toy_batch(model, counts)
                start = time.perf_counter()
                found = _gradients(compiled, model, batch)
                seconds = time.perf_counter() - start
                wanted = _gradients(run, model, batch)
                error = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(found, wanted))
                rows.append(
                    [backend, str(number), str(len(counts)), str(batch.type_counts), str(batch.slots),
                     str(sum(counters["graph_break"].values())), str(counters["stats"]["unique_graphs"]),
                     f"{seconds:.2f}", f"{error:.1e}"]
                )  # fmt: skip
    return rows


def _step_table(args: argparse.Namespace) -> str:
    import common

    roots = {"older, eager": (args.base.resolve(), "eager"), "eager": (common.ROOT, "eager")}
    if "inductor" in args.backends:
        roots["inductor"] = (common.ROOT, "inductor")
    processes = {name: _start(root, kind, args) for name, (root, kind) in roots.items()}
    times: dict[str, list[float]] = {name: [] for name in roots}
    for turn in range(args.repeats + 1):
        order = list(roots) if turn % 2 else list(roots)[::-1]
        for name in order:
            seconds = _turn(processes[name])
            if turn:  # the first one warms up and compiles
                times[name].append(seconds)
    for process in processes.values():
        process.communicate("", timeout=60)
    rows = []
    for name, values in times.items():
        ratios = [older / own for older, own in zip(times["older, eager"], values)]
        rows.append([name, f"{1000 * statistics.median(values):.1f}", f"{statistics.median(ratios):.3f}",
                     f"{min(ratios):.2f} to {max(ratios):.2f}"])  # fmt: skip
    return common.table(["", "ms/step", "older / this", "least to most"], rows)


def _start(root: Path, kind: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(args.threads)}
    command = [sys.executable, __file__, "--turns", kind, "--steps", str(args.steps)]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            cwd=Path(__file__).resolve().parents[1])  # fmt: skip


def _turn(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def _take_turns(args: argparse.Namespace) -> None:
    """Answer every line on stdin with the median time of a step, in seconds of this process's CPU."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = _model([25, 50, 100], [240, 240, 240], [46, 92], 16, 0)
    coord = np.load(WATER / "set.000" / "coord.npy")[0].reshape(-1, 3)
    box = np.load(WATER / "set.000" / "box.npy")[0].reshape(3, 3)
    batch = _batch(model, [(coord, np.loadtxt(WATER / "type.raw", dtype=int), box)])
    call = _call
    if args.turns == "inductor":
        from deepmd_ema.model.energy import run

        call = torch.compile(run, dynamic=True)
    for _ in sys.stdin:
        times = []
        for _ in range(args.steps):
            start = time.process_time()  # a busy machine takes turns away from the process, not from this clock
            _gradients(call, model, batch)
            times.append(time.process_time() - start)
        print(statistics.median(times), flush=True)


def _call(model, batch):
    return model(batch)


def _model(neuron: list[int], fitting: list[int], sel: list[int], axis: int, seed: int):
    from deepmd_ema.config import model_config_from_dict
    from deepmd_ema.model.build import build_model

    descriptor = {"type": "se_e2_a", "sel": sel, "rcut": 6.0, "rcut_smth": 0.5, "neuron": neuron, "axis_neuron": axis}
    section = {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": {"neuron": fitting}}
    return build_model(model_config_from_dict(section), seed).train()


def _toy_batch(model, counts: list[tuple[int, int]]):
    rng = np.random.default_rng(0)
    frames = []
    for first, second in counts:
        types = np.repeat([0, 1], [first, second])
        grid = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(-1, 3)[: len(types)] * 1.7
        frames.append((grid + rng.uniform(-0.3, 0.3, grid.shape), types, None))
    return _batch(model, frames)


def _batch(model, frames):
    from deepmd_ema.data.collate import Frame, collate  # Frame from where --base has it, too

    return collate([Frame(np.asarray(c, float), np.asarray(t, np.int64), b) for c, t, b in frames], model.layout)


def _gradients(call, model, batch):
    out = call(model, batch)
    model.zero_grad()
    (out["energy"].sum() + out["force"].square().sum()).backward()
    return [p.grad.clone() for p in model.parameters()]


if __name__ == "__main__":
    main()
