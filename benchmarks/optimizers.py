"""Time to accuracy of Adam, SOAP, HybridMuon and AdamWScheduleFree: runs of several lengths.

usage: python benchmarks/optimizers.py --sources DIR --work DIR [--sets NAME ...] [--output PAGE]

Small models of three sets (divided_sets.py) as in anytime.py, in float32. Learning rates are chosen for each optimizer
and set among three, with a seed and a length that are not measured, by the choosing frames; each has a schedule wsd
that is constant in the first half and then falls to a hundredth, but AdamWScheduleFree a constant rate. Of each run the
best of live weights and averages by the choosing frames is measured on the others. What is finished in --work is not
done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anytime
import common
from divided_sets import CHOOSE, SETS, TEST

NAMES = ("water", "acac", "alloys")
BUDGETS = (250, 500, 1000, 2000)
FREE = "AdamWScheduleFree"
RATES = {
    "Adam": (0.01, 0.03, 0.1),
    "SOAP": (0.01, 0.03, 0.1),
    "HybridMuon": (0.05, 0.1, 0.2),
    FREE: (0.003, 0.01, 0.03),
}
SETTINGS = {
    "Adam": {"type": "Adam"},
    "SOAP": {"type": "SOAP", "weight_decay": 0},
    "HybridMuon": {"type": "HybridMuon", "weight_decay": 0, "lr_adjust": 30},
    FREE: {"type": FREE, "weight_decay": 0, **anytime.OPTIONS[anytime.LATE]},
}
TUNING_SEED, TUNING_STEPS = 11, 400
WARMUP, DECAY_PART = 20, 0.5


@dataclass(frozen=True)
class Run:
    """One run."""

    name: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    work: Path

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.work / f"{self.name}-{self.optimizer}-{self.rate:g}-{self.seed}-{self.steps}"

    @property
    def file(self) -> Path:
        """Path of its result."""
        return self.folder.with_suffix(self.folder.suffix + ".json")

    @property
    def config(self) -> dict[str, Any]:
        """The input."""
        config = anytime.make_input(self.name, self.seed, anytime.WSD, self.steps)
        config["optimizer"] = SETTINGS[self.optimizer]
        config["learning_rate"] = {
            "type": "wsd",
            "decay_type": "linear",
            "start_lr": self.rate,
            "stop_lr": self.rate if self.optimizer == FREE else self.rate / 100,
            "warmup_steps": WARMUP,
            "decay_phase_ratio": DECAY_PART,
        }
        data = config["training"]["training_data"]
        data["systems"] = [system.removeprefix("../") for system in data["systems"]]
        return config

    def result(self) -> dict[str, Any]:
        """Return the result; the run is trained and measured if there is none."""
        if self.file.exists():
            return json.loads(self.file.read_text())
        from deepmd_ema.training.run import run_training

        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "input.json").write_text(json.dumps(self.config))
        began = time.process_time()
        with anytime.inside(self.folder):
            run_training("input.json", device="cpu")
        found = {"cpu_s": time.process_time() - began, **self._errors()}
        self.file.write_text(json.dumps(found))
        shutil.rmtree(self.folder)
        print(self.file.stem, found, flush=True)
        return found

    def _errors(self) -> dict[str, Any]:
        from deepmd_ema.config import config_from_dict
        from deepmd_ema.infer.load import load_model

        file, data = self.folder / f"model.ckpt-{self.steps}.pt", self.work / "data" / self.name
        models = {"live": load_model(file).model}
        averages = [anytime.AVERAGED_POINT] if self.optimizer == FREE else anytime.AVERAGES
        models |= {name: load_model(file, average=name).model for name in averages}
        section = next(iter(config_from_dict(self.config).tasks.values())).model
        choosing, test = (anytime.Frames.open(data / part, section) for part in (CHOOSE, TEST))
        found = {name: choosing.errors(model) for name, model in models.items()}
        best = min(found, key=lambda name: math.prod(found[name].values()))
        return {"chosen": best, "choosing": found[best], "test": test.errors(models[best])}


def main() -> None:
    """Choose rates, train, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder with the clones of init_sets.py")
    parser.add_argument("--work", type=Path, default=common.RUNS / "optimizers", help="folder of the runs")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.work = args.work.resolve()
    import torch

    torch.set_num_threads(1)
    logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
    (args.work / "data").mkdir(parents=True, exist_ok=True)
    parts = [
        f"# Time to accuracy of optimizers, {common.today()}",
        f"Models of {anytime.SMALL['neuron']}, rcut {anytime.SMALL['rcut']}, float32. Rates chosen in runs of "
        f"{TUNING_STEPS} steps with seed {TUNING_SEED}. Median over the seeds (each), "
        "on the frames that chose nothing. Seconds are those of the processor, of the whole run with its start.  \n"
        f"On {common.machine(common.programs(None), 1, 'cpu')}.",
    ]
    for name in args.sets:
        SETS[name].make(args.sources, args.work / "data" / name)
        parts += _of_set(name, args)
        common.publish("\n\n".join(parts), args.output)


