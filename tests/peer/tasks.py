"""Two tasks beside DeePMD-kit's backend pt: one batch of each, and a short training, from the same weights.

usage: python tests/peer/tasks.py --peer DIR [--cases CASE ...] [--output PAGE]

A case is a descriptor of ``tests/golden`` and a way of sharing. The peer's own trainer makes the models of a multi-task
input, with statistics, and saves them; here the run starts from that file with ``--init-model``. Compared are

- energies, forces, virials and the loss of one batch of each task, with its gradient by every parameter of the model of
  that task, and of both models after the losses of both tasks;
- statistics of new models: with equal shares beside pt, with unequal ones beside pt_expt as well;
- the weights after a training in which both programs train the tasks in the same order. Every batch has all frames of
  its task, so that the order of frames does not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comparing import common
from gradients import parameter_leaves

GOLDEN = common.ROOT / "tests" / "golden"
ELEMENTS = ["O", "H", "Na"]
# frames, and a grid of atoms: the peer divides by their number in float32 (gradients.py), which powers of 2 bear
TASKS = {"water": (2, (2, 2, 2)), "ice": (3, (4, 2, 2))}
SPACING, MIN_BOX = 2.9, 7.0  # angstrom; no image of an atom is its own neighbor
SHARES = {"water": 0.7, "ice": 0.3}
LOSS = {
    "water": {"start_pref_e": 0.1, "limit_pref_e": 1, "start_pref_f": 100, "limit_pref_f": 1,
              "start_pref_v": 0.1, "limit_pref_v": 1},
    "ice": {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 5},
}  # fmt: skip
START_LR, LR = 1e-3, 4e-4  # of a run; of the batches that are compared
OWN_NET = {"neuron": [8, 8], "numb_fparam": 1}
SHARED_NET = {**OWN_NET, "dim_case_embd": 2}
# way of sharing: the descriptors and the fitting networks of the two tasks
WAYS = {
    "descriptor": (("desc", "desc"), (OWN_NET, OWN_NET)),
    "descriptor and fitting": (("desc", "desc"), ("net", "net")),
    "type embedding": (("desc", "desc:1"), (OWN_NET, OWN_NET)),
    "nothing": (None, (OWN_NET, OWN_NET)),
}
MIXED = ("descriptor", "descriptor and fitting", "type embedding", "nothing")
KINDS = {
    "se_e2_a": ("descriptor", "descriptor and fitting", "nothing"),
    "se_e2_r": ("descriptor",),
    "hybrid": ("descriptor",),
    "dpa1": MIXED,
    "dpa1_v2": ("descriptor", "type embedding"),
    "se_e3_tebd": ("descriptor", "type embedding"),
    "dpa2": MIXED,
    "dpa3": MIXED,
    "dpa2 add_tebd_to_repinit_out": ("descriptor",),
}
CASES = [f"{kind}/{way}" for kind, ways in KINDS.items() for way in ways]
APART = ("dpa2 add_tebd_to_repinit_out/descriptor",)  # cases in which the peer leaves something out, see the page
STATISTICS = ("se_e2_a/descriptor", "dpa1/descriptor and fitting", "dpa2/descriptor", "se_e3_tebd/descriptor")
STEPS = 20
ORDER = [list(TASKS)[k] for k in np.random.default_rng(7).choice(2, STEPS, p=list(SHARES.values()))]
TOLERANCE = 1e-10
OWN = ("embedding_eval", "interpolate")  # options that DeePMD-kit refuses
OF_STATISTICS = ("mean", "stddev", "avg", "inv_std", "out_bias", "out_std")  # ends of names of buffers


def main() -> None:
    """Compute both sides, compare them and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="DIR", help="virtual environment of DeePMD-kit")
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--work", type=Path, default=common.RUNS / "tasks", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--no-train", action="store_true", help="take what the peer has computed in --work before")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        peer_side(args.work, args.cases)
        return
    if args.peer is None:
        raise SystemExit("tasks.py compares with DeePMD-kit: give --peer DIR.")
    python = str(Path(args.peer).resolve() / "bin" / "python")
    args.work = args.work.resolve()
    if not args.no_train:
        _run_peer(python, args.work, args.cases)
    rows = [_row(args.work, case) for case in args.cases]
    statistics = [
        line for case in STATISTICS if case in args.cases for line in _statistics_rows(args.work, case, python)
    ]
    common.publish(_page(rows, statistics, args.cases), args.output)
    if any(max(row[1:]) > TOLERANCE for row in rows if row[0] not in APART):
        raise SystemExit(f"something differs by more than {TOLERANCE:g}")


