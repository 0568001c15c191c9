"""Random option sets of every descriptor: is an accepted option the same function here and in DeePMD-kit.

usage: python benchmarks/peer_fuzz.py --peer DIR [--sets 20] [--seed 1] [--kinds NAME ...] [--output PAGE]

For each set DeePMD-kit makes a model in float64, draws all its numbers at random and writes a ``.dp`` file. Read
here, the model gives the same energies, atomic energies, forces and virials of a molecule with an isolated atom, a
small skewed cell and a larger box; written again, every entry of the file is the same, and DeePMD-kit evaluates it to
the same numbers. The options of the file are those that the input says here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import peer_side
from fuzz_options import KINDS, draw_set

BOUND = 1e-10
AGAIN = "written here"
# not part of the function of a model, or said in another way: spellings of the same value
IGNORED = {"seed", "data_stat_nbatch", "data_stat_protect", "data_bias_nsample", "trainable", "rcond", "protection"}


@dataclass
class Outcome:
    """What became of one option set.

    Attributes:
        job: as given to the peer.
        theirs: why the peer does not take it, or empty.
        ours: why dp-ema does not take its input, or empty.
        unread: why dp-ema does not read the peer's file, or empty.
        notes: entries of the file or options that differ, none if all is right.
        worst: largest relative difference of each output, here and where the peer read the file of dp-ema.
    """

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
    parser.add_argument("--work", type=Path, default=common.RUNS / "peer_fuzz", help="folder of the models")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for path in args.work.iterdir():
        path.unlink()
    jobs = list(_jobs(args.work, args.kinds, args.sets, args.seed))
    (args.work / "jobs0.json").write_text(json.dumps(jobs))
    run_peer(args.peer, args.work, jobs)
    outcomes = [_outcome(job) for job in jobs]
    read = [one for one in outcomes if not (one.theirs or one.unread)]
    run_peer(args.peer, args.work, [_read_again(one.job) for one in read])
    for one in read:
        _compare_read_again(one)
    common.publish(_page(outcomes, args), args.output)
    if any(one.differs for one in outcomes):
        raise SystemExit(1)


def run_peer(peer: str, work: Path, jobs: list[dict[str, Any]]) -> None:
    """Have DeePMD-kit do jobs of ``peer_side``."""
    (work / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("peer_side.py")
    words = [str(Path(peer) / "bin" / "python"), str(script), str(work / "jobs.json")]
    subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)


def largest_difference(found: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference relative to the largest number; infinite where one is not a number."""
    if not np.isfinite(reference).all() or not np.isfinite(found).all():
        return 0.0 if np.array_equal(found, reference, equal_nan=True) else np.inf
    size = np.abs(reference).max()
    return float(np.abs(found - reference).max() / (size or 1.0))


