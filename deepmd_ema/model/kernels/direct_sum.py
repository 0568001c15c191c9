"""Sums over neighbors with an embedding net that is evaluated at each pair, where no interpolation serves."""

from __future__ import annotations

import torch
from torch import Tensor

from deepmd_ema.model.nn.layers import Network

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, N functions


class DirectSum:
    """``sum_k left[k] G(s_k)`` by evaluating the net at each pair.

    Args:
        left: (A, K, C N), a column for each of the N functions, one after the other.
        s: (A, K) first input of the net.
        net: G.
        beside: (N, inputs) further inputs of each function; None: it has no other.

    Attributes:
        value: (A, C, M), a function of the parameters of the net.
    """

    def __init__(self, left: Tensor, s: Tensor, net: Network, beside: Tensor | None) -> None:
        x = s[..., None, None]
        if beside is not None:
            further = beside.to(s.dtype).expand(*s.shape, *beside.shape)
            x = torch.cat([x.expand(*further.shape[:-1], 1), further], -1)
        functions = x.shape[2]
        # all (A, D N, M), and the columns of `left` (A, D N, C)
        self._value, self._slope = net.value_and_derivative(x.flatten(1, 2))
        self._shape = left.shape[2] // functions, functions
        self.left = left
        self._left = left.unflatten(2, self._shape).transpose(2, 3).flatten(1, 2)
        self.value = torch.bmm(self._left.transpose(1, 2), self._value)

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``left`` and s from that of the value."""
        functions = self._shape[1]
        back = grad_value.transpose(1, 2)
        of_left = torch.bmm(self._value, back).unflatten(1, (-1, functions)).transpose(2, 3).flatten(2)
        of_s = (torch.bmm(self._slope, back) * self._left).unflatten(1, (-1, functions)).sum((2, 3))
        return of_left, of_s
