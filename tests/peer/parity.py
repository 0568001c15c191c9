"""Models of every kind, trained for a few steps here and in DeePMD-kit: frozen files, checkpoints,
fine-tuning.

usage: python tests/peer/parity.py --peer DIR [--models NAME ...]

Models of the options of tests/golden, trained with an average. Files frozen here (live and averaged
weights) go through what ``dp convert-backend`` calls to ``.pth`` and ``DeepPot``; checkpoints of
the backends ``pt`` and ``pt-expt`` are read here, converted, and trained on; biases of the elements
after a fine-tuning are those of DeePMD-kit. The golden models themselves are in
tests/unit/test_model_golden.py and tests/unit/test_interchange.py.
"""

import argparse
import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peer_side
import torch
from comparing import BOUND, common, predictions, run_peer, worst_of

from deepmd_ema import cli
from deepmd_ema.errors import UserError
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.tree_files import read_tree

GOLDEN = common.ROOT / "tests" / "golden"
STEPS = 4
AVERAGE = {"enable_ema": True, "ema_decay": 0.5}
OF_FINE_TUNING = ("se_e2_a", "dpa1")
# DeepPot gives other numbers for these checkpoints than DeePMD-kit does for their frozen files,
# which are equal to ours
OTHERWISE = {("dpa1", "pt-expt"), ("dpa1_v2", "pt-expt")}


def main() -> None:
    """Compare all, print a line for each file, and fail if a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer", metavar="DIR", required=True, help="virtual environment of DeePMD-kit"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME",
        help="files of tests/golden (default: all but sums)",
    )
    parser.add_argument(
        "--work", type=Path, default=common.RUNS / "parity", help="folder of the runs"
    )
    args = parser.parse_args()
    peer, work = str(Path(args.peer).resolve()), args.work.resolve()
    stems = sorted(path.stem for path in GOLDEN.glob("*.dp"))
    # sums of models have golden numbers of their own
    names = args.models or [
        name
        for name in stems
        if "fitting_net" in read_tree(GOLDEN / f"{name}.dp")["model_def_script"]
    ]
    work.mkdir(parents=True, exist_ok=True)
    wrong = []
    for found in (
        trained(peer, work, names),
        checkpoints(peer, work, names),
        fine_tuning(peer, work),
    ):
        for label, answer in found.items():
            print(
                label,
                answer if isinstance(answer, str) else f"{answer:.1e}",
                sep=": ",
                flush=True,
            )
            if (
                not isinstance(answer, str)
                and not answer <= BOUND
                and label not in OTHERWISE
            ):
                wrong.append(label)
    if wrong:
        raise SystemExit(f"differences beyond {BOUND:g}: {wrong}")


def trained(peer: str, work: Path, names: list[str]) -> dict[Any, Any]:
    """Return the differences of models trained here, frozen and converted by the peer."""
    jobs = []
    for name in names:
        folder = _prepare(work / "trained" / name, name, AVERAGE)
        with contextlib.chdir(folder):
            _ours("train", "input.json", "--device", "cpu")
            _ours("freeze", "-o", "live.dp")
            _ours("freeze", "--use-ema", "-o", "averaged.dp")
        jobs += [
            _job(name, folder / weights, convert=f"{folder / weights}.dp")
            for weights in ("live", "averaged")
        ]
    run_peer(peer, work, jobs)
    return {
        (job["name"], Path(job["out"]).name): _why_not(job)
        or _worst(Path(job["convert"]), job)
        for job in jobs
    }


def checkpoints(peer: str, work: Path, names: list[str]) -> dict[Any, Any]:
    """Return the differences of checkpoints of the peer, read, converted and trained on here."""
    trainings, jobs, found = [], [], {}
    for backend in ("pt", "pt-expt"):
        for name in names:  # pt_expt inverts the cell of an open system
            systems = 4 if backend == "pt" else 3
            folder = _prepare(
                work / "checkpoints" / f"{name}.{backend}",
                name,
                AVERAGE,
                systems=systems,
            )
            trainings.append(_training(folder, backend) | {"label": (name, backend)})
    run_peer(peer, work, trainings)
    for training in trainings:
        if why := _why_not(training):
            found[training["label"]] = f"DeePMD-kit does not train it: {why}"
            continue
        for file in (f"model.ckpt-{STEPS}.pt", f"model_ema.ckpt-{STEPS}.pt"):
            path = Path(training["cwd"]) / file
            jobs.append(
                _job(training["label"][0], path.with_suffix(""), predict=str(path))
                | {"label": training["label"]}
            )
    run_peer(peer, work, jobs)
    for job in jobs:
        try:
            answer = _why_not(job) or _of_checkpoint(Path(job["predict"]), job)
        except UserError as refused:
            answer = f"refused: {refused}"
        before = found.get(job["label"], 0.0)
        found[job["label"]] = (
            answer
            if isinstance(answer, str) or isinstance(before, str)
            else max(before, answer)
        )
    return found


def _of_checkpoint(file: Path, job: dict[str, Any]) -> float:
    """Return the largest difference of a checkpoint as it is, converted, and after a step of no
    length.
    """
    found, start = [_worst(file, job)], file.with_name(f"from_{file.stem}")
    start.mkdir(exist_ok=True)
    values = json.loads((file.parent / "input.json").read_text())
    values["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-30}
    values["training"] |= {"numb_steps": 1, "enable_ema": False}
    values["training"].pop("ema_decay")
    (start / "input.json").write_text(json.dumps(values))
    with contextlib.chdir(start):
        _ours("convert", str(file), "converted.dp")
        found.append(_worst(start / "converted.dp", job))
        if "_ema" in file.name:
            _ours(
                "convert",
                "--use-ema",
                str(file.with_name(f"model.ckpt-{STEPS}.pt")),
                "option.dp",
            )
            found.append(_worst(start / "option.dp", job))
        _ours("train", "input.json", "--device", "cpu", "--init-model", str(file))
    return max(*found, _worst(start, job))


def fine_tuning(peer: str, work: Path) -> dict[Any, Any]:
    """Return the differences of the energy biases after a fine-tuning here and there, eV."""
    found = {}
    for name in OF_FINE_TUNING:
        start = _prepare(work / "fine_tuning" / f"{name}.start", name, {})
        begin = ["--finetune", str(start / f"model.ckpt-{STEPS}.pt")]
        here, there = (
            _prepare(work / "fine_tuning" / f"{name}.{who}", name, {"numb_steps": 1}, 7)
            for who in ("ours", "peer")
        )
        trainings = [_training(start, "pt"), _training(there, "pt", *begin)]
        run_peer(peer, work, trainings)
        if why := [_why_not(job) for job in trainings if _why_not(job)]:
            raise SystemExit(f"fine-tuning of {name}: {why}")
        with contextlib.chdir(here):
            _ours("train", "input.json", "--device", "cpu", *begin)
        state = torch.load(there / "model.ckpt-1.pt", weights_only=True)["model"]
        theirs = state["model.Default.atomic_model.out_bias"].ravel()
        before, ours = (
            load_model(path).model.out_bias.ravel() for path in (begin[1], here)
        )
        if torch.equal(before, ours):
            raise SystemExit(
                f"fine-tuning of {name}: the biases are those of the start"
            )
        found[name, "biases after fine-tuning"] = float((ours - theirs).abs().max())
    return found


def _job(name: str, out: Path, **what: str) -> dict[str, Any]:
    fitting = read_tree(GOLDEN / f"{name}.dp")["model_def_script"]["fitting_net"]
    more = {
        key: fitting[key]
        for key in ("numb_fparam", "numb_aparam", "default_fparam")
        if key in fitting
    }
    return {
        "name": name,
        "out": str(out),
        "frames": str(GOLDEN / "systems.npz"),
        **more,
        **what,
    }


def _training(folder: Path, backend: str, *words: str) -> dict[str, Any]:
    """Return the job of a training in a folder."""
    command = [f"--{backend}", "train", "input.json", "--skip-neighbor-stat", *words]
    return {"train": command, "cwd": str(folder), "out": str(folder / "trained")}


def _why_not(job: dict[str, Any]) -> str:
    """Return the last line of what the peer reported where a job failed."""
    error = Path(job["out"]).with_suffix(".error")
    return error.read_text().strip().splitlines()[-1][:150] if error.exists() else ""


def _worst(file: Path, job: dict[str, Any]) -> float:
    return max(
        worst_of(predictions(file, job), Path(job["out"]).with_suffix(".npz")).values()
    )


def _ours(*words: str) -> None:
    """Run a command of dp-ema in this process; if it fails, end with what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main([*words])
    if code:
        raise SystemExit(
            f"dp-ema {' '.join(words)} failed in {Path.cwd()}:\n{said.getvalue()[-3000:]}"
        )


