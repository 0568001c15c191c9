"""Sizes of the tensors of a run in memory."""

from __future__ import annotations

from typing import NamedTuple

from deepmd_ema.config import RunConfig
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.optim.build import build_optimizer


class TensorBytes(NamedTuple):
    """Sizes of the tensors of a run, bytes.

    Attributes:
        parameters: number of trained parameters.
        weights: parameters and buffers.
        gradients: of the trained parameters.
        optimizer: moments or covariances.
        average: one average in float64.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    average: int


def tensor_bytes(config: RunConfig) -> TensorBytes:
    """Return the sizes of the tensors of a run with all numbers of neighbors resolved."""
    models = build_models({name: task.model for name, task in config.tasks.items()}, config.links)
    trained = [p for p in models.parameters() if p.requires_grad]
    return TensorBytes(
        parameters=sum(p.numel() for p in trained),
        weights=sum(t.nbytes for t in models.state_dict().values()),
        gradients=sum(p.nbytes for p in trained),
        optimizer=_optimizer_bytes(config, models),
        average=sum(8 * p.numel() for p in trained),
    )


def _optimizer_bytes(config: RunConfig, models: ModelSet) -> int:
    if isinstance(config.optimizer, LKFConfig):
        from deepmd_ema.optim.lkf import block_sizes

        counts = [p.numel() for p in models.parameters() if p.requires_grad]
        return 8 * sum(size**2 for size in block_sizes(counts, config.optimizer.kf_blocksize))
    optimizer = build_optimizer(config.optimizer, models.named_parameters())
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
