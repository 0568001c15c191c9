"""Builds the parts of a run from its config. Everything that depends on the config is decided here, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from deepmd_ema.config import config_warnings
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.dist.world import World
from deepmd_ema.report.progress import IntervalTimes
from deepmd_ema.report.table import render
from deepmd_ema.train import loop
from deepmd_ema.train.assembly.compile_models import compile_models
from deepmd_ema.train.assembly.summary import start_table
from deepmd_ema.train.start.new_run import Start
from deepmd_ema.train.start.prepare import PreparedRun

logger = logging.getLogger(__name__)


def assemble(
    prepared: PreparedRun,
    start: Start,
    world: World,
    should_update: Mapping[str, loop.Hook] | None = None,
    input_file: str = "input.json",
    callback: loop.Callback | None = None,
) -> loop.Trainer:
    """Return the trainer of a run at the step of ``start``."""
    config, models = prepared.config, prepared.models.to(world.device)
    tasks = loop.TaskMixture.build(prepared, world)
    num_steps = tasks.num_steps(config)
    # of rank 0: all ranks choose series and compile for the same frames, and so does a restart
    first = world.broadcast_from_rank0(lambda: {task.name: task.train_loader.batch(0) for task in tasks})
    batches = {name: batch.to(world.device) for name, batch in first.items()}
    interpolation = loop.InterpolationControl(models, world)
    interpolation.begin(batches, start.interpolation)
    # before the models are sharded: one rank may then compile while others wait for its code
    used = compile_models(config, models, batches, world)
    module = loop.parallelize(models, world, config.training.zero_stage)
    if start.loads_after_sharding(config):
        start.load_shards(models)
    bank = loop.build_bank(config, models, tasks.steps_per, should_update)
    times = IntervalTimes()
    reporter = loop.Reporter.build(config, tasks, bank, num_steps, start.step, times, world)
    store = loop.build_store(config, world)
    rows = loop.build_rows(prepared, num_steps, store, world)
    builder = loop.StateBuilder.build(prepared, used, bank, start.run_id(config), world)
    bests, tables = [row.best for row in rows], [*reporter.curves.values(), *(row.log for row in rows)]
    saver = loop.Saver.build(config, num_steps, start.step, builder, bests, tables, store, world)
    if isinstance(config.optimizer, LKFConfig):
        from deepmd_ema.train.loop.kalman import KalmanStep

        take_step: loop.Step = KalmanStep.build(prepared, num_steps)
    else:
        take_step = loop.GradientStep.build(prepared, module, num_steps, world)
    trainer = loop.Trainer(
        tasks=tasks,
        take_step=take_step,
        bank=bank,
        validator=loop.FullValidation.build(prepared, bank, rows, saver, num_steps, world),
        saver=saver,
        reporter=reporter,
        times=times,
        num_steps=num_steps,
        world=world,
        interpolation=interpolation,
        products=loop.context_of_products(config, world.device),
        refit=partial(loop.refit, prepared, bank) if config.training.change_bias_after_training else None,
        input_file=input_file,
        callback=callback or loop.Callback(),
    )
    for line in render(start_table(prepared, tasks, bank, num_steps, world, interpolation.describe())):
        logger.info("%s", line)
    for warning in (*tasks.warnings, *config_warnings(config, num_steps, tasks.steps_per)):
        logger.warning("%s", warning)
    state = start.state(models, tasks.state_dict())
    if state is not None:
        trainer.load_state_dict(start.step, state)
    models.train()
    return trainer