def _prepare(
    folder: Path, name: str, training: dict[str, Any], seed: int = 3, systems: int = 4
) -> Path:
    """Write an input for a golden model and its data, and return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = read_tree(GOLDEN / f"{name}.dp")
    model = {**tree["model_def_script"], "data_stat_nbatch": 8}
    if "use_srtab" in model:
        model["use_srtab"] = str(folder / "table.txt")
        np.savetxt(
            model["use_srtab"],
            tree["model"]["models"][1]["tab"]["@variables"]["vdata"],
            fmt="%.12g",
        )
    data = [
        _write_data(folder / f"data{k}", model["fitting_net"], k, seed + k)
        for k in range(systems)
    ]
    run = {
        "numb_steps": STEPS,
        "disp_freq": 1,
        "save_freq": STEPS,
        "seed": 1,
        "training_data": {"systems": data, "batch_size": 1},
        **training,
    }
    loss = {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1}
    rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 2}
    config = {"model": model, "loss": loss, "learning_rate": rate, "training": run}
    (folder / "input.json").write_text(json.dumps(config))
    return folder


def _write_data(folder: Path, fitting: dict[str, Any], number: int, seed: int) -> str:
    """Write a system of eight frames of seven atoms with labels at random, number 3 open, and
    return its path.
    """
    rng, count = np.random.default_rng(seed), 8
    system = peer_side.frames_of(GOLDEN / "systems.npz")["triclinic"]
    kinds = rng.permutation(system["type"])
    kinds[np.flatnonzero(kinds == 1)[0]] = (
        number % 3
    )  # three compositions, of which the biases follow
    atoms = len(kinds)
    arrays = {
        "coord": system["coord"][:1].repeat(count, 0)
        + 0.05 * rng.normal(size=(count, atoms, 3)),
        "energy": -20.0 * atoms + kinds.sum() + rng.normal(size=count),
        "force": rng.normal(size=(count, 3 * atoms)),
    }
    if number < 3:
        arrays["box"] = np.repeat(1.5 * system["box"][:1], count, 0)
    for name, per in (("fparam", 1), ("aparam", atoms)):
        if fitting.get(f"numb_{name}"):
            arrays[name] = rng.normal(size=(count, per * fitting[f"numb_{name}"]))
    common.write_system(folder, kinds, ["O", "H", "Na"], arrays)
    return str(folder)


if __name__ == "__main__":
    main()
