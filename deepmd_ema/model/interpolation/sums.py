"""Sums over the neighbors of an atom with an embedding net of one number per pair.

An embedding net G of se_e2_a, se_e2_r and se_atten is a function of one number s per pair, and
perhaps of elements. Where it depends on elements there are several functions of s, and ``left`` has
a column for each, which is zero for the pairs of the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.model.nn.layers import RadialFunctions

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, F functions


class NeighborSum(ABC):
    """``sum_k left[k] G(s_k)`` over the neighbors of each atom, and its vector-Jacobian product.

    Attributes:
        left: (A, K, C F), a column for each of the F functions, one after the other.
        value: (A, C, M), a function of the parameters of the net.
        beyond: (B, M), the net at further numbers, if there were any.
    """

    left: Tensor
    value: Tensor
    beyond: Tensor | None

    @abstractmethod
    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by ``left`` (A, K, C F) and s (A, K) from that by the value."""

    def rows_vjp(self, grad_value: Tensor) -> Tensor:
        """Return the gradient by ``left`` (A, K, C) with s as its first column.

        Both ways of s are added up: as a column of ``left`` and as the input of the net.
        """
        grad_left, grad_s = self.vjp(grad_value)
        return grad_left + functional.pad(
            grad_s.unsqueeze(2), (0, grad_left.shape[2] - 1)
        )


class DirectSum(NeighborSum):
    """The sum with a net that is evaluated at each pair.

    Args:
        left: (A, K, C F).
        s: (A, K) first input of the net.
        net: G.
        beside: (F, inputs) further inputs of each function; None: it has no other.
        beyond: as of the sum.
    """

    def __init__(
        self,
        left: Tensor,
        s: Tensor,
        net: RadialFunctions,
        beside: Tensor | None = None,
        beyond: Tensor | None = None,
    ) -> None:
        x = s[..., None, None]
        if beside is not None:
            further = beside.to(s.dtype).expand(*s.shape, *beside.shape)
            x = torch.cat([x.expand(*further.shape[:-1], 1), further], -1)
        functions = x.shape[2]  # x is (A, K, F, 1 + further inputs)
        # the values and slopes of all functions, (A, K F, M)
        self._value, self._slope = net.value_and_derivative(x.flatten(1, 2))
        self._shape = left.shape[2] // functions, functions
        self.left = left
        self.beyond = beyond
        # (A, K F, C): the columns of `left` in the order of the values
        self._left = left.unflatten(2, self._shape).transpose(2, 3).flatten(1, 2)
        self.value = torch.bmm(self._left.transpose(1, 2), self._value)

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``left`` and s from that of the value."""
        functions = self._shape[1]
        back = grad_value.transpose(1, 2)  # (A, M, C)
        # products (A, K F, C), as columns of `left` again and as sums over functions
        by_left = torch.bmm(self._value, back).unflatten(1, (-1, functions))
        by_s = (torch.bmm(self._slope, back) * self._left).unflatten(1, (-1, functions))
        return by_left.transpose(2, 3).flatten(2), by_s.sum((2, 3))


def inputs_at(s: Tensor, beside: Tensor | None) -> Tensor:
    """Return inputs (F, S, 1 + further ones) of a net at (S,) numbers, beside F rows of others."""
    if beside is None:
        return s[None, :, None]
    further = beside.to(s.dtype)[:, None].expand(-1, len(s), -1)
    return torch.cat([s[:, None].expand(len(beside), -1, -1), further], -1)
