"""The data of the tasks of a run, as the config names them: opened, checked and summarised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_ema.data.check import DataReport, check_systems
from deepmd_ema.data.npy import System, open_systems
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import DataError, UserError
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepmd_ema.config import RunConfig, TaskConfig, TrainingData, ValidationData

REPORTED = (ENERGY, FORCE, VIRIAL)  # read where present, whatever the loss weighs


def open_run(task: TaskConfig) -> tuple[list[System], list[System]]:
    """Return the training and the validation systems; none of the latter without ``validation_data``.

    Raises:
        DataError: with the problems of both at once.
    """
    problems: list[str] = []
    train = _open(task, task.training_data, "training.training_data.systems", problems)
    valid = _open(task, task.validation_data, "training.validation_data.systems", problems)
    if problems:
        raise DataError(problems)
    return train, valid


def check_run(task: TaskConfig, train: Sequence[System], valid: Sequence[System]) -> DataReport:
    """Return what stands in the data of a task: problems, warnings, a summary."""
    bound = task.training_data.min_pair_dist
    report = check_systems(
        train,
        valid,
        task.model.type_map,
        task.model.descriptor.cutoff,
        labels=task.loss.labels,
        min_distance=bound if bound > 0 else None,
        sel=task.model.descriptor.neighbors,
    )
    drawn = _draw_problems(task.training_data, train, "training_data")
    drawn += _draw_problems(task.validation_data, valid, "validation_data")
    report.problems[:0] = drawn
    return report


def length_lines(config: RunConfig, train: Sequence[System], report: DataReport) -> list[str]:
    """Return how long the run is and about how much memory it wants, one line each."""
    data = config.training.training_data
    if _draw_problems(data, train, ""):
        return []
    sampler = _sampler(data, train)
    steps = config.training.numb_steps or sampler.steps_for_epochs(config.training.numb_epoch or 0)
    epochs = steps / sampler.batches_per_epoch
    lines = [f"Length: {steps:,} steps = {epochs:.1f} epochs of {sampler.batches_per_epoch:,} batches"]
    if report.neighbors is not None:
        descriptor = config.model.descriptor.with_neighbors(report.neighbors)
        neighbors = list(descriptor.neighbors or ())
        atoms = max(size * system.natoms for size, system in zip(sampler.batch_size, train))
        wanted = 8 * atoms * sum(neighbors) * descriptor.numbers_per_pair
        lines.append(f"Memory: about {wanted / 1e9:.2g} GB for the largest batch ({atoms:,} atoms, sel {neighbors})")
    return lines


def _sampler(data: TrainingData | ValidationData, systems: Sequence[System]) -> Sampler:
    frames, atoms = [system.num_frames for system in systems], [system.natoms for system in systems]
    return Sampler(frames, atoms, data.batch_size, data.auto_prob, data.sys_probs)


def _draw_problems(data: TrainingData | ValidationData | None, systems: Sequence[System], section: str) -> list[str]:
    """Return what keeps batches from being drawn: options that do not fit the systems that were found."""
    if data is None:
        return []
    try:
        _sampler(data, systems)
    except UserError as error:
        return [f"training.{section}.{problem}" for problem in error.problems]
    return []


def _open(
    task: TaskConfig, data: TrainingData | ValidationData | None, where: str, problems: list[str]
) -> list[System]:
    if data is None:
        return []
    fitting = task.model.fitting_net
    try:
        return open_systems(
            data.systems,
            task.model.type_map,
            tuple(dict.fromkeys((*REPORTED, *task.loss.labels))),
            fitting.numb_fparam,
            fitting.numb_aparam,
            data.rglob_patterns,
            fitting.default_fparam,
            where,
        )
    except DataError as error:
        problems += error.problems
        return []
