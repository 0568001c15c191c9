"""Snapshots of the averages of a run, files of kind ``snapshot``: found, checked and combined."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.file import SUFFIXES, series_and_step
from deepmd_ema.commands.posthoc.combination import Combination, Track
from deepmd_ema.config.outputs import SNAPSHOTS
from deepmd_ema.distributed.tensors import check_weights
from deepmd_ema.errors import CheckpointError, collect_problems
from deepmd_ema.text import counted, first_few

HOW_TO_KEEP = (
    'Train with these in the section training, beside enable_ema where it is: "averaging": '
    '[{"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": true}, {"name": "p10", '
    '"type": "power", "sigma_rel": 0.10, "snapshots": '
    "true}]; snapshot_freq says how often (default: save_freq)."
)
# bytes of sums held at once, 2 GiB; more widths than fit take another pass over the files
MAX_BYTES = 2 << 30


@dataclass(frozen=True)
class Snapshot:
    """One snapshot.

    Attributes:
        path: the file.
        step: optimizer steps of the weights.
        profile: name of the average.
        track: how much of the weights after each step is in it.
        averaged: names of the tensors that are averaged.
        shapes: of all tensors.
    """

    path: Path
    step: int
    profile: str
    track: Track
    averaged: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SnapshotRun:
    """The snapshots of one run.

    Attributes:
        folder: the folder.
        reference: training checkpoint of ``step``, or the newest one when that is gone.
        payload: its content.
        step: the last step that is averaged over.
        snapshots: those up to ``step``, the oldest first; the last is of ``step``. May be none.
        averaged: names of the tensors that are averaged; empty without snapshots.
        notes: files that were left out, and why.
    """

    folder: Path
    reference: Path
    payload: Mapping[str, Any]
    step: int
    snapshots: Sequence[Snapshot]
    averaged: Sequence[str]
    notes: Sequence[str]

    @property
    def tracks(self) -> list[Track]:
        """The tracks of the snapshots, in their order."""
        return [snapshot.track for snapshot in self.snapshots]


def find_snapshots(folder: str | Path, step: int | None = None) -> SnapshotRun:
    """Return the snapshots of the run in ``folder``, checked to be of one trajectory of one model.

    Args:
        folder: where the run was started, with its file ``checkpoint``.
        step: the last step to average over, one that has a snapshot; the newest by default.

    Raises:
        CheckpointError: if there are no checkpoints or too few snapshots, or some cannot be read or
            combined.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "no such folder"
        raise CheckpointError(
            f"{folder}: {what}. Give the folder in which the run was started."
        )
    newest = checkpoint.resolve(folder)
    payload = checkpoint.load(newest)
    place = newest.parent / SNAPSHOTS
    all_snapshots, notes = _read_all(place, payload, newest)
    steps = sorted({snapshot.step for snapshot in all_snapshots})
    if step is None:
        step = steps[-1]
    if step not in steps:
        near = sorted(sorted(steps, key=lambda s: abs(s - step))[:5])
        raise CheckpointError(
            f"--step {step}: no snapshot of this step in {place}. There are snapshots of "
            f"{counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}; the nearest: "
            f"{', '.join(map(str, near))}."
        )
    snapshots = [snapshot for snapshot in all_snapshots if snapshot.step <= step]
    later = len(all_snapshots) - len(snapshots)
    if later:
        notes.append(f"left out: {counted(later, 'snapshot')} after step {step:,}")
    if len(snapshots) < 2:
        raise CheckpointError(
            f"{place}: 1 snapshot up to step {step}; at least 2 are needed to make averages of "
            "other widths. Keep them more often (a smaller snapshot_freq)."
        )
    _check_alike(snapshots, payload)
    averaged = [name for name in payload["model"] if name in snapshots[-1].averaged]
    # Live and tracked weights are compared with combinations at `step`: its own checkpoint is read
    # where the run still has it, else the newest one, whose rows name another step.
    series = series_and_step(newest.name)
    reference = (
        newest.with_name(f"{series[0]}-{step}{newest.suffix}")
        if series is not None
        else newest
    )
    if reference != newest and reference.exists():
        other = checkpoint.load(reference)
        # an earlier run in this folder may have left it
        if other.get("run") == payload["run"]:
            newest, payload = reference, other
    return SnapshotRun(folder, newest, payload, step, snapshots, averaged, notes)


