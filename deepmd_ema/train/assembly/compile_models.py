"""Compiles the models of a run before its first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from deepmd_ema.batch import Batch
from deepmd_ema.config import RunConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.dist.world import World
from deepmd_ema.labels import HESSIAN
from deepmd_ema.model.compiler import CompileOptions, Compiler, explained
from deepmd_ema.model.model_set import ModelSet

logger = logging.getLogger(__name__)


def compile_models(config: RunConfig, models: ModelSet, batches: Mapping[str, Batch], world: World) -> RunConfig:
    """Compile ``models`` if the input says so, and return the config with the modes that are compiled.

    All ranks compile for the same batches, so that those of one machine find the code in the cache. Must be called by
    every rank, before the models are sharded.

    Args:
        config: of the run.
        models: on the device they compute on.
        batches: one of each task, the same on all ranks and at every restart.
        world: the processes of the run.

    Raises:
        UserError: if they cannot be compiled.
    """
    in_training, infer = config.training.enable_compile, config.validating.compiled_infer
    if not in_training and not infer:
        return config
    in_validation = (in_training if infer is None else infer) and config.has_validation_data
    compiler = Compiler(CompileOptions(**plain(config.training.compile_options)), in_training, in_validation)
    if in_training or in_validation:
        hessians = any(HESSIAN in task.loss.labels for task in config.tasks.values())
        eager = "; batches with Hessians are evaluated eagerly" * hessians
        logger.info("compiling with %s, which takes minutes the first time%s", compiler.options.backend, eager)
    for is_used, training in ((in_training, True), (in_validation, False)):
        if is_used:
            _on_all_ranks(partial(_trace, compiler, models.train(training), batches), world)
    models.train()
    if in_training or in_validation:
        models.compiler = compiler
        logger.info("compiled: %s", compiler.describe())
    return replace(config, validating=replace(config.validating, compiled_infer=in_validation))


def _on_all_ranks(make: Callable[[], None], world: World) -> None:
    """Call ``make`` on the first rank of each machine, then on the others, which find the code in the cache."""
    for is_turn in (world.local_rank == 0, world.local_rank != 0):
        with world.all_ranks_ok(world.long_timeout_group):
            if is_turn:
                make()


def _trace(compiler: Compiler, models: ModelSet, batches: Mapping[str, Batch]) -> None:
    with explained("training.enable_compile", "Set it to false to train eagerly"):
        for name, model in models.by_task.items():
            compiler.trace(model, batches[name])
