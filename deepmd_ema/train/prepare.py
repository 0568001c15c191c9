"""From a config to systems that were checked, statistics, and a model with its first weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deepmd_ema.data.collate import collate
from deepmd_ema.data.loader import PairCache
from deepmd_ema.data.run import check_run, open_run
from deepmd_ema.data.sampler import batch_sizes, permutation
from deepmd_ema.errors import DataError
from deepmd_ema.model.build import build_model
from deepmd_ema.model.stat_file import read_stat_file, write_stat_file
from deepmd_ema.model.statistics import Statistics, collect_statistics
from deepmd_ema.seeds import seed_for
from deepmd_ema.train.resume import Origin, load_weights

if TYPE_CHECKING:
    from torch import Tensor

    from deepmd_ema.batch import Batch
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.npy import System
    from deepmd_ema.dist.world import World
    from deepmd_ema.model.energy import EnergyModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What stands ready before training.

    Attributes:
        config: the config with ``sel`` resolved.
        train: training systems.
        valid: validation systems, empty without validation data.
        cache: neighbors found so far, of training and validation frames.
        model: with its first weights and its statistics, on the host.
        min_nbor_dist: nearest pair, angstrom, or None when it was not looked for.
        seed: of every random stream of the run.
    """

    config: RunConfig
    train: Sequence[System]
    valid: Sequence[System]
    cache: PairCache
    model: EnergyModel
    min_nbor_dist: float | None
    seed: int


def prepare(config: RunConfig, origin: Origin, world: World, skip_neighbor_stat: bool = False) -> Prepared:
    """Open and check the data, resolve ``sel``, and make the model with its first weights.

    A new run gets statistics from data; a run that starts from a file takes those of the file. rank 0 looks at the
    data, and the others learn what it has found.

    Raises:
        DataError: with every problem of the data at once.
    """
    seed = config.training.seed
    assert seed is not None, "a run without a seed draws one before this"
    with world.all_ranks_ok():
        train, valid = open_run(config)
    made: list[Prepared] = []

    def look() -> tuple[RunConfig, float | None, Mapping[str, Tensor]]:
        made.append(_look(config, origin, train, valid, skip_neighbor_stat, world.size))
        return made[0].config, made[0].min_nbor_dist, made[0].model.state_dict()

    config, nearest, state = world.broadcast_from_rank0(look)
    if made:
        return made[0]
    model = build_model(config.model, seed_for("weights", seed))
    model.min_nbor_dist = nearest
    model.load_state_dict(state)
    return Prepared(config, train, valid, PairCache(model.layout), model, nearest, seed)


def _look(
    config: RunConfig,
    origin: Origin,
    train: Sequence[System],
    valid: Sequence[System],
    skip_neighbor_stat: bool,
    num_ranks: int,
) -> Prepared:
    """Check the data, and make the model from what they are."""
    started = time.perf_counter()
    seed = config.training.seed
    assert seed is not None, "a run without a seed draws one before this"
    report = check_run(config, train, valid)
    for line in report.warnings:
        logger.warning("%s", line)
    report.raise_problems()
    neighbors = report.neighbors
    assert neighbors is not None, "data without problems have neighbors"
    descriptor = config.model.descriptor
    if descriptor.neighbors is None:
        if skip_neighbor_stat:
            raise DataError(f"--skip-neighbor-stat: model.descriptor ({descriptor.summary()}) needs it. Give numbers.")
        config = replace(config, model=replace(config.model, descriptor=descriptor.with_neighbors(neighbors)))
    nearest = origin.min_nbor_dist if origin.path is not None else neighbors.min_distance
    checked = time.perf_counter()
    model = build_model(config.model, seed_for("weights", seed))
    model.min_nbor_dist = nearest
    cache = PairCache(model.layout)
    if origin.path is not None:
        load_weights(model, origin)
    else:
        statistics = _statistics(config, model, train, cache, seed, num_ranks)
        model.apply_statistics(statistics)
        for line in statistics.lines():
            logger.info("%s", line)
    logger.info("data and neighbors: %.1f s, statistics: %.1f s", checked - started, time.perf_counter() - checked)
    return Prepared(config, train, valid, cache, model, nearest, seed)


def _statistics(
    config: RunConfig, model: EnergyModel, systems: Sequence[System], cache: PairCache, seed: int, num_ranks: int
) -> Statistics:
    """Return the statistics from ``stat_file``, or from ``data_stat_nbatch`` batches of all ranks of every system."""
    path = config.training.stat_file
    if path is not None:
        stored = read_stat_file(path, config.model, model.descriptor)
        if stored is not None:
            logger.info("statistics are those of %s", path)
            return stored
        if config.training.stat_file_mode == "read":
            raise DataError(
                f'training.stat_file = "{path}" does not hold the statistics of this model, and stat_file_mode is '
                '"read". Use "update", or the file of a run with the same type_map, cutoff and sel.'
            )
    found = collect_statistics(model, config.model, _statistics_batches(config, systems, cache, seed, num_ranks))
    if path is not None:
        try:
            write_stat_file(path, config.model, model.descriptor, found)
        except OSError as error:
            raise DataError(
                f"training.stat_file: {path}: cannot be written ({error.strerror or error}). Remove what stands there, "
                "name another place, or leave the option out."
            ) from error
    return found


def _statistics_batches(
    config: RunConfig, systems: Sequence[System], cache: PairCache, seed: int, num_ranks: int
) -> Iterator[Batch]:
    data = config.training.training_data
    sizes, _ = batch_sizes(data.batch_size, [system.natoms for system in systems])
    for number, (system, size) in enumerate(zip(systems, sizes)):
        # a system that `filter:N` leaves out has size 0 and no share in the statistics
        order = permutation(system.num_frames, seed_for("statistics", seed, number))
        # as many as one process with all the frames of a step would take, so that it starts from the same model
        chosen = [int(k) for k in order[: config.model.data_stat_nbatch * size * num_ranks]]
        for begin in range(0, len(chosen), 8):
            yield collate([cache.get(system, k) for k in chosen[begin : begin + 8]], cache.layout)
