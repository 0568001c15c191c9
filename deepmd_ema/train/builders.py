"""Builds the parts of a run, one function each; :mod:`deepmd_ema.train.assemble` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from deepmd_ema import checkpoint
from deepmd_ema import config as sections
from deepmd_ema.config.outputs import Outputs, suffix_of
from deepmd_ema.data.loader import Loader, num_batches, sequential_batches
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.loss import build_loss
from deepmd_ema.optim.build import build_optimizer
from deepmd_ema.optim.lkf import LKF
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.report.logs import open_board
from deepmd_ema.report.progress import IntervalTimes, Progress
from deepmd_ema.report.tables import LcurveFile, ValidationLog
from deepmd_ema.seeds import seed_for
from deepmd_ema.train.display import Reporter
from deepmd_ema.train.parallel import LAST_REPLICATED_STAGE
from deepmd_ema.train.prepare import stream_of
from deepmd_ema.train.saver import Saver, Snapshots
from deepmd_ema.train.step.gradient import GradientStep
from deepmd_ema.train.step.kalman import KalmanStep
from deepmd_ema.train.task import Task, TaskMixture
from deepmd_ema.train.validate import FullValidation, Validated, ValidationData
from deepmd_ema.weights import LIVE

if TYPE_CHECKING:
    from torch import nn

    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.source import FrameSource
    from deepmd_ema.dist.world import World
    from deepmd_ema.train.averages import Tracked
    from deepmd_ema.train.prepare import PreparedRun, PreparedTask
    from deepmd_ema.train.saver import StateBuilder
    from deepmd_ema.train.step.base import Step


def build_tasks(prepared: PreparedRun, parallel_module: nn.Module, world: World) -> TaskMixture:
    """Return the models with their losses, their training frames, and validation frames if they are displayed.

    Args:
        prepared: inputs of the run.
        parallel_module: what a training step calls.
        world: the processes of the run.
    """
    config, tasks = prepared.config, []
    for name, task in prepared.tasks.items():
        make = partial(_build_loader, task, prepared.seed, world)
        valid = task.config.validation_data if config.training.disp_training else None
        tasks.append(
            Task(
                name,
                prepared.models,
                parallel_module,
                build_loss(task.config.loss, config.learning_rate.start_lr, world),
                train_loader=make(task.train, task.config.training_data, "frames"),
                display_loader=make(task.valid, valid, "display frames") if valid is not None else None,
                display_batches=valid.numb_btch if valid is not None else 1,
            )
        )
    return TaskMixture(tasks, seed=prepared.seed)


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


def build_step(prepared: PreparedRun, num_steps: int, world: World) -> Step:
    """Return what takes the steps: an optimizer that follows the gradient of the loss, or the Kalman filter."""
    config, models, stage = prepared.config, prepared.models, prepared.config.training.zero_stage
    schedule = build_schedule(config.learning_rate, num_steps)
    if isinstance(config.optimizer, sections.LKFConfig):
        kalman = LKF(models.named_parameters(), config.optimizer.kf_blocksize)
        return KalmanStep(models, kalman, schedule, config.optimizer, num_steps, prepared.seed)
    clip = config.training.gradient_max_norm or None
    optimizer = build_optimizer(config.optimizer, dict(models.named_parameters()), world.device, shared=stage == 1)
    return GradientStep(
        models, optimizer, schedule, clip, world.all_reduce_sum if stage > LAST_REPLICATED_STAGE else None
    )


def build_validator(
    prepared: PreparedRun, bank: AverageBank | None, num_steps: int, builder: StateBuilder, world: World
) -> FullValidation | None:
    """Return the full validation of the live weights and of every average that asks for it, or None."""
    config, validating, outputs = prepared.config, prepared.config.validating, Outputs(prepared.config)
    data = {name: _validation_data(task, world) for name, task in prepared.tasks.items() if task.valid}
    metric = validating.validation_metric
    rows = []
    for weights in config.fully_validated:
        for task in data:
            log = ValidationLog(outputs.validation_log(weights, task), num_steps, metric) if world.is_main else None
            best = checkpoint.BestFiles(
                outputs.best_prefix(weights, task),
                outputs.best_folder,
                validating.max_best_ckpt,
                metric,
                writes=world.is_main,
            )
            rows.append(Validated(weights, task, log, best if validating.save_best else None))
    if not rows:
        return None
    start = validating.full_val_start
    return FullValidation(
        prepared.models,
        bank,
        rows,
        data,
        partial(builder.weights, kind="best"),
        metric,
        # below 1 a fraction of the run, never at 1, a step above it
        start=None if start == 1 else int(start * num_steps) if start < 1 else int(start),
        every=validating.validation_freq,
        world=world,
    )


def _validation_data(task: PreparedTask, world: World) -> ValidationData:
    every = partial(sequential_batches, task.valid, task.model.layout, task.cache)
    return ValidationData(
        batches=partial(every, rank=world.rank, world_size=world.size),
        num_batches=num_batches(task.valid),
        padding=lambda: next(every()),
    )


def build_saver(
    config: RunConfig,
    tracked: Sequence[Tracked],
    num_steps: int,
    start: int,
    builder: StateBuilder,
    validator: FullValidation | None,
    world: World,
) -> Saver:
    """Return what writes the files of the live weights and of every average.

    Args:
        config: of the run.
        tracked: averages.
        num_steps: steps of the whole run.
        start: steps that are behind at its start.
        builder: makes the content of the files.
        validator: whose best files are pruned once a checkpoint knows of them, or None.
        world: the processes of the run.
    """
    training, folder = config.training, Outputs(config).snapshot_folder

    def series(weights: str, max_keep: int) -> checkpoint.CheckpointSeries:
        keep = checkpoint.keep_count(max_keep, training.ckpt_keep_ratio, num_steps, training.save_freq)
        return checkpoint.CheckpointSeries(training.save_ckpt, suffix_of(weights), training.save_dir, keep, start=start)

    return Saver(
        builder,
        series(LIVE, training.max_ckpt_keep),
        {t.name: series(t.name, t.keep) for t in tracked},
        bests=[row.best for row in validator.rows if row.best is not None] if validator is not None else [],
        every=training.save_freq,
        snapshots=[
            Snapshots(
                t.name,
                checkpoint.CheckpointSeries(training.save_ckpt, suffix_of(t.name), folder, 0, start),
                t.snapshot_every,
            )
            for t in tracked
            if t.snapshot_every
        ],
        world=world,
    )


def build_reporter(
    config: RunConfig, tasks: TaskMixture, tracked: Sequence[Tracked], bank: AverageBank | None, num_steps: int,
    start: int, world: World,
) -> Reporter:  # fmt: skip
    """Return the progress bar and the learning curves of the live weights and of averages that ask for one.

    Args:
        config: of the run.
        tasks: whose errors are shown.
        tracked: averages.
        bank: holds them, or None.
        num_steps: steps of the whole run.
        start: steps that are behind at its start.
        world: the processes of the run.
    """
    training, outputs = config.training, Outputs(config)
    names = {task.name: task.loss.display_names for task in tasks}
    validated = {task.name for task in tasks if task.display_loader is not None}
    shown = [LIVE, *(t.name for t in tracked if t.lcurve)] if training.disp_training else []
    curves = {w: LcurveFile(outputs.lcurve(w), names, validated) if world.is_main else None for w in shown}
    board = training.tensorboard and world.is_main
    return Reporter(
        tasks,
        Progress(num_steps, None if world.is_main else False, tasks.frames_per_step),
        lcurve=curves.pop(LIVE, None),
        times=IntervalTimes(),
        every=training.disp_freq,
        world=world,
        average=training.disp_avg,
        curves=curves,
        bank=bank,
        board=open_board(training.tensorboard_log_dir, start) if board else None,
        board_every=training.tensorboard_freq,
    )
