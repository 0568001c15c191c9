"""The data that a config names: opened and checked, task by task."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deepmd_ema.config.schema.descriptor import HasInnerNeighbors
from deepmd_ema.data.check.report import MIN_DISTANCE, DataReport, check_systems
from deepmd_ema.data.check_cache import Memory, content_digest, recall_or_find
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.data.source import BOX, COORD, FrameSource, FrameSubset, ReadSpec
from deepmd_ema.data.split import FrameTable, Split, split_frames
from deepmd_ema.errors import DataError, collect_problems, counted, first_few
from deepmd_ema.geometry import NeighborStatistics, find_pairs_once
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig, TaskConfig
    from deepmd_ema.config.schema.training import TrainingDataConfig, ValidationDataConfig

logger = logging.getLogger(__name__)

MIN_BRIDGED_DISTANCE = 0.01  # angstrom; the energy of bridging is finite but for atoms in one place
_COMPARED_BYTES = 1 << 30  # of one file, about a second; of a larger one every rank compares parts
REPORTED = (ENERGY, FORCE, VIRIAL)  # read where present, whatever the loss weighs


class TaskData(NamedTuple):
    """The data of one task; ``valid`` is empty without validation data."""

    train: list[FrameSource]
    valid: list[FrameSource]


def open_run(config: RunConfig, memories: Mapping[str, Memory] | None = None) -> dict[str, TaskData]:
    """Return the data of every task by its name, without training frames in which atoms are too close.

    Args:
        config: of the run.
        memories: by task, of what was found in data that have not changed.

    Raises:
        DataError: with the problems of all tasks at once, of training and validation data.
    """
    data: dict[str, TaskData] = {}
    problems: list[str] = []
    for name, task in config.tasks.items():
        spec = replace(_spec_of(task), memory=memories[name] if memories is not None else None)
        opened: list[list[FrameSource]] = []
        for section, given in _sections(task).items():
            opened.append([])
            if given is not None:
                with collect_problems(problems):
                    opened[-1] = open_systems(given.systems, spec, given.rglob_patterns, f"{section}.systems")
        with collect_problems(problems):
            opened[0] = _without_close_pairs(task, opened[0], spec.memory)
        data[name] = TaskData(*opened)
    if problems:
        raise DataError(problems)
    return data


def choose_validation(
    config: RunConfig, data: Mapping[str, TaskData], seed: int, memories: Mapping[str, Memory] | None = None
) -> dict[str, Split]:
    """Return the validation frames of the tasks with a ``validation_fraction``, by task.

    Args:
        config: of the run.
        data: as opened.
        seed: of the run.
        memories: by task, of what was found in data that have not changed.

    Raises:
        DataError: if frames are too few to be split.
    """
    splits, problems = dict[str, Split](), list[str]()
    for name, task in config.tasks.items():
        fraction = task.data.validation_fraction
        if fraction is None:
            continue
        of_task = seed_for(f"split of {name}", seed) if name else seed
        memory, train = memories[name] if memories is not None else None, data[name].train
        systems = [[source.name, source.num_frames] for source in train]
        about = {"task": name, "systems": systems, "validation": [fraction, of_task]}
        find = partial(_split, train, len(task.model.type_map), fraction, of_task)
        with collect_problems(problems, f"{task.place('training')}.validation_fraction: "):
            splits[name] = recall_or_find(memory, _files_of(train), about, find, Split.to_dict, Split.from_dict)
    if problems:
        raise DataError(problems)
    return splits


def _split(train: Sequence[FrameSource], num_types: int, fraction: float, seed: int) -> Split:
    table = FrameTable()
    for source in train:
        table.add(source.chunks((COORD, BOX, FORCE)), num_types, source.kinds)
    return split_frames(table, fraction, seed)


def split_off(config: RunConfig, data: Mapping[str, TaskData], splits: Mapping[str, Split]) -> dict[str, TaskData]:
    """Return the data of every task, with the chosen frames as validation frames and without them in training.

    Raises:
        DataError: if nothing of a system is left to train on, and an option has a number for each system.
    """
    return dict(data) | {name: _parts(config.tasks[name], data[name].train, split) for name, split in splits.items()}


def open_split(config: RunConfig) -> dict[str, TaskData]:
    """Return the data of every task as the run has split them.

    Raises:
        DataError: if they cannot be read.
    """
    opened = open_run(config)
    return split_off(config, opened, choose_validation(config, opened, config.training.seed or 0))


def _parts(task: TaskConfig, sources: Sequence[FrameSource], split: Split) -> TaskData:
    parts = TaskData([], [])
    ends = np.cumsum([source.num_frames for source in sources])
    for source, chosen in zip(sources, np.split(split.chosen, ends[:-1])):
        for part, frames in zip(parts, (np.flatnonzero(~chosen), np.flatnonzero(chosen))):
            if len(frames):
                part.append(FrameSubset(source, frames))
    _refuse_to_lose(task, sources, parts.train, "validation_fraction", "are for validation", "Use another seed")
    return parts


def _without_close_pairs(task: TaskConfig, sources: Sequence[FrameSource], memory: Memory | None) -> list[FrameSource]:
    """Return training data without the frames that have two atoms closer than ``min_pair_dist``."""
    bound = task.training_data.min_pair_dist
    if bound == 0:
        return list(sources)
    kept: list[FrameSource] = []
    for source in sources:
        about = {"source": source.name, "frames": source.num_frames, "closer than": bound}
        find = partial(_close_frames, source, bound)
        close = recall_or_find(memory, source.files(), about, find, lambda found: {"": found}, lambda known: known[""])
        if not close:
            kept.append(source)
        elif len(close) < source.num_frames:
            rest = FrameSubset(source, np.delete(np.arange(source.num_frames), close))
            left_out = f"leaves out {len(close):,} of {counted(source.num_frames, 'frame')}"
            rest.notes = [*source.notes, f"{left_out}: two atoms are closer than min_pair_dist = {bound:g} angstrom"]
            kept.append(rest)
    why = f"have atoms closer than {bound:g} angstrom"
    _refuse_to_lose(task, sources, kept, "training_data.min_pair_dist", why, "Use a smaller distance")
    if lost := [source.name for source in sources if source.name not in {one.name for one in kept}]:
        place = f"{task.place('training')}.training_data.min_pair_dist"
        logger.warning("%s: all frames of %s %s: the systems are left out.", place, first_few(lost), why)
    return kept


def _close_frames(source: FrameSource, bound: float) -> list[int]:
    """Return the numbers of the frames with two atoms closer than ``bound``, angstrom; none of data with faults."""
    found = list[int]()
    for index in range(source.num_frames):
        with suppress(DataError):  # which the check of the data reports
            frame = source.frame(index)
            # a cutoff far below the distances in matter would make too many cells
            if np.any(find_pairs_once(frame.coord, frame.box, max(bound, 1.0))[3] < bound):
                found.append(index)
    return found


def _refuse_to_lose(
    task: TaskConfig, sources: Sequence[FrameSource], kept: Sequence[FrameSource], option: str, why: str, advice: str
) -> None:
    """Raise DataError if no training system is left, or fewer than an option has numbers for."""
    given = task.training_data
    lost = sorted({source.name for source in sources} - {source.name for source in kept})
    place = f"{task.place('training')}.{option}: all frames of {first_few(lost)} {why}"
    if lost and not kept:
        raise DataError(f"{place}. {advice}.")
    if lost and (isinstance(given.batch_size, list) or given.sys_probs is not None or given.auto_prob.blocks):
        raise DataError(f"{place}, and batch_size, sys_probs or auto_prob counts systems. {advice}, or none of these.")


def _files_of(sources: Sequence[FrameSource]) -> dict[Path, None] | None:
    """Return the files of sources, each once: many systems may be in one; None if they are unknown."""
    files: dict[Path, None] = {}
    for source in sources:
        own = source.files()
        if own is None:
            return None
        files |= dict.fromkeys(own)
    return files


def content_of(data: Mapping[str, TaskData]) -> list[tuple[str, dict[str, Any]]]:
    """Return the content of each source, which all ranks must share: its name, frames, and a digest of each file."""
    digest = cache(partial(content_digest, most=_COMPARED_BYTES))  # many systems may be in one file
    return [
        (
            source.name,
            {
                "frames": source.num_frames,
                "sizes of frames": hashlib.sha256(np.asarray(source.frame_sizes, np.int64).tobytes()).hexdigest(),
                # without the folders: each machine may have its own copy
                **{"/".join(path.parts[-2:]): digest(path) for path in source.files() or ()},
            },
        )
        for source in itertools.chain.from_iterable(itertools.chain(*data.values()))
    ]


def difference(here: Iterable[tuple[str, dict[str, Any]]], there: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return the first difference of :func:`content_of` of this rank from that of rank 0; empty without any."""
    for (name, mine), (other_name, other) in itertools.zip_longest(here, there, fillvalue=("", dict[str, Any]())):
        for what in other | mine:
            if mine.get(what) != other.get(what):
                values = f"{mine.get(what, 'none')} here, {other.get(what, 'none')} on rank 0"
                return f"{name or other_name}: {what}: {values if what == 'frames' else 'other content'}"
    return ""


