"""Errors on old and new data before, during and after fine-tuning on the new data: alone, slowly, or with replay.

usage: python benchmarks/forgetting.py --sources DIR [--work DIR] [--quick] [--output PAGE]

Two sets with DFT labels: 3BPA at 300 K (old) and 1200 K (new), and silicon without (old) and with vacancies (new). A
small model is trained on old frames, and from it each arm is fine-tuned. Each part is divided by a fixed draw: most
frames train, some choose how much of the old weights is mixed into the new ones, and the errors are those on the rest.
DIR has the clones that init_sets.py names. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from anytime import SMALL, inside
from ase import Atoms
from ase.io import read, write
from init_sets import documents

SEEDS = (1, 2, 3)
PARTS = ("old", "new")
METRICS = {"E": "meV/atom", "F": "meV/angstrom"}
TIMES = ("before", "halfway", "after")
LR_ADJUST, LOW = 30, 0.1  # LOW: of the rate of the other arms
REPLAY = 0.3  # of the steps
PREFACTORS = {"e": 20, "f": 100}
SHARES = {"train": 0.7, "choose": 0.1, "test": 0.2}
MIXTURES = (0.25, 0.5, 0.75)  # shares of the fine-tuned weights


@dataclass(frozen=True)
class Case:
    """A set: its elements, frames of a batch, learning rate, frames of the old and the new part."""

    about: str
    type_map: tuple[str, ...]
    batch: int
    rate: float
    frames: Callable[[Path], tuple[list[Atoms], list[Atoms]]]


@dataclass(frozen=True)
class Arm:
    """A way to fine-tune.

    Attributes:
        about: for the page.
        bias: ``finetune_bias``.
        rate: of the learning rate.
        old: what the old frames of a second task are labelled with: ``train`` is DFT; empty without such a task.
    """

    about: str
    bias: str = "keep"
    rate: float = 1.0
    old: str = ""


ARMS = {
    "new": Arm("new frames; the bias is moved to them (the default)", "fit"),
    "new, keep": Arm("new frames; the bias is kept"),
    "new, keep, low rate": Arm("the same at a tenth of the learning rate", rate=LOW),
    "replay": Arm("30 % of the steps on the old training frames", old="train"),
    "replay, low rate": Arm("the same at a tenth of the learning rate", rate=LOW, old="train"),
    "replay, labels of the model": Arm("the same frames, labelled by the model before fine-tuning", old="labelled"),
}


def _molecule(sources: Path) -> tuple[list[Atoms], list[Atoms]]:
    folder = sources / "BOTNet-datasets/dataset_3BPA"
    old, mixed = read(folder / "train_300K.xyz", ":"), read(folder / "train_mixedT.xyz", ":")
    return old, mixed[len(mixed) * 2 // 3 :]  # sorted by temperature: 300, 600, 1200 K


def _silicon(sources: Path) -> tuple[list[Atoms], list[Atoms]]:
    file = sources / "mlearn/data/Si/training.json"
    groups = [document["group"] for document in json.loads(file.read_text())]
    parts = {"Vacancy": [], "AIMD-NVT": [], "Elastic": []}
    for group, atoms in zip(groups, documents(file)):
        parts.get(group, []).append(atoms)
    return parts["AIMD-NVT"] + parts["Elastic"], parts["Vacancy"]


CASES = {
    "3BPA": Case("3BPA, one molecule of 27 atoms: 300 K, then 1200 K", ("C", "H", "N", "O"), 4, 0.045, _molecule),
    "Si": Case(
        "silicon, 64 atoms: crystal, strained and in MD, then 63 atoms with a vacancy", ("Si",), 1, 0.05, _silicon
    ),
}


def main() -> None:
    """Train what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder of the clones")
    parser.add_argument("--work", type=Path, default=common.RUNS / "forgetting", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--sets", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", nargs=2, type=int, default=(2000, 600), help="before and of fine-tuning")
    parser.add_argument("--quick", action="store_true", help="one seed, 40 and 20 steps")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps = args.seeds[:1], (40, 20)
    logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    args.work = args.work.resolve()
    found = {(name, seed): _results(args, name, seed) for seed in args.seeds for name in args.sets}
    common.publish(_page(args, found), args.output)


