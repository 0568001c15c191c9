"""``dp-ema posthoc``: averages of many widths and decays made of a run's snapshots, ranked; the
best is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from deepmd_ema import checkpoint
from deepmd_ema.commands.posthoc import combination
from deepmd_ema.commands.posthoc.combination import (
    MAX_SIGMA_REL,
    SHAPES,
    TOLERANCE,
    Combinations,
    Decay,
)
from deepmd_ema.commands.posthoc.ranking import OVERALL, SHAPE, TRACKED, PosthocReport, Row
from deepmd_ema.commands.posthoc.snapshots import SnapshotRun, combine, find_snapshots
from deepmd_ema.config import RunConfig, TaskConfig, saved_config
from deepmd_ema.config.outputs import with_absolute_paths
from deepmd_ema.config.schema.averaging import sigma_rel_of
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import atoms_at_once, prefetch, sequential_batches
from deepmd_ema.data.run import open_split
from deepmd_ema.data.source import FrameSource
from deepmd_ema.distributed.files import CSV, PICTURE, check_output, ensure_writable
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import (
    ConfigError,
    DataError,
    UserError,
    collect_problems,
    command,
    counted,
    did_you_mean,
)
from deepmd_ema.infer.evaluate import open_labelled
from deepmd_ema.model.build import build_models
from deepmd_ema.model.metrics import METRICS, evaluate
from deepmd_ema.utils import LIVE, POSTHOC

NUM_SIGMA_RELS = 9  # of a range, where no number is given
MAX_SIGMA_RELS = 999  # of one range: each is validated
DEFAULT_PARTS = [0.05, 0.1, 0.2, 0.4]
NONE = "none"


def run_posthoc(
    folder: str | Path,
    sigma_rel: Sequence[str | float] | None = None,
    step: int | None = None,
    *,
    shapes: Sequence[str] | None = None,
    metric: str = OVERALL,
    systems: Sequence[str | Path] | None = None,
    rglob_patterns: Sequence[str] | None = None,
    output: str | Path | None = None,
    plot: str | Path | None = None,
    table: str | Path | None = None,
    head: str | None = None,
    device: str | None = None,
    say: Callable[[str], Any],
) -> PosthocReport:
    """Make averages of the widths ``sigma_rel`` and the decays ``shapes``, print their errors, and
    write the best one.

    Args:
        folder: where the run was started.
        sigma_rel: numbers, or words as ``0.05`` and ``0.02:0.2:9``; by default the whole resolvable
            range, unless ``shapes`` names some.
        step: the last step to average over; that of the newest snapshot by default.
        shapes: words as ``linear`` and ``cosine:0.2``, or ``none``; by default those that the
            snapshots resolve, unless ``sigma_rel`` is given.
        metric: what best means: ``overall``, or a metric of validation such as ``F:RMSE``.
        systems: validation systems; by default those of the run's input.
        rglob_patterns: names of systems to search for in ``systems``.
        output: model file; ``model_posthoc.pt`` in ``folder`` by default.
        plot: picture; ``posthoc.png`` in ``folder`` by default.
        table: ``posthoc.csv`` in ``folder`` by default.
        head: the task whose errors are measured, of a run of several; the file holds the model of
            each.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.
        say: prints a text.

    Raises:
        UserError: if snapshots or data are missing or wrong, or do not resolve a width.
    """
    # what is requested, and the snapshots
    folder = Path(folder)
    widths = parse_sigma_rels(sigma_rel)
    decays = parse_shapes(shapes)
    metrics = {
        name.upper(): name
        for name in (OVERALL, *(f"{q}:{kind}" for q in METRICS for kind in ("RMSE", "MAE")))
    }
    if metric.upper() not in metrics:
        raise UserError(
            f"--metric {metric}: unknown. {did_you_mean(metric, list(metrics.values()))}"
        )
    metric, where = metrics[metric.upper()], select_device(device)
    output, table, plot = (
        folder / default if path is None else Path(path)
        for path, default in (
            (output, "model_posthoc.pt"),
            (table, "posthoc.csv"),
            (plot, "posthoc.png"),
        )
    )
    run = find_snapshots(folder, step)
    for option, path, kind in (
        ("-o", output, None),
        ("--table", table, CSV),
        ("--plot", plot, PICTURE),
    ):
        ensure_writable(path.parent, option)
        check_output(path, option, kind)
    checkpoint.refuse_to_replace(output, "-o")
    for note in run.notes:
        say(note)
    found = find_requested(run, widths, None if shapes is None else decays)

    # the model and the validation data
    config = saved_config(
        with_absolute_paths(run.payload["config"], run.folder), source=str(run.reference)
    )
    task = config.task(head)
    opened = _open(config, task, run, systems, rglob_patterns)
    models = build_models(
        {name: each.model for name, each in config.tasks.items()}, config.links
    ).to(where)
    model, cache = models.by_task[task.name], PairCache()

    # errors of the live weights, of averages that were tracked, and of those made of snapshots
    rows: list[Row] = []
    best, best_score = -1, math.inf
    best_weights: Mapping[str, Tensor] = {}
    made = (
        (_row_of(one), weights)
        for one, weights in zip(found.combinations, combine(run, found.combinations))
    )
    with checkpoint.reading(run.reference):
        tracked = list(_tracked(run))
    for _, weights in tracked:
        checkpoint.require_finite(weights, run.reference)
    total = len(tracked) + len(found.combinations)
    for row, weights in tqdm(
        chain(tracked, made), total=total, unit=" models", disable=None, leave=False
    ):
        models.load_state_dict(weights)
        batches = sequential_batches(
            opened, model.layout, cache, atoms_at_once(where), model.labels
        )
        rows.append(replace(row, errors=evaluate(model, prefetch(batches, where), where)))
        score = rows[-1].score(metric, rows[0].errors)
        if len(rows) == 1 and math.isnan(score):
            names = ", ".join(system.name for system in opened)
            raise UserError(
                f"--metric {metric}: no frame of {names} has a label to compare. Choose another "
                "metric."
            )
        if row.combination is not None and (best < 0 or score < best_score):
            best = len(rows) - 1
            best_score = score
            best_weights = weights

    # table, model file and picture
    num_frames = sum(source.num_frames for source in opened)
    report = PosthocReport(run, found, rows, metric, best, num_frames, len(opened))
    say(report.text())
    checkpoint.save(output, _payload(run, report.chosen, found, best_weights), option="-o")
    say(f"wrote {output}: {report.chosen.describe()}")
    say(f"wrote {report.write_table(table)}")
    try:
        say(f"wrote {report.plot(plot)}")
    except ModuleNotFoundError:
        say(
            "no picture: matplotlib is not installed. pip install 'dp-ema[plot]', then run this "
            "again."
        )
    if checkpoint.refitted(run.payload):
        say(
            "the run fitted its output bias after the last step; this file and all errors above "
            f"have the bias before. `{command('dp-ema', 'change-bias', output)} -s SYSTEM` fits "
            "it to frames."
        )
    return report


def parse_sigma_rels(words: Sequence[str | float] | None) -> list[float]:
    """Return the widths that a command line names: ``0.05``, several, or ``0.02:0.2`` or
    ``0.02:0.2:9``; none for None.

    Raises:
        UserError: naming every word that is none of these.
    """
    widths: set[float] = set()
    problems = []
    for word in map(str, words or ()):
        low, _, rest = word.partition(":")
        high, _, count = rest.partition(":")
        try:
            first = float(low)
            last = float(high or low)
            number = int(count or NUM_SIGMA_RELS)
        except ValueError:
            first = last = math.nan
        if (
            0 < first <= last <= MAX_SIGMA_REL
            and (first < last) == bool(high)
            and 1 < number <= MAX_SIGMA_RELS
        ):
            widths |= set(_spaced(first, last, number))
        else:
            problems.append(
                f"--sigma-rel {word}: expected a number above 0 and at most 0.2886, or a range as "
                f"0.02:0.2 or 0.02:0.2:9 (from, to, how many: 2 to {MAX_SIGMA_RELS})."
            )
    UserError.raise_if_any(problems)
    return sorted(widths)


def parse_shapes(words: Sequence[str] | None) -> list[tuple[str, float]]:
    """Return shape and part of the decays that a command line names; none for None.

    Words are ``linear``, ``linear:0.2``, several, or ``none``. A shape without a part means one
    decay with each of ``DEFAULT_PARTS``.

    Raises:
        UserError: naming every word that is none of these.
    """
    decays: dict[tuple[str, float], None] = {}
    problems = []
    for word in [] if words is None or list(words) == [NONE] else words:
        shape, colon, part = word.partition(":")
        try:
            parts = [float(part)] if colon else DEFAULT_PARTS
        except ValueError:
            parts = [math.nan]
        if shape in SHAPES and all(0 < part <= 1 for part in parts):
            decays |= dict.fromkeys((shape, part) for part in parts)
        else:
            problems.append(
                f"--shapes {word}: expected one of {', '.join(SHAPES)}, or one with the part of "
                "the run in which the learning rate goes down, above 0 and at most 1, as "
                f"linear:0.2; or {NONE} alone."
            )
    UserError.raise_if_any(problems)
    return list(decays)


def find_requested(
    run: SnapshotRun,
    sigma_rels: Sequence[float],
    requests: Sequence[tuple[str, float]] | None = None,
) -> Combinations:
    """Return the requested combinations, with the resolvable range and decays that are left out, by
    reason.

    Without widths and requests they are widths over the resolvable range, and the decays that the
    snapshots resolve. With one of the two it is only that; with an empty list of requests, only
    widths.

    Raises:
        UserError: if the snapshots do not resolve a requested width or decay.
    """
    tracks = run.tracks
    resolvable = combination.resolvable_range(tracks, run.step)
    widths = list(sigma_rels)
    if not widths and not requests:
        tracked = sorted(
            {snapshot.track.sigma_rel for snapshot in run.snapshots if snapshot.step == run.step}
        )
        widths = _spaced(*resolvable) if resolvable else tracked
    wanted = parse_shapes(list(SHAPES)) if requests is None and not sigma_rels else requests or []
    decays, left_out = combination.place_decays(wanted, tracks, run.step)
    found = combination.find_combinations(tracks, widths, run.step, decays)
    problems: list[str] = []
    if sigma_rels:
        with collect_problems(problems):
            combination.refuse_unresolvable(found, tracks, run.step)
    bad = [
        one
        for one in found.combinations
        if isinstance(one.target, Decay) and one.residual > TOLERANCE
    ]
    for one in bad:
        left_out.setdefault(one.describe_missing(), []).append(one.target.describe())
    if requests:
        steps = counted(len({snapshot.step for snapshot in run.snapshots}), "step")
        problems += [
            f"--shapes: {name}: {reason}; there are snapshots of {steps} up to step {run.step:,}. "
            "Keep them more often (a smaller snapshot_freq), of two profiles (sigma_rel 0.05 and "
            "0.10), or ask for a larger part."
            for reason, names in left_out.items()
            for name in names
        ]
    UserError.raise_if_any(problems)
    kept = [one for one in found.combinations if all(one is not other for other in bad)]
    return replace(found, combinations=kept, resolvable=resolvable, left_out=left_out)


def _spaced(low: float, high: float, count: int = NUM_SIGMA_RELS) -> list[float]:
    """Return ``count`` widths from ``low`` to ``high``, both exactly, evenly on a logarithmic
    scale.
    """
    return [low] if low == high else [low, *np.geomspace(low, high, count)[1:-1].tolist(), high]


def _row_of(made: combination.Combination) -> Row:
    """Return the row of an average that was made of snapshots, still without errors."""
    to, is_decay = made.target, isinstance(made.target, Decay)
    kind, name = (SHAPE, to.describe()) if is_decay else (POSTHOC, POSTHOC)
    return Row(kind, name, to.sigma_rel, getattr(to, "gamma", None), to.mean_age(), made)


def _tracked(run: SnapshotRun) -> Iterator[tuple[Row, Mapping[str, Tensor]]]:
    """Yield the live weights and every average of the training checkpoint, each with its row, still
    without errors.
    """
    # a bias that was refitted after training would make live and tracked weights look better than
    # those made here
    payload = {
        name: value
        for name, value in run.payload.items()
        if name not in ("refitted", "refitted_bias")
    }
    at = f", step {payload['step']:,}" if payload["step"] != run.step else ""
    yield Row(LIVE, f"{LIVE}{at}"), checkpoint.weights_in(payload, run.reference)[0]
    for name, state in payload.get("averages", {}).get("profiles", {}).items():
        if state["updates"] < 1:
            continue  # it still is the live weights
        weights, facts = checkpoint.weights_in(payload, run.reference, name)
        gamma = float(facts.get("gamma", 0.0)) if facts.get("type") in ("power", "swa") else None
        sigma_rel = None if gamma is None else sigma_rel_of(gamma)
        yield Row(TRACKED, f"{name}{at}", sigma_rel, gamma, facts["mean_age"]), weights


def _open(
    config: RunConfig,
    task: TaskConfig,
    run: SnapshotRun,
    systems: Sequence[str | Path] | None,
    patterns: Sequence[str] | None,
) -> Sequence[FrameSource]:
    """Return the validation systems: given ones, or those that the run has split off or names."""
    if systems is not None:
        return open_labelled(
            [str(path) for path in systems], task.model, task.model.fitting_net.labels, patterns
        )
    if task.data.validation_fraction is not None:
        return open_split(config)[task.name].valid
    data = task.data.validation_data
    if data is None:
        raise ConfigError(
            f"{run.reference}: the run has no {task.place('training')}.validation_data to rank "
            "averages with. Give systems with -s, or an input that has some with --valid-data."
        )
    try:
        return open_labelled(
            list(data.systems), task.model, task.model.fitting_net.labels, data.rglob_patterns
        )
    except DataError as error:
        hint = (
            "These are the validation data of the run's input. Give others with -s, or an input "
            "with --valid-data."
        )
        raise DataError([*error.problems[:-1], f"{error.problems[-1]} {hint}"]) from error


def _payload(
    run: SnapshotRun, chosen: Row, found: Combinations, weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the content of the model file of the chosen average."""
    config, distance = run.payload["config"], run.payload.get("min_nbor_dist")
    about: dict[str, Any] = {
        name: run.payload[name] for name in ("run", "num_steps") if name in run.payload
    }
    head = checkpoint.payload_head("weights", POSTHOC, run.step, config, distance, **about)
    assert chosen.combination is not None
    of_decay = (
        {}
        if (decay := chosen.decay) is None
        else {"type": "decay", "shape": decay.shape, "part": decay.part}
    )
    average = {
        "profile": POSTHOC,
        "sigma_rel": chosen.sigma_rel,
        **(of_decay or {"type": "power", "gamma": chosen.gamma}),
        "mean_age": chosen.mean_age,
        "step": run.step,
        "residual": chosen.combination.residual,
        "condition": found.condition,
        "snapshots": len(run.snapshots),
    }
    return {**head, "average": average, "model": dict(weights)}
