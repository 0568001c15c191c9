"""Turns a config into the parts of a run. Everything that depends on the config is decided here, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from deepmd_ema.averaging import AverageBank
from deepmd_ema.checkpoint.series import BestFiles, CheckpointSeries, keep_count
from deepmd_ema.checkpoint.store import GATHERED, ShardedStore, Store
from deepmd_ema.checkpoint.writer import Writer
from deepmd_ema.config import RunConfig, config_warnings, to_dict
from deepmd_ema.config.outputs import Outputs, suffix_of
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.data.loader import Loader
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.data.source import FrameSource
from deepmd_ema.dist.own_rows import OwnRows
from deepmd_ema.dist.world import World
from deepmd_ema.loss import EnergyLoss
from deepmd_ema.model.model_set import unnested
from deepmd_ema.optim.build import build_optimizer
from deepmd_ema.optim.lkf import LKF
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.report.logs import open_board
from deepmd_ema.report.progress import IntervalTimes, Progress
from deepmd_ema.report.table import render
from deepmd_ema.report.tables import LcurveFile, RowTable, ValidationLog
from deepmd_ema.seeds import seed_for
from deepmd_ema.train.assembly.compile_models import compile_models
from deepmd_ema.train.loop.averages import Hook, snapshot_every, tracked_averages
from deepmd_ema.train.loop.interpolation import InterpolationControl
from deepmd_ema.train.loop.kalman import KalmanStep
from deepmd_ema.train.loop.refit_bias import refit
from deepmd_ema.train.loop.reporter import Reporter, start_table
from deepmd_ema.train.loop.saver import Saver, Snapshots, StateBuilder
from deepmd_ema.train.loop.sharding import LAST_REPLICATED_STAGE, parallelize
from deepmd_ema.train.loop.step import GradientStep, Step, tf32_products
from deepmd_ema.train.loop.task import Task, TaskMixture
from deepmd_ema.train.loop.trainer import Callback, Trainer
from deepmd_ema.train.loop.validate import FullValidation, Validated
from deepmd_ema.train.start.prepare import PreparedRun, PreparedTask, stream_of
from deepmd_ema.train.start.restart import Start
from deepmd_ema.weights import LIVE

logger = logging.getLogger(__name__)


def assemble(
    prepared: PreparedRun,
    start: Start,
    world: World,
    should_update: Mapping[str, Hook] | None = None,
    input_file: str = "input.json",
    callback: Callback | None = None,
) -> Trainer:
    """Return the trainer of a run at the step of ``start``."""
    config, models = prepared.config, prepared.models.to(world.device)
    tasks = _build_tasks(prepared, world)
    epochs = config.task_epochs or dict.fromkeys(config.tasks, config.training.numb_epoch or 0)
    num_steps = config.training.numb_steps or tasks.steps_for_epochs(epochs)
    # of rank 0: all ranks choose series and make code from the same frames, and a restart does again
    first = world.broadcast_from_rank0(lambda: {task.name: task.train_loader.batch(0) for task in tasks})
    batches = {name: batch.to(world.device) for name, batch in first.items()}
    interpolation = InterpolationControl(models, world)
    interpolation.begin(batches, start.interpolation)
    # before the ranks share anything out: one may then compile while others wait for its code
    used = compile_models(config, models, batches, world)
    module = parallelize(models, world, config.training.zero_stage)
    if start.loads_after_sharding(config):
        start.load_shards(models)
    averages = tracked_averages(config, tasks.steps_per, should_update)
    bank = AverageBank(models.by_task, averages, around=models) if averages else None
    builder = _build_state_builder(prepared, used, bank, start.run_id(config), world)
    store = ShardedStore(world=world.for_writer()) if config.training.writes_shards else GATHERED
    times = IntervalTimes()
    reporter = _build_reporter(config, tasks, bank, num_steps, start.step, times, world)
    rows = _validated(prepared, num_steps, store, world)
    tables = [*reporter.curves.values(), *(row.log for row in rows)]
    saver = _build_saver(config, num_steps, start.step, builder, store, rows, tables, world)
    trainer = Trainer(
        tasks=tasks,
        take_step=_build_step(prepared, module, num_steps, world),
        bank=bank,
        validator=_build_validator(prepared, bank, num_steps, rows, saver, world),
        saver=saver,
        reporter=reporter,
        times=times,
        num_steps=num_steps,
        world=world,
        interpolation=interpolation,
        products=_products(config, world),
        refit=partial(refit, prepared, bank) if config.training.change_bias_after_training else None,
        input_file=input_file,
        callback=callback or Callback(),
    )
    for line in render(start_table(prepared, tasks, averages, num_steps, world, interpolation.describe())):
        logger.info("%s", line)
    for warning in (*tasks.warnings, *config_warnings(config, num_steps, tasks.steps_per)):
        logger.warning("%s", warning)
    start.resume(trainer)
    models.train()
    return trainer


def _build_tasks(prepared: PreparedRun, world: World) -> TaskMixture:
    """Return the models with their losses, their training frames, and validation frames if they are displayed."""
    config, tasks = prepared.config, []
    for name, task in prepared.tasks.items():
        make = partial(_build_loader, task, prepared.seed, world)
        valid = task.config.displayed_data if config.training.disp_training else None
        tasks.append(
            Task(
                name,
                prepared.models,
                EnergyLoss(task.config.loss, config.learning_rate.start_lr, world),
                train_loader=make(task.train, task.config.training_data, "frames"),
                display_loader=make(task.valid, valid, "display frames") if valid is not None else None,
                display_batches=valid.numb_btch if valid is not None else 1,
                split=task.split,
            )
        )
    return TaskMixture(tasks, prepared.shares, prepared.seed)


def _build_loader(
    task: PreparedTask, seed: int, world: World, systems: Sequence[FrameSource], data: Any, stream: str
) -> Loader:
    sampler = Sampler(
        [system.num_frames for system in systems],
        [system.frame_sizes for system in systems],
        batch_size=data.batch_size,
        auto_prob=data.auto_prob,
        sys_probs=data.sys_probs,
        seed=seed_for(stream_of(stream, task.config.name), seed),
        rank=world.rank,
        world_size=world.size,
    )
    return Loader(systems, sampler, task.model.layout, cache=task.cache, pin=world.device.type == "cuda")


def _build_step(prepared: PreparedRun, module: nn.Module, num_steps: int, world: World) -> Step:
    """Return what takes the steps: an optimizer that follows the gradient of the loss, or the Kalman filter."""
    config, models, stage = prepared.config, prepared.models, prepared.config.training.zero_stage
    schedule = build_schedule(config.learning_rate, num_steps)
    if isinstance(config.optimizer, LKFConfig):
        kalman = LKF(models.named_parameters(), config.optimizer.kf_blocksize, models.tasks_of_parameters())
        return KalmanStep(models, kalman, schedule, config.optimizer, num_steps, prepared.seed)
    optimizer = build_optimizer(config.optimizer, dict(models.named_parameters()), shared=stage == 1)
    all_reduce_sum = world.all_reduce_sum if stage > LAST_REPLICATED_STAGE else None
    return GradientStep(models, module, optimizer, schedule, config.training.gradient_max_norm or None, all_reduce_sum)


def _build_state_builder(
    prepared: PreparedRun, used: RunConfig, bank: AverageBank | None, run_id: str, world: World
) -> StateBuilder:
    """Return what makes the content of model files, which name the config ``used``."""
    models, sharded = prepared.models, prepared.config.training.writes_shards
    return StateBuilder(
        models,
        bank,
        to_dict(used),
        unnested({name: model.min_nbor_dist for name, model in models.by_task.items()}),
        run_id,
        writes=world.is_main or sharded,
        shares=partial(OwnRows, world.rank, world.size) if sharded else None,
    )


def _products(config: RunConfig, world: World) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which a step multiplies matrices."""
    if config.training.enable_tf32 and world.device.type == "cuda":
        return tf32_products
    if config.training.enable_tf32:
        logger.warning("training.enable_tf32 has no effect on a CPU: products of float32 matrices are in float32.")
    return nullcontext


