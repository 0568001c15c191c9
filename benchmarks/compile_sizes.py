"""Graphs over time in a compiled run over 12 systems of 12 sizes, and the share of time that compiling takes.

usage: python benchmarks/compile_sizes.py [--kinds se_e2_a ...] [--steps 480] [--plot PNG] [--output PAGE]

The systems are cut from frames of water: whole cells and doubled ones, clusters around an atom in vacuum, one element
only, single atoms. Their labels are those of a pair potential. A run trains and validates on all of them, with batches
of several frames of one system each, and starts twice: with an empty cache and with the code of the first start. The
runs are real ones of `dp-ema train`; what is compiled and when is read from their logs, and every graph that torch
makes again is told by TORCH_LOGS=recompiles. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np

KINDS = ["se_e2_a", "se_atten, 2 layers", "dpa3"]
FRAMES = {"training": 6, "validation": 2}  # of each system
HEIGHT, WIDTH, LAST = 20.0, 0.6, 4.0  # eV, angstrom, angstrom, of the pair potential
COMPILED = re.compile(r"^\[(.{19})\] compiled graph \d+ for (\w+) in ([\d.]+) s")
GUARD = re.compile(r"\[__recompiles\]\s+- \d+/\d+: ([^#]+)")
COLORS = {"steps": "#0072B2", "graphs": "#D55E00"}


@dataclass(frozen=True)
class Kept:
    """What is kept of a cell.

    Attributes:
        atoms: number of atoms; those nearest to the first atom of the element.
        element: whose atoms are kept, or None for all.
        periodic: whether the cell is kept; then all atoms are.
        doubled: whether the cell is there twice.
    """

    atoms: int
    element: int | None = None
    periodic: bool = False
    doubled: bool = False

    def in_words(self) -> str:
        """Return what this is."""
        what = {None: "", 0: ", O only", 1: ", H only"}[self.element]
        return f"{self.atoms}{what}, {'cell' if self.periodic else 'vacuum'}"


SYSTEMS = [
    Kept(1, 0), Kept(2, 1), Kept(3), Kept(6), Kept(9), Kept(17), Kept(32, 0, True), Kept(40), Kept(64, 1, True),
    Kept(75), Kept(96, periodic=True), Kept(192, periodic=True, doubled=True),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A run: when it began and ended (s, since the epoch), its rows, and the graphs as (end, purpose, seconds)."""

    start: float
    end: float
    rows: list[tuple[int, float]]
    graphs: list[tuple[float, str, float]]
    reasons: list[str]


def main() -> None:
    """Train, and print the page."""
    args = _arguments()
    systems = _write_systems(args.work.resolve() / "compile_sizes")
    found = {(kind, start): _train(kind, start, systems, args) for kind in args.kinds for start in ("first", "second")}
    common.publish(_page(found, args), args.output)
    if args.plot is not None:
        _plot({kind: found[kind, "first"] for kind in args.kinds}, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="names in compile.json")
    parser.add_argument("--steps", type=int, default=480, help="of a run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, default=common.RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw steps and graphs over time here")
    return parser.parse_args()


def _train(kind: str, start: str, systems: dict[str, list[str]], args: argparse.Namespace) -> Result:
    """Return a finished run, which is made if it is not there."""
    folder = args.work.resolve() / "compile_sizes" / f"{kind.split(',')[0]}-{start}"
    file = folder / "times.json"
    if not file.exists():
        common.write_input(folder, _input(kind, systems, args.steps, folder.with_name(f"{kind.split(',')[0]}-cache")))
        env = common.environment(args.threads, args.device) | {"TORCH_LOGS": "recompiles"}
        clock = time.time() - time.perf_counter()
        seen = common.train(common.programs(None)["ours"], folder, env, "--skip-neighbor-stat")
        rows = [(step, clock + when) for step, when in sorted(seen.rows.items())]
        file.write_text(json.dumps({"start": clock + seen.start, "end": clock + seen.end, "rows": rows}))
    lines = (folder / "train.log").read_text().splitlines()
    graphs = [
        (time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")), match[2], float(match[3]))
        for match in map(COMPILED.match, lines)
        if match
    ]
    times = json.loads(file.read_text())
    reasons = [match[1].strip() for match in map(GUARD.search, lines) if match]
    return Result(times["start"], times["end"], times["rows"], graphs, reasons)


def _input(kind: str, systems: dict[str, list[str]], steps: int, cache: Path) -> dict:
    model = json.loads((common.ROOT / "benchmarks" / "compile.json").read_text())[kind]
    return {
        "model": {"type_map": ["O", "H"], "descriptor": model, "fitting_net": {"neuron": [60, 60, 60]}},
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 50},
        "loss": {"type": "ener", "start_pref_e": 0.1, "limit_pref_e": 1, "start_pref_f": 100, "limit_pref_f": 1},
        "training": {
            "training_data": {"systems": systems["training"], "batch_size": "auto:48"},
            "validation_data": {"systems": systems["validation"], "batch_size": 2, "numb_btch": 2},
            "numb_steps": steps,
            "disp_freq": 10,
            "save_freq": steps,
            "seed": 1,
            "enable_compile": True,
            "compile_options": {"cache_dir": str(cache)},
        },
    }


