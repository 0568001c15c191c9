"""The data that a config names: opened and checked, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from deepmd_ema.data.check.report import MIN_DISTANCE, DataReport, check_systems
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.sampler import Sampler, plan_batches
from deepmd_ema.data.source import FrameSource, ReadSpec
from deepmd_ema.errors import DataError, UserError, collect_problems, counted
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig, TaskConfig
    from deepmd_ema.config.schema.training import TrainingDataConfig, ValidationDataConfig

_MOST_NUMBERS = 12  # of neighbors in one line
REPORTED = (ENERGY, FORCE, VIRIAL)  # read where present, whatever the loss weighs


class TaskData(NamedTuple):
    """The data of one task; ``valid`` is empty without validation data."""

    train: list[FrameSource]
    valid: list[FrameSource]


def open_run(config: RunConfig) -> dict[str, TaskData]:
    """Return the data of every task by its name.

    Raises:
        DataError: with the problems of all tasks at once, of training and validation data.
    """
    data: dict[str, TaskData] = {}
    problems: list[str] = []
    for name, task in config.tasks.items():
        spec = ReadSpec.of_model(task.model, tuple(dict.fromkeys((*REPORTED, *task.loss.labels))))
        opened: list[list[FrameSource]] = []
        for section, given in _sections(task).items():
            opened.append([])
            if given is not None:
                with collect_problems(problems):
                    opened[-1] = open_systems(given.systems, spec, given.rglob_patterns, f"{section}.systems")
        data[name] = TaskData(*opened)
    if problems:
        raise DataError(problems)
    return data


def check_task(task: TaskConfig, data: TaskData) -> DataReport:
    """Return what the checks find in the data of one task: problems, warnings, a summary."""
    bound = task.training_data.min_pair_dist
    bound = bound if bound > 0 else MIN_DISTANCE
    report = check_systems(*data, task.model.type_map, task.model.descriptor, task.loss.labels, bound)
    options: list[str] = []
    for (section, given), systems in zip(_sections(task).items(), data):
        if given is not None:
            with collect_problems(options, f"{section}."):
                plan_batches(*_sizes(systems), given.batch_size, given.auto_prob, given.sys_probs)
    report.problems[:0] = options
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
        given = config.tasks[name].training_data
        sizes = _sizes(data[name].train)
        sampler = Sampler(*sizes, given.batch_size, given.auto_prob, given.sys_probs, world_size=num_ranks)
        weights[name] = float(sampler.steps_for_epochs(epochs))
    total = sum(weights[name] for name in data)
    return {name: weights[name] / total for name in data}


def length_lines(config: RunConfig, task: TaskConfig, train: Sequence[FrameSource], report: DataReport) -> list[str]:
    """Return the length of the training of a task and an estimate of its memory, one line each."""
    data = task.training_data
    try:
        sampler = Sampler(*_sizes(train), data.batch_size, data.auto_prob, data.sys_probs)
    except UserError:  # one of the problems of ``report``
        return []
    steps = config.training.numb_steps or sampler.steps_for_epochs(config.training.numb_epoch or 0)
    epochs = steps / sampler.batches_per_epoch
    batches = counted(sampler.batches_per_epoch, "batch", "batches")
    lines = [f"Length: {counted(steps, 'step')} = {epochs:.1f} epochs of {batches}"]
    if report.neighbors is not None:
        descriptor = task.model.descriptor.with_neighbors(report.neighbors)
        neighbors = list(descriptor.neighbors or ())
        atoms = max(size * int(system.frame_sizes.max()) for size, system in zip(sampler.batch_size, train))
        numbers = str(neighbors) if len(neighbors) <= _MOST_NUMBERS else f"of {sum(neighbors)} neighbors together"
        batch = f"{atoms:,} atoms, {descriptor.neighbors_option} {numbers}"
        wanted = 8 * atoms * sum(neighbors) * descriptor.numbers_per_pair
        lines.append(f"Memory: about {wanted / 1e9:.2g} GB for the largest batch ({batch})")
    return lines


def _sections(task: TaskConfig) -> dict[str, TrainingDataConfig | ValidationDataConfig | None]:
    """Return the data sections of a task by their path in the input."""
    place = task.place("training")
    return {f"{place}.training_data": task.training_data, f"{place}.validation_data": task.validation_data}


def _sizes(systems: Sequence[FrameSource]) -> tuple[list[int], list]:
    return [system.num_frames for system in systems], [system.frame_sizes for system in systems]
