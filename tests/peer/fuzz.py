"""Random option sets of every descriptor: is an accepted option the same function here and in DeePMD-kit.

usage: python tests/peer/fuzz.py --peer DIR [--sets 20] [--seed 1] [--kinds NAME ...] [--output PAGE]

For each set DeePMD-kit makes a model in float64, draws all its numbers at random and writes a ``.dp`` file. Read
here, the model gives the same energies, atomic energies, forces and virials of a molecule with an isolated atom, a
small skewed cell and a larger box; written again, every entry of the file is the same, and DeePMD-kit evaluates it, and
its checkpoint written here, to the same numbers. The options of the file are those that the input says here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peer_side
import torch
from comparing import BOUND, common, differences, other_entries, predictions, run_peer, worst_of
from random_options import KINDS, draw_set

WRITTEN = {"written here": ".dp", "as its checkpoint": ".pt"}  # what the peer reads of dp-ema


@dataclass
class Outcome:
    """The result for one option set: why a program does not take it, notes on its file, differences by output."""

    job: dict[str, Any]
    theirs: str = ""
    ours: str = ""
    unread: str = ""
    notes: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether anything is not as it should be."""
        here = self.unread or self.notes or (self.ours and not self.theirs)
        return bool(here) or any(not value <= BOUND for value in self.worst.values())


def main() -> None:
    """Draw the sets, have both programs evaluate them, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="DIR", required=True, help="virtual environment of DeePMD-kit")
    parser.add_argument("--sets", type=int, default=20, help="option sets of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the choices")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="descriptors")
    parser.add_argument("--work", type=Path, default=common.RUNS / "fuzz", help="folder of the models")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for path in args.work.iterdir():
        path.unlink()
    jobs = list(_jobs(args.work, args.kinds, args.sets, args.seed))
    run_peer(args.peer, args.work, jobs)
    outcomes = [_outcome(job) for job in jobs]
    read = [one for one in outcomes if not (one.theirs or one.unread)]
    run_peer(args.peer, args.work, [job for one in read for job in _read_again(one.job)])
    for one in read:
        _compare_read_again(one)
    common.publish(_page(outcomes, args), args.output)
    if any(one.differs for one in outcomes):
        raise SystemExit(1)


def _jobs(work: Path, kinds: list[str], sets: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the option sets with files of frames."""
    table = _write_table(work)
    all_systems, untied = _write_systems(work)
    for kind in kinds:
        rng = np.random.default_rng([seed, KINDS.index(kind)])
        for number in range(sets):
            model, cut = draw_set(kind, rng, table)
            # in a small cell some neighbors are at the same distance: with cut lists or means by slot anything goes;
            # a pair that is excluded leaves an empty slot there, and its slot to the next one here
            one_mean = "pair_exclude_types" in model or (not cut and bool(rng.random() < 0.6))
            fitting = model["fitting_net"]
            more = {key: fitting[key] for key in ("numb_fparam", "numb_aparam", "default_fparam") if key in fitting}
            yield {
                "kind": kind, "input": model, "out": str(work / f"{kind}-{number}"), "seed": 1000 * seed + number,
                "frames": str(all_systems if one_mean else untied), "one_mean": one_mean, **more,
            }  # fmt: skip


def _write_table(work: Path) -> str:
    """Write pair energies that end at zero beyond all cutoffs, and return the path."""
    r = 0.3 + 0.02 * np.arange(170)
    screened = np.exp(-r / 0.8) / r * np.clip(1 - r / r[-1], 0, None) ** 3
    path = work / "table.txt"
    np.savetxt(path, np.column_stack([r, *(q * screened for q in (900, 110, 1200, 14, 150, 1700))]), fmt="%.12g")
    return str(path)


def _write_systems(work: Path) -> tuple[Path, Path]:
    """Write frames, and those of them without neighbors at the same distance; return the paths."""
    rng = np.random.default_rng(5)
    seven = np.array([[0.1, 0.1, 0.1], [1.0, 0.3, 0.0], [-0.2, 1.0, 0.2], [2.2, 2.1, 2.0], [2.9, 2.7, 2.4],
                      [1.6, 2.6, 2.8], [3.1, 0.6, 2.8]])  # fmt: skip
    types = np.array([0, 1, 1, 0, 1, 1, 2])
    cell = np.array([[4.0, 0, 0], [0.6, 4.3, 0], [-0.4, 0.8, 4.2]]).reshape(1, 9)
    lattice = np.stack(np.meshgrid(*[np.arange(3) * 2.4] * 3, indexing="ij"), -1).reshape(-1, 3)

    def shaken(coord: np.ndarray, by: float) -> np.ndarray:
        return np.stack([coord + by * rng.normal(size=coord.shape) for _ in range(2)])

    alone = np.vstack([seven, [[9.0, 9.0, 9.0]]])  # no neighbors
    found = {
        "molecule": (shaken(alone, 0.08), np.append(types, 1), np.zeros(0)),
        "box": (shaken(lattice, 0.2)[:1], rng.integers(0, 3, len(lattice)), 7.2 * np.eye(3).reshape(1, 9)),
    }
    untied = _save_systems(work / "untied.npz", found)
    found["cell"] = (shaken(seven, 0.08), types, np.repeat(cell, 2, 0))
    return _save_systems(work / "systems.npz", found), untied


