"""Modes that config, device and ranks decide: compiled code, CUDA graphs, padding, sharding."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config import RunConfig
from deepmd_ema.config.labels import HESSIAN
from deepmd_ema.config.messages import dotted, path_of
from deepmd_ema.config.schema.descriptor import HasMixedPrecision
from deepmd_ema.config.schema.optim import LKFConfig, SOAPConfig
from deepmd_ema.data.loader import Pad
from deepmd_ema.distributed.tensors import content_digest, is_sharded, settle_shards
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import UserError
from deepmd_ema.model.compiler import Compiler, pad_for
from deepmd_ema.model.dummy_atoms import pad, to_eighth
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.text import first_few

logger = logging.getLogger(__name__)

Products: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns the context of matrix products in a step or a validation."""


@contextmanager
def products_in(tf32: bool, bfloat16: Iterable[Any] = ()) -> Iterator[None]:
    """Multiply matrices in less precision within this context.

    Args:
        tf32: whether products of float32 matrices are in TF32.
        bfloat16: parts of models whose blocks compute in bfloat16.
    """
    # the precision of torch is of the whole process: it is put back, also after an error
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


def contexts_of_products(
    config: RunConfig, models: nn.Module, device: torch.device
) -> tuple[Products, Products]:
    """Return the contexts in which steps and validations multiply matrices on a device.

    The log says which options of the input have no effect there.
    """
    in_training = config.training.enable_tf32
    in_validation = config.validating.tf32_infer
    if device.type != "cuda":
        for option, is_on in (
            ("training.enable_tf32", in_training),
            ("validating.tf32_infer", in_validation),
        ):
            if is_on:
                logger.warning(
                    "%s has no effect on a CPU: products of float32 matrices are in float32.",
                    option,
                )
        # mixed precision: only options that the input has, as use_amp is on by default
        places = ["validating.amp_infer"] if config.validating.amp_infer else []
        for task in config.tasks.values():
            option = f"{task.place('model')}.descriptor.use_amp"
            descriptor = task.model.descriptor
            is_given = path_of(option) in config.source.given_options
            if (
                is_given
                and isinstance(descriptor, HasMixedPrecision)
                and descriptor.use_amp
            ):
                places.append(dotted(config.source.path(option)))
        for place in (
            dict.fromkeys(places) if device.type == "cpu" else ()
        ):  # tasks share parts
            effect = "no effect on a CPU, which multiplies in the precision of the parameters"
            logger.info("%s = true: %s", place, effect)
        return nullcontext, nullcontext
    # in training the descriptor itself decides (use_amp); in validation amp_infer does for all
    parts = [part for part in models.modules() if hasattr(part, "infers_in_bfloat16")]
    if not config.validating.amp_infer:
        parts = []
    return partial(products_in, in_training), partial(products_in, in_validation, parts)


def compiled_modes(config: RunConfig) -> tuple[bool, bool]:
    """Return whether training, and whether validation, runs compiled code."""
    in_training = config.training.enable_compile
    infer = config.validating.compiled_infer
    return in_training, (
        in_training if infer is None else infer
    ) and config.has_validation_data


