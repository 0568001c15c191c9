"""Restarts from any zero_stage and number of processes at any other, and comparison of training at all stages.

    python benchmarks/restart_matrix.py --descriptors se_e2_a dpa3
    python benchmarks/restart_matrix.py --quick --descriptors se_e2_a dpa2 --optimizers AdamW HybridMuon

Both parts are made for every combination of the descriptors, optimizers and precisions that are named.

Part 1, stages 0 to 3 on 1 to 4 processes: 16 runs of 8 steps of a tiny model with 6 averages, each of which saves
after 5. From there every run is continued as every other (256 restarts, 12 frames in a step everywhere). Three times it
is looked at: what is loaded is saved again at once and compared with the source, to the bit; the end is compared with
that of the run which was never interrupted, and so are the rows of the learning curves.

Part 2, stages 0 to 3 on 2 processes: the same run of 50 steps of a real model, with two averages, beside stage 0 and
beside one process with twice the batch. ``se_e2_a`` is that of the input, other descriptors take its place.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from common import (
    EXAMPLE,
    ROOT,
    RUNS,
    bare,
    machine,
    programs,
    publish,
    read_input,
    table,
    today,
    with_numeric_sel,
    with_precision,
)

sys.path.insert(0, str(ROOT / "tests"))

GLOBAL_BATCH = 12  # of 28 frames: the last batch has 4, of which one frame is left for each of 4 ranks
STEPS, HALF = 8, 5
LIMIT_S = 1200
AVERAGES = [
    {"name": "slow", "decay": 0.95, "lcurve": True},
    {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 5},
    {"name": "flat", "type": "swa", "start_step": 2, "update_every": 2, "device": "cpu"},
    {"name": "whole", "decay": 0.9, "layout": "full_tensor", "dtype": "float64"},
]
PARTS = {"weights": ("model",), "moments": ("optimizer",), "averages": ("averages",)}
CURVES = ("lcurve.out", "lcurve_slow.out")
OPTIMIZERS = {
    "Adam": {},
    "AdamW": {"weight_decay": 0.01},
    "AdamWScheduleFree": {},
    "AdaMuon": {},
    "HybridMuon": {"enable_gram": False},
    "SOAP": {"precondition_frequency": 3},
}

Place = tuple[int, int]  # stage, processes


@dataclass(frozen=True)
class Kind:
    """A training: the name of a small descriptor of the tests, the optimizer, the precision of the nets."""

    descriptor: str
    optimizer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.descriptor}, {self.optimizer}, {self.precision}"

    def put_into(self, config: dict) -> dict:
        """Return an input that trains this."""
        from toy_models import SECTIONS

        if config["model"]["descriptor"]["type"] != self.descriptor:
            section = dict(SECTIONS[self.descriptor])
            if isinstance(section.get("sel"), list):
                section["sel"] = section["sel"][: len(config["model"]["type_map"])]
            config["model"]["descriptor"] = section | {"seed": 1}
        config["optimizer"] = {"type": self.optimizer, **OPTIMIZERS[self.optimizer]}
        return with_precision(config, self.precision)


def main() -> None:
    """Run both parts for every kind and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--descriptors", nargs="+", default=["se_e2_a", "dpa3"], help="of tests/toy_models.py")
    parser.add_argument("--optimizers", nargs="+", default=["Adam"], choices=OPTIMIZERS)
    parser.add_argument("--precisions", nargs="+", default=["float64"], choices=("float64", "float32"))
    parser.add_argument(
        "--quick", action="store_true", help="stages 0 to 3 on 2 processes, one process alone; 10 steps of part 2"
    )
    parser.add_argument("--input", type=Path, default=EXAMPLE / "input.json", help="input of part 2")
    parser.add_argument("--steps", type=int, help="steps of part 2, 50 by default")
    parser.add_argument("--work", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    work = args.work / "restart_matrix"
    shutil.rmtree(work, ignore_errors=True)
    places = list(product(range(4), range(1, 5))) if not args.quick else [(0, 1), *product(range(4), [2])]
    failed: list[str] = []
    lines = [f"# Restarts between stages and numbers of processes, {today()}", "", *about(args.input, places)]
    for number, kind in enumerate(Kind(*k) for k in product(args.descriptors, args.optimizers, args.precisions)):
        folder = work / str(number)
        folder.mkdir(parents=True)
        began = time.perf_counter()
        pairs = matrix(folder, kind, places)
        stages = equal_stages(folder, kind, args.input, args.steps or (10 if args.quick else 50))
        failed += [str(kind)] * any(not_as_promised(a == b, pair) for (a, b), pair in pairs.items())
        lines += ["", f"## {kind}", "", *matrix_page(places, pairs), "", *stages, "",
                  f"{time.perf_counter() - began:.0f} s on {machine(programs(None), 1, 'cpu')}."]  # fmt: skip
        if args.output is not None:  # what is done is kept, should a later kind end the run
            args.output.write_text("\n".join(lines) + "\n")
    publish("\n".join(lines), args.output)
    if failed:
        raise SystemExit("not as promised: " + "; ".join(failed))


def not_as_promised(same_place: bool, pair: dict) -> bool:
    """Whether something is not the same bits that should be."""
    return pair["resaved"] != [] or (same_place and (pair["end"] != 0 or pair["curves"] != []))


def matrix(work: Path, kind: Kind, places: list[Place]) -> dict[tuple[Place, Place], dict]:
    """Return for each (source, target) what differed after loading, and the largest difference at the end."""
    from helpers import tiny_input, write_system
    from parallel_runs import run_ranks

    write_system(work / "data", frames=28, natoms=12, seed=1, sets=2)
    for stage, ranks in places:
        config = tiny_input(
            ["../data"], ["../data"], num_steps=STEPS, model__fitting_net__neuron=[7, 7], training__disp_freq=2,
            training__zero_stage=stage, training__save_freq=HALF, training__disp_avg=True, training__enable_ema=True,
            training__ema_decay=0.9, training__averaging=AVERAGES,
        )  # fmt: skip
        for section in ("training_data", "validation_data"):
            config["training"][section]["batch_size"] = GLOBAL_BATCH // ranks
        folder = folder_of(work, (stage, ranks))
        folder.mkdir()
        (folder / "input.json").write_text(json.dumps(kind.put_into(config)))
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

    from deepmd_ema.training.loop.trainer import Callback
    from deepmd_ema.training.run import run_training

    class Compare(Callback):
        """Compares what a restart would save before its first step with what it was made of."""

        def __init__(self, origin: Place | None) -> None:
            self.origin, self.resaved = origin, []

        def on_start(self, trainer) -> None:
            content = trainer.saver.builder.training(trainer.step, trainer.state_dict)
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
            curves = [name for name in CURVES if rows_after(where / name) != rows_after(folder / name)]
            answers.append(
                {"resaved": compare.resaved, "end": max(largest_differences(*ends).values()), "curves": curves}
            )
    return answers


def rows_after(curve: Path, step: int = HALF) -> list[str]:
    """Return the rows of a learning curve after ``step``."""
    rows = [line for line in curve.read_text().splitlines() if not line.startswith("#")]
    later = [row for row in rows if int(row.split()[0]) > step]
    assert later, curve
    return later


def equal_stages(work: Path, kind: Kind, input_file: Path, steps: int) -> list[str]:
    """Return lines about the same run at every stage on 2 processes, and on one with twice the batch."""
    import torch
    from parallel_runs import run_ranks, train_here

    config = kind.put_into(bare(with_numeric_sel(read_input(input_file, None))))
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
    return [f"The same {steps} steps at every stage on 2 processes (the largest weight is {largest:.1f}):", "",
            table(header, rows)]  # fmt: skip


def about(input_file: Path, places: list[Place]) -> list[str]:
    """Return the lines that say what was done."""
    return [
        f"First table of each kind: a tiny model, {GLOBAL_BATCH} frames a step everywhere, 6 averages; "
        f"{len(places)} runs of {STEPS} steps, each continued from its step {HALF} as every other. Rows: stage x "
        "processes of the checkpoint, columns: of the restart; the largest difference of any weight, moment or average "
        "from the run that was not interrupted; `=`: the same bits.", "",
        f"Second table: `{input_file.parent.name}`, 2 frames a step, an EMA and a power average; the largest "
        "difference of any number.",
    ]  # fmt: skip


def matrix_page(places: list[Place], pairs: dict[tuple[Place, Place], dict]) -> list[str]:
    """Return the lines of part 1."""
    same = [pair for (a, b), pair in pairs.items() if a == b]
    other = [pair["end"] for (a, b), pair in pairs.items() if a != b]
    resaved = sum(pair["resaved"] == [] for pair in pairs.values())
    name = "{0[0]}x{0[1]}".format
    rows = [[f"**{name(a)}**", *(show(pairs[a, b]["end"]) for b in places)] for a in places]
    return [
        f"Loaded and saved again at once, weights, moments, averages and counters are the same bits: {resaved} of "
        f"{len(pairs)} pairs. At the end {sum(pair['end'] == 0 for pair in same)} of {len(same)} restarts on the same "
        f"stage and processes are the same bits, {sum(pair['curves'] == [] for pair in same)} with the same rows of "
        f"both learning curves; of the {len(other)} others {sum(d == 0 for d in other)} are the same bits, and the "
        f"largest difference is {max(other):.1e}.", "",
        table(["", *map(name, places)], rows),
        *[f"\n{name(a)} to {name(b)} differs after loading: {', '.join(pair['resaved'][:5])}"
          for (a, b), pair in pairs.items() if pair["resaved"]],
    ]  # fmt: skip


def folder_of(work: Path, place: Place) -> Path:
    """Return the folder of the run of a place."""
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
    """Yield every tensor and number of a checkpoint with its place; not the config, nor the digest, which is of it."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if path or key not in ("config", "digest"):
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