def _validated(prepared: PreparedRun, num_steps: int, store: Store, world: World) -> list[Validated]:
    """Return the rows of a full validation: the live weights and every average that asks for it, by task."""
    config, validating, outputs = prepared.config, prepared.config.validating, Outputs(prepared.config)
    metric, rows = validating.validation_metric, []
    for weights in config.fully_validated:
        for task in (name for name, task in prepared.tasks.items() if task.valid):
            log = ValidationLog(outputs.validation_log(weights, task), num_steps, metric) if world.is_main else None
            prefix, folder, keep = outputs.best_prefix(weights, task), outputs.best_folder, validating.max_best_ckpt
            best = BestFiles(prefix, folder, keep, metric, writes=world.is_main, store=store)
            rows.append(Validated(weights, task, log, best if validating.save_best else None))
    return rows


def _build_validator(
    prepared: PreparedRun, bank: AverageBank | None, num_steps: int, rows: Sequence[Validated], saver: Saver,
    world: World,
) -> FullValidation:  # fmt: skip
    """Return the full validation of ``rows``, whose best files ``saver`` has written."""
    validating = prepared.config.validating
    tasks = {name: task for name, task in prepared.tasks.items() if task.valid}
    # below 1 a fraction of the run, never at 1, a step above it; the last step is validated in any case but never
    start = validating.full_val_start
    first = None if start == 1 else int(start * num_steps) if start < 1 else int(start)
    metric, every, begin = validating.validation_metric, validating.validation_freq, saver.writer.begin
    keep = saver.keep_best
    return FullValidation(prepared.models, bank, rows, tasks, begin, keep, metric, first, every, num_steps, world)


