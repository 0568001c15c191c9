"""Makes the parts of a run: frames, validation, files, display. Each function makes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema import checkpoint
from deepmd_ema import config as sections
from deepmd_ema.config import to_dict
from deepmd_ema.data.loader import Loader, num_batches, sequential_batches
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.optim.build import build_optimizer
from deepmd_ema.optim.lkf import LKF
from deepmd_ema.report import IntervalTimes, LcurveFile, Progress, ValidationLog, open_board
from deepmd_ema.seeds import seed_for
from deepmd_ema.train.display import Display
from deepmd_ema.train.kalman import KalmanStep
from deepmd_ema.train.parallel import LAST_REPLICATED_STAGE
from deepmd_ema.train.places import snapshot_folder, suffixed
from deepmd_ema.train.saver import Payloads, Saver, Snapshots
from deepmd_ema.train.step import GradientStep
from deepmd_ema.train.task import Task
from deepmd_ema.train.validate import LIVE, FullValidation, Validated

if TYPE_CHECKING:
    from torch import nn

    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.data.npy import System
    from deepmd_ema.dist.world import World
    from deepmd_ema.loss import EnergyLoss
    from deepmd_ema.optim.schedule import Schedule
    from deepmd_ema.train.averages import Tracked
    from deepmd_ema.train.prepare import Prepared
    from deepmd_ema.train.step import Step


@dataclass(frozen=True)
class Plan:
    """What the parts of a run have in common.

    Attributes:
        prepared: config, data and model.
        num_steps: steps of the whole run.
        start: steps that are behind at its start.
        tracked: averages, and what is made of each.
        bank: holds them, or None.
        run: identifies the trajectory of weights.
        world: the processes of the run.
    """

    prepared: Prepared
    num_steps: int
    start: int
    tracked: Sequence[Tracked]
    bank: AverageBank | None
    run: str
    world: World


def make_sampler(systems: Sequence[System], data: Any, seed: int, stream: str, world: World) -> Sampler:
    """Return the order of the frames of ``systems``, as the section ``data`` says."""
    return Sampler(
        [system.num_frames for system in systems],
        [system.natoms for system in systems],
        batch_size=data.batch_size,
        auto_prob=data.auto_prob,
        sys_probs=data.sys_probs,
        seed=seed_for(stream, seed),
        rank=world.rank,
        world_size=world.size,
    )


def make_task(plan: Plan, wrapped: nn.Module, loss: EnergyLoss, sampler: Sampler) -> Task:
    """Return the model with its training frames, and its validation frames if they are displayed.

    Args:
        plan: of the run.
        wrapped: what a training step calls.
        loss: of the task.
        sampler: of the training frames.
    """
    prepared, pin = plan.prepared, plan.world.device.type == "cuda"
    model, training = prepared.model, prepared.config.training
    frames = Loader(prepared.train, sampler, model.layout, cache=prepared.cache, pin=pin)
    if training.validation_data is None or not training.disp_training:
        return Task("", model, loss, frames, wrapped=wrapped)
    order = make_sampler(prepared.valid, training.validation_data, prepared.seed, "display frames", plan.world)
    shown = Loader(prepared.valid, order, model.layout, cache=prepared.cache, pin=pin)
    return Task("", model, loss, frames, shown, training.validation_data.numb_btch, wrapped)


def make_step(plan: Plan, schedule: Schedule) -> Step:
    """Return what takes the steps: an optimizer that follows the gradient of the loss, or the Kalman filter."""
    config, model, stage = plan.prepared.config, plan.prepared.model, plan.prepared.config.training.zero_stage
    if isinstance(config.optimizer, sections.LKFConfig):
        kalman = LKF(model.named_parameters(), config.optimizer.kf_blocksize)
        return KalmanStep(model, kalman, schedule, config.optimizer, plan.num_steps, plan.prepared.seed)
    device, clip = plan.world.device, config.training.gradient_max_norm or None
    optimizer = build_optimizer(config.optimizer, dict(model.named_parameters()), device, shared=stage == 1)
    return GradientStep(
        model, optimizer, schedule, clip, plan.world.all_reduce_sum if stage > LAST_REPLICATED_STAGE else None
    )


def make_validator(plan: Plan) -> FullValidation | None:
    """Return the full validation of the live weights and of every average that asks for it, or None."""
    prepared = plan.prepared
    config, validating = prepared.config, prepared.config.validating
    wanted = [LIVE] * validating.full_validation + [t.name for t in plan.tracked if t.full_validation]
    if not wanted:
        return None
    metric = validating.validation_metric
    folder = Path(validating.save_best_dir or Path(config.training.save_ckpt).parent)
    rows, world = [], plan.world
    for weights in wanted:
        suffix = "" if weights == LIVE else f"_{weights}"
        log = ValidationLog(suffixed(validating.full_val_file, suffix), plan.num_steps, metric)
        best = checkpoint.BestFiles(f"best{suffix}", folder, validating.max_best_ckpt, metric, writes=world.is_main)
        rows.append(Validated(weights, log if world.is_main else None, best if validating.save_best else None))
    every = partial(sequential_batches, prepared.valid, prepared.model.layout, prepared.cache)
    return FullValidation(
        prepared.model,
        plan.bank,
        rows,
        partial(every, rank=world.rank, world_size=world.size),
        plan.world.device,
        metric,
        start=_validation_start(validating.full_val_start, plan.num_steps),
        every=validating.validation_freq,
        world=world,
        num_batches=num_batches(prepared.valid),
        padding=lambda: next(every()),
    )


def make_saver(plan: Plan, validator: FullValidation | None) -> Saver:
    """Return what writes the files of the live weights and of every average."""
    prepared, training = plan.prepared, plan.prepared.config.training
    payloads = Payloads(
        prepared.model, plan.bank, to_dict(prepared.config), prepared.min_nbor_dist, plan.run, plan.world.is_main
    )

    def series(suffix: str, max_keep: int) -> checkpoint.CheckpointSeries:
        keep = checkpoint.keep_count(max_keep, training.ckpt_keep_ratio, plan.num_steps, training.save_freq)
        return checkpoint.CheckpointSeries(training.save_ckpt, suffix, training.save_dir, keep, start=plan.start)

    averages: Mapping[str, checkpoint.CheckpointSeries] = {t.name: series(f"_{t.name}", t.keep) for t in plan.tracked}
    folder = snapshot_folder(prepared.config)
    snapshots = [
        Snapshots(
            t.name,
            checkpoint.CheckpointSeries(training.save_ckpt, f"_{t.name}", folder, 0, plan.start),
            t.snapshot_every,
        )
        for t in plan.tracked
        if t.snapshot_every
    ]
    bests = [row.best for row in validator.rows if row.best is not None] if validator is not None else []
    live = series("", training.max_ckpt_keep)
    return Saver(payloads, live, averages, bests, training.save_freq, snapshots, plan.world)


def make_display(plan: Plan, loss: EnergyLoss, frames_per_step: float) -> Display:
    """Return the progress bar, the learning curves of the live weights and of averages that ask for one.

    Args:
        plan: of the run.
        loss: whose values are shown.
        frames_per_step: mean number of frames in a step of all ranks together.
    """
    training = plan.prepared.config.training
    is_main = plan.world.is_main
    curves: dict[str, LcurveFile | None] = {}
    if training.disp_training:
        validated = training.validation_data is not None
        for name in ("", *(t.name for t in plan.tracked if t.lcurve)):
            file = suffixed(training.disp_file, f"_{name}" if name else "")
            curves[name] = LcurveFile(file, loss.display_names, validation=validated) if is_main else None
    return Display(
        progress=Progress(plan.num_steps, None if is_main else False, frames_per_step),
        lcurve=curves.pop("", None),
        times=IntervalTimes(),
        every=training.disp_freq,
        device=plan.world.device,
        average=training.disp_avg,
        curves=curves,
        bank=plan.bank,
        world=plan.world,
        board=open_board(training.tensorboard_log_dir, plan.start) if training.tensorboard and is_main else None,
        board_every=training.tensorboard_freq,
    )


def _validation_start(start: float, num_steps: int) -> int | None:
    """Return the first validated step: a fraction of the run below 1, never at 1, a step above it."""
    if start == 1:
        return None
    return int(start * num_steps) if start < 1 else int(start)
