"""Networks of dense layers that return, beside their value, its derivative or gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.activation import activation

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor_bases import ListSection

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# B rows, in one or more dimensions; N inputs, M outputs of a layer


class Layer(nn.Module):
    """``y = act(x W + b) * idt``, plus a skip connection where ``residual`` is on.

    It adds ``x`` if M == N, ``[x, x]`` if M == 2 N, and nothing for other widths.

    ``b`` and ``idt`` are left out where there are none. All but ``vjp`` compute in the precision of
    x.

    Args:
        num_in: N.
        num_out: M.
        act: name of the activation function.
        residual: whether there is a skip connection where the widths allow one.
        timestep: whether a skip connection comes with a trained step size ``idt``.
        dtype: precision of the parameters.
        generator: source of the initial parameters.
        bias: whether there is a ``b``.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        act: str,
        *,
        residual: bool,
        timestep: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation = activation(act)
        # the widths of DeePMD-kit's residual networks; 0 copies: no skip connection
        self.copies = (
            num_out // num_in if residual and num_out in (num_in, 2 * num_in) else 0
        )

        def draw(shape: tuple[int, ...], mean: float, spread: float) -> nn.Parameter:
            # in float64 whatever the precision, so that both precisions start from the same numbers
            values = mean + spread * torch.randn(
                shape, dtype=torch.float64, generator=generator
            )
            return nn.Parameter(values.to(dtype))

        # means and spreads as in DeePMD-kit
        self.weight = draw((num_in, num_out), 0.0, (num_in + num_out) ** -0.5)
        self.bias: Any = (
            draw((num_out,), 0.0, 1.0) if bias else None
        )  # a parameter, or None
        self.idt = draw((num_out,), 0.1, 0.001) if timestep and self.copies else None

    def forward(self, x: Tensor) -> Tensor:
        """Return y (B, M)."""
        y = self.activation.value(self._affine(x))
        # the step size in the precision of x, which may be wider than that of the parameters
        return self._add_skip(y if self.idt is None else y * self.idt.to(x.dtype), x)

    def with_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (B, M) and the derivative d(y - skip)/d(x W + b), (B, M)."""
        z = self._affine(x)
        y = self.activation.value(z)
        derivative = self.activation.derivative(z, y)
        if self.idt is not None:
            idt = self.idt.to(x.dtype)
            y = y * idt
            derivative = derivative * idt
        return self._add_skip(y, x), derivative

    def jvp(self, dx: Tensor, derivative: Tensor) -> Tensor:
        """Return the change of y (B, M) for a change of x (B, N)."""
        weight = self.weight.to(dx.dtype)
        # one input: no product of matrices, as in `_affine`
        change = dx * weight[0] if len(weight) == 1 else dx @ weight
        return self._add_skip(derivative * change, dx)

    def vjp(self, grad: Tensor, derivative: Tensor) -> Tensor:
        """Return the gradient with respect to x (B, N) from that with respect to y (B, M)."""
        # the gradient has the precision of the parameters: the weight is not converted
        back = (grad * derivative) @ self.weight.T
        if self.copies:
            # the skip connection of M == 2 N copied x: both halves lead back to it
            width = back.shape[-1]
            back = back + (
                grad if self.copies == 1 else grad[..., :width] + grad[..., width:]
            )
        return back

    def _affine(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return x @ weight
        bias = self.bias.to(x.dtype)
        # one input: inductor chooses a product of matrices by the number of rows, one graph more
        if len(weight) == 1:
            return torch.addcmul(bias, x, weight[0])
        # all leading dimensions as rows of one product, with the addition of the bias in it
        return torch.addmm(bias, x.flatten(0, -2), weight).view(
            *x.shape[:-1], len(bias)
        )

    def _add_skip(self, y: Tensor, x: Tensor) -> Tensor:
        if not self.copies:
            return y
        return y + (x if self.copies == 1 else torch.cat([x, x], -1))


def module_list(modules: Iterable[ModuleT]) -> Sequence[ModuleT]:
    """Return a ``torch.nn.ModuleList``, for type checkers as a sequence of its modules."""
    return cast("Sequence[ModuleT]", nn.ModuleList(modules))


class RadialFunctions(Protocol):
    """A network whose first input is a number of each pair of atoms, which may be interpolated."""

    @property
    def numbers_per_row(self) -> int:
        """Return the numbers that its layers have for a row of inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output (..., M) of inputs (..., N), in their precision."""

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (..., M) and its derivative (..., M) by the first input."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters."""


