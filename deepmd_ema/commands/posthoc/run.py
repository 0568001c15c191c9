"""``dp-ema posthoc``: averages of many widths and decays made of snapshots, ranked and written."""

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
from deepmd_ema.commands.posthoc.ranking import (
    OVERALL,
    SHAPE,
    TRACKED,
    PosthocReport,
    Row,
)
from deepmd_ema.commands.posthoc.snapshots import SnapshotRun, combine, find_snapshots
from deepmd_ema.config import RunConfig, TaskConfig, saved_config
from deepmd_ema.config.outputs import with_absolute_paths
from deepmd_ema.config.schema.averaging import sigma_rel_of
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import atoms_at_once, prefetch, sequential_batches
from deepmd_ema.data.run import open_split
from deepmd_ema.data.source import FrameSource
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import ConfigError, DataError, UserError, collect_problems
from deepmd_ema.files import CSV, PICTURE, check_output, ensure_writable
from deepmd_ema.infer.evaluate import open_labelled
from deepmd_ema.model.build import build_models
from deepmd_ema.model.metrics import METRICS, evaluate
from deepmd_ema.text import command, counted, did_you_mean
from deepmd_ema.utils import LIVE, POSTHOC

NUM_SIGMA_RELS = 9  # widths of a range without a number
MAX_SIGMA_RELS = 999  # widths of one range: each is validated
DEFAULT_PARTS = [
    0.05,
    0.1,
    0.2,
    0.4,
]  # parts of the run in which a shape without a part decays
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
    """Make averages of widths and decays, print their errors, and write the best one.

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
    # requested widths and decays, and the snapshots
    folder = Path(folder)
    widths = parse_sigma_rels(sigma_rel)
    decays = parse_shapes(shapes)
    metrics = {
        name.upper(): name
        for name in (
            OVERALL,
            *(f"{q}:{kind}" for q in METRICS for kind in ("RMSE", "MAE")),
        )
    }
    if metric.upper() not in metrics:
        raise UserError(
            f"--metric {metric}: unknown. {did_you_mean(metric, list(metrics.values()))}"
        )
    metric = metrics[metric.upper()]
    torch_device = select_device(device)
    output = folder / "model_posthoc.pt" if output is None else Path(output)
    table = folder / "posthoc.csv" if table is None else Path(table)
    plot = folder / "posthoc.png" if plot is None else Path(plot)
    # Files are checked before the work: evaluating the averages may take hours.
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
    requested = find_requested(run, widths, None if shapes is None else decays)

    # the model and the validation data
    config = saved_config(
        with_absolute_paths(run.payload["config"], run.folder),
        source=str(run.reference),
    )
    task = config.task(head)
    sources = _open(config, task, run, systems, rglob_patterns)
    sections = {name: each.model for name, each in config.tasks.items()}
    models = build_models(sections, config.links).to(torch_device)
    model = models.by_task[task.name]
    cache = PairCache()  # pairs of neighbors are the same for all weights

    # errors of the live weights, of averages that were tracked, and of those made of snapshots
    rows: list[Row] = []
    best, best_score = -1, math.inf
    best_weights: Mapping[str, Tensor] = {}
    # A generator: only a group of sums and the best weights so far are in memory. There may be a
    # thousand averages.
    combined = (
        (_row_of(candidate), weights)
        for candidate, weights in zip(
            requested.combinations, combine(run, requested.combinations)
        )
    )
    # read in whole, so that a fault of the file is reported before anything is evaluated
    with checkpoint.reading(run.reference):
        tracked = list(_tracked(run))
    for _, weights in tracked:
        checkpoint.require_finite(weights, run.reference)
    # live weights first: the scores of all others are relative to theirs
    candidates = chain(tracked, combined)
    total = len(tracked) + len(requested.combinations)
    num_atoms = atoms_at_once(torch_device)
    for row, weights in tqdm(
        candidates, total=total, unit=" models", disable=None, leave=False
    ):
        models.load_state_dict(weights)
        batches = sequential_batches(
            sources, model.layout, cache, num_atoms, model.labels
        )
        errors = evaluate(model, prefetch(batches, torch_device), torch_device)
        rows.append(replace(row, errors=errors))
        score = rows[-1].score(metric, rows[0].errors)
        if len(rows) == 1 and math.isnan(score):
            names = ", ".join(source.name for source in sources)
            raise UserError(
                f"--metric {metric}: no frame of {names} has a label to compare. Choose another "
                "metric."
            )
        # The file holds the best one made of snapshots; a tracked average has a file already. The
        # first is taken even if its score is NaN or infinite; a number replaces NaN.
        is_better = best < 0 or math.isnan(best_score) or score < best_score
        if row.combination is not None and is_better:
            best = len(rows) - 1
            best_score = score
            best_weights = weights

    # table, model file and picture
    num_frames = sum(source.num_frames for source in sources)
    report = PosthocReport(run, requested, rows, metric, best, num_frames, len(sources))
    say(report.text())
    payload = _payload(run, report.chosen, requested, best_weights)
    checkpoint.save(output, payload, option="-o")
    say(f"wrote {output}: {report.chosen.describe()}")
    say(f"wrote {report.write_table(table)}")
    try:
        say(f"wrote {report.plot(plot)}")
    except ModuleNotFoundError:
        say(
            "no picture: matplotlib is not installed. pip install 'dp-ema[plot]', then run this "
            "again."
        )
    # the bias was fitted for the weights of the last step
    if checkpoint.refitted(run.payload):
        say(
            "the run fitted its output bias after the last step; this file and all errors above "
            f"have the bias before. `{command('dp-ema', 'change-bias', output)} -s SYSTEM` fits "
            "it to frames."
        )
    return report


def parse_sigma_rels(arguments: Sequence[str | float] | None) -> list[float]:
    """Return the widths that a command line names; none for None.

    An argument is a width, ``0.05``, or a range, ``0.02:0.2`` or ``0.02:0.2:9``.

    Raises:
        UserError: naming every argument that is none of these.
    """
    widths: set[float] = set()
    problems = []
    for text in map(str, arguments or ()):
        low, *rest = text.split(":", 2)
        high = rest[0] if rest else ""
        try:
            first = float(low)
            last = float(high or low)
            number = int(rest[1]) if rest[1:] and rest[1] else NUM_SIGMA_RELS
        except ValueError:
            first = last = math.nan
        # comparisons with NaN are False
        if (
            0 < first <= last <= MAX_SIGMA_REL
            and (first < last) == bool(rest)
            and 1 < number <= MAX_SIGMA_RELS
        ):
            widths |= set(_spaced(first, last, number))
        else:
            problems.append(
                f"--sigma-rel {text}: expected a number above 0 and at most 0.2886, or a range as "
                f"0.02:0.2 or 0.02:0.2:9 (from, to, how many: 2 to {MAX_SIGMA_RELS})."
            )
    UserError.raise_if_any(problems)
    return sorted(widths)


def parse_shapes(arguments: Sequence[str] | None) -> list[tuple[str, float]]:
    """Return shape and part of the decays that a command line names; none for None.

    Arguments are ``linear``, ``linear:0.2``, several, or ``none``. A shape without a part means one
    decay with each of ``DEFAULT_PARTS``.

    Raises:
        UserError: naming every argument that is none of these.
    """
    # a dict keeps the order and drops repetitions, "linear:0.1" beside "linear"
    decays: dict[tuple[str, float], None] = {}
    problems = []
    for text in [] if arguments is None or list(arguments) == [NONE] else arguments:
        shape, *part = text.split(":", 1)
        try:
            parts = [float(part[0])] if part else DEFAULT_PARTS
        except ValueError:
            parts = [math.nan]
        if shape in SHAPES and all(0 < part <= 1 for part in parts):
            decays |= dict.fromkeys((shape, part) for part in parts)
        else:
            problems.append(
                f"--shapes {text}: expected one of {', '.join(SHAPES)}, or one with the part of "
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
    """Return the requested combinations, the resolvable range and, by reason, decays left out.

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
        # snapshots that resolve no range have at least their own widths
        tracked = sorted(
            {
                snapshot.track.sigma_rel
                for snapshot in run.snapshots
                if snapshot.step == run.step
            }
        )
        widths = _spaced(*resolvable) if resolvable else tracked
    # None means the defaults, an empty list ("none") no decay
    wanted = (
        parse_shapes(list(SHAPES))
        if requests is None and not sigma_rels
        else requests or []
    )
    decays, left_out = combination.place_decays(wanted, tracks, run.step)
    solved = combination.find_combinations(tracks, widths, run.step, decays)
    problems: list[str] = []
    if sigma_rels:
        with collect_problems(problems):
            combination.refuse_unresolvable(solved, tracks, run.step)
    resolved = []
    for candidate in solved.combinations:
        if isinstance(candidate.target, Decay) and candidate.residual > TOLERANCE:
            names = left_out.setdefault(candidate.describe_missing(), [])
            names.append(candidate.target.describe())
        else:
            resolved.append(candidate)
    # a decay that was named is an error; decays of the defaults are left out with a line
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
    return replace(
        solved, combinations=resolved, resolvable=resolvable, left_out=left_out
    )


