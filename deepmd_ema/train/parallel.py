"""What ranks share out: nothing (zero_stage 0), moments (1), gradients too (2), parameters too (3)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from deepmd_ema.dist.dtensor import full_tensor, is_sharded

if TYPE_CHECKING:
    from deepmd_ema.dist.world import World
    from deepmd_ema.model.energy import EnergyModel

LAST_REPLICATED_STAGE = 1  # the largest stage at which every rank holds all parameters


def parallelize(model: EnergyModel, world: World, stage: int) -> nn.Module:
    """Return what a training step calls; from stage 2 on ``model`` itself is sharded in place.

    Weights must be the same on all ranks. Gradients become means over the ranks in the backward pass.

    Args:
        model: on the device it computes on.
        world: the processes of the run; one alone has nothing to share at stage 0.
        stage: ``training.zero_stage``.
    """
    if stage > LAST_REPLICATED_STAGE:
        _shard(model, world, reshard=stage > 2)
        return model
    if world.size == 1:
        return model
    # buckets that are laid out anew after the first step would add up in another order after a restart:
    # with unused parameters allowed, they stay
    with warnings.catch_warnings():
        # `broadcast_buffers` got another name in torch 2.13, which older ones do not know
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model, broadcast_buffers=False, init_sync=False, find_unused_parameters=True, gradient_as_bucket_view=True
        )


def whole_state(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Return the state dict with whole tensors, gathered one by one; every rank must call this when sharded.

    Args:
        model: sharded or not.
        keep: whether this rank wants them; else the result is empty.
    """
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = full_tensor(value)
        if keep:
            state[name] = whole.cpu() if is_sharded(value) else whole
    return state


def _shard(model: EnergyModel, world: World, reshard: bool) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,))
    model.evaluate_all_blocks()
    for block, methods in model.blocks():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        for method in methods:
            register_fsdp_forward_method(block, method)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
