"""Uncertainty of forces from one run, beside a committee of four seeds: rank correlation with the true force error.

usage: python benchmarks/uncertainty.py --sources DIR --work DIR [--max-minutes M] [--output PAGE]

Five sets, each with test frames like those of training and others that differ (hotter, larger molecules, vacancies).
Small models in float32, four seeds, at a constant and at a decaying learning rate. Judged is the average p05 of a seed:
how do estimates of its force error rank atoms and frames by the true error? Estimates from one run:

- averages: the spread of live weights and of averages made of snapshots;
- SWAG: samples of all weights from a diagonal normal distribution with the moments of snapshots or of live weights
  (Maddox et al., arXiv:1902.02476, equation 1 and section 3.3), times a factor;
- force: the length of the predicted force, which takes no estimate at all.

DIR of --sources holds the clones that ``init_sets.py`` names. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from ase import Atoms
from ase.io import read, write
from init_sets import documents
from scipy.stats import rankdata, spearmanr
from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.batch import Batch
from deepmd_ema.config import config_from_dict
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.convert import convert_data
from deepmd_ema.data.loader import sequential_batches
from deepmd_ema.data.source import FrameSource
from deepmd_ema.infer.evaluate import open_labelled
from deepmd_ema.labels import ENERGY, FORCE, LABELS
from deepmd_ema.model.build import build_models
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.posthoc.combination import find_combinations
from deepmd_ema.posthoc.snapshots import SnapshotRun, combine, find_snapshots
from deepmd_ema.training.run import run_training

SEEDS = (1, 2, 3, 4)
SCHEDULES = {"constant": 1e-3, "decaying": 3e-5}  # learning rate at the end
STEPS, SNAPSHOT_FREQ, SAVE_FREQ = 2000, 50, 100
PREFACTORS = {ENERGY: 1.0, FORCE: 10.0}
JUDGED = "p05"
SIGMA_RELS = (0.03, 0.05, 0.10, 0.15)
NUM_SAMPLES = 8  # of SWAG
SWAG_FACTORS = (1, 10)
RIVALS = ("committee", "committee, same cost", "averages")
QUALITIES = {
    "atoms": "Rank correlation of the deviation and the error of each atom's force",
    "frames": "Rank correlation of the largest deviation and the largest error of each frame",
    "worst": "Area under the curve for the tenth of the frames with the largest error",
    "ratio": "Root mean square of the errors over that of the deviations",
}
WORST_PART = 0.1


@dataclass(frozen=True)
class Data:
    """Frames of one set.

    Attributes:
        about: of training frames, and of the two kinds of test frames.
        frames: given the folder of the clones, frames for training, like them, and different ones.
        batch: frames of a training batch.
    """

    about: str
    frames: Callable[[Path], Sequence[Sequence[Atoms]]]
    batch: int


def _bpa(sources: Path) -> list[list[Atoms]]:
    folder = sources / "BOTNet-datasets/dataset_3BPA"
    cold, mixed = (read(folder / f"train_{name}.xyz", ":") for name in ("300K", "mixedT"))
    return [[a for k, a in enumerate(cold) if k % 5], cold[::5], [*mixed[200:320:2], *mixed[360:480:2]]]


def _acac(sources: Path) -> list[list[Atoms]]:
    folder = sources / "BOTNet-datasets/dataset_acac"
    return [
        read(folder / f"{name}.xyz", every) for name, every in
        (("train_300K", ":"), ("test_MD_300K", "::4"), ("test_MD_600K", "::4"))
    ]  # fmt: skip


def _molybdenum(sources: Path) -> list[list[Atoms]]:
    file = sources / "mlearn/data/Mo/training.json"
    groups = [(each["group"], each["description"]) for each in json.loads(file.read_text())]
    known, other = [], []
    for atoms, (group, text) in zip(documents(file), groups):
        is_known = group == "Elastic" or (group == "AIMD-NVT" and text.endswith(" 300 K"))
        (known if is_known else other).append(atoms)
    return [[a for k, a in enumerate(known) if k % 4], known[::4], [a for a in other if len(a) > 50][::2]]


def _example(system: str) -> list[Atoms]:
    """Return the frames of a system of the examples."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "data.extxyz")
        convert_data([str(common.ROOT / "examples" / system)], str(file))
        return read(file, ":")


def _molecules(_: Path) -> list[list[Atoms]]:
    return [_example(f"molecules/data/{name}") for name in ("train_small", "validation_small", "validation_large")]


def _water(_: Path) -> list[list[Atoms]]:
    train = [atoms for t in (300, 350) for atoms in _example(f"water/data/train_{t}K")]
    # 12 frames of each of 300, 350, 400, 450 and 500 K
    return [train, _example("water/data/validation")[:24], _example("water/data/train_500K")[::3]]


