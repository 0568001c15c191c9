"""From a config to checked data, models with their first weights, averages, and fits of biases."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from deepmd_ema.data.split import Split
from deepmd_ema.distributed.tensors import prefix_of
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import ConfigError, DataError, UserError
from deepmd_ema.files import writing
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
from deepmd_ema.model.statistics import (
    Statistics,
    collect_statistics,
    shared_statistics,
)
from deepmd_ema.optim.build import split_by_pattern
from deepmd_ema.text import counted
from deepmd_ema.training.restart import check_content, reads_shards
from deepmd_ema.training.tasks import Task, build_task
from deepmd_ema.training.weights import Start
from deepmd_ema.utils import LIVE, seed_for, stream_of

logger = logging.getLogger(__name__)

# frames of a fit after training: few numbers are fitted, and more would only take longer
MAX_FRAMES = 10_000
_MAX_EVIDENCE = 30  # frames that show whether labels are of another method
MAX_ATOMS_AT_ONCE = (
    512  # in a batch whose energies are evaluated: dpa4 takes 3 MB for each
)


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

    A new run gets statistics from data; a run that starts from a file takes those of the file.
    Rank 0 checks the data and makes the statistics, and the other ranks get the results. Must be
    called by every rank.

    Args:
        config: of the run, with a seed.
        start: where the run starts.
        world: the processes of the run.
        skip_neighbor_stat: whether ``sel: auto`` is refused.

    Raises:
        DataError: with every problem of the data at once.
    """
    seed = config.training.seed
    assert seed is not None, "a run without a seed draws one before this"
    started = time.perf_counter()
    # folders with what is known of data that have not changed since an earlier check, by task
    results = {name: Outputs(config).checked_data(name) for name in config.tasks}

    # Open the systems on every rank. Some files must be read completely for their numbers of
    # frames: rank 0 does so first and writes them to these folders, for the other ranks.
    systems: dict[str, TaskData] = {}

    def open_first() -> None:
        with suppress(UserError):  # all ranks raise the same error in the next lines
            systems.update(open_run(config, results))

    world.broadcast_from_rank0(open_first)
    with world.all_ranks_ok():
        systems = systems or open_run(config, results)

    # The order of frames is a function of the seed on each rank: with other files on one of them,
    # ranks would silently train on other frames than the log says.
    if world.size > 1:
        content = content_of(systems)
        content_of_main = world.broadcast_from_rank0(lambda: content)
        with world.all_ranks_ok():
            if text := difference(content, content_of_main):
                raise DataError(
                    f"rank {world.rank} on {socket.gethostname()} has other data than rank 0: "
                    f"{text}. All ranks must read the same frames: use a folder that they share, "
                    "or copy it to each machine again."
                )

    # a restart whose data have other paths: only if they are the same frames
    contents = world.broadcast_from_rank0(
        lambda: {name: digest_of(data.train) for name, data in systems.items()}
    )
    with world.all_ranks_ok():
        check_content(start, contents)

    # Split validation frames off. Rank 0 chooses them, so that all ranks have the same frames in
    # each part.
    splits = world.broadcast_from_rank0(
        lambda: choose_validation(config, systems, seed, results)
    )
    for name, split in splits.items():
        prefix = f"task {name}: " if name else ""
        for line in split.lines:
            logger.info("%s%s", prefix, line)
        for finding in split.findings():
            logger.warning("%s%s", prefix, finding)
    with world.all_ranks_ok():
        systems = split_off(config, systems, splits) if splits else systems

    # by these a restart sees whether errors are still of the same frames
    validated: dict[str, str] = {}
    if config.fully_validated:
        validated = world.broadcast_from_rank0(
            partial(_validation_content, systems, contents, splits)
        )

    # check the training frames that are left, and count their neighbors for `sel`
    checked = world.broadcast_from_rank0(
        partial(_check_data, config, systems, results, start, skip_neighbor_stat)
    )
    config = checked.config
    checked_at = time.perf_counter()

    # build the models; each task has random numbers of its own, whatever other tasks there are
    cache = PairCache(
        local_size=world.local_size
    )  # one for all tasks: they share its limit
    seeds = {name: seed_for(stream_of("weights", name), seed) for name in config.tasks}
    models = build_models(
        {name: task.model for name, task in config.tasks.items()}, config.links, seeds
    )
    # a mistake in a pattern is reported before statistics are made, which take longer
    split_by_pattern(config.optimizer.groups, models.first_names(), config.source)
    for name, model in models.by_task.items():
        model.min_nbor_dist = checked.nearest[name]
    tasks = {
        name: build_task(
            config,
            name,
            data,
            contents[name],
            splits.get(name),
            validated.get(name, ""),
            models,
            cache,
            seed,
            world,
        )
        for name, data in systems.items()
    }
    run = PreparedRun(
        config, tasks, models, run_length(config, systems, world.size), seed
    )

    # Statistics and weights of a file come from rank 0, so that all ranks start bit by bit alike.
    # With a checkpoint in shards each rank reads its own, after the models are sharded.
    if not reads_shards(start, config):
        state = world.broadcast_from_rank0(
            partial(_first_weights, run, start, world.size)
        )
        if not world.is_main:
            run.models.load_state_dict(state)
    dates = ", ".join(checked.dates)
    logger.debug(
        "data and neighbors: %.1f s%s, statistics: %.1f s",
        checked_at - started,
        f" (this content was checked before: {dates})" if dates else "",
        time.perf_counter() - checked_at,
    )
    return run