def _spec_of(task: TaskConfig) -> ReadSpec:
    return ReadSpec.of_model(task.model, tuple(dict.fromkeys((*REPORTED, *task.loss.labels))))


def check_task(task: TaskConfig, data: TaskData) -> DataReport:
    """Return the report of the checks of the data of one task: problems, warnings, a summary."""
    model = task.model
    bound = _least_distance(task)
    report = check_systems(*data, model.type_map, model.descriptor, task.loss.labels, bound, task=task.name)
    report.problems[:0] = _option_problems(task, data)
    report.warnings += _close_for_bridging(task, report)
    return report


def _least_distance(task: TaskConfig) -> float:
    """Return the distance below which two atoms are a problem, angstrom; frames below a larger one are left out."""
    least = MIN_DISTANCE if task.model.bridging is None else MIN_BRIDGED_DISTANCE
    given = task.training_data.min_pair_dist
    return min(given, least) if given > 0 else least


def _close_for_bridging(task: TaskConfig, report: DataReport) -> Iterator[str]:
    """Yield a warning if training frames may have atoms whose distances are clamped to a constant."""
    window, kept = task.model.bridging, task.training_data.min_pair_dist
    if window is None or report.neighbors is None or kept >= window.inner:
        return
    if (nearest := report.neighbors.min_distance) < window.inner:
        of = f"task {task.name}: " * bool(task.name)
        yield (
            f"{of}atoms are {nearest:.3f} angstrom apart ({report.closest}), nearer than bridging_r_inner = "
            f"{window.inner:g}: the network cannot learn from their forces. training.training_data.min_pair_dist: "
            f"{window.inner:g} leaves such training frames out."
        )