def predictions(path: Path, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what a model file says here of the frames of a job."""
    from deepmd_ema.infer.potential import Potential

    potential, found = Potential(path, device="cpu"), {}
    for name, system in peer_side.frames_of(job["frames"]).items():
        coord, kinds, box = system["coord"], system["type"], system["box"]
        more = peer_side.conditions(job, *coord.shape[:2])
        got = potential.evaluate(coord, kinds, box if box.size else None, **more)
        found |= {f"{name}_{key}": getattr(got, key) for key in peer_side.OUTPUTS}
    return found


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
    """Return how the peer's answer to an option set compares with ours."""
    from deepmd_ema.config import model_config_from_dict
    from deepmd_ema.errors import CheckpointError, ConfigError
    from deepmd_ema.interchange import read_dp

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
    try:
        read, model, _ = read_dp(f"{out}.dp")
    except CheckpointError as refused:
        one.unread = str(refused)
        return one
    if config is not None:
        if config.use_srtab is not None:  # DeePMD-kit ignores it beside a table
            config = replace(config, preset_out_bias=None)
        one.notes += [f"option {text}" for text in _other_options(config, read)]
    one.notes += [f"file: {text}" for text in _other_entries(Path(f"{out}.dp"), Path(f"{out}.ours.dp"), read, model)]
    one.worst = _worst(predictions(Path(f"{out}.dp"), job), Path(f"{out}.npz"))
    return one


def _worst(found: dict[str, np.ndarray], reference: Path) -> dict[str, float]:
    """Return the largest relative difference of each output over all systems."""
    with np.load(reference) as file:
        by_name = {name: largest_difference(value, file[name]) for name, value in found.items()}
    return {key: max(v for name, v in by_name.items() if name.endswith(f"_{key}") and not (
        key == "energy" and name.endswith("atom_energy"))) for key in peer_side.OUTPUTS}  # fmt: skip


def _other_options(ours: Any, read: Any) -> Iterator[str]:
    """Yield the options that differ between the input and the file."""
    from deepmd_ema.config import to_dict

    yield from _differences(to_dict(ours), to_dict(read), "")


def _differences(first: Any, second: Any, path: str) -> Iterator[str]:
    """Yield what differs in two trees, but for what is not part of the function of a model."""
    kinds = (type(first), type(second))
    if kinds == (dict, dict):
        for name in sorted((first.keys() | second.keys()) - IGNORED):
            if name not in first or name not in second:
                yield f"{path}.{name} only in {'the first' if name in first else 'the second'}"
            else:
                yield from _differences(first[name], second[name], f"{path}.{name}")
    elif np.ndarray in kinds:
        rounding = 1e-12 if path.endswith("tab_data") else 0  # splines, computed again from the rows of the table
        if np.shape(first) != np.shape(second) or not np.allclose(first, second, rtol=rounding, atol=rounding):
            yield f"{path}: arrays {np.shape(first)} and {np.shape(second)} differ"
    elif kinds == (list, list) and len(first) == len(second) and not path.endswith(".sel"):
        for number, pair in enumerate(zip(first, second)):
            yield from _differences(*pair, f"{path}[{number}]")
    elif _plain(path, first) != _plain(path, second):
        yield f"{path}: {first!r} and {second!r}"


def _plain(path: str, value: Any) -> Any:
    """Return a value of an option as it is understood: some have several spellings."""
    if path.endswith(".ln_eps"):
        return 1e-5 if value is None else value
    if path.endswith(".sel"):
        return int(np.sum(value))
    return value[0] if "preset_out_bias" in path and isinstance(value, list) else value


def _other_entries(theirs: Path, ours: Path, config: Any, model: Any) -> Iterator[str]:
    """Write the model again, and yield the entries of the file that are not those of the peer's."""
    from deepmd_ema.interchange.dp.files import read_tree
    from deepmd_ema.interchange.dp.model import write_dp

    write_dp(ours, model, config)
    found = _differences(read_tree(theirs)["model"], read_tree(ours)["model"], "")
    for place in _of_se_e3(config.descriptor):  # one of the two networks of a pair is not used
        found = [text for text in found if f"{place}.embeddings.networks[" not in text]
    yield from found


def _of_se_e3(descriptor: Any) -> list[str]:
    """Return the places of parts of type se_e3."""
    parts = {".descriptor": descriptor}
    if descriptor.type == "hybrid":
        parts = {f".descriptor.list[{number}]": part for number, part in enumerate(descriptor.list)}
    return [place for place, part in parts.items() if part.type == "se_e3"]


def _read_again(job: dict[str, Any]) -> dict[str, Any]:
    return {**job, "file": f"{job['out']}.ours.dp", "out": f"{job['out']}_ours"}


def _compare_read_again(one: Outcome) -> None:
    """Note how the peer evaluates the file of dp-ema."""
    again = Path(f"{one.job['out']}_ours")
    if again.with_suffix(".error").exists():
        text = again.with_suffix(".error").read_text().strip().splitlines()[-1]
        one.notes.append(f"the peer does not read the file of dp-ema: {text}")
        return
    with np.load(again.with_suffix(".npz")) as file:
        worst = _worst(dict(file), Path(f"{one.job['out']}.npz"))
    one.worst[AGAIN] = max(worst.values())


def _page(outcomes: list[Outcome], args: argparse.Namespace) -> str:
    """Return the page."""
    rows = [_row(kind, [one for one in outcomes if one.job["kind"] == kind]) for kind in args.kinds]
    header = ["kind", "sets", "not in DeePMD-kit", "compared", *peer_side.OUTPUTS, AGAIN, "differ"]
    lines = [f"- {_name(one)}: {text}" for one in outcomes for text in _faults(one)]
    refused = Counter(one.theirs for one in outcomes if one.theirs)
    return "\n".join([
        f"# Random options beside DeePMD-kit 3.2.0, {common.today()}",
        "",
        f"`python benchmarks/peer_fuzz.py --peer DIR --sets {args.sets} --seed {args.seed}`",
        "",
        *__doc__.splitlines()[4:],
        "",
        "Largest differences relative to the largest number of each output of each system, all in float64. Bound: "
        f"{BOUND:g}.",
        "The last column of numbers: DeePMD-kit with the file that was written here, beside its own.",
        "",
        common.table(header, rows),
        "",
        "## What differs",
        "",
        *(lines or ["Nothing."]),
        "",
        "## Sets that DeePMD-kit does not take",
        "",
        *([f"- {count} times: {text[:200]}" for text, count in refused.items()] or ["None."]),
        "",
        "Taken here although DeePMD-kit does not take them: "
        + (", ".join(_name(one) for one in outcomes if one.theirs and not one.ours) or "none")
        + ".",
    ])  # fmt: skip


def _row(kind: str, outcomes: list[Outcome]) -> list[str]:
    compared = [one for one in outcomes if one.worst]
    worst = [max((one.worst.get(key, 0.0) for one in compared), default=0.0) for key in (*peer_side.OUTPUTS, AGAIN)]
    refused = sum(bool(one.theirs) for one in outcomes)
    differ = sum(one.differs for one in outcomes)
    return [kind, str(len(outcomes)), str(refused), str(len(compared)), *(f"{one:.1e}" for one in worst), str(differ)]


def _faults(one: Outcome) -> Iterator[str]:
    """Yield what is not as it should be with a set, and the set."""
    if not one.differs:
        return
    if one.unread:
        yield f"not read here: {one.unread}"
    if one.ours:
        yield f"its input is refused here: {one.ours}"
    yield from one.notes
    yield from (f"{key} differs by {value:.1e}" for key, value in one.worst.items() if not value <= BOUND)
    yield f"`{json.dumps(one.job['input'])}`"


def _name(one: Outcome) -> str:
    return Path(one.job["out"]).name


if __name__ == "__main__":
    main()
