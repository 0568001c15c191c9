"""The data that a config names: opened and checked, task by task."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deepmd_ema.config.data_options import data_options
from deepmd_ema.config.labels import FORCE, LABELS, WEIGHTS
from deepmd_ema.data.check.report import MIN_DISTANCE, DataReport, check_systems
from deepmd_ema.data.check.suspects import elements_without_tensors
from deepmd_ema.data.check_cache import recall_or_find
from deepmd_ema.data.formats.discover import open_systems, repeated, split_address
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.data.source import BOX, COORD, FrameSource, FrameSubset, ReadSpec
from deepmd_ema.data.split import FrameTable, Split, split_frames
from deepmd_ema.errors import ConfigError, DataError, UserError, collect_problems
from deepmd_ema.files import file_digest
from deepmd_ema.findings import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    error,
    note,
    warning,
    with_severity,
    with_task,
)
from deepmd_ema.geometry import NeighborStatistics, find_pairs_once
from deepmd_ema.text import counted, first_few
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config import InputFile, RunConfig, TaskConfig
    from deepmd_ema.config.schema.text_options import Metric
    from deepmd_ema.config.schema.training import (
        TrainingDataConfig,
        ValidationDataConfig,
    )

logger = logging.getLogger(__name__)

MIN_BRIDGED_DISTANCE = (
    0.01  # angstrom; the energy of bridging is finite but for atoms in one place
)
# bytes of a file that ranks compare, in about a second; of a larger file they compare parts
COMPARED_BYTES = 1 << 30
# factor of steps before they are rounded up: a share of the steps is rounded itself
_SLACK = 1 - 1e-12
_SECTIONS = (
    "training_data",
    "validation_data",
)  # sections of the parts train and valid of TaskData


class TaskData(NamedTuple):
    """The data of one task; ``valid`` and ``test`` are empty without such data."""

    train: list[FrameSource]
    valid: list[FrameSource]
    test: list[FrameSource]


def open_run(
    config: RunConfig, results: Mapping[str, Path] | None = None
) -> dict[str, TaskData]:
    """Return the data of every task, without training frames in which atoms are too close.

    Args:
        config: of the run.
        results: by task, the folder of what is known of data that have not changed.

    Raises:
        DataError: with the problems of all tasks at once, of training, validation and test data.
    """
    data = dict[str, TaskData]()
    problems = list[str]()
    for name, task in config.tasks.items():
        weights = WEIGHTS if task.data.training_data.frame_weights else ()
        # labels of predicted quantities are read where present, also without a weight in the loss
        labels = dict.fromkeys((*task.model.fitting_net.labels, *task.labels, *weights))
        spec = ReadSpec.of_model(task.model, tuple(labels))
        spec = replace(spec, results=results[name] if results is not None else None)
        data[name] = TaskData([], [], [])  # the lists are filled below
        sections = {
            f"{task.place('training')}.{section}": getattr(task.data, section)
            for section in _SECTIONS
        }
        sections[task.place("validating.test_data")] = task.test
        for (where, options), sources in zip(sections.items(), data[name]):
            if options is not None:
                with collect_problems(problems):
                    sources += open_systems(
                        options.systems,
                        spec,
                        options.rglob_patterns,
                        f"{where}.systems",
                    )
        if task.data.training_data.min_pair_dist:
            with collect_problems(problems):
                train = _without_close_pairs(task, data[name].train, spec.results)
                data[name] = data[name]._replace(train=train)
    DataError.raise_if_any(problems)
    return data


def checked_config(file: InputFile) -> RunConfig:
    """Return the run that an input describes; where it has mistakes the data are checked, too.

    Raises:
        ConfigError: with every mistake of the input, and those of the data as far as they can be
            read.
    """
    if file.mistakes:
        in_data = _mistakes_in_data(file.readable) if file.readable else []
        raise ConfigError([*file.mistakes, *in_data])
    return file.config


def _mistakes_in_data(config: RunConfig) -> list[Finding]:
    """Return the errors of the data of a run in which defaults are in place of wrong options."""
    models = [task.model for task in config.tasks.values()]
    if any(
        finding.severity == ERROR for model in models for finding in model.findings()
    ):
        return []  # such as a list of neighbors without a number for each element
    try:
        data = open_run(config)
    except UserError as error:
        return error.findings
    findings = (
        finding
        for name in config.tasks
        for finding in check_task(config, name, data[name]).findings
    )
    return [finding for finding in findings if finding.severity == ERROR]


def choose_validation(
    config: RunConfig,
    data: Mapping[str, TaskData],
    seed: int,
    results: Mapping[str, Path] | None = None,
) -> dict[str, Split]:
    """Return the validation frames of the tasks with a ``validation_fraction``, by task.

    Args:
        config: of the run.
        data: as opened.
        seed: of the run.
        results: by task, the folder of what is known of data that have not changed.

    Raises:
        DataError: if frames are too few to be split.
    """
    splits = dict[str, Split]()
    problems = list[str]()
    for name, task in config.tasks.items():
        fraction = task.data.validation_fraction
        train = data[name].train
        if fraction is None:
            continue
        # each task of several has a seed of its own
        split_seed = seed_for(f"split of {name}", seed) if name else seed
        files = [file for source in train for file in source.files()]
        about = {
            "task": name,
            "model": data_options(task.model),
            "systems": [[source.name, source.num_frames] for source in train],
            "parts": _parts(train),
            "validation": [fraction, split_seed],
        }
        split = partial(_split, train, len(task.model.type_map), fraction, split_seed)
        with collect_problems(
            problems, f"{task.place('training')}.validation_fraction: "
        ):
            folder = results[name] if results is not None else None
            stored = recall_or_find(folder, files, about, split)
            splits[name] = Split(*(stored[part] for part in Split._fields))
    DataError.raise_if_any(problems)
    return splits


def _split(
    train: Sequence[FrameSource], num_types: int, fraction: float, seed: int
) -> dict[str, Any]:
    table = FrameTable()
    for source in train:
        table.add(source.chunks((COORD, BOX, FORCE)), num_types, source.kinds)
    return split_frames(table, fraction, seed)._asdict()


def split_off(
    config: RunConfig, data: Mapping[str, TaskData], splits: Mapping[str, Split]
) -> dict[str, TaskData]:
    """Return the data of every task, with the chosen frames in validation and not in training.

    Raises:
        DataError: if nothing of a system is left to train on, and an option has a number for each
            system.
    """
    divided = dict(data)
    for name, split in splits.items():
        sources = data[name].train
        parts = TaskData([], [], data[name].test)
        lost = list[str]()
        ends = np.cumsum([source.num_frames for source in sources])
        for source, mask in zip(sources, np.split(split.mask, ends[:-1])):
            if mask.all():
                lost.append(source.name)
            for part, title, is_in in (
                (parts.train, "training part", ~mask),
                (parts.valid, "validation part", mask),
            ):
                if is_in.any():
                    title = "" if is_in.all() else title
                    part.append(FrameSubset(source, np.flatnonzero(is_in), title))
        reason = _Reason(
            "validation_fraction", "are for validation", "Use another seed"
        )
        _lost_systems(config.tasks[name], lost, parts.train, reason)
        divided[name] = parts
    return divided


def open_split(config: RunConfig, with_test: bool = False) -> dict[str, TaskData]:
    """Return the data of every task as the run has split them, with the test data if wanted.

    Raises:
        DataError: if they cannot be read.
    """
    if not with_test:
        config = replace(
            config,
            validating=replace(config.validating, test_data=None, test_data_dict={}),
        )
    opened = open_run(config)
    return split_off(
        config, opened, choose_validation(config, opened, config.training.seed or 0)
    )


def _without_close_pairs(
    task: TaskConfig, sources: Sequence[FrameSource], results: Path | None
) -> list[FrameSource]:
    """Return training data without the frames that have two atoms closer than ``min_pair_dist``."""
    bound = task.data.training_data.min_pair_dist
    remaining = list[FrameSource]()
    lost = list[str]()

    def close_frames(source: FrameSource) -> dict[str, Any]:
        """Return the numbers of frames with atoms that are too close, in JSON values."""
        close = list[int]()
        for index in range(source.num_frames):
            with suppress(
                DataError
            ):  # the check of the data reports frames with faults
                frame = source.frame(index)
                # a cutoff far below the distances in matter would make too many cells
                if np.any(
                    find_pairs_once(frame.coord, frame.box, max(bound, 1.0)).distance
                    < bound
                ):
                    close.append(index)
        return {"close": close}

    for source in sources:
        about = {
            "source": source.name,
            "frames": source.num_frames,
            "closer than": bound,
        }
        close = recall_or_find(
            results, source.files(), about, partial(close_frames, source)
        )["close"]
        if not close:
            remaining.append(source)
        elif len(close) < source.num_frames:
            rest = FrameSubset(source, np.delete(np.arange(source.num_frames), close))
            left_out = (
                f"leaves out {len(close):,} of {counted(source.num_frames, 'frame')}"
            )
            rest.notes = [
                *source.notes,
                f"{left_out}: two atoms are closer than min_pair_dist = {bound:g} angstrom",
            ]
            remaining.append(rest)
        else:
            lost.append(source.name)
    why = f"have atoms closer than {bound:g} angstrom"
    reason = _Reason("training_data.min_pair_dist", why, "Use a smaller distance")
    if place := _lost_systems(task, lost, remaining, reason):
        logger.warning("%s: the systems are left out.", place)
    return remaining


class _Reason(NamedTuple):
    """Reason for which an option leaves out frames: what they have in common, and a remedy."""

    option: str
    why: str
    advice: str


def _lost_systems(
    task: TaskConfig,
    lost: Sequence[str],
    remaining: Sequence[FrameSource],
    reason: _Reason,
) -> str:
    """Return a text about an option and the systems of which nothing is left; empty if none.

    Args:
        task: whose data.
        lost: names of the training systems of which nothing is left.
        remaining: training systems with the frames that are left.
        reason: of the option.

    Raises:
        DataError: if no training system is left, or fewer than an option has numbers for.
    """
    options = task.data.training_data
    place = (
        f"{task.place('training')}.{reason.option}: all frames of "
        f"{first_few(lost)} {reason.why}"
    )
    if lost and not remaining:
        raise DataError(f"{place}. {reason.advice}.")
    # an option with a number for each system would be applied to the wrong systems
    if lost and (
        isinstance(options.batch_size, list)
        or options.sys_probs is not None
        or options.auto_prob.blocks
    ):
        raise DataError(
            f"{place}, and batch_size, sys_probs or auto_prob counts systems. {reason.advice}, or "
            "none of these."
        )
    return place if lost else ""


def content_of(data: Mapping[str, TaskData]) -> dict[str, Any]:
    """Return the frames and digests of files of each source, which all ranks must share."""

    @cache  # many systems may be in one file
    def digest(path: Path) -> str | None:
        with suppress(OSError):  # a file that one rank cannot read differs
            return file_digest(path, COMPARED_BYTES)
        return None

    contents: dict[str, Any] = {}
    for source in itertools.chain.from_iterable(itertools.chain(*data.values())):
        sizes = hashlib.sha256(
            np.asarray(source.frame_sizes, np.int64).tobytes()
        ).hexdigest()
        contents |= {
            f"{source.name}: frames": source.num_frames,
            f"{source.name}: sizes of frames": sizes,
        }
        # without the folders: each machine may have its own copy
        contents |= {
            f"{source.name}: {'/'.join(path.parts[-2:])}": digest(path)
            for path in source.files()
        }
    return contents


def digest_of(sources: Sequence[FrameSource]) -> str:
    """Return a digest of the frames of sources in their order; empty if unreadable.

    It does not depend on the paths of the sources.
    """
    digest = cache(
        partial(file_digest, most=COMPARED_BYTES)
    )  # many systems may be in one file
    contents = list[list[Any]]()
    for source in sources:
        group = split_address(source.name)[1]
        try:
            contents.append([group, source.num_frames, *map(digest, source.files())])
        except OSError:
            return ""
    return hashlib.sha256(json.dumps([contents, _parts(sources)]).encode()).hexdigest()[
        :16
    ]


def difference(content: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """Return the first difference between two :func:`content_of`; empty without any.

    Args:
        content: of this rank.
        reference: of rank 0.
    """
    for what in {**reference, **content}:
        if content.get(what) != reference.get(what):
            values = f"{content.get(what, 'none')} here, {reference.get(what, 'none')} on rank 0"
            return f"{what}: {values if what.endswith(': frames') else 'other content'}"
    return ""


def check_task(
    config: RunConfig, name: str, data: TaskData, results: Path | None = None
) -> DataReport:
    """Return the report of the checks of the data of one task: findings and a summary.

    Args:
        config: of the run.
        name: of the task.
        data: its sources.
        results: folder of reports. A report of the same data and options is returned from there,
            without a summary, and a new report without errors is stored there. None to check the
            data always.
    """
    task = config.tasks[name]
    model = task.model
    descriptor = task.model.descriptor
    bridging = task.model.bridging
    deciding = config.deciding_metrics(task) if config.fully_validated else {}
    is_alone = sum(other.is_validated for other in config.tasks.values()) == 1
    chosen = task.data.training_data.min_pair_dist
    weights = WEIGHTS if task.data.training_data.frame_weights else ()
    # frames in which atoms are closer than a larger min_pair_dist are left out
    least = min(
        chosen or math.inf, MIN_DISTANCE if bridging is None else MIN_BRIDGED_DISTANCE
    )
    report: DataReport | None = None

    def check() -> dict[str, Any]:
        nonlocal report
        report = check_systems(
            data.train,
            data.valid,
            model.type_map,
            descriptor,
            task.labels,
            least,
            task=task.name,
            test=data.test,
        )
        in_task = [*_task_findings(task, data, report)]
        if deciding:
            in_task += _unknown_errors(task, deciding, report, is_alone)
        findings = [*with_task(task.name, in_task)]
        first = [*with_severity(ERROR, findings), *with_severity(WARNING, findings)]
        report.findings = [*first, *report.findings, *with_severity(NOTE, findings)]
        return report.to_dict()

    sources = [*data.train, *data.valid, *data.test]
    about = {  # the options that change the result
        "task": task.name,
        "model": data_options(model),
        "systems": [
            [source.name, source.num_frames, list(source.unread)] for source in sources
        ],
        "parts": _parts(sources),
        "validation": [len(data.valid), len(data.test)],
        "labels": [*task.labels, *weights],
        "deciding": [deciding, is_alone],
        "min_pair_dist": [least, chosen],
    }
    stored = recall_or_find(
        results, [file for source in sources for file in source.files()], about, check
    )
    # check() was not called if the report was stored
    report = report or DataReport.from_dict(stored, model.type_map, descriptor.cutoff)
    # Options that do not fit the number and sizes of the systems are found each time: the key of a
    # stored report does not have them.
    problems = list[str]()
    for section, systems in zip(_SECTIONS, data):
        if (options := getattr(task.data, section)) is not None:
            with collect_problems(problems, f"{task.place('training')}.{section}."):
                build_sampler(options, systems)
    report.findings[:0] = [error("", text) for text in problems]
    return report


def _parts(sources: Sequence[FrameSource]) -> list[list[int]]:
    """Return the numbers of the frames of sources that are parts of others."""
    return [
        source.numbers.tolist() for source in sources if isinstance(source, FrameSubset)
    ]


def _task_findings(
    task: TaskConfig, data: TaskData, report: DataReport
) -> Iterator[Finding]:
    """Yield findings about sources, weights of frames, and options that do not fit the data."""
    wholes = [dict.fromkeys(source.whole for source in part) for part in data]
    texts = [text for part in data for source in part for text in source.warnings]
    for text in dict.fromkeys(texts):
        yield warning("", text)
    # both parts of a system that was split are of one source, which is listed once
    listed = [
        [s.name for s in part if part is wholes[0] or s not in wholes[0]]
        for part in wholes
    ]
    yield from repeated(*listed)
    units = dict[tuple[str, str], str]()
    for source in itertools.chain(*data):
        for what, unit in source.units.items():
            units.setdefault((what, unit), source.whole.name)
    for what, number_of_units in Counter(what for what, _ in units).items():
        if number_of_units > 1:
            shown = [f"{u} in {name}" for (w, u), name in units.items() if w == what]
            yield error(
                "", f"{what} has several units: {', '.join(shown)}. Expected one."
            )
    options = task.data.training_data
    place = f"{task.place('training')}.training_data.frame_weights"
    systems = [source.name for source in data.train if set(WEIGHTS) & {*source.unread}]
    if systems:
        number = f"{len(systems)} of {counted(len(data.train), 'system')} (first: {systems[0]})"
        yield note(place, f" is false: the weights of frames in {number} are not used")
    weighted = [
        scan for scan in report.training if any(map(scan.label_frames.get, WEIGHTS))
    ]
    if options.frame_weights and not weighted:
        names = ", ".join(f"set.*/{name}.npy" for name in WEIGHTS)
        yield warning(
            place,
            " is true, and no training frame has a weight: all count alike. "
            f"Expected weight or config_weight in extended XYZ, or {names}.",
        )
    for name in WEIGHTS if options.frame_weights else ():
        chunks = (
            chunk.arrays for source in data.train for chunk in source.chunks((name,))
        )
        parts = [arrays[name] for arrays in chunks if name in arrays]
        if parts:
            weights = np.concatenate(parts)
            zero = counted(int((weights == 0).sum()), "frame")
            yield note(
                name,
                f" of {counted(len(weights), 'training frame')}: "
                f"{weights.min():.4g} to {weights.max():.4g}, "
                f"mean {weights.mean():.4g}, zero in {zero}",
            )
    excluded = task.model.excluded_types
    yield from elements_without_tensors(
        report.training, task.labels, task.model.type_map, excluded
    )
    bridging = task.model.bridging
    nearest = (
        report.neighbors.min_distance if report.neighbors is not None else math.inf
    )
    # frames with a smaller distance than min_pair_dist are left out already
    nearest_in_use = max(options.min_pair_dist, nearest)
    # nearer than this, distances are clamped to a constant
    if bridging is not None and nearest_in_use < bridging.inner:
        yield warning(
            "",
            f"atoms are {nearest:.3f} angstrom apart ({report.closest}), nearer than "
            f"bridging_r_inner = {bridging.inner:g}: the network cannot learn from their forces. "
            f"training.training_data.min_pair_dist: {bridging.inner:g} "
            "leaves such training frames out.",
        )


def _unknown_errors(
    task: TaskConfig,
    deciding: Mapping[str, Metric],
    report: DataReport,
    is_alone: bool,
) -> Iterator[Finding]:
    """Yield findings about metrics that choose weights and of which no frame has a label.

    Args:
        task: whose metrics.
        deciding: metrics by option.
        report: of its data.
        is_alone: whether no other task has validation data, whose errors count as well.
    """
    label_of = dict[str, str]()
    measured = list[str]()  # letters of the errors that are numbers
    for label in task.model.fitting_net.labels:
        for quantity in LABELS[label].errors:
            # open frames have no volume, and so no stress
            needs_cell = quantity.per == "volume"
            label_of[quantity.metric] = f"{label} and a cell" if needs_cell else label
            if quantity.metric and any(
                label in scan.label_frames
                and not (needs_cell and scan.open_frames == scan.system.num_frames)
                for scan in report.validation
            ):
                measured.append(quantity.metric)
    for option, metric in deciding.items() if report.validation else ():
        if metric.quantity in measured:
            continue
        stops = option.endswith("early_stop")
        effect = "does not count" if stops else "chooses no best weights"
        choices = [f"{letter}:{metric.error}" for letter in measured]
        yield (error if stops and is_alone else warning)(
            option,
            f": no validation frame has {label_of[metric.quantity]}, so that {metric} {effect}. "
            f"Choose {' or '.join(choices) or 'other validation data'}.",
        )


def build_sampler(
    options: TrainingDataConfig | ValidationDataConfig,
    systems: Sequence[FrameSource],
    **settings: int,
) -> Sampler:
    """Return the sampler of a section of data.

    Args:
        options: of the section.
        systems: of the section.
        settings: ``seed``, ``rank`` and ``world_size`` of the run.
    """
    frames = [system.num_frames for system in systems]
    natoms = [system.frame_sizes for system in systems]
    return Sampler(
        frames,
        natoms,
        options.batch_size,
        options.auto_prob,
        options.sys_probs,
        **settings,
    )


class TaskLength(NamedTuple):
    """Length of the training of one task.

    Attributes:
        share: of the steps of the run.
        epochs: passes over its training frames.
        batches: of one epoch.
        frames: mean number in a step.
        max_atoms: of the largest batch.
        findings: warnings about frames and batches.
    """

    share: float
    epochs: float
    batches: int
    frames: float
    max_atoms: int
    findings: tuple[Finding, ...]


class RunLength(NamedTuple):
    """Length of a run.

    Attributes:
        num_steps: of the run.
        tasks: length of the training of each task.
        frames_per_step: mean number of frames in a step of all ranks together.
        steps_per: steps of one of ``steps``, ``frames`` and ``epochs``, in which lengths of
            averages are given. In an epoch every task has, on average, seen all of its frames at
            least once.
    """

    num_steps: int
    tasks: Mapping[str, TaskLength]
    frames_per_step: float
    steps_per: Mapping[str, float]


def run_length(
    config: RunConfig, data: Mapping[str, TaskData], num_ranks: int = 1
) -> RunLength:
    """Return the length of a run.

    Args:
        config: of the run.
        data: of each task.
        num_ranks: ranks that share each step; more of them make an epoch shorter.

    Raises:
        UserError: if options do not fit the systems.
    """
    options = {name: config.tasks[name].data.training_data for name in data}
    samplers = {
        name: build_sampler(options[name], task_data.train, world_size=num_ranks)
        for name, task_data in data.items()
    }
    # shares of the steps: weights of tasks in the input, else numbers of systems; epochs of a task
    # set its share
    weights = dict(config.task_weights) or {
        name: float(len(task_data.train)) for name, task_data in data.items()
    }
    for name, epochs in config.task_epochs.items():
        weights[name] = float(samplers[name].batches_for_epochs(epochs))
    total = sum(weights[name] for name in data)
    batches_per_step = config.training.accumulate
    shares = {name: weights[name] / total for name in data}
    # tasks without a share have no steps, and set no length
    drawn = {name: sampler for name, sampler in samplers.items() if shares[name]}
    epochs_of = config.task_epochs or dict.fromkeys(
        data, config.training.numb_epoch or 0
    )
    num_steps = config.training.numb_steps or max(
        math.ceil(
            sampler.batches_for_epochs(epochs_of[name])
            / (shares[name] * batches_per_step)
            * _SLACK
        )
        for name, sampler in drawn.items()
    )
    tasks = {
        name: TaskLength(
            shares[name],
            shares[name] * num_steps * batches_per_step / sampler.batches_per_epoch,
            sampler.batches_per_epoch,
            batches_per_step * sampler.frames_per_step,
            sampler.max_atoms,
            tuple(sampler.findings),
        )
        for name, sampler in samplers.items()
    }
    # batches of the run in which the slowest task has an epoch
    epoch_batches = max(
        math.ceil(sampler.batches_per_epoch / shares[name] * _SLACK)
        for name, sampler in drawn.items()
    )
    frames = sum(task.share * task.frames for task in tasks.values() if task.share)
    steps_per = {
        "steps": 1.0,
        "frames": 1 / frames,
        "epochs": epoch_batches / batches_per_step,
    }
    return RunLength(num_steps, tasks, frames, steps_per)


def with_neighbors(
    config: RunConfig, neighbors: Mapping[str, NeighborStatistics]
) -> RunConfig:
    """Return the config with ``sel: auto`` as numbers, from the neighbors in each task's data."""
    models = {}
    for name, task in config.tasks.items():
        if task.model.descriptor.neighbors is None:
            # a descriptor that tasks share has room for the neighbors in all
            shared = reduce(
                NeighborStatistics.with_counts_of,
                [neighbors[other] for other in config.sharing_with(name)],
            )
            models[name] = task.model.with_descriptor(
                task.model.descriptor.with_neighbors(shared)
            )
    return config.with_models(models) if models else config