def _validation_content(
    systems: Mapping[str, TaskData],
    contents: Mapping[str, str],
    splits: Mapping[str, Split],
) -> dict[str, str]:
    """Return digests of the validation data by task, where files can be read again.

    Args:
        systems: data by task.
        contents: digests of the training data as they were opened.
        splits: validation frames that were split off training data.
    """
    validated = {}
    for name, data in systems.items():
        if name not in splits:
            validated[name] = digest_of(data.valid)
        elif contents[name]:
            validated[name] = f"{contents[name]} {splits[name].digest}"
    return validated


class _CheckedData(NamedTuple):
    """Result of the checks of the data.

    Attributes:
        config: of the run, with ``sel`` resolved.
        nearest: distance of the nearest pair by task, angstrom, or None.
        dates: of earlier checks that are still valid, with the names of their tasks.
    """

    config: RunConfig
    nearest: dict[str, float | None]
    dates: list[str]


def _check_data(
    config: RunConfig,
    systems: Mapping[str, TaskData],
    results: Mapping[str, Path],
    start: Start,
    skip: bool,
) -> _CheckedData:
    """Check the data of all tasks; ``skip`` refuses ``sel: auto``."""
    nearest = {}
    neighbors = {}
    dates = []
    problems = list[str | Finding]()
    for name, task in config.tasks.items():
        report = check_task(config, name, systems[name], results[name])
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
            neighbors[name] = report.neighbors
    DataError.raise_if_any(problems)
    return _CheckedData(with_neighbors(config, neighbors), nearest, dates)


def _first_weights(
    run: PreparedRun, start: Start, num_ranks: int
) -> Mapping[str, Tensor]:
    """Put statistics and the weights of a file into the models, and return all weights.

    Without a file the weights are those of the seed.
    """
    # New tasks, elements or fitting networks need statistics of the data: the file does not have
    # their means, spreads and biases.
    if run.config.tasks.keys() - start.saved.keys() or any(
        source.fresh_fitting
        or start.new_elements(name, run.config.tasks[name].model.type_map)
        for name, source in start.sources.items()
        if name in run.config.tasks
    ):
        collected = {
            name: _statistics(task, run.seed, num_ranks)
            for name, task in run.tasks.items()
        }
        # tasks that share a part share its statistics, with weights by their shares of the steps
        shares = {name: length.share for name, length in run.length.tasks.items()}
        by_task = shared_statistics(collected, run.config.links, shares)
        for name, statistics in by_task.items():
            run.tasks[name].model.apply_statistics(statistics)
            for line in statistics.lines():
                logger.debug("%s%s", (f"task {name}: " if name else ""), line)
    # after the statistics, which the file replaces where it has some; the bias last, because its
    # move is a fit of label minus prediction with these weights
    start.load_weights(run.models)
    for task in run.tasks.values():
        _move_bias(run, task, start, num_ranks)
    return run.models.state_dict()


