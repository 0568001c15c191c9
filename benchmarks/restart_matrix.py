"""Does a checkpoint of any zero_stage on any number of processes go on at any other, and do all stages train the same?

Part 1, stages 0 to 3 on 1 to 4 processes: 16 runs of 8 steps of a tiny model with 6 averages, each of which saves
after 5. From there every run is continued as every other (256 restarts, 12 frames in a step everywhere). Twice it is
looked at: what is loaded is saved again at once and compared with the source, to the bit; and the end is compared with
that of the run which was never interrupted.

Part 2, stages 0 to 3 on 2 processes: the same run of 50 steps of a real model, with two averages, beside stage 0 and
beside one process with twice the batch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from itertools import product
from pathlib import Path

from common import EXAMPLE, ROOT, RUNS, bare, machine, programs, publish, read_input, table, today, with_numeric_sel

sys.path.insert(0, str(ROOT / "tests"))

GLOBAL_BATCH = 12  # of 28 frames: the last batch has 4, of which one frame is left for each of 4 ranks
STEPS, HALF = 8, 5
LIMIT_S = 1200
AVERAGES = [
    {"name": "slow", "decay": 0.95, "lcurve": True},
    {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 5},
    {"name": "flat", "type": "swa", "start_step": 2, "update_every": 2, "device": "cpu"},
    {"name": "whole", "decay": 0.9, "layout": "full_tensor", "dtype": "float64"},
    {"name": "ranged", "type": "swa", "layout": "rank_range"},
]
PARTS = {"weights": ("model",), "moments": ("optimizer",), "averages": ("averages",)}

Place = tuple[int, int]  # stage, processes


def main() -> None:
    """Run both parts and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="stages 0 and 3 on 1 and 2 processes, 10 steps of part 2")
    parser.add_argument("--input", type=Path, default=EXAMPLE / "input.json", help="input of part 2")
    parser.add_argument("--steps", type=int, help="steps of part 2, 50 by default")
    parser.add_argument("--work", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    work = args.work / "restart_matrix"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    places = list(product((0, 3), (1, 2)) if args.quick else product(range(4), range(1, 5)))
    began = time.perf_counter()
    pairs = matrix(work, places)
    between = time.perf_counter()
    stages = equal_stages(work, args.input, args.steps or (10 if args.quick else 50))
    lines = [f"# Restarts between stages and numbers of processes, {today()}", "",
             f"{machine(programs(None), 1, 'cpu')}. {between - began:.0f} s for part 1, "
             f"{time.perf_counter() - between:.0f} s for part 2.", "",
             *matrix_page(places, pairs), "", *stages]  # fmt: skip
    publish("\n".join(lines), args.output)
    good = all(pair["resaved"] == [] and (a != b or pair["end"] == 0) for (a, b), pair in pairs.items())
    raise SystemExit(0 if good else 1)


def matrix(work: Path, places: list[Place]) -> dict[tuple[Place, Place], dict]:
    """Return for each (source, target) what differed after loading, and the largest difference at the end."""
    from helpers import tiny_input, write_system
    from parallel_runs import run_ranks

    write_system(work / "data", frames=28, natoms=12, seed=1, sets=2)
    for stage, ranks in places:
        config = tiny_input(
            ["../data"], ["../data"], num_steps=STEPS, model__fitting_net__neuron=[7, 7],
            training__zero_stage=stage, training__save_freq=HALF, training__disp_avg=True, training__enable_ema=True,
            training__ema_decay=0.9, training__averaging=AVERAGES,
        )  # fmt: skip
        for section in ("training_data", "validation_data"):
            config["training"][section]["batch_size"] = GLOBAL_BATCH // ranks
        folder = folder_of(work, (stage, ranks))
        folder.mkdir()
        (folder / "input.json").write_text(json.dumps(config))
    for place in places:
        run_ranks(place[1], train_from, str(work), place, [None], limit=LIMIT_S)
    found = {}
    for place in places:
        answers = run_ranks(place[1], train_from, str(work), place, places, limit=LIMIT_S)[0].value
        found |= {(origin, place): answer for origin, answer in zip(places, answers)}
        print(f"restarts as stage {place[0]} on {place[1]}: done", file=sys.stderr)
    return found


def train_from(work: str, place: Place, origins: list[Place | None]) -> list[dict]:
    """Train as ``place`` from the middle of each origin, or from the beginning; compare as rank 0.

    A process of the place runs this.
    """
    import torch

    from deepmd_ema.train.run import run_training
    from deepmd_ema.train.trainer import Callback

    class Compare(Callback):
        """Compares what a restart would save before its first step with what it was made of."""

        def __init__(self, origin: Place | None) -> None:
            self.origin, self.resaved = origin, []

        def on_start(self, trainer) -> None:
            content = trainer.saver.builder.training(trainer.step, trainer.state_dict())
            if self.origin is not None and trainer.world.is_main:
                source = torch.load(checkpoint_of(Path(work), self.origin, HALF), weights_only=True)
                self.resaved += differing(source, content)

    answers = []
    folder = folder_of(Path(work), place)
    for number, origin in enumerate(origins):
        where = folder
        if origin is not None:
            where = Path(work) / f"stage{place[0]}on{place[1]}-{number}"
        agree_on_port(folder / f"port-{number}-of-{len(origins)}", where, folder / "input.json")
        os.chdir(where)
        how: dict = {}
        if origin is not None:
            how = {"restart": str(checkpoint_of(Path(work), origin, HALF)), "allow_config_change": True}
        compare = Compare(origin)
        run_training("input.json", device="cpu", callback=compare, **how)
        if os.environ["RANK"] == "0" and origin is not None:
            ends = [
                torch.load(f, weights_only=True) for f in (f"model.ckpt-{STEPS}.pt", checkpoint_of(Path(work), place))
            ]
            answers.append({"resaved": compare.resaved, "end": max(largest_differences(*ends).values())})
    return answers


def equal_stages(work: Path, input_file: Path, steps: int) -> list[str]:
    """Return lines about the same run at every stage on 2 processes, and on one with twice the batch."""
    import torch
    from parallel_runs import run_ranks, train_here

    config = bare(with_numeric_sel(read_input(input_file, None)))
    training = config["training"]
    training |= {"numb_steps": steps, "enable_ema": True, "ema_decay": 0.95, "disp_freq": 10}
    training["averaging"] = [{"name": "p05", "type": "power", "sigma_rel": 0.05}]
    ends = {}
    for name, stage, ranks in [("one process, twice the batch", 0, 1), *((f"stage {s}", s, 2) for s in range(4))]:
        training["zero_stage"], training["training_data"]["batch_size"] = stage, 2 // ranks
        folder = work / f"equal{stage}{ranks}"
        folder.mkdir()
        (folder / "input.json").write_text(json.dumps(config))
        run_ranks(ranks, train_here, str(folder), {}, limit=LIMIT_S)
        ends[name] = torch.load(folder / f"model.ckpt-{steps}.pt", weights_only=True)
        print(f"{name}: done", file=sys.stderr)
    alone, zero = ends["one process, twice the batch"], ends["stage 0"]
    largest = max(float(t.abs().max()) for _, t in tensors_of(alone["model"]) if t.numel())
    rows = [
        [name, *(show(largest_differences(end, other)[part]) for other in (zero, alone) for part in PARTS)]
        for name, end in ends.items()
    ]
    header = ["run", *(f"{part}, to {to}" for to in ("stage 0", "one process") for part in PARTS)]
    return [
        f"## The same {steps} steps at every stage on 2 processes", "",
        f"`{input_file.parent.name}`, float64, 2 frames a step, an EMA and a power average. Largest difference of any "
        f"number (the largest weight is {largest:.1f}); `=`: the same bits.",
        "", table(header, rows),
    ]  # fmt: skip


def matrix_page(places: list[Place], pairs: dict[tuple[Place, Place], dict]) -> list[str]:
    """Return the lines of part 1."""
    same = [pair["end"] for (a, b), pair in pairs.items() if a == b]
    other = [pair["end"] for (a, b), pair in pairs.items() if a != b]
    resaved = sum(pair["resaved"] == [] for pair in pairs.values())
    name = "{0[0]}x{0[1]}".format
    rows = [[f"**{name(a)}**", *(show(pairs[a, b]["end"]) for b in places)] for a in places]
    return [
        "## Any stage and number of processes to any other", "",
        f"Loaded and saved again at once, weights, moments, averages and counters are the same bits: {resaved} of "
        f"{len(pairs)} pairs. After {STEPS - HALF} more steps, beside the run that was not interrupted: "
        f"{sum(d == 0 for d in same)} of {len(same)} restarts on the same stage and processes are the same bits, and "
        f"so are {sum(d == 0 for d in other)} of the {len(other)} others; the largest difference among these is "
        f"{max(other):.1e}.", "",
        f"Largest difference of any weight, moment or average at the end; rows: stage x processes of the checkpoint, "
        f"columns: of the restart; {GLOBAL_BATCH} frames a step everywhere; `=`: the same bits.", "",
        table(["", *map(name, places)], rows),
        *[f"\n{name(a)} to {name(b)} differs after loading: {', '.join(pair['resaved'][:5])}"
          for (a, b), pair in pairs.items() if pair["resaved"]],
    ]  # fmt: skip


def folder_of(work: Path, place: Place) -> Path:
    """Return where the run of a place is."""
    return work / f"stage{place[0]}on{place[1]}"


def checkpoint_of(work: Path, place: Place, step: int = STEPS) -> Path:
    """Return a checkpoint of the unbroken run of a place."""
    return folder_of(work, place) / f"model.ckpt-{step}.pt"


def agree_on_port(note: Path, folder: Path, input_file: Path) -> None:
    """Make the folder of a run as rank 0, and meet at a port that is free now; the others read which one it is."""
    from parallel_runs import free_port

    if os.environ["RANK"] == "0":
        folder.mkdir(exist_ok=True)
        if folder != input_file.parent:
            shutil.copy(input_file, folder)
        port = free_port()
        note.with_suffix(".part").write_text(str(port))
        os.replace(note.with_suffix(".part"), note)
    while not note.exists():
        time.sleep(0.005)
    os.environ["MASTER_PORT"] = note.read_text()


def tensors_of(tree, path: str = ""):
    """Yield every tensor and number of a checkpoint with its place; not the config."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if path or key != "config":
                yield from tensors_of(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from tensors_of(value, f"{path}.{number}")
    elif isinstance(tree, (bool, int, float, str)) or tree is None:
        yield path, torch.tensor(math.nan) if tree is None or isinstance(tree, str) else torch.tensor(tree)


def differing(left, right) -> list[str]:
    """Return the places in two checkpoints that are not the same bits."""
    import torch

    a, b = dict(tensors_of(left)), dict(tensors_of(right))
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or a[name].dtype != b[name].dtype
        or not torch.equal(a[name].nan_to_num(), b[name].nan_to_num())
    )


def largest_differences(left, right) -> dict[str, float]:
    """Return the largest difference of any number of the weights, the moments and the averages."""
    out = {}
    for part, keys in PARTS.items():
        sides = [dict(tensors_of({key: side[key] for key in keys})) for side in (left, right)]
        assert sides[0].keys() == sides[1].keys()
        numbers = [(a.double() - sides[1][name].double()).abs().nan_to_num() for name, a in sides[0].items()]
        out[part] = max(float(n.max()) for n in numbers if n.numel())
    return out


def show(difference: float) -> str:
    """Return a difference for a table."""
    return "=" if difference == 0 else f"{difference:.0e}"


if __name__ == "__main__":
    main()