def _option_problems(task: TaskConfig, data: TaskData) -> list[str]:
    """Return messages about options that do not fit the number and sizes of the systems."""
    problems: list[str] = []
    for (section, given), systems in zip(_sections(task).items(), data):
        if given is not None:
            with collect_problems(problems, f"{section}."):
                Sampler(*_sizes(systems), given.batch_size, given.auto_prob, given.sys_probs)
    return problems


def check_unless_unchanged(task: TaskConfig, data: TaskData, memory: Memory) -> DataReport:
    """Return the report of the checks of one task, a stored one if the content of the data is the same.

    Args:
        task: its options.
        data: its sources.
        memory: of reports; one without problems is added.
    """
    descriptor, sources, spec = task.model.descriptor, [*data.train, *data.valid], _spec_of(task)
    window = task.model.bridging
    about = {  # the options that change the result
        "task": task.name,
        "systems": [[source.name, source.num_frames, list(source.unread)] for source in sources],
        "parts": [source.frames.tolist() for source in sources if isinstance(source, FrameSubset)],
        "validation": len(data.valid),
        "read": [list(spec.type_map), list(spec.labels), spec.numb_fparam, spec.numb_aparam, spec.default_fparam],
        "labels": list(task.loss.labels),
        "cutoff": descriptor.cutoff,
        "neighbors": [descriptor.neighbors_option, descriptor.neighbors],
        "inner": list(descriptor.inner_neighbors()) if isinstance(descriptor, HasInnerNeighbors) else None,
        "min_pair_dist": _least_distance(task),
        "bridging": window and [window.inner, task.training_data.min_pair_dist],
    }
    stored = partial(DataReport.from_dict, type_map=task.model.type_map, rcut=descriptor.cutoff)
    find = partial(check_task, task, data)
    report = recall_or_find(memory, _files_of(sources), about, find, DataReport.to_dict, stored)
    if report.date:
        report.problems += _option_problems(task, data)
    return report


def task_shares(config: RunConfig, data: Mapping[str, TaskData], num_ranks: int) -> dict[str, float]:
    """Return the probability of each task to be trained by a step: as given, or by the number of its systems.

    Args:
        config: of the run.
        data: of each task.
        num_ranks: ranks that share each step; more of them make an epoch shorter.
    """
    weights = dict(config.task_weights)
    if not weights:
        weights = {name: float(len(of.train)) for name, of in data.items()}
    for name, epochs in config.task_epochs.items():
        weights[name] = float(_sampler(config, name, data, num_ranks).batches_for_epochs(epochs))
    total = sum(weights[name] for name in data)
    return {name: weights[name] / total for name in data}


