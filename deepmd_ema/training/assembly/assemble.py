"""Builds the parts of a run from its config. Everything that depends on the config is decided here, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch
from deepmd_ema.checkpoint.series import Store
from deepmd_ema.config import RunConfig, config_warnings
from deepmd_ema.config.due import due_in
from deepmd_ema.config.fields import plain
from deepmd_ema.config.messages import dotted, path_of
from deepmd_ema.config.schema.descriptor import HasMixedPrecision
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.dist.world import World
from deepmd_ema.labels import HESSIAN
from deepmd_ema.model.compiler import CompileOptions, Compiler, explained
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.report.record import RunRecord
from deepmd_ema.report.table import render
from deepmd_ema.report.times import RunTimes
from deepmd_ema.training.assembly.summary import start_table
from deepmd_ema.training.loop.averages import Hook, build_bank
from deepmd_ema.training.loop.cuda_graphs import GraphedSteps
from deepmd_ema.training.loop.interpolation import InterpolationControl
from deepmd_ema.training.loop.modes import compiled_modes, launches_graphs, why_no_graphs
from deepmd_ema.training.loop.refit import refit_bias
from deepmd_ema.training.loop.reporter import Reporter
from deepmd_ema.training.loop.saver import Saver, StateBuilder
from deepmd_ema.training.loop.sharding import parallelize
from deepmd_ema.training.loop.step import GradientStep, Products, Step, context_of_products, context_of_validation
from deepmd_ema.training.loop.task import TaskMixture
from deepmd_ema.training.loop.trainer import Callback, Trainer
from deepmd_ema.training.loop.validate import FullValidation
from deepmd_ema.training.start.new_run import Start
from deepmd_ema.training.start.prepare import PreparedRun

logger = logging.getLogger(__name__)

_COMPILES, _EAGERLY = "training.enable_compile", "Set it to false to train eagerly"
FORWARD_SHARE = 0.25  # of the time of a step, to validate as many frames: 0.16 to 0.37 for se_e2_a on two cores


def assemble(
    prepared: PreparedRun,
    start: Start,
    world: World,
    should_update: Mapping[str, Hook] | None = None,
    input_file: str = "input.json",
    callback: Callback | None = None,
    record: RunRecord | None = None,
) -> Trainer:
    """Return the trainer of a run at the step of ``start``."""
    config, models = prepared.config, prepared.models.to(world.device)
    tasks = TaskMixture(prepared, world)
    num_steps = tasks.num_steps(config)
    # of rank 0: all ranks choose series and compile for the same frames, and so does a restart
    first = world.broadcast_from_rank0(lambda: {task.name: task.train_loader.batch(0) for task in tasks})
    batches = {name: batch.to(world.device) for name, batch in first.items()}
    interpolation = InterpolationControl(models, world)
    interpolation.begin(batches, start.interpolation)
    # before the models are sharded: one rank may then compile while others wait for its code
    products = context_of_products("training.enable_tf32", config.training.enable_tf32, world.device)
    in_validation = context_of_validation(config, models, world.device)
    for line in remarks_on_mixed_precision(config, world.device):
        logger.info("%s", line)
    used = compile_models(config, models, batches, world, (products, in_validation))
    module = parallelize(models, world, config.training.zero_stage)
    if start.loads_after_sharding(config):
        start.load_shards(models)
    bank = build_bank(config, models, tasks.steps_per, should_update, num_steps)
    times, run = _times(prepared, tasks, num_steps), start.run_id(config)
    reporter = Reporter(config, tasks, bank, num_steps, run, world, times, in_validation)
    store = Store(world.for_writer() if config.training.writes_shards else None)
    validator = FullValidation(prepared, bank, num_steps, store, world, in_validation)
    builder = StateBuilder.build(prepared, used, bank, run, num_steps, world)
    tables = [*filter(None, reporter.curves.values()), *validator.logs]
    saver = Saver(config, num_steps, start.step, builder, validator.bests, tables, store, world)
    take_step = _step(prepared, module, num_steps, world)
    trainer = Trainer(
        tasks=tasks,
        take_step=take_step,
        bank=bank,
        validator=validator,
        saver=saver,
        reporter=reporter,
        times=reporter.times,
        record=record or RunRecord(),
        num_steps=num_steps,
        world=world,
        interpolation=interpolation,
        products=products,
        graphs=_graphs(config, take_step, bank, world, products),
        refit=partial(refit_bias, prepared, bank) if config.training.change_bias_after_training else None,
        validates_before=start.validates_before,
        input_file=input_file,
        callback=callback or Callback(),
    )
    _log_start(prepared, tasks, bank, num_steps, world, interpolation.describe())
    if (state := start.state(models, tasks.state_dict())) is not None:
        trainer.load_state_dict(start.step, state)
    models.train()
    return trainer


def _log_start(
    prepared: PreparedRun, tasks: TaskMixture, bank: AverageBank | None, num_steps: int, world: World, embedding: str
) -> None:
    """Log the summary of a run and warnings about its data and its input."""
    for line in render(start_table(prepared, tasks, bank, num_steps, world, embedding)):
        logger.info("%s", line)
    for warning in (*tasks.warnings, *config_warnings(prepared.config, num_steps, tasks.steps_per)):
        logger.warning("%s", warning)


def _times(prepared: PreparedRun, tasks: TaskMixture, num_steps: int) -> RunTimes:
    """Return the stopwatch of a run; until the first validation was measured its time is that of some steps."""
    frames = sum(system.num_frames for task in prepared.tasks.values() for system in task.valid)
    steps = FORWARD_SHARE * len(prepared.config.fully_validated) * frames / tasks.frames_per_step
    return RunTimes(due_in(prepared.config, num_steps), {"validation": steps})


def _step(prepared: PreparedRun, module: nn.Module, num_steps: int, world: World) -> Step:
    """Return the steps of the optimizer of a run; ``module`` evaluates the models."""
    if isinstance(prepared.config.optimizer, LKFConfig):
        from deepmd_ema.training.loop.kalman import KalmanStep

        return KalmanStep(prepared, num_steps)
    return GradientStep(prepared, module, num_steps, world)


def _graphs(
    config: RunConfig,
    take_step: Step,
    bank: AverageBank | None,
    world: World,
    products: Products,
) -> GraphedSteps | None:
    """Return the steps as CUDA graphs, or None, with a warning if the input requests them."""
    if not config.training.cuda_graphs:
        return None
    if not launches_graphs(config, world):
        logger.warning("training.cuda_graphs has no effect: %s.", why_no_graphs(config, world))
        return None
    assert isinstance(take_step, GradientStep)
    return GraphedSteps(take_step, bank, world.device, products)


def remarks_on_mixed_precision(config: RunConfig, device: torch.device) -> list[str]:
    """Return a line for each option of the input that requests bfloat16 where there is none, on a CPU."""
    places = ["validating.amp_infer"] if config.validating.amp_infer and device.type == "cpu" else []
    for task in config.tasks.values() if device.type == "cpu" else ():
        option = f"{task.place('model')}.descriptor.use_amp"
        descriptor = task.model.descriptor
        if isinstance(descriptor, HasMixedPrecision) and descriptor.use_amp and path_of(option) in config.source.given:
            places.append(dotted(config.source.path(option)))
    of_cpu = "no effect on a CPU, which multiplies in the precision of the parameters"
    return [f"{place} = true: {of_cpu}" for place in dict.fromkeys(places)]  # tasks share parts


def compile_models(
    config: RunConfig, models: ModelSet, batches: Mapping[str, Batch], world: World, products: tuple[Products, Products]
) -> RunConfig:
    """Compile ``models`` if the input says so, and return the config with the modes that are compiled.

    All ranks compile for the same batches, so that those of one machine find the code in the cache. Must be called by
    every rank, before the models are sharded.

    Args:
        config: of the run.
        models: on the device they compute on.
        batches: one of each task, the same on all ranks and at every restart.
        world: the processes of the run.
        products: contexts of matrix products in a step and in a validation, on which graphs depend.

    Raises:
        UserError: if they cannot be compiled.
    """
    if not config.training.enable_compile and not config.validating.compiled_infer:
        return config
    in_training, in_validation = compiled_modes(config)
    if in_training or in_validation:
        compiler = Compiler(CompileOptions(**plain(config.training.compile_options)), in_training, in_validation)
        hessians = any(HESSIAN in task.loss.labels for task in config.tasks.values())
        eager = "; batches with Hessians are evaluated eagerly" * hessians
        logger.info("compiling with %s, which takes minutes the first time%s", compiler.options.backend, eager)
        for training in [True] * in_training + [False] * in_validation:
            models.train(training)
            context = products[0] if training else products[1]
            # the first rank of each machine, then the others, which find the code in the cache
            for is_turn in (world.local_rank == 0, world.local_rank != 0):
                with world.all_ranks_ok(world.long_timeout_group), explained(_COMPILES, _EAGERLY):
                    for name, model in models.by_task.items() if is_turn else ():
                        with context():
                            compiler.trace(model, batches[name])
        models.train()
        models.compiler = compiler
        logger.info("compiled: %s", compiler.describe())
    return replace(config, validating=replace(config.validating, compiled_infer=in_validation))