def _save_systems(path: Path, found: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Path:
    keys = ("coord", "type", "box")
    np.savez(path, **{f"{name}_{key}": value for name, one in found.items() for key, value in zip(keys, one)})
    return path


def _outcome(job: dict[str, Any]) -> Outcome:
    """Return the comparison of the peer's answer to an option set with ours."""
    from deepmd_ema.config import model_config_from_dict, to_dict
    from deepmd_ema.errors import CheckpointError, ConfigError
    from deepmd_ema.interop.deepmd_pt import read_deepmd_pt, write_deepmd_pt
    from deepmd_ema.interop.dp import read_dp

    out, one = Path(job["out"]), Outcome(job)
    error = Path(f"{out}.error")
    config = None
    try:
        config = model_config_from_dict(job["input"])
    except ConfigError as refused:
        one.ours = str(refused)
    if error.exists():
        one.theirs = error.read_text().strip().splitlines()[-1]
        return one
    with np.load(f"{out}.npz") as file:
        if not all(np.isfinite(value).all() for value in file.values()):
            one.theirs = "its energies are not numbers"
            return one
    try:
        read, model, _ = read_dp(f"{out}.dp")
    except CheckpointError as refused:
        one.unread = str(refused)
        return one
    if config is not None:
        if config.use_srtab is not None:  # DeePMD-kit ignores it beside a table
            config = replace(config, preset_out_bias=None)
        one.notes += [f"option {text}" for text in differences(to_dict(config), to_dict(read), "")]
    one.notes += [f"file: {text}" for text in other_entries(Path(f"{out}.dp"), Path(f"{out}.ours.dp"), read, model)]
    one.worst = worst_of(predictions(Path(f"{out}.dp"), job), Path(f"{out}.npz"))
    write_deepmd_pt(Path(f"{out}.ours.pt"), {"": (read, model, {"weights": "live"})})
    _, again, _ = read_deepmd_pt(torch.load(f"{out}.ours.pt", weights_only=True), Path(f"{out}.ours.pt"))
    known = again.state_dict()
    if not all(torch.equal(value, known[name]) for name, value in model.state_dict().items()):
        one.notes.append("its tensors are other ones in a checkpoint")
    return one


def _read_again(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**job, "file": f"{job['out']}.ours{suffix}", "out": f"{job['out']}_ours_{suffix[1:]}"}
        for suffix in WRITTEN.values()
    ]


def _compare_read_again(one: Outcome) -> None:
    """Note how the peer evaluates the files of dp-ema."""
    for name, job in zip(WRITTEN, _read_again(one.job)):
        again = Path(job["out"])
        if again.with_suffix(".error").exists():
            text = again.with_suffix(".error").read_text().strip().splitlines()[-1]
            one.notes.append(f"the peer does not read the file of dp-ema ({name}): {text}")
            continue
        with np.load(again.with_suffix(".npz")) as file:
            worst = worst_of(dict(file), Path(f"{one.job['out']}.npz"))
        one.worst[name] = max(worst.values())


def _page(outcomes: list[Outcome], args: argparse.Namespace) -> str:
    """Return the page."""
    rows = [_row(kind, [one for one in outcomes if one.job["kind"] == kind]) for kind in args.kinds]
    header = ["kind", "sets", "not in DeePMD-kit", "compared", *peer_side.OUTPUTS, *WRITTEN, "differ"]
    lines = [f"- {Path(one.job['out']).name}: {text}" for one in outcomes for text in _faults(one)]
    title = f"# Random options beside DeePMD-kit 3.2.0, {common.today()}, seed {args.seed}, bound {BOUND:g}"
    return "\n".join([title, "", common.table(header, rows), "", *lines])


def _row(kind: str, outcomes: list[Outcome]) -> list[str]:
    compared = [one for one in outcomes if one.worst]
    worst = [max((one.worst.get(key, 0.0) for one in compared), default=0.0) for key in (*peer_side.OUTPUTS, *WRITTEN)]
    refused = sum(bool(one.theirs) for one in outcomes)
    differ = sum(one.differs for one in outcomes)
    return [kind, str(len(outcomes)), str(refused), str(len(compared)), *(f"{one:.1e}" for one in worst), str(differ)]


def _faults(one: Outcome) -> Iterator[str]:
    """Yield each fault of a set, and the set."""
    if not one.differs:
        return
    if one.unread:
        yield f"not read here: {one.unread}"
    if one.ours:
        yield f"its input is refused here: {one.ours}"
    yield from one.notes
    yield from (f"{key} differs by {value:.1e}" for key, value in one.worst.items() if not value <= BOUND)
    yield f"`{json.dumps(one.job['input'])}`"


if __name__ == "__main__":
    main()