SETS = {
    "3BPA": Data("3BPA, DFT: 300 K; 300 K; 600 and 1,200 K", _bpa, 4),
    "acac": Data("acetylacetone, DFT: 300 K; 300 K; 600 K", _acac, 4),
    "molecules": Data(
        "GFN2-xTB: CH3OH, CH3NH2, HCOOH, CH3COOH; the same; C2H5OH, CH3OCH3, CH3CONH2, C3H8",
        _molecules,
        4,
    ),
    "Mo": Data("Mo, DFT: MD at 300 K and strained; the same; MD at 3,000 and 6,000 K, vacancies", _molybdenum, 2),
    "water": Data("water, GFN1-xTB: 300 and 350 K; the same; 500 K", _water, 1),
}


def main() -> None:
    """Train and measure what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder of the clones")
    parser.add_argument("--work", type=Path, default=common.RUNS / "uncertainty", help="folder of the runs")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="start no further run after this time")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
    end, found = time.monotonic() + 60 * args.max_minutes, {}
    for schedule in args.schedules:
        for name in args.sets:
            case = Case(name, schedule, args.work.resolve(), args.sources.resolve())
            if time.monotonic() < end or case.file.exists():
                found[case] = case.result()
    common.publish(_page(found), args.output)


@dataclass(frozen=True)
class Case:
    """The runs of one set with one schedule.

    Attributes:
        name: of the set.
        schedule: of the learning rate.
        work: folder of all runs.
        sources: folder of the clones.
    """

    name: str
    schedule: str
    work: Path
    sources: Path

    @property
    def file(self) -> Path:
        """Path of the result."""
        return self.work / self.name / f"{self.schedule}.json"

    @property
    def data(self) -> list[Path]:
        """Paths of the frames: training, like training, different."""
        return [self.work / self.name / f"{part}.extxyz" for part in ("train", "like", "different")]

    def result(self) -> dict[str, Any]:
        """Return the quality of each estimate, by seed and part; from the file, if it is there."""
        if not self.file.exists():
            if not self.data[-1].exists():
                self.data[0].parent.mkdir(parents=True, exist_ok=True)
                for path, frames in zip(self.data, SETS[self.name].frames(self.sources)):
                    write(path, frames)
            folders = [self._trained(seed) for seed in SEEDS]
            result = _measure(folders, self.data)
            self.file.write_text(json.dumps(result))
            print(f"{self.name}, {self.schedule}: done", flush=True)
        return json.loads(self.file.read_text())

    def _trained(self, seed: int) -> Path:
        folder = self.work / self.name / f"{self.schedule}-{seed}"
        if not (folder / f"model.ckpt-{STEPS}.pt").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "input.json").write_text(json.dumps(self._input(seed)))
            with contextlib.chdir(folder):
                run_training("input.json", device="cpu")
        return folder

    def _input(self, seed: int) -> dict[str, Any]:
        elements = sorted({symbol for atoms in read(self.data[0], ":") for symbol in atoms.get_chemical_symbols()})
        sizes = {"rcut": 4.5, "rcut_smth": 0.5, "neuron": [8, 16, 32], "axis_neuron": 8, "type_one_side": True}
        nets = {"precision": "float32", "seed": seed}
        weights = {f"{when}_pref_{LABELS[n].symbol}": p for n, p in PREFACTORS.items() for when in ("start", "limit")}
        kept = {"snapshots": True, "snapshot_freq": SNAPSHOT_FREQ, "ckpt_keep": 1}
        return {
            "model": {
                "type_map": elements,
                "descriptor": {"type": "se_e2_a", "sel": "auto", **sizes, **nets},
                "fitting_net": {"neuron": [40, 40, 40], **nets},
            },
            "learning_rate": {
                "type": "wsd", "decay_type": "linear", "start_lr": 1e-3, "stop_lr": SCHEDULES[self.schedule],
                "warmup_steps": 100, "decay_phase_ratio": 0.4,
            },
            "loss": {"type": "ener", **weights},
            "training": {
                "training_data": {"systems": [str(self.data[0])], "batch_size": SETS[self.name].batch},
                "numb_steps": STEPS,
                "seed": seed,
                "disp_freq": 500,
                "save_freq": SAVE_FREQ,
                "max_ckpt_keep": 10**6,
                "averaging": [
                    {"name": "p05", "type": "power", "sigma_rel": 0.05, **kept},
                    {"name": "p10", "type": "power", "sigma_rel": 0.10, **kept},
                ],
            },
        }  # fmt: skip


@dataclass(frozen=True)
class _Frames:
    """Test frames of both parts, in the order in which a model computes their forces.

    Attributes:
        model: any weights are loaded into it.
        systems: like training, different.
        cache: their neighbors.
    """

    model: EnergyModel
    systems: Sequence[FrameSource]
    cache: PairCache

    def forces(self, weights: Mapping[str, Tensor]) -> np.ndarray:
        """Return the forces (A, 3)."""
        self.model.load_state_dict(weights)
        with torch.no_grad():
            return np.concatenate([self.model(batch)[FORCE].double().numpy() for batch in self._batches()])

    def truth(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the labels (A, 3), the frame of each atom, and the part of each frame."""
        labels, frames, count = [], [], 0
        for batch in self._batches():
            labels.append(batch.labels[FORCE].double().numpy())
            frames.append(batch.atom_frame.numpy() + count)
            count += len(batch.num_atoms)
        parts = np.repeat([0, 1], [system.num_frames for system in self.systems])
        return np.concatenate(labels), np.concatenate(frames), parts

    def _batches(self) -> Iterator[Batch]:
        return sequential_batches(self.systems, self.model.layout, self.cache, 512, (ENERGY, FORCE))


