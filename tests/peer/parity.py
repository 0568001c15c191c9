"""Models of every kind here and in DeePMD-kit: frozen files, checkpoints, bias of fine-tuning.

usage: python tests/peer/parity.py --peer DIR [--parts NAME ...] [--models NAME ...] [--output PAGE]

Models of the options of tests/golden, trained for a few steps with an average. The golden models themselves are in
tests/test_model_golden.py and tests/test_interchange.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peer_side
from comparing import BOUND, common, predictions, run_peer, worst_of

GOLDEN = common.ROOT / "tests" / "golden"
TYPES = ["O", "H", "Na"]
STEPS = 4
TRAINING = {
    "loss": {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1},
    "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 2},
}
OF_FINE_TUNING = ("se_e2_a", "dpa1")
Rows = list[list[str]]


@dataclass(frozen=True)
class Run:
    """Environment of DeePMD-kit, folder of all files, names of the models."""

    peer: str
    work: Path
    names: list[str]

    def ask(self, jobs: list[dict[str, Any]]) -> None:
        """Have DeePMD-kit do jobs."""
        run_peer(self.peer, self.work, jobs)

    def folder(self, *parts: str) -> Path:
        """Return a folder of the run, made if need be."""
        found = self.work.joinpath(*parts)
        found.mkdir(parents=True, exist_ok=True)
        return found


def main() -> None:
    """Do the parts and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="DIR", required=True, help="virtual environment of DeePMD-kit")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="which tables")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="files of tests/golden (default: all but sums)")
    parser.add_argument("--work", type=Path, default=common.RUNS / "parity", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    # sums of models have golden numbers of their own
    stems = sorted(path.stem for path in GOLDEN.glob("*.dp"))
    names = args.models or [name for name in stems if "fitting_net" in tree_of(name)["model_def_script"]]
    run = Run(str(Path(args.peer).resolve()), args.work.resolve(), names)
    run.folder()
    tables = {part: list(PARTS[part](run)) for part in args.parts}
    title = f"# Parity with DeePMD-kit 3.2.0, {common.today()}, bound {BOUND:g}"
    common.publish("\n".join([title, *(line for lines in tables.values() for line in ("", *lines))]), args.output)
    wrong = [line for lines in tables.values() for line in lines if _differs(line)]
    if wrong:
        raise SystemExit("\n".join(["These lines have a difference that is too large:", *wrong]))


def _differs(line: str) -> bool:
    """Return whether a line of a table has a difference beyond the bound."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    numbers = [float(cell) for cell in cells if re.fullmatch(r"\d\.\de[+-]\d+|inf", cell)]
    return any(number > BOUND for number in numbers)


def trained(run: Run) -> Iterator[str]:
    """Yield the table of models trained here, frozen and converted by the peer."""
    rows, jobs = [], []
    for name in run.names:
        folder = _prepare(run, "trained", name, {"enable_ema": True, "ema_decay": 0.5})
        with contextlib.chdir(folder):
            _ours("train", "input.json", "--device", "cpu")
            _ours("freeze", "-o", "live.dp")
            _ours("freeze", "--use-ema", "-o", "averaged.dp")
        for weights in ("live", "averaged"):
            file = folder / f"{weights}.dp"
            jobs.append(_job(name, folder / weights) | {"convert": str(file), "file": str(file), "weights": weights})
    run.ask(jobs)
    for job in jobs:
        found = cells(predictions(Path(job["file"]), job), _answer(job))
        rows.append([job["name"], job["weights"], *found])
    yield from ("## Trained here, frozen, through `dp convert-backend` to `.pth`, in `DeepPot`", "")
    yield common.table(["model", "weights", *peer_side.OUTPUTS], rows)


def checkpoints(run: Run) -> Iterator[str]:
    """Yield the table of checkpoints of the peer, read here."""
    both = [(name, backend) for backend in ("pt", "pt-expt") for name in run.names]
    training = {"enable_ema": True, "ema_decay": 0.5}
    folders = [  # pt_expt inverts the cell of an open system
        _prepare(run, "checkpoints", f"{name}.{backend}", training, name, systems=4 if backend == "pt" else 3)
        for name, backend in both
    ]
    trainings = [_training(folder, backend) for folder, (_, backend) in zip(folders, both)]
    run.ask(trainings)
    jobs: list[dict[str, Any]] = []
    rows: Rows = []
    for (name, backend), folder, done in zip(both, folders, trainings):
        if _why_not(done):
            rows.append([name, backend, "", f"DeePMD-kit does not train it: {_why_not(done)}", "", "", ""])
            continue
        for weights, file in (("live", f"model.ckpt-{STEPS}.pt"), ("averaged", f"model_ema.ckpt-{STEPS}.pt")):
            jobs.append(_job(name, folder / weights) | {"predict": str(folder / file), "weights": weights})
    run.ask(jobs)
    rows += [_checkpoint_row(job) for job in jobs]
    yield from ("## Checkpoints of DeePMD-kit, read here", "")
    yield common.table(["model", "backend", "weights", "read", "converted", "`--use-ema`", "`--init-model`"], rows)


def fine_tuning(run: Run) -> Iterator[str]:
    """Yield the table of the energy biases after a fine-tuning here and there."""
    import torch

    from deepmd_ema.infer.load import load_model

    rows = []
    for name in OF_FINE_TUNING:
        start = _prepare(run, "fine_tuning", f"{name}.start", {}, name)
        begin = ["--finetune", str(start / f"model.ckpt-{STEPS}.pt")]
        folders = [
            _prepare(run, "fine_tuning", f"{name}.{who}", {"numb_steps": 1}, name, 7) for who in ("ours", "peer")
        ]
        trainings = [_training(start, "pt"), _training(folders[1], "pt", *begin)]
        run.ask(trainings)
        if any(_why_not(job) for job in trainings):
            raise SystemExit(f"fine-tuning of {name}: {[_why_not(job) for job in trainings]}")
        with contextlib.chdir(folders[0]):
            _ours("train", "input.json", "--device", "cpu", *begin)
        before, ours = (load_model(path).model.out_bias.ravel().tolist() for path in (begin[1], folders[0]))
        state = torch.load(folders[1] / "model.ckpt-1.pt", weights_only=True)["model"]
        theirs = state["model.Default.atomic_model.out_bias"].ravel().tolist()
        for kind, old, one, other in zip(TYPES, before, ours, theirs):
            rows.append([name, kind, f"{old:.9f}", f"{one:.12f}", f"{other:.12f}", f"{abs(one - other):.1e}"])
    yield from ("## Energy biases after fine-tuning", "")
    yield common.table(["model", "element", "before", "here", "DeePMD-kit", "differ by"], rows)


PARTS: dict[str, Callable[[Run], Iterator[str]]] = {
    "trained": trained,
    "checkpoints": checkpoints,
    "fine_tuning": fine_tuning,
}


def tree_of(name: str) -> dict[str, Any]:
    """Return the content of a golden model."""
    from deepmd_ema.interop.tree_files import read_tree

    return read_tree(GOLDEN / f"{name}.dp")


def cells(found: dict[str, np.ndarray], reference: Path) -> list[str]:
    """Return the largest differences of each output as texts, or what the peer reported instead."""
    if not reference.exists():
        text = reference.with_suffix(".error").read_text().strip().splitlines()[-1]
        return [f"DeePMD-kit: {text}", *[""] * (len(peer_side.OUTPUTS) - 1)]
    return [f"{value:.1e}" for value in worst_of(found, reference).values()]


def _job(name: str, out: Path) -> dict[str, Any]:
    fitting = tree_of(name)["model_def_script"]["fitting_net"]
    more = {key: fitting[key] for key in ("numb_fparam", "numb_aparam", "default_fparam") if key in fitting}
    return {"name": name, "out": str(out), "frames": str(GOLDEN / "systems.npz"), **more}


def _answer(job: dict[str, Any]) -> Path:
    return Path(job["out"]).with_name(Path(job["out"]).name + ".npz")


def _prepare(
    run: Run, part: str, folder: str, training: dict[str, Any], name: str = "", seed: int = 3, systems: int = 4
) -> Path:
    """Write an input for a golden model and its data, and return the folder."""
    name, made = name or folder, run.folder(part, folder)
    for pattern in ("model*", "*.error"):
        for path in made.glob(pattern):
            path.unlink()
    tree = tree_of(name)
    model = copy.deepcopy(tree["model_def_script"])
    if "use_srtab" in model:
        model["use_srtab"] = str(made / "table.txt")
        np.savetxt(model["use_srtab"], tree["model"]["models"][1]["tab"]["@variables"]["vdata"], fmt="%.12g")
    fitting = model["fitting_net"]
    paths = [_write_data(made / f"data{k}", fitting, k, seed + k) for k in range(systems)]
    data = {"systems": paths, "batch_size": 1}
    run_section = {"numb_steps": STEPS, "disp_freq": 1, "save_freq": STEPS, "seed": 1, "training_data": data}
    (made / "input.json").write_text(
        json.dumps({"model": {**model, "data_stat_nbatch": 8}, **TRAINING, "training": {**run_section, **training}})
    )
    return made


def _write_data(folder: Path, fitting: dict[str, Any], number: int, seed: int) -> str:
    """Write a system of eight frames of seven atoms with labels at random, number 3 open, and return its path."""
    rng = np.random.default_rng(seed)
    system = peer_side.frames_of(GOLDEN / "systems.npz")["triclinic"]
    kinds, cell = rng.permutation(system["type"]), 1.5 * system["box"][0]
    count, atoms = 8, len(kinds)
    part = folder / "set.000"
    part.mkdir(parents=True, exist_ok=True)
    kinds[np.flatnonzero(kinds == 1)[0]] = number % 3  # three compositions, of which the biases follow
    (folder / "type.raw").write_text("\n".join(str(kind) for kind in kinds))
    (folder / "type_map.raw").write_text("\n".join(TYPES))
    coord = system["coord"][:1].repeat(count, 0) + 0.05 * rng.normal(size=(count, atoms, 3))
    arrays = {"coord": coord, "energy": -20.0 * atoms + kinds.sum() + rng.normal(size=count),
              "force": rng.normal(size=(count, 3 * atoms))}  # fmt: skip
    if number < 3:
        arrays["box"] = np.repeat(cell[None], count, 0)
    else:
        (folder / "nopbc").touch()
    for name, per in (("fparam", 1), ("aparam", atoms)):
        if fitting.get(f"numb_{name}"):
            arrays[name] = rng.normal(size=(count, per * fitting[f"numb_{name}"]))
    for name, value in arrays.items():
        np.save(part / f"{name}.npy", value.reshape(count, -1) if name != "energy" else value)
    return str(folder)


def _ours(*words: str) -> None:
    """Run a command of dp-ema in this process.

    Raises:
        SystemExit: with what it printed, if it fails.
    """
    from deepmd_ema import cli

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main([*words])
    if code:
        raise SystemExit(f"dp-ema {' '.join(words)} failed in {Path.cwd()}:\n{said.getvalue()[-3000:]}")


def _training(folder: Path, backend: str, *words: str) -> dict[str, Any]:
    """Return the job of a training in a folder."""
    command = [f"--{backend}", "train", "input.json", "--skip-neighbor-stat", *words]
    return {"train": command, "cwd": str(folder), "out": str(folder / "trained")}


def _why_not(job: dict[str, Any]) -> str:
    """Return the last line of what the peer reported where a job failed."""
    error = Path(f"{job['out']}.error")
    return error.read_text().strip().splitlines()[-1][:150] if error.exists() else ""


def _checkpoint_row(job: dict[str, Any]) -> list[str]:
    """Return the row of one checkpoint of the peer that is read here."""
    from deepmd_ema.errors import UserError

    file, folder = Path(job["predict"]), Path(job["predict"]).parent
    label = [job["name"], folder.name.rpartition(".")[2], job["weights"]]
    if not _answer(job).exists():
        return [*label, *cells({}, _answer(job))[:1], "", "", ""]
    try:
        read = _worst_here(file, job)
    except UserError as refused:
        return [*label, f"refused: {' '.join(str(refused).split())[len(str(file)) :][:120]}", "", "", ""]
    with contextlib.chdir(folder):
        converted = folder / f"{file.stem}.dp"
        _ours("convert", str(file), str(converted))
        by_option = ""
        if job["weights"] == "averaged":
            _ours("convert", "--use-ema", str(folder / f"model.ckpt-{STEPS}.pt"), str(folder / "option.dp"))
            by_option = f"{_worst_here(folder / 'option.dp', job):.1e}"
    return [*label, f"{read:.1e}", f"{_worst_here(converted, job):.1e}", by_option, _after_start(file, job)]


def _after_start(file: Path, job: dict[str, Any]) -> str:
    """Return the difference of a model that was trained from a checkpoint for a step of no length."""
    folder = file.parent / f"from_{file.stem}"
    folder.mkdir(exist_ok=True)
    values = json.loads((file.parent / "input.json").read_text())
    values["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-30}
    values["training"] |= {"numb_steps": 1, "enable_ema": False}
    values["training"].pop("ema_decay")
    (folder / "input.json").write_text(json.dumps(values))
    with contextlib.chdir(folder):
        _ours("train", "input.json", "--device", "cpu", "--init-model", str(file))
    return f"{_worst_here(folder, job):.1e}"


def _worst_here(file: Path, job: dict[str, Any]) -> float:
    return max(worst_of(predictions(file, job), _answer(job)).values())


if __name__ == "__main__":
    main()