def _of_set(name: str, args: argparse.Namespace) -> list[str]:
    """Return the part of the page of one set."""
    tuning, rates = [], {}
    for optimizer, candidates in RATES.items():
        runs = [Run(name, optimizer, rate, TUNING_SEED, TUNING_STEPS, args.work) for rate in candidates]
        scores = {run.rate: run.result()["choosing"] for run in runs}
        rates[optimizer] = min(scores, key=lambda rate: math.prod(scores[rate].values()))
        cells = [f"{rate:g}: {error['energy']:.3g} / {error['force']:.4g}" for rate, error in scores.items()]
        tuning.append([optimizer, *cells, f"{rates[optimizer]:g}"])
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for seed in args.seeds:
        for steps in BUDGETS:
            for optimizer, rate in rates.items():
                result = Run(name, optimizer, rate, seed, steps, args.work).result()
                found.setdefault((optimizer, steps), []).append(result)
    rows = [
        [optimizer, str(steps), f"{statistics.median(result['cpu_s'] for result in results):.0f}",
         *(common.median_and_each([result["test"][quantity] for result in results]) for quantity in anytime.METRICS)]
        for (optimizer, steps), results in found.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (list(RATES).index(row[0]), int(row[1])))
    return [
        f"## {name}",
        f"{SETS[name].about}. Choice of the rate, energy meV/atom / force meV/angstrom:",
        common.table(["optimizer", "", "", "", "chosen"], tuning),
        common.table(["optimizer", "steps", "s", "energy, meV/atom", "force, meV/angstrom"], rows),
        "Steps and seconds to the errors of the longest run of Adam, between runs on a line of the logarithms:",
        common.table(["optimizer", *(f"{quantity}: {unit}" for quantity in anytime.METRICS for unit in ("steps", "s"))],
                     [[optimizer, *_to_targets(optimizer, found)] for optimizer in RATES]),
    ]  # fmt: skip


def _to_targets(optimizer: str, found: dict[tuple[str, int], list[dict[str, Any]]]) -> list[str]:
    cells = []
    for quantity in anytime.METRICS:
        target = statistics.median(result["test"][quantity] for result in found["Adam", BUDGETS[-1]])
        errors = [statistics.median(result["test"][quantity] for result in found[optimizer, b]) for b in BUDGETS]
        seconds = [statistics.median(result["cpu_s"] for result in found[optimizer, b]) for b in BUDGETS]
        cells += [_reached(values, errors, target) for values in (BUDGETS, seconds)]
    return cells


def _reached(values: Sequence[float], errors: Sequence[float], target: float) -> str:
    """Return at which of growing values an error falls to a target."""
    if errors[0] <= target:
        return f"< {values[0]:.0f}"
    for k in range(1, len(values)):
        if errors[k] <= target:
            part = math.log(errors[k - 1] / target) / math.log(errors[k - 1] / errors[k])
            return f"{values[k - 1] * (values[k] / values[k - 1]) ** part:.0f}"
    return f"> {values[-1]:.0f}"


if __name__ == "__main__":
    main()