def why_no_graphs(config: RunConfig, world: World) -> str:
    """Return the reason why steps are not launched as CUDA graphs; empty if they are."""
    training, optimizer = config.training, config.optimizer
    several_batches = (
        "a step of several batches (training.accumulate) would be a graph for each combination of "
        "their shapes"
    )
    # the first that holds is shown
    reasons = {
        "there are none on a CPU": world.device.type != "cuda",
        "LKF draws numbers on the host in each step": isinstance(optimizer, LKFConfig),
        "SOAP changes its bases in some steps only": isinstance(optimizer, SOAPConfig),
        "ranks exchange gradients in a step": world.size > 1,
        # FSDP and the sharded optimizer call them whatever the number of ranks
        "a step at zero_stage 1 to 3 has collectives, also with one rank": training.zero_stage
        > 0,
        several_batches: training.accumulate > 1,
        "compile_options makes CUDA graphs of its own": (
            training.enable_compile and training.compile_options.makes_cuda_graphs
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def launches_graphs(config: RunConfig, world: World) -> bool:
    """Whether steps are launched as CUDA graphs.

    If the input leaves it open, only where this is known to work.
    """
    chosen = config.training.cuda_graphs
    if chosen is None:  # not with ROCm, nor beside compiled code
        chosen = torch.version.cuda is not None and not config.training.enable_compile
    return chosen and not why_no_graphs(config, world)


def pads(
    config: RunConfig, compiler: Compiler | None, world: World, layout: NeighborLayout
) -> list[Pad | None]:
    """Return the functions that pad training batches and displayed validation batches.

    None: they stay.
    """
    modes = (
        (compiler.in_training, compiler.in_validation)
        if compiler is not None
        else (False, False)
    )
    pads_of_modes = [
        pad_for(config.training.compile_options, layout) if is_compiled else None
        for is_compiled in modes
    ]
    if launches_graphs(config, world):
        # sizes rounded up by an eighth at most: batches then have few shapes, each of which needs
        # a graph of its own
        pads_of_modes[0] = partial(pad, layout=layout, up=to_eighth)
    return pads_of_modes


def compile_models(
    config: RunConfig,
    models: ModelSet,
    batches: Mapping[str, Batch],
    world: World,
    products: tuple[Products, Products],
) -> RunConfig:
    """Compile ``models`` if the input says so; return the config with the compiled modes.

    All ranks compile for the same batches, so that those of one machine find the code in the cache.
    Must be called by every rank, before the models are sharded.

    Args:
        config: of the run.
        models: on the device they compute on.
        batches: one of each task, the same on all ranks and at every restart.
        world: the processes of the run.
        products: contexts of matrix products in a step and in a validation, on which graphs depend.

    Raises:
        UserError: without a C++ compiler.
    """
    if not config.training.enable_compile and not config.validating.compiled_infer:
        return config
    in_training, in_validation = compiled_modes(config)
    if in_training or in_validation:
        place = (
            "training.enable_compile" if in_training else "validating.compiled_infer"
        )
        compiler = Compiler(
            config.training.compile_options, place, in_training, in_validation
        )
        hessians = any(HESSIAN in task.labels for task in config.tasks.values())
        logger.info(
            "compiling with %s, which takes minutes the first time%s",
            compiler.options.backend,
            "; batches with Hessians are evaluated eagerly" if hessians else "",
        )
        # code of steps and of validations apart: only the former is differentiated by parameters
        for training, is_wanted in ((True, in_training), (False, in_validation)):
            # where steps could not be compiled, validations are not tried
            if not is_wanted or not (training or compiler.in_validation):
                continue
            models.train(training)
            context, reasons = products[0] if training else products[1], list[str]()
            # the first rank of each machine, then the others, which find the code in the cache
            for is_turn in (world.local_rank == 0, world.local_rank != 0):
                with world.all_ranks_ok(world.long_timeout_group), context():
                    reasons += [
                        compiler.trace(model, batches[name])
                        for name, model in models.by_task.items()
                        if is_turn
                    ]
            # a reason of one rank makes all of them evaluate eagerly: they take part in the same
            # collectives, and round alike
            compiler.refuse(training, next(filter(None, reasons), ""))
            compiler.agree(world)
        models.train()
        if compiler.in_training or compiler.in_validation:
            models.compiler = compiler
            logger.info("compiled: %s", compiler.describe())
    return replace(
        config, validating=replace(config.validating, compiled_infer=in_validation)
    )


LAST_REPLICATED_STAGE = 1  # the largest stage at which every rank holds all parameters


def parallelize(models: ModelSet, world: World, stage: int) -> nn.Module:
    """Return the module that a training step calls.

    From stage 2 on ``models`` itself is sharded in place. Weights must be the same on all ranks.
    Gradients become means over the ranks in the backward pass.

    Args:
        models: on the device they compute on.
        world: the processes of the run; one alone has nothing to share at stage 0.
        stage: ``training.zero_stage``.
    """
    if stage > LAST_REPLICATED_STAGE:
        _shard(models, world, reshard=stage > 2)
        return models
    if world.size == 1:
        return models
    # buffers are constants of the models, equal on all ranks: sending them would cost a collective
    # in each step; the name of the option from torch 2.13 on, and before
    parameters = inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {
        next(
            n for n in ("forward_sync_buffers", "broadcast_buffers") if n in parameters
        ): False
    }
    # Buckets that are laid out anew after the first step would add up in another order after a
    # restart: with unused parameters allowed, they stay. With several tasks a step uses the
    # parameters of one of them. Weights are equal already, so init_sync is off.
    return DistributedDataParallel(
        models,
        init_sync=False,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        **buffers,
    )


def check_replicas(models: nn.Module, world: World, step: int) -> None:
    """Check that all ranks hold equal tensors, where each holds all of them.

    Must be called by every rank.

    Reads all tensors: for the start of a run and its checkpoints, not for each step.

    Args:
        models: sharded or not; what is sharded is on one rank only and not compared.
        world: the processes of the run.
        step: for the message.

    Raises:
        UserError: on rank 0, naming the first tensor of another rank that differs.
    """
    if world.size == 1:
        return
    # By tensor: one that has several names is read once. Digests are sent in place of tensors.
    names = {
        t: name
        for name, t in models.state_dict(keep_vars=True).items()
        if not is_sharded(t)
    }
    ranks = world.gather(
        {name: content_digest(t.detach().cpu()) for t, name in names.items()}
    )
    with world.all_ranks_ok():
        for rank, digests in enumerate(ranks):
            if different := [
                name for name, digest in digests.items() if digest != ranks[0][name]
            ]:
                raise UserError(
                    f"step {step:,}: rank {rank} holds other weights than rank 0, where all ranks "
                    f"hold the same: {first_few(different, 4)}. Nothing was saved after the last "
                    "checkpoint, from which the run can be restarted. Processors of different "
                    "kinds round differently: use ranks of one kind, or training.zero_stage 1, "
                    "with which one rank updates each weight for all."
                )


def _shard(models: ModelSet, world: World, reshard: bool) -> None:
    """Shard ``models`` in place with FSDP2, from the inner modules to the root."""
    # they take half a second to import, which a run that shards nothing saves
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # torch warns of outputs that are views; nothing here changes them in place
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module .* returned a view", UserWarning
    )
    mesh = init_device_mesh(world.device.type, (world.size,))
    done: set[nn.Module] = set()  # shared by tasks: a module may be sharded once

    def shard(module: nn.Module, reshard: bool = reshard) -> None:
        if module not in done:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            done.add(module)

    # compiled code takes all parameters of a model at once, and cannot wait for blocks
    task_models = list(models.by_task.values())
    if models.compiler is not None:
        shard(models)
        settle_shards(models)
        return

    # the blocks of a fitting network, so that a rank gathers one of them at a time; all blocks are
    # evaluated, also those that a batch does not need, because ranks gather them together
    for model in task_models:
        model.evaluate_all_blocks()
        for block, methods in model.fitting.blocks():
            shard(block)
            for method in methods:
                register_fsdp_forward_method(block, method)

    # Shared parts of tasks must be sharded before the models around them, which would each take
    # them for their own: the largest modules that several models contain. torch does not take
    # lists of modules as one.
    inside = [
        [module for module in model.modules() if module is not model]
        for model in dict.fromkeys(task_models)
    ]
    count = Counter(module for modules in inside for module in dict.fromkeys(modules))
    shared = [
        module
        for module, number in count.items()
        if number > 1 and not isinstance(module, nn.ModuleList)
    ]
    inner = {
        child for module in shared for child in module.modules() if child is not module
    }
    for module in shared:
        if module not in inner and any(True for _ in module.parameters()):
            # its weights are needed until the model has its forces, after its own forward pass
            shard(module, reshard=False)
            # another way into a descriptor than its forward pass
            if hasattr(module, "features_and_equivariants"):
                register_fsdp_forward_method(module, "features_and_equivariants")

    # the models, and last the root, through which all forward passes go
    for model in task_models:
        shard(model)
    shard(models)
    settle_shards(models)
