"""Layers of attention among neighbors in plain torch (DPA-1), and softmax over neighbors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.nn.norm import normalised

# A atoms, K neighbor slots, M channels of a pair, C columns of the rows

# a neighbor at the cutoff has the logit of an empty slot, -20, in smooth attention; as DeePMD-kit
LOGIT_SHIFT = 20.0
EPS = 1e-12  # shorter rows are divided by this number; as torch.nn.functional.normalize


@dataclass(frozen=True)
class AttentionOptions:
    """Options of the layers of attention.

    Attributes:
        gated: whether weights are multiplied by the cosines of the angles between neighbors.
        unit: whether queries, keys and values have the length 1.
        scaling: factor of the product of query and key.
        shift: added to logits before they are multiplied by the switch; None where they are not,
            which is not smooth.
        eps: of the layer norm.
    """

    gated: bool
    unit: bool
    scaling: float
    shift: float | None
    eps: float


@dataclass(frozen=True)
class Attended:
    """Inputs of layers of attention among the neighbors of each atom.

    Attributes:
        rows: (A, K, C), with which the channels of the pairs are summed at the end.
        embed: a function of ``inputs`` that returns the channels of the pairs (A, K, M).
        inputs: (A, K, ...) or (A, 1, ...).
        counts: (A,) slots of each atom that are computed, beyond which its rows are 0; None: all.
        mask: (A, K) bool, where there is a neighbor.
        switch: (A, K).
        direction: (A, K, 3) unit vectors.
        num_slots: slots of an atom with those that are not here.
    """

    rows: Tensor
    embed: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    counts: Tensor | None
    mask: Tensor
    switch: Tensor
    direction: Tensor
    num_slots: int


def attended_moments(
    neighbors: Attended,
    layers: Sequence[Weights],
    options: AttentionOptions,
    normalised: Callable[..., Tensor] = normalised,
) -> Tensor:
    """Return ``rows^T Y`` (A, C, M), Y the channels of the pairs after all layers of attention."""
    pairs = neighbors.embed(*neighbors.inputs)
    both = neighbors.switch[:, :, None] * neighbors.switch[:, None, :]  # (A, K, K)
    for weights in layers:
        flat = torch.addmm(weights.in_bias, pairs.flatten(0, -2), weights.in_weight)
        projected = flat.view(*pairs.shape[:-1], len(weights.in_bias)).unflatten(
            -1, (3, -1)
        )
        if options.unit:
            # torch.nn.functional.normalize in fewer operations; only rows about as short as EPS
            # differ
            projected = (
                projected * (projected.square().sum(-1, keepdim=True) + EPS**2).rsqrt()
            )
        query, key, value = projected.unbind(-2)
        logits = torch.bmm(query * options.scaling, key.transpose(1, 2))
        # smooth: the logit of a pair that leaves goes to that of an empty slot, its factor to 0
        if options.shift is not None:
            logits = (logits + options.shift) * both - options.shift
            attention = softmax_with_absent(logits, neighbors.num_slots)
            factor = both
        else:
            attention = masked_softmax(logits, neighbors.mask[:, None, :])
            factor = neighbors.mask[:, :, None].to(logits.dtype)
        if options.gated:
            direction = neighbors.direction
            factor = factor * torch.bmm(direction, direction.transpose(1, 2))
        attended = torch.bmm(attention * factor, value)
        flat = torch.addmm(
            weights.out_bias, attended.flatten(0, -2), weights.out_weight
        )
        pairs = normalised(
            pairs + flat.view(pairs.shape),
            weights.norm_weight,
            weights.norm_bias,
            options.eps,
        )
    return torch.bmm(neighbors.rows.transpose(1, 2), pairs)


def softmax_with_absent(logits: Tensor, num_slots: int) -> Tensor:
    """Return the softmax of ``logits`` (..., K) among ``num_slots``.

    Slots beyond K are empty: each has the logit -20.
    """
    absent = (
        torch.full_like(logits[..., :1], num_slots - logits.shape[-1]).log()
        - LOGIT_SHIFT
    )
    return torch.cat([logits, absent], -1).softmax(-1)[..., :-1]


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of ``logits`` (..., K) where ``mask`` is true.

    Equal numbers where it is nowhere true.
    """
    # finite, so that a row of empty slots has no nan
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
