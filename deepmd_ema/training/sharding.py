"""Sharding by `zero_stage`: nothing (0), optimizer state (1), gradients (2), parameters (3)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepmd_ema.distributed.tensors import content_digest, is_sharded
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import UserError, first_few
from deepmd_ema.model.model_set import ModelSet

LAST_REPLICATED_STAGE = 1  # the largest stage at which every rank holds all parameters


def parallelize(models: ModelSet, world: World, stage: int) -> nn.Module:
    """Return the module that a training step calls; from stage 2 on ``models`` itself is sharded in place.

    Weights must be the same on all ranks. Gradients become means over the ranks in the backward pass.

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
    # buckets that are laid out anew after the first step would add up in another order after a restart:
    # with unused parameters allowed, they stay
    known = inspect.signature(DistributedDataParallel).parameters
    # the name of the option from torch 2.13 on, and before
    buffers: dict[str, Any] = {next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known): False}
    return DistributedDataParallel(
        models, init_sync=False, find_unused_parameters=True, gradient_as_bucket_view=True, **buffers
    )


def check_replicas(models: nn.Module, world: World, step: int) -> None:
    """Check that all ranks hold equal tensors, where each holds all of them. Must be called by every rank.

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
    # by tensor: one that has several names is read once
    names = {t: name for name, t in models.state_dict(keep_vars=True).items() if not is_sharded(t)}
    ranks = world.gather({name: content_digest(t.detach().cpu()) for t, name in names.items()})
    with world.all_ranks_ok():
        for rank, digests in enumerate(ranks):
            if different := [name for name, digest in digests.items() if digest != ranks[0][name]]:
                raise UserError(
                    f"step {step:,}: rank {rank} holds other weights than rank 0, where all ranks hold the same: "
                    f"{first_few(different, 4)}. Nothing was saved after the last checkpoint, from which the run can "
                    "be restarted. Processors of different kinds round differently: use ranks of one kind, or "
                    "training.zero_stage 1, with which one rank updates each weight for all."
                )


def _shard(models: ModelSet, world: World, reshard: bool) -> None:
    # they take half a second to import, which a run that shards nothing saves
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(world.device.type, (world.size,))
    done: set[nn.Module] = set()

    def shard(module: nn.Module, reshard: bool = reshard) -> None:
        if module not in done:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            done.add(module)

    each = list(models.by_task.values())
    if models.compiler is not None:  # its code takes all parameters of a model at once, and cannot wait for blocks
        shard(models)
        return
    for model in each:
        model.evaluate_all_blocks()
        for block, methods in model.blocks():
            shard(block)
            for method in methods:
                register_fsdp_forward_method(block, method)
    # what tasks share must be sharded before the models around it, which would each take it for their own
    for module in _shared(each):
        # its weights are needed until the model has its forces, after its own forward pass
        shard(module, reshard=False)
    for model in each:
        shard(model)
    shard(models)  # the root, through which all forward passes go


def _shared(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the largest modules inside several of ``models``; torch does not take lists of modules as one."""
    inside = [[module for module in model.modules() if module is not model] for model in dict.fromkeys(models)]
    count = Counter(module for modules in inside for module in dict.fromkeys(modules))
    shared = [module for module, number in count.items() if number > 1 and not isinstance(module, nn.ModuleList)]
    inner = {child for module in shared for child in module.modules() if child is not module}
    return [module for module in shared if module not in inner and any(True for _ in module.parameters())]