def _spaced(low: float, high: float, count: int = NUM_SIGMA_RELS) -> list[float]:
    """Return ``count`` widths from ``low`` to ``high``, both exactly, on a logarithmic scale."""
    # geomspace() may round the ends, and a width just beyond the range would be refused
    return (
        [low]
        if low == high
        else [low, *np.geomspace(low, high, count)[1:-1].tolist(), high]
    )


def _row_of(candidate: combination.Combination) -> Row:
    """Return the row of an average that was made of snapshots, still without errors."""
    target = candidate.target
    if isinstance(target, Decay):
        name = target.describe()
        return Row(SHAPE, name, target.sigma_rel, None, target.mean_age(), candidate)
    return Row(
        POSTHOC, POSTHOC, target.sigma_rel, target.gamma, target.mean_age(), candidate
    )


def _tracked(run: SnapshotRun) -> Iterator[tuple[Row, Mapping[str, Tensor]]]:
    """Yield live weights and averages of the training checkpoint, with rows that have no errors."""
    # A bias that was refitted after training would make live and tracked weights look better than
    # those made here. The snapshots have the bias before.
    payload = {
        name: value
        for name, value in run.payload.items()
        if name not in ("refitted", "refitted_bias")
    }
    # the checkpoint of the last step that is averaged over may be gone
    at = f", step {payload['step']:,}" if payload["step"] != run.step else ""
    yield Row(LIVE, f"{LIVE}{at}"), checkpoint.weights_in(payload, run.reference)[0]
    for name, state in checkpoint.averages_in(payload).items():
        if state["updates"] < 1:
            continue  # it still is the live weights
        weights, facts = checkpoint.weights_in(payload, run.reference, name)
        gamma = (
            float(facts.get("gamma", 0.0))
            if facts.get("type") in ("power", "swa")
            else None
        )
        sigma_rel = None if gamma is None else sigma_rel_of(gamma)
        yield Row(TRACKED, f"{name}{at}", sigma_rel, gamma, facts["mean_age"]), weights