def _build_saver(
    config: RunConfig, num_steps: int, start: int, builder: StateBuilder, store: Store, rows: Iterable[Validated],
    tables: Iterable[RowTable | None], world: World,
) -> Saver:  # fmt: skip
    """Return what writes the files of the live weights and of every average.

    Args:
        config: of the run.
        num_steps: steps of the whole run.
        start: steps done before it, at a restart.
        builder: makes the content of the files.
        store: writes the files.
        rows: of full validations, whose best files are pruned once a checkpoint knows of them.
        tables: whose rows are older than a checkpoint; None on ranks that write nothing.
        world: the processes of the run.
    """
    training, folder = config.training, Outputs(config).snapshot_folder
    files_of = partial(CheckpointSeries, training.save_ckpt, start=start, store=store)

    def series(weights: str, max_keep: int | None) -> CheckpointSeries:
        most = training.max_ckpt_keep if max_keep is None else max_keep
        keep = keep_count(most, training.ckpt_keep_ratio, num_steps, training.save_freq)
        return files_of(suffix_of(weights), training.save_dir, keep)

    return Saver(
        builder,
        Writer(world, everywhere=config.training.writes_shards),
        series(LIVE, None),
        {a.name: series(a.name, a.ckpt_keep) for a in training.averaging},
        bests=[row.best for row in rows if row.best is not None],
        every=training.save_freq,
        snapshots=[
            Snapshots(a.name, files_of(suffix_of(a.name), folder, 0), every)
            for a in training.averaging
            if (every := snapshot_every(a, training.save_freq))
        ],
        tables=[table for table in tables if table is not None],
    )


def _build_reporter(
    config: RunConfig, tasks: TaskMixture, bank: AverageBank | None, num_steps: int, start: int, times: IntervalTimes,
    world: World,
) -> Reporter:  # fmt: skip
    """Return the progress bar and the learning curves of the live weights and of averages that ask for one."""
    training, outputs = config.training, Outputs(config)
    names = {task.name: task.loss.display_names for task in tasks}
    validated = {task.name for task in tasks if task.display_loader is not None}
    shown = (
        [LIVE, *(average.name for average in training.averaging if average.lcurve)] if training.disp_training else []
    )
    curves = {w: LcurveFile(outputs.lcurve(w), names, validated) if world.is_main else None for w in shown}
    board = training.tensorboard and world.is_main
    return Reporter(
        tasks,
        Progress(num_steps, None if world.is_main else False, tasks.frames_per_step),
        times=times,
        every=training.disp_freq,
        world=world,
        average=training.disp_avg,
        curves=curves,
        bank=bank,
        board=open_board(training.tensorboard_log_dir, start) if board else None,
        board_every=training.tensorboard_freq,
    )
