"""Modes of evaluation that config and device decide: compiled code, CUDA graphs, batches that are filled up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config import RunConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.config.labels import HESSIAN
from deepmd_ema.config.messages import dotted, path_of
from deepmd_ema.config.schema.descriptor import HasMixedPrecision
from deepmd_ema.config.schema.optim import LKFConfig, SOAPConfig
from deepmd_ema.data.loader import Pad
from deepmd_ema.distributed.world import World
from deepmd_ema.model.compiler import CompileOptions, Compiler, explained
from deepmd_ema.model.dummy_atoms import pad, to_eighth
from deepmd_ema.model.interface import HasBlocksInBfloat16
from deepmd_ema.model.model_set import ModelSet

logger = logging.getLogger(__name__)

Products: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns the context of matrix products in a step or a validation."""


@contextmanager
def products_in(tf32: bool, bfloat16: Iterable[HasBlocksInBfloat16] = ()) -> Iterator[None]:
    """Multiply float32 matrices in TF32, and blocks of these parts of models in bfloat16, within this context."""
    before = torch.get_float32_matmul_precision()
    if tf32:
        torch.set_float32_matmul_precision("high")
    for part in bfloat16:
        part.infers_in_bfloat16 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for part in bfloat16:
            part.infers_in_bfloat16 = False


def contexts_of_products(config: RunConfig, models: nn.Module, device: torch.device) -> tuple[Products, Products]:
    """Return the contexts in which steps and validations multiply matrices of ``models`` on a device."""
    in_training, in_validation = config.training.enable_tf32, config.validating.tf32_infer
    if device.type != "cuda":
        for option, is_on in (("training.enable_tf32", in_training), ("validating.tf32_infer", in_validation)):
            if is_on:
                logger.warning("%s has no effect on a CPU: products of float32 matrices are in float32.", option)
        return nullcontext, nullcontext
    parts = [part for part in models.modules() if isinstance(part, HasBlocksInBfloat16)]
    parts = parts if config.validating.amp_infer else []
    return (
        partial(products_in, tf32=True) if in_training else nullcontext,
        partial(products_in, in_validation, parts) if in_validation or parts else nullcontext,
    )


def compiled_modes(config: RunConfig) -> tuple[bool, bool]:
    """Return whether training, and whether validation, runs compiled code."""
    in_training, infer = config.training.enable_compile, config.validating.compiled_infer
    return in_training, (in_training if infer is None else infer) and config.has_validation_data


def why_no_graphs(config: RunConfig, world: World) -> str:
    """Return the reason why steps are not launched as CUDA graphs; empty if they are."""
    if world.device.type != "cuda":
        return "there are none on a CPU"
    if isinstance(config.optimizer, LKFConfig):
        return "LKF draws numbers on the host in each step"
    if isinstance(config.optimizer, SOAPConfig):
        return "SOAP changes its bases in some steps only"
    if world.size > 1:
        return "ranks exchange gradients in a step"
    if config.training.accumulate > 1:
        return "a step of several batches (training.accumulate) would be a graph for each combination of their shapes"
    if config.training.enable_compile and config.training.compile_options.makes_cuda_graphs:
        return "compile_options makes CUDA graphs of its own"
    return ""


def pads(config: RunConfig, world: World, layout: NeighborLayout) -> tuple[Pad | None, Pad | None]:
    """Return the functions that fill up batches of training and displayed ones of validation; None: they stay."""
    in_training, in_validation = compiled_modes(config)
    compiled = CompileOptions(**plain(config.training.compile_options)).pad(layout)
    of_training = compiled if in_training else None
    if config.training.cuda_graphs and not why_no_graphs(config, world):  # few shapes
        of_training = partial(pad, layout=layout, up=to_eighth)
    return of_training, compiled if in_validation else None


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
                explains = explained("training.enable_compile", "Set it to false to train eagerly")
                with world.all_ranks_ok(world.long_timeout_group), explains:
                    for name, model in models.by_task.items() if is_turn else ():
                        with context():
                            compiler.trace(model, batches[name])
        models.train()
        models.compiler = compiler
        logger.info("compiled: %s", compiler.describe())
    return replace(config, validating=replace(config.validating, compiled_infer=in_validation))