def _move_bias(run: PreparedRun, task: Task, start: Start, num_ranks: int) -> None:
    """Give a model of a file the output bias that its data need, and log what they show."""
    model, config = task.model, task.config.model
    how = start.moves_bias(task.name, config.finetune_bias)
    # None: the bias is fresh. A model without an effect of the bias has nothing to move.
    if how is None or not np.any(config.fitting_net.bias_effect):
        return
    prefix = f"task {task.name}: " if task.name else ""
    file = start.path

    # energies of elements that the input fixes (atom_ener) come before any fit
    bias = model.out_bias.numpy().reshape(
        len(config.type_map), *LABELS[model.labels[0]].shape
    )
    fixed_bias = with_given_energies(config, bias)
    if start.fine_tunes:
        model.out_bias.copy_(torch.from_numpy(fixed_bias).view_as(model.out_bias))
    elif not np.allclose(fixed_bias, bias):
        text = (
            "%sthe energies that the input gives for %s have no effect with --init-model: they "
            "are those of %s"
        )
        logger.warning(text, prefix, ", ".join(fixed_elements(config)), file)

    # predictions for the frames of the statistics; where nothing is fitted, a few frames show
    # whether the labels are of another method
    new = start.new_elements(task.name, model.type_map)
    if how != KEEP or new:
        batches = _statistics_batches(task, run.seed, num_ranks)
    else:
        chosen = chosen_frames(task.config, task.train, run.seed, _MAX_EVIDENCE)
        batches = sequential_batches(
            task.train, model.layout, task.cache, MAX_ATOMS_AT_ONCE, frames=chosen
        )
    frames = energies_of(model, config, batches)
    if not len(frames):
        if start.fine_tunes:
            text = (
                "%sno training frame has a label to compare the output bias "
                "with: it stays as in %s"
            )
            logger.warning(text, prefix, file)
        return

    # --init-model continues with the bias of the file; the shift is computed for the warning only
    move = move_bias(frames, bias, model.out_std.numpy().reshape(bias.shape), new, how)
    text = (
        f"{prefix}{move.evidence(config)}, on {counted(len(frames), 'training frame')}"
    )
    if start.fine_tunes:
        model.out_bias.copy_(torch.from_numpy(move.bias).view_as(model.out_bias))
        # the spread of a property is the unit of its network, and stays
        if ENERGY in model.labels and move.is_moved:
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
            "%s: the output bias %s",
            text,
            "was moved" if move.is_moved else f"stays as in {file}",
        )


def _statistics(task: Task, seed: int, num_ranks: int) -> Statistics:
    """Return the statistics from ``stat_file``, or from batches of every system.

    These are ``data_stat_nbatch`` batches, each as large as those of all ranks together.
    """
    path = task.config.data.stat_file
    place = f"{task.config.place('training')}.stat_file"
    # frames that are split off for validation have no share in the statistics
    content = task.content and f"{task.content} {task.split}"
    if path is not None:
        stored = read_stat_file(path, task.config.model, task.model.descriptor)
        if isinstance(stored, Statistics):
            logger.info("statistics are those of %s", path)
            # one of them is empty if files of the data could not be read again, or the file does
            # not say of which data it is
            if content and stored.content not in ("", content):
                logger.warning(
                    "%s = %s: its statistics are of other training data than those of this run. "
                    "Remove it to compute them anew, or name another file.",
                    place,
                    path,
                )
            return stored
        if task.config.data.stat_file_mode == "read":
            raise DataError(
                f'{place} = "{path}" does not hold the statistics of this model, and '
                f'stat_file_mode is "read": {stored}. Use "update", or the file of a run of the '
                "same model."
            )
        if Path(path).exists():
            logger.info(
                "%s = %s: %s. The statistics are computed anew.", place, path, stored
            )
    batches = _statistics_batches(task, seed, num_ranks)
    statistics = replace(
        collect_statistics(task.model, task.config.model, batches), content=content
    )
    if path is not None:
        advice = "Remove the file that is there, name another place, or leave the option out."
        with writing(f"{place}: {path}", advice):
            write_stat_file(path, task.config.model, statistics)
    return statistics


def _statistics_batches(task: Task, seed: int, num_ranks: int) -> Iterator[Batch]:
    """Return batches of the frames of the statistics; those of several systems may be in one."""
    train = task.train
    stream = stream_of("statistics", task.config.name)
    layout = task.model.layout
    # by system: the number of frames in a batch, and the frames of which batches are made; a system
    # that `filter:N` leaves out has size 0 and no share in the statistics
    sizes, frames_of_systems = batch_sizes(
        task.config.data.training_data.batch_size,
        [system.frame_sizes for system in train],
    )[:2]
    chosen = list[list[int]]()
    for number, (system, size, frames) in enumerate(
        zip(train, sizes, frames_of_systems)
    ):
        # drawn at random, as frames that follow each other in a file are often alike
        order = frames[permutation(len(frames), seed_for(stream, seed, number))]
        # as many as one process with all the frames of a step would take, so that it starts from
        # the same model
        num_drawn = task.config.model.data_stat_nbatch * size * num_ranks
        chosen.append(order[:num_drawn].tolist())
        # Isolated atoms as well, from the first hundred of the remaining frames of one atom: a
        # sample rarely has one, and without them nothing fixes what compositions leave open. With
        # one molecule alone each element gets the mean energy, hundreds of eV from that of its
        # atom.
        rest = order[num_drawn:]
        for k in rest[system.frame_sizes[rest] == 1][:100].tolist():
            box = system.frame(k).box
            if is_isolated(np.ones(1), None if box is None else box[None], layout.rcut)[
                0
            ]:
                chosen[-1].append(k)
    return sequential_batches(
        train, layout, task.cache, MAX_ATOMS_AT_ONCE, frames=chosen
    )