def _open(
    config: RunConfig,
    task: TaskConfig,
    run: SnapshotRun,
    systems: Sequence[str | Path] | None,
    patterns: Sequence[str] | None,
) -> Sequence[FrameSource]:
    """Return the validation systems: ``systems``, or those that the run has split off or names."""
    if systems is not None:
        return open_labelled(
            [str(path) for path in systems],
            task.model,
            task.model.fitting_net.labels,
            patterns,
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
            list(data.systems),
            task.model,
            task.model.fitting_net.labels,
            data.rglob_patterns,
        )
    except DataError as error:
        hint = (
            "These are the validation data of the run's input. Give others with -s, or an input "
            "with --valid-data."
        )
        raise DataError(
            [*error.problems[:-1], f"{error.problems[-1]} {hint}"]
        ) from error


def _payload(
    run: SnapshotRun,
    chosen: Row,
    combinations: Combinations,
    weights: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the content of the model file of the chosen average."""
    config, distance = run.payload["config"], run.payload.get("min_nbor_dist")
    about: dict[str, Any] = {
        name: run.payload[name] for name in ("run", "num_steps") if name in run.payload
    }
    head = checkpoint.payload_head(
        "weights", POSTHOC, run.step, config, distance, **about
    )
    assert chosen.combination is not None
    profile: dict[str, Any] = {"type": "power", "gamma": chosen.gamma}
    if (decay := chosen.decay) is not None:
        profile = {"type": "decay", "shape": decay.shape, "part": decay.part}
    average = {
        "profile": POSTHOC,
        "sigma_rel": chosen.sigma_rel,
        **profile,
        "mean_age": chosen.mean_age,
        "step": run.step,
        "residual": chosen.combination.residual,
        "condition": combinations.condition,
        "snapshots": len(run.snapshots),
    }
    return {**head, "average": average, "model": dict(weights)}
