"""Turns a config into the parts of a run. Everything that depends on the config is decided here, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from deepmd_ema.averaging import AverageBank
from deepmd_ema.config import config_warnings, to_dict
from deepmd_ema.model.model_set import unnested
from deepmd_ema.train import banner, builders
from deepmd_ema.train.averages import Hook, tracked_averages
from deepmd_ema.train.bias import refit
from deepmd_ema.train.parallel import parallelize
from deepmd_ema.train.saver import StateBuilder
from deepmd_ema.train.trainer import Callback, Trainer

if TYPE_CHECKING:
    from deepmd_ema.dist.world import World
    from deepmd_ema.train.prepare import PreparedRun
    from deepmd_ema.train.start import Start

logger = logging.getLogger(__name__)


def assemble(
    prepared: PreparedRun,
    start: Start,
    world: World,
    should_update: Mapping[str, Hook] | None = None,
    input_file: str = "input.json",
    callback: Callback | None = None,
) -> Trainer:
    """Return the trainer of a run at the step where ``start`` stands."""
    config, models = prepared.config, prepared.models.to(world.device)
    tasks = builders.build_tasks(prepared, parallelize(models, world, config.training.zero_stage), world)
    num_steps = config.training.numb_steps or tasks.steps_for_epochs(config.training.numb_epoch or 0)
    tracked = tracked_averages(config, tasks, should_update)
    bank = AverageBank(models.by_task, [t.profile for t in tracked]) if tracked else None
    builder = StateBuilder(
        models,
        bank,
        to_dict(config),
        unnested({name: task.min_nbor_dist for name, task in prepared.tasks.items()}),
        start.run_id(config),
        world.is_main,
    )
    validator = builders.build_validator(prepared, bank, num_steps, builder, world)
    trainer = Trainer(
        tasks=tasks,
        take_step=builders.build_step(prepared, num_steps, world),
        bank=bank,
        validator=validator,
        saver=builders.build_saver(config, tracked, num_steps, start.step, builder, validator, world),
        reporter=builders.build_reporter(config, tasks, tracked, bank, num_steps, start.step, world),
        num_steps=num_steps,
        world=world,
        refit=partial(refit, prepared, bank) if config.training.change_bias_after_training else None,
        input_file=input_file,
        callback=callback or Callback(),
    )
    for line in banner.start_lines(prepared, tasks, tracked, num_steps, world):
        logger.info("%s", line)
    steps_per = {"frames": 1 / tasks.frames_per_step, "epochs": float(tasks.batches_per_epoch)}
    for warning in (*tasks.warnings, *config_warnings(config, num_steps, steps_per)):
        logger.warning("%s", warning)
    start.resume(trainer)
    models.train()
    return trainer