def _write_systems(base: Path) -> dict[str, list[str]]:
    """Write the systems that are not there, and return their folders."""
    water = common.EXAMPLE / "data" / "train_300K"
    kinds = np.loadtxt(water / "type.raw", dtype=int)
    coords = np.load(water / "set.000" / "coord.npy").reshape(-1, len(kinds), 3)
    boxes = np.load(water / "set.000" / "box.npy").reshape(-1, 3, 3)
    folders: dict[str, list[str]] = {purpose: [] for purpose in FRAMES}
    for kept in SYSTEMS:
        first = 0
        for purpose, count in FRAMES.items():
            folder, part = base / purpose / f"{kept.atoms:03d}", slice(first, first + count)
            if not folder.exists():
                _write(kept, kinds, coords[part], boxes[part], folder)
            folders[purpose].append(str(folder))
            first += count
    return folders


def _write(kept: Kept, kinds: np.ndarray, coords: np.ndarray, boxes: np.ndarray, folder: Path) -> None:
    chosen, positions, cells = _cut(kept, kinds, coords, boxes)
    arrays = {"coord": positions} | ({"box": cells} if kept.periodic else {})
    labels = [_labels(one, cell if kept.periodic else None) for one, cell in zip(positions, cells)]
    arrays |= {"energy": np.array([e for e, _ in labels]), "force": np.array([f for _, f in labels])}
    common.write_system(folder, chosen, ["O", "H"], arrays)


def _cut(kept: Kept, kinds: np.ndarray, coords: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return types (N,), positions (F, N, 3) and cells (F, 3, 3) of what is kept."""
    if kept.doubled:
        coords, kinds = np.concatenate([coords, coords + boxes[:, :1]], 1), np.tile(kinds, 2)
        boxes = boxes * np.array([2, 1, 1])[:, None]
    mine = np.flatnonzero(kinds == kept.element) if kept.element is not None else np.arange(len(kinds))
    if kept.periodic:
        assert len(mine) == kept.atoms
    else:  # the nearest ones of the first frame in all of them
        away = coords[:, mine] - coords[:, mine[:1]]
        away -= np.rint(away @ np.linalg.inv(boxes)) @ boxes
        near = np.argsort(np.linalg.norm(away[0], axis=-1))[: kept.atoms]
        return kinds[mine[near]], away[:, near], boxes
    return kinds[mine], coords[:, mine], boxes


def _labels(coord: np.ndarray, box: np.ndarray | None) -> tuple[float, np.ndarray]:
    """Return the energy, eV, and the forces (N, 3), eV/angstrom, of pairs that repel each other."""
    from deepmd_ema.geometry import find_pairs

    pairs = find_pairs(coord, box, LAST)
    vector = pairs.vector(coord, box)
    distance = np.linalg.norm(vector, axis=-1)
    rest = 1 - distance / LAST
    energy = HEIGHT * np.exp(-distance / WIDTH) * rest**2
    slope = -HEIGHT * np.exp(-distance / WIDTH) * (rest**2 / WIDTH + 2 * rest / LAST)
    force = np.zeros_like(coord)
    np.add.at(force, pairs.i, slope[:, None] * vector / distance[:, None])  # each pair occurs from both ends
    return 0.5 * float(energy.sum()), force


def _page(found: dict[tuple[str, str], Result], args: argparse.Namespace) -> str:
    rows = []
    for (kind, start), run in found.items():
        total, compiling = run.end - run.start, sum(seconds for _, _, seconds in run.graphs)
        counts = [str(sum(purpose == name for _, purpose, _ in run.graphs)) for name in ("training", "validation")]
        rows.append([kind, start, *counts, str(len(run.reasons)), f"{compiling:.1f}", f"{total:.1f}",
                     f"{100 * compiling / total:.0f} %"])  # fmt: skip
    header = ["", "start", "training graphs", "validation graphs", "made again", "compiling, s", "run, s", "share"]
    told = [f"- {kind}, {start} start: {reason}" for (kind, start), run in found.items() for reason in run.reasons]
    parts = [
        f"# Graphs of a run over {len(SYSTEMS)} systems of {len(SYSTEMS)} sizes, {common.today()}",
        f"Atoms of a frame: {'; '.join(kept.in_words() for kept in SYSTEMS)}. {args.steps} steps, batches of as many "
        "frames of one system as have 48 atoms, all systems validated.",
        common.table(header, rows),
        *(["Graphs made again:\n\n" + "\n".join(told)] if told else []),
        f"On {common.machine(common.programs(None), args.threads, args.device)}.",
    ]
    return "\n\n".join(parts)


def _plot(found: dict[str, Result], output: Path) -> None:
    """Draw steps and graphs over time, one panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.4), layout="constrained", squeeze=False)
    for axis, (kind, run) in zip(axes[0], found.items()):
        for end, _, seconds in run.graphs:
            axis.axvspan(end - seconds - run.start, end - run.start, color="#dddddd", lw=0)
        steps = [(0, run.rows[0][1]), *run.rows]
        axis.plot([when - run.start for _, when in steps], [step for step, _ in steps], color=COLORS["steps"])
        axis.set(title=kind, xlabel="seconds (grey: compiling)", xlim=(0, run.end - run.start), ylim=(0, None))
        axis.set_ylabel("steps", color=COLORS["steps"])
        other = axis.twinx()
        when = [0.0, *(end - run.start for end, _, _ in run.graphs), run.end - run.start]
        count = [*range(len(run.graphs) + 1), len(run.graphs)]
        other.step(when, count, where="post", color=COLORS["graphs"])
        other.set_ylabel("graphs", color=COLORS["graphs"])
        other.set(ylim=(0, max(4, len(run.graphs) + 1)), yticks=range(max(4, len(run.graphs) + 1) + 1))
    figure.savefig(output, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
