"""The sets of operations for eager mode on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepmd_ema.model.nn.activation import Activation
from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.attention import Attended, AttentionOptions
from deepmd_ema.model.ops.cpu import attention, moments, silu, tanh_gradients, triples
from deepmd_ema.model.ops.reference import REFERENCE, Moments, Operations

# inputs of fitting networks with those of rows that fill up: more are bound by arithmetic, and fewer by launches
MAX_STACKED = 1 << 22

# A atoms, K neighbor slots, M channels of a pair, C channels of an atom


@dataclass(frozen=True)
class CPUOperations(Operations):
    """Operations that work in place, in portions that fit the cache, with gradients written out.

    Attributes:
        numbers_in_cache: of a portion, for each thread.
    """

    is_for_cpu: ClassVar[bool] = True
    numbers_in_cache: int = 1 << 17

    def activated(self, z: Tensor, function: Activation) -> Tensor:
        """Return ``function(z)``."""
        return silu.activated(z, function)

    def moments(self, rows: Tensor, net: Network) -> Moments:
        """Return the moments of a net of one number; ``rows`` are (A, K, 4)."""
        if not net.is_tanh:
            return super().moments(rows, net)
        return moments.tanh_moments(rows, net, self)

    def attended_moments(self, given: Attended, layers: Sequence[Weights], options: AttentionOptions) -> Tensor:
        """Return ``rows^T Y`` (A, C, M), Y the channels of the pairs after all layers of attention."""
        if not given.mask.numel():
            return super().attended_moments(given, layers, options)
        return attention.attended_moments(given, layers, options, self)

    def triple_sums_and_vjp(
        self, products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        """Return the sums and a function from their gradient to that by ``products``."""
        of = triples.triple_sums_and_vjp if net.is_tanh else super().triple_sums_and_vjp
        return of(products, types, mask, table, net)


@dataclass(frozen=True)
class GPUOperations(Operations):
    """Operations with gradients written out where these launch fewer kernels and never wait for the device."""

    def moments(self, rows: Tensor, net: Network) -> Moments:
        """Return the moments of a net of one number; ``rows`` are (A, K, 4)."""
        if not net.is_tanh or not rows.numel():
            return super().moments(rows, net)
        return moments.tanh_moments(rows, net, self)

    def values_and_gradients(self, x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs (A,) of networks of one output and their gradients by the inputs (A, N)."""
        is_stacked = nets[0].is_scalar_tanh and len(nets) > 1 and len(nets) * max(shares) * x.shape[1] <= MAX_STACKED
        if not is_stacked:
            return super().values_and_gradients(x, nets, shares)
        return tanh_gradients.stacked_values_and_gradients(x, nets, shares)


CPU, GPU = CPUOperations(), GPUOperations()


def operations_for(device: torch.device) -> Operations:
    """Return the operations of models on a device that are evaluated eagerly."""
    return {"cpu": CPU, "cuda": GPU}.get(device.type, REFERENCE)