def _results(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Return the errors of each arm by time, part and metric; those of mixed weights have one time, ``after``."""
    folder = args.work / f"{name}-{seed}-{args.steps[0]}-{args.steps[1]}"
    if (folder / "results.json").exists():
        return json.loads((folder / "results.json").read_text())
    data, began = _write_data(args, name), time.process_time()
    first = _train(folder / "first", _input(name, seed, args.steps[0], {"old": f"{data}/old_train.xyz"}, ARMS["new"]))
    before = folder / "first" / f"model.ckpt-{first}.pt"
    labelled = folder / "labelled.xyz"
    labelled.unlink(missing_ok=True)
    _say(["convert", f"{data}/old_train.xyz", str(labelled), "--labels-of", str(before)])
    old = {"train": f"{data}/old_train.xyz", "labelled": str(labelled)}
    results = {}
    for arm, how in ARMS.items():
        place = folder / arm.replace(", ", "_").replace(" ", "_")
        parts = {"new": f"{data}/new_train.xyz"} | ({"old": old[how.old]} if how.old else {})
        steps = _train(place, _input(name, seed, args.steps[1], parts, how), finetune=str(before))
        head = "new" if how.old else None
        models = [_model(place / f"model.ckpt-{step}.pt", head) for step in (steps // 2, steps)]
        models.insert(0, _at_the_start(before, models[0]))
        results[arm] = {when: _errors(model, data, "test") for when, model in zip(TIMES, models)}
        if not how.old and how.bias == "keep":
            results[f"{arm}, mixed"] = _mixed(models[0], models[-1], data)
    results["cpu_s"] = time.process_time() - began
    (folder / "results.json").write_text(json.dumps(results))
    print(f"{name}, seed {seed}: {results['cpu_s']:.0f} s of processor time", flush=True)
    return results


def _write_data(args: argparse.Namespace, name: str) -> Path:
    """Write the frames of both parts, divided by a fixed draw."""
    folder = args.work / "data" / name
    if not folder.exists():
        folder.mkdir(parents=True)
        for part, frames in zip(PARTS, CASES[name].frames(args.sources)):
            order = np.random.default_rng(20261124).permutation(len(frames))
            ends = np.rint(np.cumsum([0, *SHARES.values()]) * len(frames)).astype(int)
            for use, begin, end in zip(SHARES, ends, ends[1:]):
                write(folder / f"{part}_{use}.xyz", [frames[k] for k in order[begin:end]])
    return folder


def _input(name: str, seed: int, steps: int, parts: Mapping[str, str], arm: Arm) -> dict[str, Any]:
    """Return the input of a run of one part, or of both as tasks with one model."""
    case, tasks = CASES[name], {}
    model = {
        "type_map": list(case.type_map),
        "descriptor": {"type": "se_e2_a", "sel": "auto", "type_one_side": True, "seed": seed, **SMALL},
        "fitting_net": {"neuron": [40, 40, 40], "precision": "float32", "seed": seed},
    }
    rate = arm.rate * case.rate
    config: dict[str, Any] = {
        "model": {**model, "finetune_bias": arm.bias},
        "optimizer": {"type": "HybridMuon", "lr_adjust": LR_ADJUST, "weight_decay": 0},
        "learning_rate": {"type": "wsd", "decay_type": "linear", "start_lr": rate, "stop_lr": rate / 100,
                          "decay_phase_ratio": 0.5, "warmup_steps": steps // 30},
        "loss": {f"{when}_pref_{term}": value for term, value in PREFACTORS.items() for when in ("start", "limit")},
        "training": {"numb_steps": steps, "seed": seed, "save_freq": steps // 2, "disp_freq": steps},
    }  # fmt: skip
    tasks = {part: {"training_data": {"systems": [file], "batch_size": case.batch}} for part, file in parts.items()}
    if len(parts) == 1:
        config["training"] |= next(iter(tasks.values()))
        return config
    one = {key: key for key in model} | {"finetune_head": "Default", "finetune_bias": arm.bias}
    config["model"] = {"shared_dict": model, "model_dict": dict.fromkeys(parts, one)}
    config["loss_dict"] = dict.fromkeys(parts, config.pop("loss"))
    config["training"] |= {"data_dict": tasks, "model_prob": {"new": 1 - REPLAY, "old": REPLAY}}
    return config


def _train(folder: Path, config: Mapping[str, Any], **start: str) -> int:
    """Train in a folder and return the number of steps."""
    from deepmd_ema.training.run import run_training

    folder.mkdir(parents=True, exist_ok=True)
    with inside(folder):
        return run_training(config, device="cpu", **start).step


def _say(words: Sequence[str]) -> None:
    from deepmd_ema.cli import main as program

    with contextlib.redirect_stdout(io.StringIO()):
        assert program(words) == 0


def _model(file: Path, head: str | None = None) -> Any:
    from deepmd_ema.infer.load import load_model

    return load_model(file, head=head)


def _at_the_start(file: Path, tuned: Any) -> Any:
    """Return the model of the file with the bias that fine-tuning has given it, which no step changes."""
    model = _model(file)
    model.model.out_bias.copy_(tuned.model.out_bias)
    return model


def _mixed(old: Any, new: Any, data: Path) -> dict[str, Any]:
    """Return the errors of old and new weights mixed in the share with the least errors on the choosing frames."""
    weights, found = (old.model.state_dict(), new.model.state_dict()), {}
    base = {key: {name: tensor.clone() for name, tensor in of.items()} for key, of in zip(("old", "new"), weights)}
    scores = {}
    for share in (0.0, *MIXTURES, 1.0):
        mixed = {name: tensor.lerp(base["new"][name], share) if tensor.is_floating_point() else tensor
                 for name, tensor in base["old"].items()}  # fmt: skip
        new.model.load_state_dict(mixed)
        found[share] = _errors(new, data, "test")
        choosing = _errors(new, data, "choose")
        scores[share] = sum(np.log(choosing[part][metric]) for part in PARTS for metric in METRICS)
    best = min(scores, key=scores.__getitem__)
    return {"after": found[best], "share": best}


def _errors(loaded: Any, data: Path, use: str) -> dict[str, dict[str, float]]:
    """Return the RMSEs on both parts."""
    from deepmd_ema.data.collate import PairCache
    from deepmd_ema.data.loader import sequential_batches
    from deepmd_ema.infer.evaluate import open_labelled
    from deepmd_ema.labels import ENERGY, FORCE
    from deepmd_ema.metrics import evaluate

    out, labels = {}, (ENERGY, FORCE)
    for part in PARTS:
        systems = open_labelled([f"{data}/{part}_{use}.xyz"], loaded.config, labels)
        batches = sequential_batches(systems, loaded.model.layout, PairCache(), labels=labels)
        errors = evaluate(loaded.model, batches, torch.device("cpu"))
        out[part] = {metric: 1000 * errors.metric(f"{metric}:RMSE") for metric in METRICS}
    return out


def _page(args: argparse.Namespace, found: Mapping[tuple[str, int], dict[str, Any]]) -> str:
    """Return the page: medians of all arms, then each seed."""
    minutes = sum(results["cpu_s"] for results in found.values()) / 60
    first, steps = args.steps
    lines = [
        f"# Fine-tuning without forgetting, {common.today()}", "",
        f"Command: `python benchmarks/forgetting.py --sources DIR --steps {first} {steps}`. {minutes:.0f} minutes of "
        f"one core; {common.machine(common.programs(None), 1, 'cpu')}.", "",
        "se_e2_a, cutoff 4.5 angstrom, neuron 8-16-32, HybridMuon with the rates of `dp-ema init`, "
        f"{first} steps on old frames, then {steps} in each arm, seeds {', '.join(map(str, args.seeds))}. Errors are "
        "RMSEs on test frames, which choose nothing.", "",
        common.table(["arm", "trained on"], [[name, arm.about] for name, arm in ARMS.items()]),
    ]  # fmt: skip
    for name in args.sets:
        lines += ["", f"## {CASES[name].about}", "", _medians(args, found, name), "", *_seeds(args, found, name)]
    return "\n".join(lines)


def _medians(args: argparse.Namespace, found: Mapping[tuple[str, int], dict[str, Any]], name: str) -> str:
    """Return a table of medians over the seeds, before -> halfway -> after."""
    header = ["arm", *(f"{part} {metric}, {unit}" for part in PARTS for metric, unit in METRICS.items())]
    rows = []
    for arm in _arms(found[name, args.seeds[0]]):
        results = [found[name, seed][arm] for seed in args.seeds]
        times = [when for when in TIMES if when in results[0]]
        rows.append([arm, *(
            " → ".join(f"{statistics.median(r[when][part][metric] for r in results):.3g}" for when in times)
            for part in PARTS for metric in METRICS
        )])  # fmt: skip
    return "Medians over the seeds, before → halfway → after.\n\n" + common.table(header, rows)


def _seeds(args: argparse.Namespace, found: Mapping[tuple[str, int], dict[str, Any]], name: str) -> list[str]:
    """Return a table of each seed after fine-tuning."""
    header = ["arm, after", *(f"{part} {metric}" for part in PARTS for metric in METRICS)]
    rows = []
    for arm in _arms(found[name, args.seeds[0]]):
        results = [found[name, seed][arm] for seed in args.seeds]
        shares = [f"{r['share']:g}" for r in results if "share" in r]
        title = f"{arm} (share of new weights {', '.join(shares)})" if shares else arm
        cells = [", ".join(f"{r['after'][part][metric]:.3g}" for r in results) for part in PARTS for metric in METRICS]
        rows.append([title, *cells])
    return ["Each seed.", "", common.table(header, rows)]


def _arms(results: Mapping[str, Any]) -> list[str]:
    return [arm for arm in results if arm != "cpu_s"]


if __name__ == "__main__":
    main()
