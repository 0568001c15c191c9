"""How far an average made of snapshots is from the same average tracked directly, over the residual of its profile.

usage: python benchmarks/posthoc_tolerance.py [RUN_DIR | --shapes]

Without a folder: weights that walk, drift and jitter in several ways, 10,000 steps, averages of 25 lengths made of 2 to
100 snapshots of one or two profiles. With the folder of a run of dp-ema that kept snapshots and tracked other power
profiles as well: those, made of its snapshots and of fewer of them. With --shapes: decays of the learning rate over
parts of the made-up runs in place of lengths. Errors are parts of the distance between the average and the live
weights, which is what averaging changes at all.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import numpy as np
import torch

from deepmd_ema.averaging import gamma_of
from deepmd_ema.checkpoint import weights_in
from deepmd_ema.posthoc.combination import find_combinations
from deepmd_ema.posthoc.profiles import SHAPES, Track
from deepmd_ema.posthoc.shapes import DecayRequest, place_decays
from deepmd_ema.posthoc.snapshots import combine, find_snapshots

STEPS, WEIGHTS = 10_000, 50
COUNTS = (2, 3, 4, 5, 8, 10, 20, 50, 100)
PAIRS = ((0.05, 0.10), (0.05,), (0.10,), (0.03, 0.2))
LENGTHS = np.geomspace(0.008, 0.28, 25)
DECAYS = [DecayRequest(shape, part) for shape in SHAPES for part in np.geomspace(0.02, 1, 12).tolist()]
EDGES = (0, 0.001, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", nargs="?", help="a run with snapshots and other power profiles")
    parser.add_argument("--shapes", action="store_true", help="decays in place of lengths")
    args = parser.parse_args()
    rows = of_walks(args.shapes) if args.run_dir is None else of_run(args.run_dir)
    kinds = list(dict.fromkeys(kind for kind, _, _ in rows))
    print("| residual |", " | ".join(f"{kind}: median, worst" for kind in kinds), "|")
    print("| --- |", " | ".join("---" for _ in kinds), "|")
    for low, high in pairwise(EDGES):
        cells = []
        for kind in kinds:
            errors = [error for other, residual, error in rows if other == kind and low < residual <= high]
            cells.append(f"{np.median(errors):.2%}, {max(errors):.2%}" if errors else "-")
        print(f"| {low:.1%} to {high:.1%} |", " | ".join(cells), "|")


def of_walks(shapes: bool) -> list[tuple[str, float, float]]:
    """Return (kind of trajectory, residual, error) of made-up trajectories."""
    rows = []
    for widths in PAIRS:
        for count in COUNTS:
            kept = [Track(gamma_of(w), STEPS // count * n) for n in range(1, count + 1) for w in widths]
            last = kept[-1].end
            shares = np.array([np.pad(track.shares(), (0, last - track.updates)) for track in kept])
            decays = place_decays(DECAYS, kept, last)[0] if shapes else []
            for combination in find_combinations(kept, [] if shapes else LENGTHS, last, decays).combinations:
                target = combination.target.shares()
                for kind, whole in TRAJECTORIES.items():
                    weights = whole[:last]
                    direct, made = target @ weights, combination.coefficients @ (shares @ weights)
                    error = np.linalg.norm(made - direct) / np.linalg.norm(direct - weights[-1])
                    rows.append((kind, combination.residual, error))
    return rows


def of_run(folder: str) -> list[tuple[str, float, float]]:
    """Return (kind, residual, error) of the power profiles that a run has tracked, made of its snapshots."""
    run = find_snapshots(folder)
    live = _flat(run.payload["model"], run)
    rows = []
    states = run.payload["averages"]["profiles"]
    tracked = {name: Track.of(state, run.step) for name, state in states.items() if state["type"] == "power"}
    for skip in (1, 2, 3, 4, 5, 8):
        steps = sorted({kept.step for kept in run.snapshots}, reverse=True)[::skip]
        for names in {frozenset({name}) for name in {k.profile for k in run.snapshots}} | {frozenset(tracked)}:
            some = [k for k in run.snapshots if k.step in steps and k.profile in names]
            part = type(run)(**{**vars(run), "snapshots": some})
            combinations = find_combinations(
                part.tracks, [track.sigma_rel for track in tracked.values()], run.step
            ).combinations
            for name, combination, made in zip(tracked, combinations, combine(part, combinations)):
                direct = _flat(weights_in(run.payload, run.reference, name)[0], run)
                error = (_flat(made, run) - direct).norm() / (direct - live).norm()
                rows.append(("weights of the run", combination.residual, float(error)))
    return rows


def _flat(weights: dict[str, torch.Tensor], run: object) -> torch.Tensor:
    return torch.cat([weights[name].double().ravel() for name in run.averaged])


def _jitter(memory: float) -> np.ndarray:
    """Return noise of unit size that forgets in ``memory`` steps."""
    keep, rng = np.exp(-1 / memory), np.random.default_rng(int(memory))
    out, now = np.empty((STEPS, WEIGHTS)), rng.normal(size=WEIGHTS)
    for step in range(STEPS):
        now = keep * now + np.sqrt(1 - keep**2) * rng.normal(size=WEIGHTS)
        out[step] = now
    return out


def _trajectories() -> dict[str, np.ndarray]:
    rng, time = np.random.default_rng(0), np.arange(1, STEPS + 1)[:, None] / STEPS
    drift = time**-0.3 * rng.normal(size=WEIGHTS) + np.log(time) * rng.normal(size=WEIGHTS)
    moves = rng.normal(size=(STEPS, WEIGHTS))
    return {
        "walk": np.cumsum(moves, 0),
        "jitter of 10 steps": _jitter(10),
        "jitter of 1,000": _jitter(1000),
        "drift": drift,
        "drift and jitter of 10": drift + 0.3 * _jitter(10),
        "drift and walk": 30 * drift + 0.3 * np.cumsum(moves, 0),
        "walk that comes to rest": np.cumsum(moves * np.cos(np.pi / 2 * time), 0),
    }


TRAJECTORIES = _trajectories()


if __name__ == "__main__":
    main()