def _measure(folders: Sequence[Path], data: Sequence[Path]) -> dict[str, Any]:
    """Return the errors, and by seed, estimate and part the quality of estimates."""
    runs = [find_snapshots(folder) for folder in folders]
    judged = [checkpoint.weights_in(run.payload, run.reference, JUDGED)[0] for run in runs]
    config = next(iter(config_from_dict(runs[0].payload["config"]).tasks.values())).model
    model = build_models({"": config}).by_task[""].eval()
    tests = [open_labelled([path], config, (ENERGY, FORCE))[0] for path in data[1:]]
    frames = _Frames(model, tests, PairCache())
    labels, frame, parts = frames.truth()
    committee = np.stack([frames.forces(weights) for weights in judged])
    quarter = [checkpoint.load(folder / f"model.ckpt-{STEPS // len(SEEDS)}.pt") for folder in folders]
    cheap = np.stack([frames.forces(checkpoint.weights_in(one, "", JUDGED)[0]) for one in quarter])
    by_seed = []
    for seed, run, own in zip(SEEDS, runs, committee):
        estimates = {
            "force": np.linalg.norm(own, axis=-1),
            "committee": _spread(committee),
            "committee, same cost": _spread(cheap),
            **_from_trajectory(run, frames),
            **_from_swag(run, frames, seed),
        }
        error = np.linalg.norm(own - labels, axis=-1)
        by_seed.append({name: _quality(estimate, error, frame, parts) for name, estimate in estimates.items()})
    errors = [[_rms((own - labels)[parts[frame] == part]) for own in committee] for part in (0, 1)]
    return {"errors": errors, "by_seed": by_seed}


def _spread(forces: np.ndarray) -> np.ndarray:
    """Return the deviation of each atom's force, as model-devi computes it, from those of models (M, A, 3)."""
    return np.sqrt(forces.var(axis=0).sum(axis=-1))