class Network(nn.Module):
    """Dense layers one after the other.

    Args:
        widths: number of inputs, then of the outputs of each hidden layer.
        act: activation function of the hidden layers.
        timestep: whether skip connections have a trained step size.
        dtype: precision of the parameters.
        seed: of the initial parameters.
        num_out: outputs of a linear layer at the end, or None to end with the last hidden layer.
        bias: whether the hidden layers have a ``b``.

    Attributes:
        is_tanh: whether all layers are ``tanh(x W + b)`` plus a skip connection, the first one
            without one.
        is_scalar_tanh: whether these are layers of tanh, with step sizes or not, before a linear
            one with one output.
        numbers_per_row: outputs of all layers.
    """

    def __init__(
        self,
        widths: Sequence[int],
        act: str,
        *,
        timestep: bool,
        dtype: torch.dtype,
        seed: int,
        num_out: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden = [
            Layer(
                n,
                m,
                act,
                residual=True,
                timestep=timestep,
                dtype=dtype,
                generator=generator,
                bias=bias,
            )
            for n, m in pairwise(widths)
        ]
        if num_out is not None:
            hidden.append(linear(widths[-1], num_out, dtype, generator))
        self.layers = module_list(hidden)
        # ops/cpu has kernels for networks of these two forms
        tanhs = [
            layer.activation.name == "tanh" and layer.bias is not None
            for layer in hidden
        ]
        has_steps = any(layer.idt is not None for layer in hidden)
        self.is_tanh = all(tanhs) and not hidden[0].copies and not has_steps
        self.is_scalar_tanh = num_out == 1 and bias and all(tanhs[:-1])
        self.numbers_per_row = sum(layer.weight.shape[1] for layer in hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, M)."""
        for layer in self.layers:
            x = layer(x)
        return x

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the outputs (B,) and its gradient with respect to the inputs (B, N).

        Both are ordinary functions of the parameters: a loss of the gradient needs one backward
        pass, not two.
        """
        # (B, M) of each layer, which the gradient takes on its way back
        derivatives = []
        for layer in self.layers:
            x, derivative = layer.with_derivative(x)
            derivatives.append(derivative)
        grad = torch.ones_like(x)
        for layer, derivative in zip(reversed(self.layers), reversed(derivatives)):
            grad = layer.vjp(grad, derivative)
        return x.sum(1), grad

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, M) and its derivative (B, M) with respect to the first input."""
        # the change of x as the first input changes by 1; it goes through the layers with the value
        dx = torch.ones_like(x)
        if x.shape[-1] > 1:
            dx = torch.cat([dx[..., :1], torch.zeros_like(x[..., 1:])], -1)
        for layer in self.layers:
            x, derivative = layer.with_derivative(x)
            dx = layer.jvp(dx, derivative)
        return x, dx


def linear(
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    source: torch.Generator | int,
    bias: bool = True,
) -> Layer:
    """Return a layer without activation function.

    Its parameters are drawn from ``source``, a generator or a seed.
    """
    generator = (
        torch.Generator().manual_seed(source) if isinstance(source, int) else source
    )
    return Layer(
        num_in,
        num_out,
        "none",
        residual=False,
        timestep=False,
        dtype=dtype,
        generator=generator,
        bias=bias,
    )


def embedding_network(
    options: ListSection, num_in: int, dtype: torch.dtype, seed: int
) -> Network:
    """Return the embedding network of ``num_in`` inputs for the options of a descriptor."""
    widths = [num_in, *options.neuron]
    return Network(
        widths,
        options.activation_function,
        timestep=options.resnet_dt,
        dtype=dtype,
        seed=seed,
    )


def freeze(module: nn.Module, trainable: bool | Iterable[bool]) -> None:
    """Take the parameters of ``module`` out of training unless ``trainable``.

    A list of values is true if all of them are.
    """
    wanted = trainable if isinstance(trainable, bool) else all(trainable)
    module.requires_grad_(wanted)