def _run_peer(python: str, work: Path, cases: list[str]) -> None:
    """Write data and inputs, and let the peer compute its side of all cases."""
    work.mkdir(parents=True, exist_ok=True)
    for task, (frames, grid) in TASKS.items():
        write_system(work / task, frames, grid, np.random.default_rng(frames))
    for case in cases:
        common.write_input(folder_of(work, case), input_of(case, work))
    words = [python, __file__, "--as-peer", "--work", work, "--cases", *cases]
    subprocess.run(words, check=True, env=common.environment(1, "cpu"), stdout=sys.stderr)


def folder_of(work: Path, case: str) -> Path:
    """Return the folder of a case."""
    return work / case.replace("/", "-").replace(" ", "_")


def write_system(folder: Path, frames: int, edges: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Write frames of atoms that are shaken off a grid, with labels and a frame parameter drawn at random."""
    grid = np.stack(np.meshgrid(*map(np.arange, edges)), -1).reshape(-1, 3) * SPACING
    atoms, box = len(grid), np.maximum(SPACING * np.array(edges), MIN_BOX)
    force = rng.normal(0, 1, (frames, atoms, 3))
    arrays = {
        "coord": (grid + rng.normal(0, 0.25, (frames, atoms, 3))).reshape(frames, -1),
        "box": np.tile(np.diag(box).ravel(), (frames, 1)),
        "energy": rng.normal(-3 * atoms, 1, frames),
        "force": (force - force.mean(1, keepdims=True)).reshape(frames, -1),
        "virial": rng.normal(0, 3, (frames, 9)),
        "fparam": rng.normal(2, 1, (frames, 1)),
    }
    (folder / "set.000").mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "type.raw", np.sort(np.arange(atoms) % len(ELEMENTS)), fmt="%d")
    (folder / "type_map.raw").write_text("\n".join(ELEMENTS) + "\n")
    for name, array in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", array)


def input_of(case: str, work: Path, shares: Mapping[str, float] = SHARES) -> dict[str, Any]:
    """Return the input of two tasks."""
    from deepmd_ema.config import to_dict
    from deepmd_ema.interop.dp import read_dp

    kind, _, way = case.partition("/")
    name, _, option = kind.partition(" ")
    config, _, _ = read_dp(GOLDEN / f"{name}.dp")
    own = _for_peer(to_dict(config)["descriptor"])
    if option:
        own[option] = True
    descriptors, nets = WAYS[way]
    text = json.dumps([descriptors or (own, own), nets])
    descriptors, nets = json.loads(text)
    shared = {"elements": ELEMENTS, "desc": own, "net": SHARED_NET}
    data = {
        task: {"training_data": {"systems": [str(work / task)], "batch_size": frames}}
        for task, (frames, _) in TASKS.items()
    }
    return {
        "model": {
            "shared_dict": {key: part for key, part in shared.items() if key == "elements" or f'"{key}' in text},
            "model_dict": {
                task: {"type_map": "elements", "descriptor": descriptor, "fitting_net": net}
                for task, descriptor, net in zip(TASKS, descriptors, nets, strict=True)
            },
        },
        "learning_rate": {"type": "exp", "start_lr": START_LR, "stop_lr": 1e-5, "decay_steps": 4},
        "loss_dict": LOSS,
        "training": {
            "data_dict": data, "model_prob": dict(shares), "numb_steps": STEPS, "disp_freq": 1, "save_freq": STEPS,
            "seed": 1,
        },
    }  # fmt: skip


def _for_peer(section: Any) -> Any:
    """Return a section without options that DeePMD-kit does not have, and without those that are null."""
    if isinstance(section, list):
        return [_for_peer(part) for part in section]
    if not isinstance(section, dict):
        return section
    return {name: _for_peer(value) for name, value in section.items() if value is not None and name not in OWN}


# ---- the peer, in its environment


def peer_side(work: Path, cases: list[str]) -> None:
    """Make the models of each case, evaluate a batch of each task, and train."""
    import torch
    from deepmd.pt.train import training

    torch.set_num_threads(1)
    order: Iterator[str] = iter(())
    # the only thing that is drawn by this function in a training loop is the task of a step
    training.dp_random.choice = lambda *_, **__: list(TASKS).index(next(order))
    for case in cases:
        os.chdir(folder_of(work, case))
        trainer = _peer_trainer()
        trainer.get_data = partial(_with_exact_flags, trainer.get_data)
        trainer.save_model(Path("start.pt"), lr=START_LR, step=0)
        first = {name: value.clone() for name, value in trainer.wrapper.state_dict().items() if name != "_extra_state"}
        batches = {task: trainer.get_data(is_train=True, task_key=task) for task in TASKS}
        found = {}
        for tasks in (*((task,) for task in TASKS), tuple(TASKS)):
            trainer.wrapper.zero_grad(set_to_none=True)
            for task in tasks:
                given, label, _ = batches[task]
                predicted, loss, _ = trainer.wrapper(**given, cur_lr=LR, label=label, task_key=task)
                loss.backward()
                frames = np.argsort(label["energy"].numpy().ravel())
                for key in ("energy", "force", "virial"):
                    found[f"{task}/{key}"] = predicted[key].detach().numpy()[frames].ravel()
                found[f"{task}/loss"] = np.array(loss.item())
            for task in tasks:
                model = trainer.wrapper.model[task]
                leaves = parameter_leaves(model, model.serialize)
                found |= {f"gradient of {'+'.join(tasks)}/{task}/{name}": value for name, value in leaves.items()}
            with torch.no_grad():
                for name, value in trainer.wrapper.state_dict().items():
                    if name in first:
                        value.copy_(first[name])
        np.savez("peer.npz", **found)
        order = iter(ORDER)
        trainer.run()


def _with_exact_flags(get: Callable[..., tuple], **which: Any) -> tuple:
    """Return a batch in which the flags of labels are no numbers of float32, to which they would round prefactors."""
    given, label, log = get(**which)
    return given, {name: float(v) if name.startswith("find_") else v for name, v in label.items()}, log


def _peer_trainer() -> Any:
    """Return the trainer of ``input.json`` in this folder, as the training command makes it."""
    from deepmd.pt.entrypoints.main import get_trainer
    from deepmd.pt.utils.multi_task import preprocess_shared_params
    from deepmd.utils.argcheck import normalize
    from deepmd.utils.compat import update_deepmd_input

    config = json.loads(Path("input.json").read_text())
    config["model"], links = preprocess_shared_params(config["model"])
    config = normalize(update_deepmd_input(config, warning=False), multi_task=True)
    return get_trainer(config, shared_links=links)


# ---- here


def our_side(folder: Path) -> dict[str, np.ndarray]:
    """Evaluate a batch of each task with the weights of ``start.pt``."""
    import torch

    from deepmd_ema.interop.dp import model_tree

    trainer, config = _our_trainer(folder)
    tasks = {task.name: task for task in trainer.tasks}
    models = next(iter(trainer.tasks)).models
    first = {name: value.clone() for name, value in models.state_dict().items()}
    batches, found = {name: next(task.train_loader) for name, task in tasks.items()}, {}
    for names in (*((name,) for name in TASKS), tuple(TASKS)):
        models.zero_grad(set_to_none=True)
        for name in names:
            task, batch = tasks[name], batches[name]
            predicted = models(name, batch, **{**task.loss.needs(batch), "need_virial": True})
            loss, _ = task.loss(predicted, batch, LR)
            loss.backward()
            frames = np.argsort(batch.labels["energy"].numpy())
            for key in ("energy", "force", "virial"):
                value = predicted[key].detach()
                value = batch.in_file_order(value) if key == "force" else value
                found[f"{name}/{key}"] = value.numpy().reshape(len(frames), -1)[frames].ravel()
            found[f"{name}/loss"] = np.array(loss.item())
        for name in names:
            model, section = models.by_task[name], config.tasks[name].model
            leaves = parameter_leaves(model, lambda model=model, section=section: model_tree(model, section))
            found |= {f"gradient of {'+'.join(names)}/{name}/{path}": value for path, value in leaves.items()}
        with torch.no_grad():
            models.load_state_dict(first)
    trainer.tasks.close()
    return found


def _our_trainer(folder: Path, start_file: str | None = "start.pt") -> tuple[Any, Any]:
    """Return the trainer of ``input.json`` in a folder, from the weights of a file or new, and the config."""
    from deepmd_ema.config import load_config
    from deepmd_ema.distributed.world import World
    from deepmd_ema.training.prepare import prepare
    from deepmd_ema.training.trainer import Trainer
    from deepmd_ema.training.weights import Start, load_weights

    os.chdir(folder)
    start, world = load_weights(start_file) if start_file else Start(), World()
    prepared = prepare(start.adopt_from_checkpoint(load_config("input.json")), start, world)
    return Trainer(prepared, start, world), prepared.config


def our_training(folder: Path) -> dict[str, np.ndarray]:
    """Train from ``start.pt`` with the tasks in the order of the peer, and return the last weights by name."""
    (ours := folder / "ours").mkdir(exist_ok=True)
    (ours / "input.json").write_text((folder / "input.json").read_text())
    trainer, _ = _our_trainer(ours, "../start.pt")
    tasks = {task.name: task for task in trainer.tasks}
    trainer.tasks.draw = lambda step: tasks[ORDER[step - 1]]
    trainer.run()
    return weights_of(ours / "model.ckpt.pt")


def weights_of(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of all models of a file of either program by ``task/name``."""
    from deepmd_ema.infer.load import load_models

    models = load_models(file).models
    return {f"{t}/{n}": v.numpy() for t, of in models.items() for n, v in of.model.state_dict().items()}


# ---- comparison


def _row(work: Path, case: str) -> tuple[str, float, float, float, float, float]:
    """Return the largest relative differences of predictions, losses, gradients, and of weights after the training."""
    folder = folder_of(work, case)
    ours, peer = our_side(folder), dict(np.load(folder / "peer.npz"))
    if ours.keys() != peer.keys():
        raise SystemExit(f"{case}: other parameters: {sorted(ours.keys() ^ peer.keys())[:6]}")
    of = {"predicted": [], "loss": [], "own": [], "both": []}
    floor = 1e-12 * max(np.abs(value).max() for name, value in peer.items() if name.startswith("gradient"))
    for name, value in peer.items():
        kind = "both" if "+" in name else "own" if name.startswith("gradient") else "predicted"
        kind = "loss" if name.endswith("/loss") else kind
        of[kind].append(_apart(ours[name], value, floor if kind in ("own", "both") else 0.0))
    last, mine = weights_of(folder / "model.ckpt.pt"), our_training(folder)
    first = weights_of(folder / "start.pt")
    way, apart = (np.sqrt(sum(((last[n] - other[n]) ** 2).sum() for n in last)) for other in (first, mine))
    return case, *(max(values) for values in of.values()), float(apart / way)


def _apart(one: np.ndarray, other: np.ndarray, floor: float = 0.0) -> float:
    """Return the largest difference of two arrays over the largest number of the second."""
    return float(np.abs(one.reshape(other.shape) - other).max() / max(np.abs(other).max(), floor, 1e-300))


def _statistics_rows(work: Path, case: str, peer: str) -> Iterator[list[str]]:
    """Yield for equal and unequal shares what the statistics of new models here and in both backends differ by."""
    for shares in ({"water": 0.5, "ice": 0.5}, SHARES):
        found = {}
        for who in ("ours", "pt", "pt-expt"):
            folder = folder_of(work, case) / f"statistics_{who}_{shares['water']}"
            config = input_of(case, work, shares)
            config["training"] |= {"numb_steps": 1, "save_freq": 1}
            common.write_input(folder, config)
            if who == "ours":
                trainer, _ = _our_trainer(folder, None)
                models = next(iter(trainer.tasks)).models
                trainer.tasks.close()
                found[who] = {n.replace(".", "/", 1): v.numpy() for n, v in models.state_dict().items()}
                continue
            words = [str(Path(peer).parent / "dp"), f"--{who}", "train", "input.json", "--skip-neighbor-stat"]
            done = subprocess.run(
                words, cwd=folder, env=common.environment(1, "cpu"), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{case}: {who} failed:\n{done.stderr[-2000:]}")
            found[who] = weights_of(folder / "model.ckpt.pt")
        names = [name for name in found["ours"] if name.endswith(OF_STATISTICS)]
        descriptor = [name for name in names if "/descriptor" in name]
        rest = [name for name in names if name not in descriptor]
        cells = [
            f"{max((_apart(found['ours'][n], found[who][n]) for n in group), default=0.0):.1e}"
            for who in ("pt", "pt-expt") for group in (descriptor, rest)
        ]  # fmt: skip
        yield [case, " : ".join(f"{share:g}" for share in shares.values()), *cells]


def _page(rows: list[tuple], statistics: list[list[str]], cases: list[str]) -> str:
    header = ["descriptor / shared", "predictions", "losses", "gradients of one task", "of both", f"{STEPS} steps"]
    beside = [
        "descriptor / shared",
        "shares",
        "pt: descriptor",
        "pt: the rest",
        "pt_expt: descriptor",
        "pt_expt: the rest",
    ]
    command = "python tests/peer/tasks.py --peer DIR" + (f" --cases {' '.join(cases)}" if cases != CASES else "")
    return "\n".join([
        f"# Two tasks beside DeePMD-kit 3.2.0, {common.today()}",
        "",
        f"`{command}`, of commit {_commit()}",
        "",
        "The peer's trainer (backend pt) has made models for two tasks; the run here starts from its file.",
        f"Float64. Relative differences: of an array, the largest over its largest number. {STEPS} steps: distance of",
        "the last weights of both over that from the first weights, all tensors of both models, same order of tasks",
        f"({ORDER.count('water')} steps of one, {ORDER.count('ice')} of the other, Adam). Bound: {TOLERANCE:g}.",
        "",
        common.table(header, [[row[0], *(f"{value:.1e}" for value in row[1:])] for row in rows]),
        "",
        "The flags of labels, numbers of float32 in the peer, are given to its loss in float64: as they are they",
        "round the prefactors, which alone changes losses by 4e-8 and the weights after 20 steps by up to 5e-9.",
        "",
        "`dpa2` with `add_tebd_to_repinit_out`: at level 0 the peer shares all of the descriptor but `tebd_transform`;",
        "here that is shared too. Where tasks share a part of a hybrid, the peer fails (no `descriptor_list`).",
        "",
        "Statistics of new models: `descriptor` its means and spreads, `the rest` those of frame parameters and the",
        "energies of the elements.",
        "",
        common.table(beside, statistics),
    ])  # fmt: skip


def _commit() -> str:
    words = ["git", "-C", str(common.ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