def _from_trajectory(run: SnapshotRun, frames: _Frames) -> dict[str, np.ndarray]:
    made = combine(run, find_combinations(run.tracks, SIGMA_RELS, run.step).combinations)
    averages = np.stack([frames.forces(weights) for weights in [run.payload["model"], *made]])
    last = [checkpoint.load(run.folder / f"model.ckpt-{step}.pt") for step in range(STEPS // 2, STEPS + 1, STEPS // 10)]
    live = np.stack([frames.forces(one["model"]) for one in last])
    mine = np.stack([frames.forces(checkpoint.weights_in(one, "", JUDGED)[0]) for one in last])
    return {
        "live and averages": _spread(averages),
        "averages": _spread(averages[1:]),
        "checkpoints, live": _spread(live),
        "checkpoints, p05": _spread(mine),
    }


def _from_swag(run: SnapshotRun, frames: _Frames, seed: int) -> dict[str, np.ndarray]:
    """Return the spread of samples of the weights, by whose moments they have and the factor of their deviations."""
    live = [checkpoint.load(run.folder / f"model.ckpt-{s}.pt") for s in range(STEPS // 2, STEPS + 1, SAVE_FREQ)]
    averaged = [checkpoint.load(s.path) for s in run.snapshots if s.profile == JUDGED and s.step >= STEPS // 2]
    found = {}
    for of, payloads in (("live", live), ("p05", averaged)):
        moments = {}
        for name in run.averaged:
            values = torch.stack([one["model"][name].double() for one in payloads])
            moments[name] = values.mean(0), values.std(0, correction=0)
        for factor in SWAG_FACTORS:
            random = torch.Generator().manual_seed(seed)
            forces = []
            for _ in range(NUM_SAMPLES):
                drawn = {
                    name: mean + factor * deviation * torch.randn(mean.shape, generator=random, dtype=torch.float64)
                    for name, (mean, deviation) in moments.items()
                }
                forces.append(frames.forces({**run.payload["model"], **drawn}))
            found[f"SWAG of {of}, x{factor}"] = _spread(np.stack(forces))
    return found


def _quality(estimate: np.ndarray, error: np.ndarray, frame: np.ndarray, parts: np.ndarray) -> dict[str, list[float]]:
    """Return the quality of an estimate of each atom's error: a number for each part, and for both together."""
    most, worst = np.zeros(len(parts)), np.zeros(len(parts))
    np.maximum.at(most, frame, estimate)
    np.maximum.at(worst, frame, error)
    of_atom, found = parts[frame], {}
    for chosen in ((0,), (1,), (0, 1)):
        atoms, frames = np.isin(of_atom, chosen), np.isin(parts, chosen)
        values = {
            "atoms": spearmanr(estimate[atoms], error[atoms])[0],
            "frames": spearmanr(most[frames], worst[frames])[0],
            "worst": _area(most[frames], worst[frames] >= np.quantile(worst[frames], 1 - WORST_PART)),
            "ratio": _rms(error[atoms]) / max(_rms(estimate[atoms]), 1e-30),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(float(value))
    return found


def _area(values: np.ndarray, is_wanted: np.ndarray) -> float:
    """Return the area under the receiver operating characteristic: how often a wanted one has the larger value."""
    wanted, others = is_wanted.sum(), (~is_wanted).sum()
    return (rankdata(values)[is_wanted].sum() - wanted * (wanted + 1) / 2) / (wanted * others)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _page(found: Mapping[Case, Mapping[str, Any]]) -> str:
    """Return the page: a table for each quality and schedule, and how often estimates win."""
    page = [
        f"# Uncertainty of forces from one run, {common.today()}",
        "Command: `python benchmarks/uncertainty.py --sources DIR`. Machine: "
        f"{common.machine(common.programs(None), 1, 'cpu')}.",
        common.table(
            ["set", "training; like it; different", "schedule", "F RMSE, meV/angstrom, each seed"],
            [
                [case.name, SETS[case.name].about, case.schedule,
                 ", ".join(f"{1000 * a:.0f} / {1000 * b:.0f}" for a, b in zip(*result["errors"]))]
                for case, result in found.items()
            ],
        ),
    ]  # fmt: skip
    names = list(next(iter(found.values()))["by_seed"][0])
    for quality, title in QUALITIES.items():
        page.append(f"## {title}")
        for schedule in dict.fromkeys(case.schedule for case in found):
            of = {case: result for case, result in found.items() if case.schedule == schedule}
            rows = [[name, *(_cell(result, name, quality) for result in of.values()), _mean(of, name, quality)]
                    for name in names]  # fmt: skip
            page.append(common.table([f"{schedule} rate", *(case.name for case in of), "mean"], rows))
    page.append("## How often the row has the larger number, of all sets, schedules and seeds")
    rows = []
    for name in names:
        row = [name]
        for other in RIVALS:
            wins = [one[name][q][2] > one[other][q][2] for q in ("atoms", "frames", "worst")
                    for result in found.values() for one in result["by_seed"]]  # fmt: skip
            count = len(wins) // 3
            row.append("" if name == other else " ".join(str(sum(wins[k : k + count])) for k in (0, count, 2 * count)))
        rows.append([*row, str(count)])
    page.append(common.table(["atoms, frames, worst", *(f"over {other}" for other in RIVALS), "of"], rows))
    return "\n\n".join(page)


def _cell(result: Mapping[str, Any], name: str, quality: str) -> str:
    return " ".join(
        f"{statistics.median(one[name][quality][part] for one in result['by_seed']):.2f}" for part in range(3)
    )


def _mean(of: Mapping[Case, Mapping[str, Any]], name: str, quality: str) -> str:
    """Return the mean over the sets of the medians over seeds; the geometric mean of ratios."""
    medians = np.array([[statistics.median(one[name][quality][k] for one in result["by_seed"]) for k in range(3)]
                        for result in of.values()])  # fmt: skip
    means = np.exp(np.log(medians).mean(0)) if quality == "ratio" else medians.mean(0)
    return " ".join(f"{value:.2f}" for value in means)


if __name__ == "__main__":
    main()
