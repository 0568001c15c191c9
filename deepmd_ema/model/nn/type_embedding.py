"""A vector for each element, which networks that serve all elements take as an input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.layers import Network, freeze


class TypeEmbedding(nn.Module):
    """One dense layer of the one-hot vector of an element (DPA-1, Zhang et al., arXiv:2208.08236, eq. 7).

    Args:
        num_types: T.
        width: numbers of an embedding.
        bias: whether the layer has a bias.
        trainable: whether it is trained.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self, num_types: int, width: int, *, bias: bool, trainable: bool, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.net = Network([num_types, width], "linear", timestep=False, dtype=dtype, seed=seed, bias=bias)
        freeze(self.net, trainable)

    def forward(self) -> Tensor:
        """Return the embeddings of all elements (T, width)."""
        weight = self.net.stack[0].weight
        return self.net(torch.eye(len(weight), dtype=weight.dtype, device=weight.device))


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]`` (..., C) by a product: its derivative adds in a fixed order, on any device."""
    return one_hot(index, len(table), table.dtype) @ table


def one_hot(index: Tensor, num_types: int, dtype: torch.dtype) -> Tensor:
    """Return (..., T), 1 in the column of each element."""
    return (index[..., None] == torch.arange(num_types, device=index.device)).to(dtype)