def steps_for_epochs(tasks: Iterable[tuple[float, float, Sampler]], accumulate: int) -> int:
    """Return the steps of a run in which every task has had its epochs, on average.

    Args:
        tasks: epochs, share of the steps, and what draws the batches of each.
        accumulate: batches of a step.
    """
    numbers = ((sampler.batches_for_epochs(epochs), share) for epochs, share, sampler in tasks if share)
    return max(steps_with_share(number, share * accumulate) for number, share in numbers)


def steps_per_unit(tasks: Iterable[tuple[float, int, float]], accumulate: int) -> dict[str, float]:
    """Return the steps of each unit in which lengths of averages are given.

    In those of an epoch every task has, on average, seen all of its frames at least once.

    Args:
        tasks: share of the steps, batches of an epoch, and mean number of frames in a step, of each.
        accumulate: batches of a step.
    """
    drawn = [task for task in tasks if task[0]]
    batches = max(steps_with_share(number, share) for share, number, _ in drawn)
    frames = sum(share * number for share, _, number in drawn)
    return {"steps": 1.0, "frames": 1 / frames, "epochs": batches / accumulate}


def steps_with_share(number: int, share: float) -> int:
    """Return after how many steps of the run a task that has ``share`` batches in each on average had ``number``."""
    return math.ceil(number / share * (1 - 1e-12))  # a share is rounded


class TaskLength(NamedTuple):
    """Length of the training of one task.

    Attributes:
        share: of the steps of the run.
        epochs: passes over its training frames.
        batches: of one epoch.
        frames: mean number in a step.
        max_atoms: of the largest batch.
        warnings: about frames and batches.
    """

    share: float
    epochs: float
    batches: int
    frames: float
    max_atoms: int
    warnings: tuple[str, ...]


def run_length(config: RunConfig, data: Mapping[str, TaskData]) -> tuple[int, dict[str, TaskLength]]:
    """Return the steps of a run in one process, and the length of each task.

    Raises:
        UserError: if options do not fit the systems.
    """
    shares, samplers = task_shares(config, data, 1), {name: _sampler(config, name, data) for name in data}
    epochs = config.task_epochs or dict.fromkeys(data, config.training.numb_epoch or 0)
    accumulate, each = config.training.accumulate, [(epochs[n], shares[n], samplers[n]) for n in data]
    steps = config.training.numb_steps or steps_for_epochs(each, accumulate)
    return steps, {
        name: TaskLength(
            shares[name], shares[name] * steps * accumulate / of.batches_per_epoch, of.batches_per_epoch,
            accumulate * of.frames_per_step, of.max_atoms, tuple(of.warnings),
        )
        for name, of in samplers.items()
    }  # fmt: skip


def with_neighbors(config: RunConfig, found: Mapping[str, NeighborStatistics]) -> RunConfig:
    """Return the config with ``sel: auto`` as numbers, from the neighbors in the data of each task."""
    models = {}
    for name, task in config.tasks.items():
        if task.model.descriptor.neighbors is None:
            # a descriptor that tasks share has room for the neighbors in all
            of_all = reduce(NeighborStatistics.with_counts_of, [found[other] for other in config.sharing_with(name)])
            models[name] = task.model.with_descriptor(task.model.descriptor.with_neighbors(of_all))
    return config.with_models(models) if models else config


def most_slots(task: TaskConfig, report: DataReport) -> int:
    """Return the most slots for neighbors that an atom has in a batch; 0 where neighbors are not known."""
    found = report.neighbors
    if found is None:
        return 0
    kept = list(task.model.descriptor.with_neighbors(found).neighbors or ())
    # a batch has slots for the neighbors that there are, however many may be kept
    there = list(found.max_neighbors) if len(kept) == len(found.max_neighbors) else [found.max_total]
    return sum(map(min, kept, there))


def _sampler(config: RunConfig, name: str, data: Mapping[str, TaskData], num_ranks: int = 1) -> Sampler:
    given = config.tasks[name].training_data
    sizes = _sizes(data[name].train)
    return Sampler(*sizes, given.batch_size, given.auto_prob, given.sys_probs, world_size=num_ranks)


def _sections(task: TaskConfig) -> dict[str, TrainingDataConfig | ValidationDataConfig | None]:
    """Return the data sections of a task by their path in the input."""
    place = task.place("training")
    return {f"{place}.training_data": task.training_data, f"{place}.validation_data": task.validation_data}


def _sizes(systems: Sequence[FrameSource]) -> tuple[list[int], list]:
    return [system.num_frames for system in systems], [system.frame_sizes for system in systems]
