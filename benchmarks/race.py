"""Errors for the same labels and processor time: dp-ema, DeePMD-kit, MACE, NequIP and PET.

usage: python benchmarks/race.py --sources DIR --work DIR --peers DIR [--seconds 60 600]
                                 [--sets NAME ...] [--trainers NAME ...] [--seeds 1 2 3]
                                 [--output PAGE]

--sources holds the clones that init_sets.py names, --peers the environments that race_peers.sh
makes. Each trainer gets the same frames, one thread, and the recipe that its documentation advises
for a small set, made as long as the budget allows: two short runs give the time of the start and of
an epoch (or step), and the run has as many as fit in. Seconds are those of the processor, of the
whole command. One script evaluates all models by their ASE calculators. What is in --work is not
trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from ase.io import read, write
from common import ROOT, environment, machine, programs, publish, table, today
from init_sets import documents

TEST_FRAMES = 200  # of each file, evenly spaced
VALIDATION = 0.1
COMMAND = [sys.executable, "-m", "deepmd_ema"]
FOLDER = Path(__file__).resolve().parent


def _botnet(sources: Path, name: str) -> dict[str, Any]:
    folder = sources / "BOTNet-datasets" / f"dataset_{name}"
    tests = ("test_MD_300K", "test_MD_600K", "test_dihedral")
    train = read(folder / "train_300K.xyz", ":")
    return {"train": train, **{t.split("_")[-1]: read(folder / f"{t}.xyz", ":") for t in tests}}


def _mlearn(sources: Path, name: str) -> dict[str, Any]:
    folder = sources / "mlearn" / "data" / name
    return {
        "train": list(documents(folder / "training.json")),
        "test": list(documents(folder / "test.json")),
    }


def _water(_sources: Path, _name: str) -> dict[str, Any]:
    parts = {}
    data = ROOT / "examples" / "water" / "data"
    folders = {"train": [*data.glob("train_*")], "test": [data / "validation"]}
    for part, systems in folders.items():
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "frames.extxyz"
            subprocess.run([*COMMAND, "convert", *map(str, systems), str(file)], check=True)
            parts[part] = read(file, ":")
    return parts


SETS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "acac": _botnet,
    "Si": _mlearn,
    "Mo": _mlearn,
    "water": _water,
}
"""Frames for training and for tests, by the names of the sets."""


@dataclass(frozen=True)
class Trainer:
    """A program with its recipe.

    Attributes:
        environment: folder of --peers; empty for this program.
        kind: of race_evaluate.py.
        model: the file that is evaluated.
        unit: what the length of a run is counted in.
        probes: lengths of two short runs.
        prepare: writes the input of a run of this length in a folder; returns its commands.
    """

    environment: str
    kind: str
    model: str
    unit: str
    probes: tuple[int, int]
    prepare: Callable[[Path, int, int], list[list[str]]]


def _dp_ema(model: str) -> Trainer:
    def prepare(folder: Path, steps: int, seed: int) -> list[list[str]]:
        words = ["--model", model] if model else []
        subprocess.run(
            [*COMMAND, "init", "../train.extxyz", "--steps", str(steps), *words],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        values = yaml.safe_load((folder / "input.yaml").read_text())
        values["training"]["seed"] = seed
        (folder / "input.json").write_text(json.dumps(values))
        return [[*COMMAND, "train", "input.json"]]

    return Trainer("", "deepmd_ema", "model_ema.ckpt.pt", "steps", (40, 120), prepare)


def _deepmd(folder: Path, steps: int, seed: int) -> list[list[str]]:
    """Write the input of DeePMD-kit's water example; the rate falls 200 times in the run."""
    subprocess.run(
        [*COMMAND, "convert", "../train.extxyz", "data"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    elements = sorted({s for atoms in read(folder / "../train.extxyz", ":") for s in atoms.symbols})
    descriptor = {
        "type": "se_e2_a",
        "sel": "auto",
        "rcut_smth": 0.5,
        "rcut": 6.0,
        "neuron": [25, 50, 100],
        "resnet_dt": False,
        "axis_neuron": 16,
        "seed": seed,
    }
    values = {
        "model": {
            "type_map": elements,
            "descriptor": descriptor,
            "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "seed": seed},
        },
        "learning_rate": {
            "type": "exp",
            "decay_steps": max(1, steps // 200),
            "start_lr": 0.001,
            "stop_lr": 3.51e-8,
        },
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
            "start_pref_v": 0,
            "limit_pref_v": 0,
        },
        "training": {
            "training_data": {"systems": ["data"], "batch_size": "auto"},
            "numb_steps": steps,
            "seed": seed,
            "disp_freq": max(1, steps // 4),
            "save_freq": steps,
        },
    }
    (folder / "input.json").write_text(json.dumps(values))
    return [["dp", "--pt", "train", "input.json"], ["dp", "--pt", "freeze", "-o", "model.pth"]]


def _mace(folder: Path, epochs: int, seed: int) -> list[list[str]]:
    """Return the command of MACE's README with invariant messages, ten frames a step."""
    words = {
        "name": "race",
        "train_file": "../train.extxyz",
        "valid_fraction": VALIDATION,
        "E0s": "average",
        "model": "MACE",
        "hidden_irreps": "64x0e",
        "r_max": 5.0,
        "batch_size": 10,
        "max_num_epochs": epochs,
        "start_stage_two": max(1, round(0.8 * epochs)),
        "ema_decay": 0.99,
        "energy_key": "energy",
        "forces_key": "forces",
        "stress_key": "stress",
        "device": "cpu",
        "seed": seed,
        "eval_interval": max(1, epochs // 10),
    }
    options = [f"--{key}={value}" for key, value in words.items()]
    return [["mace_run_train", *options, "--stage_two", "--ema", "--amsgrad"]]


def _nequip(folder: Path, epochs: int, seed: int) -> list[list[str]]:
    """Write the input of NequIP's tutorial, for a CPU and without an end by patience."""
    elements = sorted({s for atoms in read(folder / "../train.extxyz", ":") for s in atoms.symbols})
    metric = "val0_epoch/weighted_sum"
    coefficients = {"total_energy": 1.0, "forces": 1.0}
    metrics = {
        "_target_": "nequip.train.EnergyForceMetrics",
        "coeffs": {"total_energy_mae": 1.0, "forces_mae": 1.0},
    }
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 5, "shuffle": True}
    values = {
        "run": ["train"],
        "data": {
            "_target_": "nequip.data.datamodule.ASEDataModule",
            "seed": seed,
            "split_dataset": {
                "file_path": str((folder / "../train.extxyz").resolve()),
                "train": 1 - VALIDATION,
                "val": VALIDATION,
            },
            "transforms": [
                {
                    "_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper",
                    "model_type_names": elements,
                },
                {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 5.0},
            ],
            "train_dataloader": loader,
            "val_dataloader": loader | {"batch_size": 10, "shuffle": False},
            "stats_manager": {
                "_target_": "nequip.data.CommonDataStatisticsManager",
                "dataloader_kwargs": {"batch_size": 10},
                "type_names": elements,
            },
        },
        "trainer": {
            "_target_": "lightning.Trainer",
            "accelerator": "cpu",
            "max_epochs": epochs,
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [
                {
                    "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "monitor": metric,
                    "dirpath": str(folder.resolve()),
                    "filename": "best",
                }
            ],
        },
        "training_module": {
            "_target_": "nequip.train.EMALightningModule",
            "ema_decay": 0.999,
            "loss": {
                "_target_": "nequip.train.EnergyForceLoss",
                "per_atom_energy": True,
                "coeffs": coefficients,
            },
            "val_metrics": metrics,
            "train_metrics": metrics,
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
            "lr_scheduler": {
                "scheduler": {
                    "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau",
                    "factor": 0.6,
                    "patience": 5,
                    "threshold": 0.2,
                    "min_lr": 1e-6,
                },
                "monitor": metric,
                "interval": "epoch",
                "frequency": 1,
            },
            "model": {
                "_target_": "nequip.model.NequIPGNNModel",
                "compile_mode": "eager",
                "seed": seed,
                "model_dtype": "float32",
                "type_names": elements,
                "r_max": 5.0,
                "num_bessels": 8,
                "bessel_trainable": False,
                "polynomial_cutoff_p": 6,
                "num_layers": 4,
                "l_max": 1,
                "parity": True,
                "num_features": 32,
                "radial_mlp_depth": 2,
                "radial_mlp_width": 64,
                "avg_num_neighbors": "${training_data_stats:num_neighbors_mean}",
                "per_type_energy_scales": "${training_data_stats:per_type_forces_rms}",
                "per_type_energy_shifts": "${training_data_stats:per_atom_energy_mean}",
                "per_type_energy_scales_trainable": False,
                "per_type_energy_shifts_trainable": False,
                "pair_potential": {
                    "_target_": "nequip.nn.pair_potential.ZBL",
                    "units": "metal",
                    "chemical_species": elements,
                },
            },
        },
        "global_options": {"allow_tf32": False},
    }
    (folder / "race.yaml").write_text(yaml.safe_dump(values))
    here = str(folder.resolve())
    compiled = ["best.ckpt", "model.nequip.pt2", "--mode", "aotinductor", "--device", "cpu"]
    return [
        ["nequip-train", "-cp", here, "-cn", "race"],
        ["nequip-compile", *compiled, "--target", "ase"],
    ]


def _pet(folder: Path, epochs: int, seed: int) -> list[list[str]]:
    """Write the options of metatrain's example of PET from scratch."""
    frames = read(folder / "../train.extxyz", ":")
    energy = {"key": "energy", "unit": "eV", "forces": {"key": "forces"}}
    if "stress" in frames[0].calc.results:
        energy["stress"] = {"key": "stress"}
    values = {
        "seed": seed,
        "device": "cpu",
        "architecture": {
            "name": "pet",
            "model": {"cutoff": 4.5},
            "training": {"num_epochs": epochs, "batch_size": 10},
        },
        "training_set": {
            "systems": {"read_from": "../train.extxyz", "length_unit": "Angstrom"},
            "targets": {"energy": energy},
        },
        "validation_set": VALIDATION,
        "test_set": 0.0,
    }
    (folder / "options.yaml").write_text(yaml.safe_dump(values))
    return [["mtt", "train", "options.yaml", "-o", "model.pt"]]


TRAINERS = {
    "dp-ema init": _dp_ema(""),
    "dp-ema se_e2_a": _dp_ema("se_e2_a"),
    "dp-ema dpa4c": _dp_ema("dpa4c"),
    "MACE": Trainer("mace", "mace", "race_stagetwo.model", "epochs", (1, 3), _mace),
    "NequIP": Trainer("nequip", "nequip", "model.nequip.pt2", "epochs", (1, 3), _nequip),
    "PET": Trainer("pet", "pet", "model.pt", "epochs", (1, 3), _pet),
    "DeePMD-kit": Trainer("deepmd", "deepmd", "model.pth", "steps", (20, 60), _deepmd),
}


def main() -> None:
    """Train what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("sources", "work", "peers"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seconds", type=float, nargs="+", default=[60], help="budgets (60)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.work, args.peers = args.work.resolve(), args.peers.resolve()
    for name in args.sets:
        _write_set(args, name)
        for seconds in args.seconds:
            for seed in args.seeds:
                for trainer in args.trainers:
                    _race(args, name, trainer, seconds, seed)
    publish(_page(args), args.output)


def _write_set(args: argparse.Namespace, name: str) -> None:
    """Write the frames of a set, unless that was done."""
    folder = args.work / name
    if (folder / "train.extxyz").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    parts = SETS[name](args.sources, name)
    for part, frames in parts.items():
        if part != "train":
            frames = frames[:: max(1, len(frames) // TEST_FRAMES)]
        for atoms in frames:
            # without what a file says beside: each reader would take another part of it
            atoms.info = {}
            atoms.arrays = {name: atoms.arrays[name] for name in ("numbers", "positions")}
        file = "train" if part == "train" else f"test_{part}"
        write(folder / f"{file}.extxyz", frames)


def _race(args: argparse.Namespace, name: str, which: str, seconds: float, seed: int) -> None:
    """Train and evaluate, unless that was done."""
    trainer = TRAINERS[which]
    stem = which.replace(" ", "_")
    result = args.work / name / f"{stem}-{seconds:g}-{seed}.json"
    if result.exists():
        return
    probes = args.work / name / f"{stem}-probes.json"
    if not probes.exists():
        times = [_train(args, name, f"{stem}-probe", trainer, n, 1)[0] for n in trainer.probes]
        probes.write_text(json.dumps(times))
    short, longer = json.loads(probes.read_text())
    each = (longer - short) / (trainer.probes[1] - trainer.probes[0])
    length = int((seconds - short) / each) + trainer.probes[0]
    if length < 1:
        print(f"{name}, {which}: the start takes longer than {seconds:g} s", flush=True)
        return
    spent, peak = _train(args, name, f"{stem}-run", trainer, length, seed)
    folder = args.work / name / f"{stem}-run"
    tests = sorted((args.work / name).glob("test_*.extxyz"))
    words = [trainer.kind, str(folder / trainer.model), "--tests", *map(str, tests)]
    python = _python(args, trainer)
    done = subprocess.run(
        [python, str(FOLDER / "race_evaluate.py"), *words],
        capture_output=True,
        text=True,
        env=environment(1, "cpu"),
        cwd=folder,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {which}: {done.stderr[-3000:]}")
    row = {"length": length, "unit": trainer.unit, "cpu_s": spent, "peak_mb": peak}
    row |= json.loads(done.stdout.splitlines()[-1])
    result.write_text(json.dumps(row, indent=1))
    print(name, which, seconds, seed, row, flush=True)


def _python(args: argparse.Namespace, trainer: Trainer) -> str:
    if not trainer.environment:
        return sys.executable
    return str(args.peers / trainer.environment / "bin" / "python")


def _train(
    args: argparse.Namespace, name: str, run: str, trainer: Trainer, length: int, seed: int
) -> tuple[float, float]:
    """Train in a new folder; return seconds of the processor and the largest memory, MB."""
    folder = args.work / name / run
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seconds = peak = 0.0
    path = f"{Path(_python(args, trainer)).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(1, "cpu") | {"PATH": path}
    for command in trainer.prepare(folder, length, seed):
        with (folder / "train.log").open("a") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env)
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{folder}: {(folder / 'train.log').read_text()[-3000:]}")
        if "train" in " ".join(command[:4]):
            seconds += used.ru_utime + used.ru_stime
            peak = max(peak, used.ru_maxrss / 1024)
    return seconds, peak


def _page(args: argparse.Namespace) -> str:
    """Return the page: a table per set and budget, medians over the seeds with their range."""
    parts = []
    for name in args.sets:
        for seconds in args.seconds:
            rows = []
            for which in args.trainers:
                stem = which.replace(" ", "_")
                files = [args.work / name / f"{stem}-{seconds:g}-{s}.json" for s in args.seeds]
                results = [json.loads(file.read_text()) for file in files if file.exists()]
                if results:
                    rows.append([which, *_cells(results)])
            if rows:
                tests = list(results[0]["errors"]) if results else []
                head = ["trainer", "length", "CPU s", *tests, "MD, us/atom/step", "MB", "seeds"]
                parts += [f"## {name}, {seconds:g} s", table(head, rows)]
    return "\n\n".join(
        [
            f"# Errors for the same labels and time, {today()}",
            "Energies (meV/atom) / forces (meV/angstrom) / stresses (meV/angstrom^3), RMSE; median "
            f"of the seeds. Machine: {machine(programs(None), 1, 'cpu')}.",
            *parts,
        ]
    )


def _cells(results: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a trainer."""
    first = results[0]
    cells = [f"{first['length']:,} {first['unit']}", f"{median(r['cpu_s'] for r in results):.0f}"]
    for test, quantities in first["errors"].items():
        values = [median(r["errors"][test][q] for r in results) for q in quantities]
        cells.append(" / ".join(f"{value:.3g}" for value in values))
    cells.append(f"{median(r['md_us'] for r in results):.0f}")
    cells.append(f"{max(r['peak_mb'] for r in results):.0f}")
    return [*cells, str(len(results))]


if __name__ == "__main__":
    main()