def combine(
    run: SnapshotRun, combinations: Sequence[Combination], most_bytes: int = MAX_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of each combination: averaged tensors combined, all others as in the last.

    One snapshot at a time is in memory. Sums are in float64; the results have the precision of an
    average that was tracked, float32 or wider.

    Args:
        run: whose snapshots.
        combinations: coefficients over ``run.snapshots``.
        most_bytes: of sums held at once.
    """
    model = run.payload["model"]
    sizes = [model[name].numel() for name in run.averaged]
    size = sum(sizes)
    # Each pass over the files makes as many sums as fit into memory, of 8 bytes a number.
    group = max(1, most_bytes // (8 * max(1, size)))
    for low in range(0, len(combinations), group):
        chosen = combinations[low : low + group]
        # (combinations of this pass, snapshots)
        coefficients = torch.from_numpy(np.stack([c.coefficients for c in chosen]))
        # (combinations of this pass, averaged numbers)
        sums = torch.zeros(len(coefficients), size, dtype=torch.float64)
        last: dict[str, Tensor] = {}
        for k, snapshot in enumerate(run.snapshots):
            last = checkpoint.load(snapshot.path)["model"]
            flat = torch.cat(
                [last[name].to(torch.float64).ravel() for name in run.averaged]
            )
            sums.addr_(
                coefficients[:, k], flat
            )  # outer product of (combinations,) and (numbers,)
        for row in sums:
            averaged = {}
            for name, part in zip(run.averaged, row.split(sizes)):
                dtype = torch.promote_types(model[name].dtype, torch.float32)
                averaged[name] = part.view(model[name].shape).to(dtype)
            yield {name: averaged.get(name, last[name]) for name in model}


def _read_all(
    place: Path, payload: Mapping[str, Any], newest: Path
) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots of the run of ``payload``, the oldest first, and notes on others."""
    snapshots: list[Snapshot] = []
    left_out: dict[str, list[str]] = {}  # files by reason
    problems: list[str] = []
    for path in sorted(
        path for suffix in SUFFIXES for path in place.glob(f"*{suffix}")
    ):
        with collect_problems(problems), checkpoint.reading(path):
            # one model at a time is in memory: shapes and facts are enough until they are combined
            facts = checkpoint.load(path)
            model = facts.pop("model")
            checkpoint.require_finite(model, path)
            shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
            average, step = facts.get("average", {}), facts["step"]
            if facts["kind"] != "snapshot" or facts.get("run") != payload.get("run"):
                left_out.setdefault("of another run", []).append(path.name)
            # left by a run that was ended before its next checkpoint, or by another branch
            elif step > payload["step"]:
                left_out.setdefault(f"beyond {newest.name}", []).append(path.name)
            elif (hook := average.get("should_update")) is not None:
                problems.append(
                    f"{path}: was updated when {hook} decided, and not at known steps."
                )
            elif not 0 <= (gamma := average.get("gamma", 0.0)) < math.inf:
                problems.append(
                    f"{path}: average.gamma is {gamma}, expected a number >= 0."
                )
            # before the first update it is the live weights, and has no profile
            elif average["updates"] > 0:
                track = Track.of(average, step)
                # The age in the file was counted at each update. The age of the track follows from
                # its settings, and differs if they were others in some part of the run.
                mean_age = track.mean_age() + step - track.end
                if math.isclose(
                    average["mean_age"], mean_age, rel_tol=1e-6, abs_tol=1e-3
                ):
                    averaged = frozenset(map(str, facts["averaged"]))
                    snapshots.append(
                        Snapshot(path, step, facts["weights"], track, averaged, shapes)
                    )
                else:
                    left_out.setdefault(
                        "of averages whose settings were changed at a restart", []
                    ).append(path.name)
    CheckpointError.raise_if_any(problems)
    notes = [
        f"{what}, left out: {first_few(files, 5)}" for what, files in left_out.items()
    ]
    if not snapshots:
        why = f"({'; '.join(notes)}) " if notes else ""
        raise CheckpointError(
            f"{place}: no snapshots of the run of {newest}. {why}{HOW_TO_KEEP}"
        )
    return sorted(
        snapshots, key=lambda snapshot: (snapshot.step, snapshot.profile)
    ), notes


def _check_alike(snapshots: Sequence[Snapshot], payload: Mapping[str, Any]) -> None:
    """Check that all snapshots have the same tensors, of the same shapes, and averaged the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in payload["model"].items()}
    last = snapshots[-1]
    problems: list[str] = []
    # files by the names that are averaged in one of both only: one message for all files of a kind
    different_files: dict[frozenset[str], list[str]] = {}
    for snapshot in snapshots:
        with collect_problems(problems):
            check_weights(shapes, snapshot.shapes, snapshot.path)
            if different := last.averaged ^ snapshot.averaged:
                different_files.setdefault(different, []).append(str(snapshot.path))
    problems += [
        f"{first_few(paths, 2)}: other tensors were averaged than in {last.path}; different: "
        f"{first_few(sorted(different), 5)}. Only averages of the same tensors combine (`buffers` "
        "of training.averaging): move the others to another folder."
        for different, paths in different_files.items()
    ]
    CheckpointError.raise_if_any(problems)
