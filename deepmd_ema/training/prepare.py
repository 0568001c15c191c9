"""From a config to checked systems, statistics, models with their first weights, averages, and fits
of the bias.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch
from deepmd_ema.config import RunConfig, TaskConfig
from deepmd_ema.config.labels import ENERGY, LABELS
from deepmd_ema.config.outputs import Outputs
from deepmd_ema.config.schema.averaging import ScheduleFreeProfile
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.data.check.scan import is_isolated
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import atoms_at_once, sequential_batches
from deepmd_ema.data.run import (
    RunLength,
    TaskData,
    check_task,
    choose_validation,
    content_of,
    difference,
    digest_of,
    open_run,
    run_length,
    split_off,
    with_neighbors,
)
from deepmd_ema.data.sampler import batch_sizes, permutation
from deepmd_ema.data.source import FrameSource
from deepmd_ema.distributed.files import writing
from deepmd_ema.distributed.tensors import prefix_of
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import ConfigError, DataError, UserError, counted
from deepmd_ema.findings import ERROR, Finding, with_severity
from deepmd_ema.model.build import build_models
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import ModelSet, TaskModel
from deepmd_ema.model.output_bias import (
    KEEP,
    BiasFit,
    change_bias,
    energies_of,
    fixed_elements,
    move_bias,
    with_given_energies,
)
from deepmd_ema.model.stat_file import read_stat_file, write_stat_file
from deepmd_ema.model.statistics import Statistics, collect_statistics, shared_statistics
from deepmd_ema.optim.build import split_by_pattern
from deepmd_ema.training.restart import check_content, reads_shards
from deepmd_ema.training.tasks import Task, build_task
from deepmd_ema.training.weights import Start
from deepmd_ema.utils import LIVE, seed_for, stream_of

logger = logging.getLogger(__name__)

MAX_FRAMES = (
    10_000  # of a fit after training: few numbers are fitted, more frames would only take longer
)
_MAX_EVIDENCE = 30  # frames that show whether labels are of another method
MAX_ATOMS_AT_ONCE = 512  # in a batch whose energies are evaluated: dpa4 takes 3 MB for each


@dataclass(frozen=True)
class PreparedRun:
    """Inputs of a training run.

    Attributes:
        config: of the run, with ``sel`` resolved.
        tasks: by name.
        models: those of the tasks.
        length: of the run and of each task.
        seed: of every random stream of the run.
    """

    config: RunConfig
    tasks: Mapping[str, Task]
    models: ModelSet
    length: RunLength
    seed: int


def prepare(
    config: RunConfig, start: Start, world: World, skip_neighbor_stat: bool = False
) -> PreparedRun:
    """Open and check the data, resolve ``sel``, and make the models with their first weights.

    A new run gets statistics from data; a run that starts from a file takes those of the file. rank
    0 looks at the data, and the others learn what it has found.

    Raises:
        DataError: with every problem of the data at once.
    """
    seed = config.training.seed
    assert seed is not None, "a run without a seed draws one before this"
    started = time.perf_counter()
    results = {name: Outputs(config).checked_data(name) for name in config.tasks}
    systems: dict[str, TaskData] = {}

    def open_first() -> None:
        with suppress(UserError):  # which all ranks see in the next lines
            systems.update(open_run(config, results))

    # rank 0 first: of files that must be read completely it remembers what the others need
    world.broadcast_from_rank0(open_first)
    with world.all_ranks_ok():
        systems = systems or open_run(config, results)
    if world.size > 1:
        here = content_of(systems)
        there = world.broadcast_from_rank0(lambda: here)
        with world.all_ranks_ok():
            if found := difference(here, there):
                raise DataError(
                    f"rank {world.rank} on {socket.gethostname()} has other data than rank 0: "
                    f"{found}. All ranks must read the same frames: use a folder that they share, "
                    "or copy it to each machine again."
                )
    contents = world.broadcast_from_rank0(
        lambda: {name: digest_of(data.train) for name, data in systems.items()}
    )
    with world.all_ranks_ok():
        check_content(start, contents)
    # of rank 0: all ranks have the same frames in each part
    splits = world.broadcast_from_rank0(lambda: choose_validation(config, systems, seed, results))
    for name, split in splits.items():
        of_task = f"task {name}: " if name else ""
        for line in split.lines:
            logger.info("%s%s", of_task, line)
        for finding in split.findings():
            logger.warning("%s%s", of_task, finding)
    with world.all_ranks_ok():
        systems = split_off(config, systems, splits) if splits else systems
    config, nearest, dates = world.broadcast_from_rank0(
        partial(_check_data, config, systems, results, start, skip_neighbor_stat)
    )
    checked = time.perf_counter()
    cache = PairCache(local_size=world.local_size)  # one for all tasks: they share its limit
    seeds = {name: seed_for(stream_of("weights", name), seed) for name in config.tasks}
    models = build_models(
        {name: task.model for name, task in config.tasks.items()}, config.links, seeds
    )
    # a mistake is reported before statistics are made
    split_by_pattern(config.optimizer.groups, models.first_names(), config.source)
    for name, model in models.by_task.items():
        model.min_nbor_dist = nearest[name]
    tasks = {
        name: build_task(
            config, name, data, contents[name], splits.get(name), models, cache, seed, world
        )
        for name, data in systems.items()
    }
    run = PreparedRun(config, tasks, models, run_length(config, systems, world.size), seed)
    if not reads_shards(start, config):
        state = world.broadcast_from_rank0(partial(_first_weights, run, start, world.size))
        if not world.is_main:
            run.models.load_state_dict(state)
    known = f" (this content was checked before: {', '.join(dates)})" if dates else ""
    logger.debug(
        "data and neighbors: %.1f s%s, statistics: %.1f s",
        checked - started,
        known,
        time.perf_counter() - checked,
    )
    return run


def _check_data(
    config: RunConfig,
    systems: Mapping[str, TaskData],
    results: Mapping[str, Path],
    start: Start,
    skip: bool,
) -> tuple[RunConfig, dict[str, float | None], list[str]]:
    """Return the config with ``sel`` resolved, nearest pairs by task, and dates of earlier checks
    that still hold.
    """
    nearest = {}
    found = {}
    dates = []
    problems = list[str | Finding]()
    for name, task in config.tasks.items():
        report = check_task(task, systems[name], results[name])
        if report.date:
            dates.append(f"{name} {report.date}".lstrip())
        for line in report.notes:
            logger.info("%s", line)
        for line in report.warnings:
            logger.warning("%s", line)
        problems += with_severity(ERROR, report.findings)
        descriptor = task.model.descriptor
        if skip and descriptor.neighbors is None:
            place = f"{task.place('model')}.descriptor"
            problems.append(
                f"--skip-neighbor-stat: {place} ({descriptor.summary()}) needs it. Give numbers."
            )
        if not report.problems:
            assert report.neighbors is not None, "data without problems have neighbors"
            nearest[name] = start.min_nbor_dist(name, report.neighbors.min_distance)
            found[name] = report.neighbors
    DataError.raise_if_any(problems)
    return with_neighbors(config, found), nearest, dates


def _first_weights(run: PreparedRun, start: Start, num_ranks: int) -> Mapping[str, Tensor]:
    """Put the weights of a file into the models, or statistics beside those of the seed, and return
    them.
    """
    # the file may not have all means, spreads and biases: of new tasks, elements or fitting
    # networks
    if run.config.tasks.keys() - start.saved.keys() or any(
        source.fresh_fitting or start.new_elements(name, run.config.tasks[name].model.type_map)
        for name, source in start.sources.items()
        if name in run.config.tasks
    ):
        found = {name: _statistics(task, run.seed, num_ranks) for name, task in run.tasks.items()}
        for name, statistics in shared_statistics(
            found, run.config.links, {name: of.share for name, of in run.length.tasks.items()}
        ).items():
            run.tasks[name].model.apply_statistics(statistics)
            for line in statistics.lines():
                logger.debug("%s%s", (f"task {name}: " if name else ""), line)
    start.load_weights(run.models)
    for task in run.tasks.values():
        _move_bias(run, task, start, num_ranks)
    return run.models.state_dict()


def _move_bias(run: PreparedRun, task: Task, start: Start, num_ranks: int) -> None:
    """Give a model of a file the output bias that its data need, and say what they show."""
    model, config = task.model, task.config.model
    how = start.moves_bias(task.name, config.finetune_bias)
    if how is None or not np.any(config.fitting_net.bias_effect):
        return
    of_task = f"task {task.name}: " if task.name else ""
    file = start.path
    bias = model.out_bias.numpy().reshape(len(config.type_map), *LABELS[model.labels[0]].shape)
    given = with_given_energies(config, bias)
    if start.fine_tunes:
        model.out_bias.copy_(torch.from_numpy(given).view_as(model.out_bias))
    elif not np.allclose(given, bias):
        text = (
            "%sthe energies that the input gives for %s have no effect with --init-model: they "
            "are those of %s"
        )
        logger.warning(text, of_task, ", ".join(fixed_elements(config)), file)
    new = start.new_elements(task.name, model.type_map)
    if how != KEEP or new:
        batches = _statistics_batches(task, run.seed, num_ranks)
    else:  # nothing is fitted
        chosen = chosen_frames(task.config, task.train, run.seed, _MAX_EVIDENCE)
        batches = sequential_batches(
            task.train, model.layout, task.cache, MAX_ATOMS_AT_ONCE, frames=chosen
        )
    frames = energies_of(model, config, batches)
    if not len(frames):
        if start.fine_tunes:
            text = (
                "%sno training frame has a label to compare the output bias with: it stays as in %s"
            )
            logger.warning(text, of_task, file)
        return
    move = move_bias(frames, bias, model.out_std.numpy().reshape(bias.shape), new, how)
    text = f"{of_task}{move.evidence(config)}, on {counted(len(frames), 'training frame')}"
    if start.fine_tunes:
        model.out_bias.copy_(torch.from_numpy(move.bias).view_as(model.out_bias))
        if (
            ENERGY in model.labels and move.is_moved
        ):  # the spread of a property is the unit of its network
            model.out_std.copy_(torch.from_numpy(move.std).view_as(model.out_std))
    if how == KEEP and move.is_of_another_method:
        place = task.config.place("model")
        remedy = (
            f'{place}.finetune_bias = "fit"'
            if start.fine_tunes
            else "--finetune in place of --init-model"
        )
        text += (
            f". The output bias stays as in {file}, and weights would have to learn the shift; "
            f"{remedy} moves it."
        )
        logger.warning("%s", text)
    elif start.fine_tunes:
        logger.info(
            "%s: the output bias %s", text, "was moved" if move.is_moved else f"stays as in {file}"
        )


def _statistics(task: Task, seed: int, num_ranks: int) -> Statistics:
    """Return the statistics from ``stat_file``, or from ``data_stat_nbatch`` batches of all ranks
    of every system.
    """
    path, place = task.config.data.stat_file, f"{task.config.place('training')}.stat_file"
    if path is not None:
        stored = read_stat_file(path, task.config.model, task.model.descriptor)
        if isinstance(stored, Statistics):
            logger.info("statistics are those of %s", path)
            return stored
        if task.config.data.stat_file_mode == "read":
            raise DataError(
                f'{place} = "{path}" does not hold the statistics of this model, and '
                f'stat_file_mode is "read": {stored}. Use "update", or the file of a run of the '
                "same model."
            )
        if Path(path).exists():
            logger.info("%s = %s: %s. The statistics are computed anew.", place, path, stored)
    found = collect_statistics(
        task.model, task.config.model, _statistics_batches(task, seed, num_ranks)
    )
    if path is not None:
        advice = "Remove the file that is there, name another place, or leave the option out."
        with writing(f"{place}: {path}", advice):
            write_stat_file(path, task.config.model, found)
    return found


def _statistics_batches(task: Task, seed: int, num_ranks: int) -> Iterator[Batch]:
    """Return batches of the frames of the statistics; those of several systems may be in one."""
    train = task.train
    stream = stream_of("statistics", task.config.name)
    layout = task.model.layout
    sizes, taken, _ = batch_sizes(
        task.config.data.training_data.batch_size, [system.frame_sizes for system in train]
    )
    chosen = list[list[int]]()
    for number, (system, size, frames) in enumerate(zip(train, sizes, taken)):
        # a system that `filter:N` leaves out has size 0 and no share in the statistics
        order = frames[permutation(len(frames), seed_for(stream, seed, number))]
        # as many as one process with all the frames of a step would take, so that it starts from
        # the same model
        drawn = task.config.model.data_stat_nbatch * size * num_ranks
        chosen.append(order[:drawn].tolist())
        # and the isolated atoms of the first hundred of the others that are one atom: a sample
        # rarely has one, and without them nothing fixes what compositions leave open. Of one
        # molecule alone each element gets the mean energy, hundreds of eV from that of its atom.
        rest = order[drawn:]
        for k in rest[system.frame_sizes[rest] == 1][:100].tolist():
            box = system.frame(k).box
            chosen[-1] += [k] * bool(
                is_isolated(np.ones(1), None if box is None else box[None], layout.rcut)[0]
            )
    return sequential_batches(train, layout, task.cache, MAX_ATOMS_AT_ONCE, frames=chosen)


def refit_bias(prepared: PreparedRun, bank: AverageBank) -> dict[str, dict[str, Tensor]]:
    """Return the output biases (1, T, 1) in eV that fit the data, by weights and by their names in
    the models.

    The weights are ``live`` and every average. With its bias the mean residual per atom over the
    training frames of a task is zero for the weights that it was fitted with. All frames take part
    up to 10,000, of more a sample in which every system has its share; it depends on the seed of
    the run only. Nothing in the models or the bank changes. A task without energies is left out,
    with a warning. Readers of the last files use these biases, in place of those that a restart
    continues from.

    Args:
        prepared: data and models of the run; it computes where the models are.
        bank: averages, maybe none.
    """
    fitted: dict[str, dict[str, Tensor]] = {}
    for weights in (LIVE, *bank.names):
        with bank.swapped_in(weights):
            for name, task in prepared.tasks.items():
                if ENERGY not in task.model.labels:
                    continue
                chosen = chosen_frames(task.config, task.train, prepared.seed, MAX_FRAMES)
                most = atoms_at_once(task.model.out_bias.device)
                batches = sequential_batches(
                    task.train, task.model.layout, task.cache, most, frames=chosen
                )
                words = f" fitted again with the weights {f'{name} {weights}'.lstrip()}"
                fit = _fit_bias(task, prepared.models.of(name), batches, words)
                if fit is not None:
                    tensor = torch.from_numpy(fit.bias).view(1, -1, 1)
                    fitted.setdefault(weights, {})[f"{prefix_of(name)}out_bias"] = tensor
                elif weights == LIVE:
                    logger.warning(
                        "training.change_bias_after_training: no training frame%s has an energy, "
                        "so there is nothing to fit the bias to: it stays as it is",
                        (f" of task {name}" if name else ""),
                    )
    return fitted


def _fit_bias(
    task: Task, model: EnergyModel | TaskModel, batches: Iterable[Batch], words: str
) -> BiasFit | None:
    """Return the bias with which the mean residual per atom of frames is zero; None if none has an
    energy.
    """
    before = model.out_bias.view(-1).cpu().numpy()
    frames = energies_of(model, task.config.model, batches)
    if not len(frames):
        return None
    fit = change_bias(frames, before)
    means = [
        np.mean(frames.residual(moved) / frames.num_atoms) for moved in (None, fit.bias - before)
    ]
    logger.info(
        "output bias%s on %s: mean residual %s meV/atom before, %s after",
        words,
        counted(len(frames), "frame"),
        *(f"{round(1000 * mean, 6) + 0.0:.4g}" for mean in means),
    )
    return fit


def chosen_frames(
    task: TaskConfig, train: Sequence[FrameSource], seed: int, most: int
) -> list[Sequence[int]]:
    """Return the frames of each system: all, or a sample of ``most`` of them in proportion to the
    systems' sizes.
    """
    # frames that `filter:N` leaves out were not trained on
    _, frames, _ = batch_sizes(
        task.data.training_data.batch_size, [system.frame_sizes for system in train]
    )
    counts = [len(own) for own in frames]
    total = sum(counts)
    if total <= most:
        return [own.tolist() for own in frames]
    # rounded so that they add up: the shares are the differences of rounded edges
    edges = np.cumsum([0, *counts]) * most // total
    stream = stream_of("bias", task.name)
    orders = [
        permutation(count, seed_for(stream, seed, number)) for number, count in enumerate(counts)
    ]
    return [
        np.sort(own[order[:share]]).tolist()
        for own, order, share in zip(frames, orders, np.diff(edges))
    ]


Hook = Callable[[int, float], bool]


def tracked_averages(
    config: RunConfig,
    steps_per: Mapping[str, float],
    should_update: Mapping[str, Hook] | None,
    num_steps: int,
) -> list[Profile]:
    """Return the profile of each average of the list ``training.averaging``.

    Args:
        config: of the run.
        steps_per: steps of one of ``steps``, ``frames`` and ``epochs``.
        should_update: for some averages by name, called before each update.
        num_steps: length of the run.

    Raises:
        ConfigError: if ``should_update`` names an average that the run does not track.
    """
    hooks = dict(should_update or {})
    profiles = []
    lr = config.learning_rate
    for average in config.training.averaging:
        changes: dict[str, Any] = {"should_update": hooks.pop(average.name, None)}
        if isinstance(average, ScheduleFreeProfile):
            assert isinstance(config.optimizer, AdamWScheduleFreeConfig)  # a rule of the input
            changes |= {"adam_beta1": config.optimizer.adam_beta1, "r": config.optimizer.r}
            changes |= {
                "warmup_steps": lr.num_warmup_steps(num_steps),
                "warmup_start_factor": lr.warmup_start_factor,
            }
        profiles.append(average.in_steps(steps_per, **changes))
    if hooks:
        known = ", ".join(profile.name for profile in profiles) or "none"
        raise ConfigError(
            f"should_update: no average is called {', '.join(hooks)}. This run tracks: {known}."
        )
    return profiles
