"""Activation functions with their derivatives, by the names that a config uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.config.schema.text_options import ActivationName


@dataclass(frozen=True)
class Activation:
    """A function of one number and its derivative; both can be differentiated by autograd.

    Attributes:
        name: as the config says it.
        value: y(z).
        derivative: dy/dz as a function of (z, y).
        bend: where a silu bends into a tanh, infinity if it does not; None of other functions.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    bend: float | None = None

    def __reduce__(self) -> tuple[Callable[[str], Activation], tuple[str]]:
        """Pickle and copy the name, because functions without one cannot be pickled."""
        return activation, (self.name,)


@cache
def activation(name: str) -> Activation:
    """Return the activation function called ``name``; ``silut:T`` bends into a tanh above T.

    Raises:
        ConfigError: if the name is unknown.
    """
    read = ActivationName(name)
    # derivatives are written out, because a loss of forces differentiates them once more
    if read.kind == "silut":
        value = partial(_silut, bend=read.bend)
        derivative = partial(_silut_derivative, bend=read.bend)
        return Activation(str(name), value, derivative, read.bend)
    # infinity: silu has no bend, so that written-out derivatives hold for all numbers
    return Activation(
        str(name), *_KNOWN[read.kind], math.inf if read.kind == "silu" else None
    )


def _gelu(z: Tensor) -> Tensor:
    return functional.gelu(z, approximate="tanh")


def _gelu_derivative(z: Tensor, _: Tensor) -> Tensor:
    # 0.5 z (1 + tanh(scale (z + cubic z^3))), the tanh form of gelu
    scale = math.sqrt(2 / math.pi)
    cubic = 0.044715
    t = torch.tanh(scale * (z + cubic * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * scale * (1 + 3 * cubic * z * z)


# z sigmoid(z) in terms of s: s (1 + z (1 - s))
def _silu_derivative(z: Tensor, _: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _silut(z: Tensor, bend: float) -> Tensor:
    # tanh continues value and slope of silu at the bend, so that large numbers stay bounded
    value, slope = _silu_at(bend)
    return torch.where(
        z < bend, functional.silu(z), torch.tanh(slope * (z - bend)) + value
    )


def _silut_derivative(z: Tensor, y: Tensor, bend: float) -> Tensor:
    _, slope = _silu_at(bend)
    t = torch.tanh(slope * (z - bend))
    return torch.where(z < bend, _silu_derivative(z, y), slope * (1 - t * t))


def _silu_at(z: float) -> tuple[float, float]:
    # value and slope of silu at a number
    s = 1 / (1 + math.exp(-z))
    return z * s, s * (1 + z * (1 - s))


# y(z) and dy/dz as a function of z and y
_KNOWN: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
] = {
    "tanh": (torch.tanh, lambda _, y: 1 - y * y),
    "relu": (functional.relu, lambda z, _: (z > 0).to(z.dtype)),
    "relu6": (functional.relu6, lambda z, _: ((z > 0) & (z < 6)).to(z.dtype)),
    "softplus": (functional.softplus, lambda z, _: torch.sigmoid(z)),
    "sigmoid": (torch.sigmoid, lambda _, y: y * (1 - y)),
    "gelu": (_gelu, _gelu_derivative),
    "gelu_tf": (_gelu, _gelu_derivative),
    "silu": (functional.silu, _silu_derivative),
    "none": (lambda z: z, lambda z, _: torch.ones_like(z)),
    "linear": (lambda z: z, lambda z, _: torch.ones_like(z)),
}