def refit_bias(
    prepared: PreparedRun, bank: AverageBank
) -> dict[str, dict[str, Tensor]]:
    """Return the output biases (1, T, 1) in eV that fit the data, by weights and names of tensors.

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
                chosen = chosen_frames(
                    task.config, task.train, prepared.seed, MAX_FRAMES
                )
                max_atoms = atoms_at_once(task.model.out_bias.device)
                batches = sequential_batches(
                    task.train, task.model.layout, task.cache, max_atoms, frames=chosen
                )
                # through the models of the run: ranks may have sharded them as a whole
                origin = (
                    f" fitted again with the weights {f'{name} {weights}'.lstrip()}"
                )
                fit = _fit_bias(task, prepared.models.of(name), batches, origin)
                if fit is not None:
                    tensor = torch.from_numpy(fit.bias).view(1, -1, 1)
                    fitted.setdefault(weights, {})[f"{prefix_of(name)}out_bias"] = (
                        tensor
                    )
                elif weights == LIVE:
                    logger.warning(
                        "training.change_bias_after_training: no training frame%s has an energy, "
                        "so there is nothing to fit the bias to: it stays as it is",
                        (f" of task {name}" if name else ""),
                    )
    return fitted


def _fit_bias(
    task: Task, model: EnergyModel | TaskModel, batches: Iterable[Batch], origin: str
) -> BiasFit | None:
    """Return the bias with which the mean residual per atom is zero; None without energies.

    Args:
        task: whose data are fitted.
        model: with the weights.
        batches: of the frames.
        origin: part of the line in the log.
    """
    before = model.out_bias.view(-1).cpu().numpy()  # (T,) eV
    frames = energies_of(model, task.config.model, batches)
    if not len(frames):
        return None
    fit = change_bias(frames, before)
    means = [
        np.mean(frames.residual(moved) / frames.num_atoms)
        for moved in (None, fit.bias - before)
    ]
    logger.info(
        "output bias%s on %s: mean residual %s meV/atom before, %s after",
        origin,
        counted(len(frames), "frame"),
        # rounded, as the second is zero to rounding; + 0.0 makes 0 of -0
        *(f"{round(1000 * mean, 6) + 0.0:.4g}" for mean in means),
    )
    return fit


def chosen_frames(
    task: TaskConfig, train: Sequence[FrameSource], seed: int, most: int
) -> list[Sequence[int]]:
    """Return the frames of each system: all, or a sample of ``most`` of them.

    Each system has a share in proportion to its size.
    """
    # frames that `filter:N` leaves out were not trained on
    frames = batch_sizes(
        task.data.training_data.batch_size, [system.frame_sizes for system in train]
    )[1]
    counts = [len(numbers) for numbers in frames]
    total = sum(counts)
    if total <= most:
        return [numbers.tolist() for numbers in frames]
    # rounded so that they add up: the shares are the differences of rounded edges
    edges = np.cumsum([0, *counts]) * most // total
    stream = stream_of("bias", task.name)
    orders = [
        permutation(count, seed_for(stream, seed, number))
        for number, count in enumerate(counts)
    ]
    # in the order of the file, which is faster to read
    return [
        np.sort(numbers[order[:share]]).tolist()
        for numbers, order, share in zip(frames, orders, np.diff(edges))
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
        # the averaged point of the optimizer is computed from live weights by its own options
        if isinstance(average, ScheduleFreeProfile):
            assert isinstance(
                config.optimizer, AdamWScheduleFreeConfig
            )  # a rule of the input
            changes |= {
                "adam_beta1": config.optimizer.adam_beta1,
                "r": config.optimizer.r,
            }
            changes |= {
                "warmup_steps": lr.num_warmup_steps(num_steps),
                "warmup_start_factor": lr.warmup_start_factor,
            }
        profiles.append(average.in_steps(steps_per, **changes))
    if hooks:  # names that no average has taken
        tracked = ", ".join(profile.name for profile in profiles) or "none"
        raise ConfigError(
            f"should_update: no average is called {', '.join(hooks)}. This run tracks: {tracked}."
        )
    return profiles
