"""``dp-ema posthoc``: averages of many widths and decays made of a run's snapshots, ranked; the best is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deepmd_ema import checkpoint
from deepmd_ema.averaging import sigma_rel_of
from deepmd_ema.config import TaskConfig, saved_config
from deepmd_ema.config.paths import with_absolute_paths
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import atoms_at_once, prefetch, sequential_batches
from deepmd_ema.data.run import TaskData, open_split
from deepmd_ema.data.source import FrameSource
from deepmd_ema.dist.world import select_device
from deepmd_ema.errors import ConfigError, DataError, UserError, collect_problems, command, counted, did_you_mean
from deepmd_ema.files import CSV, PICTURE, refuse_to_lose
from deepmd_ema.infer.evaluate import open_labelled
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.metrics import METRICS, Errors, evaluate
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.posthoc.combination import (
    MAX_SIGMA_REL,
    TOLERANCE,
    Combination,
    Combinations,
    describe_missing,
    find_combinations,
    refuse_unresolvable,
    resolvable_range,
)
from deepmd_ema.posthoc.profiles import SHAPES, Decay
from deepmd_ema.posthoc.ranking import OVERALL, RANKED, TRACKED, PosthocReport, Row
from deepmd_ema.posthoc.shapes import DecayRequest, parse_shapes, parse_words, place_decays
from deepmd_ema.posthoc.snapshots import SnapshotRun, combine, find_snapshots
from deepmd_ema.weight_names import LIVE, POSTHOC

NUM_SIGMA_RELS = 9  # of a range, where no number is given
MAX_SIGMA_RELS = 999  # of one range: each is validated
LABELS = (ENERGY, FORCE, VIRIAL)


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
    """Make averages of the widths ``sigma_rel`` and the decays ``shapes``, print their errors, and write the best one.

    Args:
        folder: where the run was started.
        sigma_rel: numbers, or words as ``0.05`` and ``0.02:0.2:9``; by default the whole resolvable range, unless
            ``shapes`` names some.
        step: the last step to average over; that of the newest snapshot by default.
        shapes: words as ``linear`` and ``cosine:0.2``, or ``none``; by default those that the snapshots resolve, unless
            ``sigma_rel`` is given.
        metric: what best means: ``overall``, or a metric of validation such as ``F:RMSE``.
        systems: validation systems; by default those of the run's input.
        rglob_patterns: names of systems to search for in ``systems``.
        output: model file; ``model_posthoc.pt`` in ``folder`` by default.
        plot: picture; ``posthoc.png`` in ``folder`` by default.
        table: ``posthoc.csv`` in ``folder`` by default.
        head: the task whose errors are measured, of a run of several; the file holds the model of each.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.
        say: prints a text.

    Raises:
        UserError: if snapshots or data are missing or wrong, or do not resolve a width.
    """
    folder, (widths, decays) = Path(folder), _parse(sigma_rel, shapes)
    metric = _known_metric(metric)
    where = select_device(device)
    output, table, plot = (
        folder / default if path is None else Path(path)
        for path, default in ((output, "model_posthoc.pt"), (table, "posthoc.csv"), (plot, "posthoc.png"))
    )
    run = find_snapshots(folder, step)
    _ensure_writable(output, table, plot)
    for note in run.notes:
        say(note)
    found, resolvable, left_out = find_requested(run, widths, decays)
    config = saved_config(with_absolute_paths(run.payload["config"], run.folder), source=str(run.reference))
    task = config.task(head)
    data = open_split(config) if systems is None and task.data.validation_fraction is not None else {}
    opened = _open(task, run, data, systems, rglob_patterns)
    models = build_models({name: each.model for name, each in config.tasks.items()}, config.links)
    validation = _Validation(models.to(where), task.name, opened, where, metric)
    rows, best, weights = _measured(run, found.combinations, validation)
    num_frames = sum(source.num_frames for source in opened)
    report = PosthocReport(run, found, resolvable, rows, metric, best, num_frames, len(opened), left_out)
    say(report.text())
    checkpoint.save(output, _payload(run, report.chosen, found, weights), option="-o")
    say(f"wrote {output}: {report.chosen.describe()}")
    say(f"wrote {report.write_table(table)}")
    try:
        say(f"wrote {report.plot(plot)}")
    except ModuleNotFoundError:
        say("no picture: matplotlib is not installed. pip install 'dp-ema[plot]', then run this again.")
    if checkpoint.refitted(run.payload):
        say(
            "the run fitted its output bias after the last step; this file and all errors above have the bias before. "
            f"`{command('dp-ema', 'change-bias', output)} -s SYSTEM` fits it to frames."
        )
    return report


def _ensure_writable(output: Path, table: Path, plot: Path) -> None:
    """Raise UserError if a file cannot be written, or would replace one of another kind."""
    for option, path in (("-o", output), ("--table", table), ("--plot", plot)):
        checkpoint.ensure_writable(path.parent, option)
        if path.is_dir():
            raise UserError(f"{option} {path}: a folder. Give the name of a file.")
    checkpoint.refuse_to_replace(output, "-o")
    refuse_to_lose(table, "--table", CSV)
    refuse_to_lose(plot, "--plot", PICTURE)


def parse_sigma_rels(words: Sequence[str | float] | None) -> list[float]:
    """Return the widths that a command line names: ``0.05``, several, or ``0.02:0.2`` or ``0.02:0.2:9``; none for None.

    Raises:
        UserError: naming every word that is none of these.
    """
    expected = (
        "a number above 0 and at most 0.2886, or a range as 0.02:0.2 or 0.02:0.2:9 (from, to, how many: 2 to "
        f"{MAX_SIGMA_RELS})."
    )
    return sorted(set(parse_words("--sigma-rel", list(map(str, words or ())), _parse_word, expected)))


def find_requested(
    run: SnapshotRun, sigma_rels: Sequence[float], requests: Sequence[DecayRequest] | None = None
) -> tuple[Combinations, tuple[float, float] | None, dict[str, list[str]]]:
    """Return the requested combinations, the resolvable range, and decays that are left out, by reason.

    Without widths and requests they are widths over the resolvable range, and the decays that the snapshots resolve.
    With one of the two it is only that; with an empty list of requests, only widths.

    Raises:
        UserError: if the snapshots do not resolve a requested width or decay.
    """
    tracks = run.tracks
    resolvable = resolvable_range(tracks, run.step)
    widths = list(sigma_rels)
    if not widths and not requests:
        tracked = sorted({snapshot.track.sigma_rel for snapshot in run.snapshots if snapshot.step == run.step})
        widths = _spaced(*resolvable) if resolvable else tracked
    wanted = parse_shapes(list(SHAPES)) if requests is None and not sigma_rels else requests or []
    decays, left_out = place_decays(wanted, tracks, run.step)
    found = find_combinations(tracks, widths, run.step, decays)
    unresolved = [one for one in found.combinations if _is_unresolved(one)]
    problems: list[str] = []
    with collect_problems(problems):
        if sigma_rels:
            refuse_unresolvable(found, tracks, run.step)
    if requests:
        problems += _refused(run, left_out, unresolved)
    if problems:
        raise UserError(problems)
    for combination in unresolved:
        left_out.setdefault(f"residual above {100 * TOLERANCE:g} %", []).append(combination.target.describe())
    kept = [one for one in found.combinations if not _is_unresolved(one)]
    return replace(found, combinations=kept), resolvable, left_out


def _is_unresolved(one: Combination) -> bool:
    """Whether it replaces a decay that the snapshots do not resolve."""
    return isinstance(one.target, Decay) and one.residual > TOLERANCE


def measure_combinations(
    run: SnapshotRun,
    combinations: Sequence[Combination],
    models: ModelSet,
    task: str,
    systems: Sequence[FrameSource],
    device: torch.device,
    metric: str = OVERALL,
) -> tuple[list[Row], int, Mapping[str, Tensor]]:
    """Return the errors of live weights, tracked averages and combinations; the row of the best, and its weights."""
    return _measured(run, combinations, _Validation(models.to(device), task, systems, device, metric))


@dataclass
class _Validation:
    """Errors of weights on validation frames, and which are better.

    Attributes:
        models: on the device.
        task: whose errors.
        systems: validation systems.
        device: of the models.
        metric: what better means.
        cache: neighbors found so far.
        live: errors of the live weights, which are measured first.
    """

    models: ModelSet
    task: str
    systems: Sequence[FrameSource]
    device: torch.device
    metric: str
    cache: PairCache = field(default_factory=PairCache)
    live: Errors | None = None

    def errors(self, weights: Mapping[str, Tensor]) -> Errors:
        """Return the errors of weights of all models."""
        self.models.load_state_dict(weights)
        model = self.models.by_task[self.task]
        batches = sequential_batches(self.systems, model.layout, self.cache, atoms_at_once(self.device), LABELS)
        errors = evaluate(model, prefetch(batches, self.device), self.device)
        if self.live is None:
            _check_labels(errors, self.metric, self.systems)
            self.live = errors
        return errors

    def score(self, row: Row) -> float:
        """Return the value of the metric."""
        assert self.live is not None
        return row.score(self.metric, self.live)


def _measured(
    run: SnapshotRun, combinations: Sequence[Combination], validation: _Validation
) -> tuple[list[Row], int, Mapping[str, Tensor]]:
    """Return the rows of :func:`measure_combinations`."""
    rows: list[Row] = []
    best: tuple[float, int, Mapping[str, Tensor]] = (math.inf, -1, {})
    tracked = list(_tracked(run))
    made = ((Row.of(one), weights) for one, weights in zip(combinations, combine(run, combinations)))
    with tqdm(total=len(tracked) + len(combinations), unit=" models", disable=None, leave=False) as bar:
        for row, weights in chain(tracked, made):
            rows.append(replace(row, errors=validation.errors(weights)))
            value = validation.score(rows[-1])
            if row.combination is not None and (best[1] < 0 or value < best[0]):
                best = (value, len(rows) - 1, weights)
            bar.update()
    return rows, best[1], best[2]


def _tracked(run: SnapshotRun) -> Iterator[tuple[Row, Mapping[str, Tensor]]]:
    """Yield the live weights and every average of the training checkpoint, each with its row, still without errors."""
    # a bias that was refitted after training would make live and tracked weights look better than those made here
    payload = {name: value for name, value in run.payload.items() if name not in ("refitted", "refitted_bias")}
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
    task: TaskConfig, run: SnapshotRun, split: Mapping[str, TaskData], systems: Sequence[str | Path] | None,
    patterns: Sequence[str] | None,
) -> list[FrameSource]:  # fmt: skip
    """Return the validation systems: given ones, or those that the run has split off or names."""
    paths = [str(path) for path in systems or ()]
    if systems is None and task.data.validation_fraction is not None:
        return split[task.name].valid
    if systems is None:
        data = task.validation_data
        if data is None:
            raise ConfigError(
                f"{run.reference}: the run has no {task.place('training')}.validation_data to rank averages with. Give "
                "systems with -s, or an input that has some with --valid-data."
            )
        paths, patterns = list(data.systems), data.rglob_patterns
    try:
        return open_labelled(paths, task.model, LABELS, patterns)
    except DataError as error:
        if systems is not None:
            raise
        hint = "These are the validation data of the run's input. Give others with -s, or an input with --valid-data."
        raise DataError([*error.problems[:-1], f"{error.problems[-1]} {hint}"]) from error


def _known_metric(metric: str) -> str:
    """Return ``metric`` as it is written here."""
    known = [OVERALL, *(f"{name}:{kind}" for name in METRICS for kind in ("RMSE", "MAE"))]
    found = next((name for name in known if name.upper() == metric.upper()), None)
    if found is None:
        raise UserError(f"--metric {metric}: unknown. {did_you_mean(metric, known)}")
    return found


def _check_labels(live: Errors, metric: str, systems: Sequence[FrameSource]) -> None:
    """Check that the frames have what ``metric`` compares with."""
    if metric == OVERALL:
        if all(math.isnan(live.metric(f"{name}:RMSE")) for name in RANKED):
            names = ", ".join(system.name for system in systems)
            raise UserError(f"no frame of {names} has an energy, a force or a virial to compare.")
    elif math.isnan(live.metric(metric)):
        raise UserError(f"--metric {metric}: no frame of the validation data has this label. Choose another metric.")


def _parse(
    sigma_rel: Sequence[str | float] | None, shapes: Sequence[str] | None
) -> tuple[list[float], list[DecayRequest] | None]:
    """Return the requested widths and decays, or raise the problems of both."""
    problems: list[str] = []
    widths: list[float] = []
    decays: list[DecayRequest] = []
    with collect_problems(problems):
        widths = parse_sigma_rels(sigma_rel)
    with collect_problems(problems):
        decays = parse_shapes(shapes)
    if problems:
        raise UserError(problems)
    return widths, None if shapes is None else decays


def _parse_word(word: str) -> list[float]:
    """Return the widths that one word names; none if it is not understood."""
    parts = word.split(":")
    try:
        count = int(parts.pop()) if len(parts) == 3 else NUM_SIGMA_RELS
        ends = [float(part) for part in parts]
    except ValueError:
        return []
    if len(ends) > 2 or not all(0 < end <= MAX_SIGMA_REL for end in ends) or not 1 < count <= MAX_SIGMA_RELS:
        return []
    low, high = ends[0], ends[-1]
    return ends if len(ends) == 1 else _spaced(low, high, count) if low < high else []


def _spaced(low: float, high: float, count: int = NUM_SIGMA_RELS) -> list[float]:
    """Return ``count`` widths from ``low`` to ``high``, both exactly, evenly on a logarithmic scale."""
    return [low] if low == high else [low, *np.geomspace(low, high, count)[1:-1].tolist(), high]


def _refused(
    run: SnapshotRun, left_out: Mapping[str, Sequence[str]], unresolved: Sequence[Combination]
) -> Iterator[str]:
    """Yield a problem for each requested decay that the snapshots do not resolve."""
    steps = len({snapshot.step for snapshot in run.snapshots})
    advice = (
        f"there are snapshots of {counted(steps, 'step')} up to step {run.step:,}. Keep them more often (a smaller "
        "snapshot_freq), of two profiles (sigma_rel 0.05 and 0.10), or ask for a larger part."
    )
    for reason, names in left_out.items():
        yield from (f"--shapes: {name}: {reason} in it; {advice}" for name in names)
    for combination in unresolved:
        yield f"--shapes: {describe_missing(combination)[:-1]}; {advice}"


def _payload(run: SnapshotRun, chosen: Row, found: Combinations, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the content of the model file of the chosen average."""
    config, distance = run.payload["config"], run.payload.get("min_nbor_dist")
    about: dict[str, Any] = {name: run.payload[name] for name in ("run", "num_steps") if name in run.payload}
    assert chosen.combination is not None
    average: dict[str, Any] = {"profile": POSTHOC, "sigma_rel": chosen.sigma_rel}
    if chosen.decay is None:
        average |= {"type": "power", "gamma": chosen.gamma}
    else:
        average |= {"type": "decay", "shape": chosen.decay.shape, "part": chosen.decay.part}
    average |= {"mean_age": chosen.mean_age, "step": run.step, "residual": chosen.combination.residual}
    average |= {"condition": found.condition, "snapshots": len(run.snapshots)}
    head = checkpoint.payload_head("weights", POSTHOC, run.step, config, distance, **about)
    return {**head, "average": average, "model": dict(weights)}
