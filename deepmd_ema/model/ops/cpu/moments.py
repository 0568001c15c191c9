"""Moments of embedding nets of tanh layers, evaluated at each pair in portions of the cache.

A portion stays in the cache from the first layer to the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.reference import Moments, moments

# A atoms, K neighbor slots, M channels of the embedding, N inputs of a layer
# a "jet" (A, 2, K, M) holds values in [:, 0] and derivatives with respect to s in [:, 1]


NUMBERS_IN_CACHE = 1 << 17  # size of a portion for each thread of a CPU


def portions(rows: Tensor, numbers: int) -> list[slice]:
    """Return slices of rows (B, ...) that stay in the cache of a CPU; of a GPU all.

    Each row has ``numbers``.
    """
    if not numbers or not len(rows):
        return []
    # torch gives each thread a part of a portion
    most = NUMBERS_IN_CACHE * torch.get_num_threads() // numbers
    step = len(rows) if rows.is_cuda else max(1, most)
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def tanh_moments(rows: Tensor, net: Network) -> Moments:
    """Return the moments of a net of ``rows`` (A, K, 4), written out if its layers are of tanh."""
    if not net.is_tanh or not rows.numel():
        return moments(rows, net)
    flat = [p for layer in net.layers for p in (layer.weight, layer.bias)]
    copies = tuple(layer.copies for layer in net.layers)
    # values and derivatives of the widest layer, which are read and written again for each
    # operation
    width = 2 * rows.shape[1] * max(layer.weight.shape[1] for layer in net.layers)
    parts = portions(rows, width)
    if torch.is_grad_enabled():
        return Moments(rows, *_TanhMoments.apply(rows, parts, copies, *flat))
    jet = _tanh_jets(rows[..., 0], parts, copies, flat, keep=False)[-1]
    return Moments(rows, torch.bmm(rows.transpose(1, 2), jet[:, 0]), jet)


class _TanhMoments(torch.autograd.Function):
    """Moments and jet of a net of tanh layers without step sizes, computed in portions."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        parts: list[slice],
        copies: tuple[int, ...],
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor]:
        jets = _tanh_jets(rows[..., 0], parts, copies, flat, keep=True)
        ctx.save_for_backward(rows, *flat, *jets)
        ctx.parts = parts
        ctx.copies = copies
        return torch.bmm(rows.transpose(1, 2), jets[-1][:, 0]), jets[-1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_value: Tensor, grad_jet: Tensor
    ) -> tuple[Tensor | None, ...]:
        copies = ctx.copies
        num_layers = len(copies)
        rows, *saved = ctx.saved_tensors
        flat, jets = saved[: 2 * num_layers], saved[2 * num_layers :]
        grads: list[Tensor | None] = [None] * len(flat)
        for part in ctx.parts:
            grad = grad_jet[part].clone()  # autograd may use the gradient elsewhere
            grad[:, 0].baddbmm_(rows[part], grad_value[part])
            for index in range(num_layers - 1, 0, -1):
                # grad is by the jet after layer `index`, grad_z by (z, dz/ds), below by the jet
                # before it
                before = jets[index - 1][part]
                grad_z = _tanh_layer_backward(
                    grad, jets[index][part], before, copies[index]
                )
                num_in, num_out = flat[2 * index].shape
                # weights are sums over atoms, slots, and both rows of the jet
                factors = before.reshape(-1, num_in).T, grad_z.view(-1, num_out)
                so_far = grads[2 * index]
                grads[2 * index] = (
                    torch.mm(*factors) if so_far is None else so_far.addmm_(*factors)
                )
                grads[2 * index + 1] = _plus(
                    grads[2 * index + 1], grad_z[:, 0].sum((0, 1))
                )
                below = torch.mm(grad_z.view(-1, num_out), flat[2 * index].T)
                if copies[index]:
                    skipped = grad.reshape(-1, copies[index], num_in)
                    below.view(-1, 1, num_in).add_(
                        skipped
                        if copies[index] == 1
                        else skipped[:, :1] + skipped[:, 1:]
                    )
                grad = below.view(before.shape)
            # the first layer has the input s and its derivative 1, not a jet
            grad_z = _tanh_layer_backward(grad, jets[0][part], None, 0)
            by_weight = torch.addcmul(
                grad_z[:, 1], rows[part][..., :1], grad_z[:, 0]
            ).sum((0, 1))
            grads[0] = _plus(grads[0], by_weight[None])
            grads[1] = _plus(grads[1], grad_z[:, 0].sum((0, 1)))
        return (
            None,
            None,
            None,
            *(torch.zeros_like(p) if g is None else g for p, g in zip(flat, grads)),
        )


def _plus(so_far: Tensor | None, more: Tensor) -> Tensor:
    return more if so_far is None else so_far.add_(more)


def _tanh_jets(
    s_all: Tensor, parts: list[slice], copies: tuple[int, ...], flat: Any, *, keep: bool
) -> list[Tensor]:
    """Return the jets (A, 2, K, M) after each layer, or only after the last one unless ``keep``."""
    num_atoms, num_slots = s_all.shape
    weights, biases = flat[0::2], flat[1::2]
    last = len(weights) - 1
    jets = [
        s_all.new_empty(num_atoms if keep or i == last else 0, 2, num_slots, w.shape[1])
        for i, w in enumerate(weights)
    ]
    for part in parts:
        s = s_all[part, :, None]
        # without a backward pass the inner layers are written to scratch memory, which stays in the
        # cache
        if keep or last == 0:
            jet = jets[0][part]
        else:
            jet = s.new_empty(len(s), 2, num_slots, weights[0].shape[1])
        torch.addcmul(biases[0], s, weights[0], out=jet[:, 0])
        # (1 - tanh(z)^2) dz/ds, with dz/ds = W
        square = jet[:, 0].tanh_().square()
        torch.addcmul(weights[0][0], square, weights[0][0], value=-1, out=jet[:, 1])
        for index in range(1, last + 1):
            num_in, num_out = weights[index].shape
            z = torch.mm(jet.view(-1, num_in), weights[index]).view(
                -1, 2, num_slots, num_out
            )
            value = z[:, 0].add_(biases[index]).tanh_()
            z[:, 1].addcmul_(value.square(), z[:, 1], value=-1)
            out = jets[index][part] if keep or index == last else z
            # z holds tanh and its derivative alone, so the skip connection is added on the way out
            if copies[index]:
                shape = (-1, copies[index], num_in)
                torch.add(z.view(shape), jet.view(-1, 1, num_in), out=out.view(shape))
            elif out is not z:
                out.copy_(z)
            jet = out
    return jets


def _tanh_layer_backward(
    grad: Tensor, jet: Tensor, before: Tensor | None, copies: int
) -> Tensor:
    """Return the gradient by z and dz/ds from that by ``(y, dy/ds)``, y = tanh(z) + skip.

    y' = (1 - y^2) z', so the gradient of y' reaches z through -2 y y': only values that are at hand
    are needed.
    """
    if copies:
        # without the skip connection the jet is that of tanh alone
        assert before is not None
        width = before.shape[-1]
        tanh_jet = torch.sub(
            jet.reshape(-1, copies, width), before.reshape(-1, 1, width)
        )
        jet = tanh_jet.view(jet.shape)
    value, derivative = jet[:, 0], jet[:, 1]
    grad_z = grad * torch.addcmul(value.new_ones(()), value, value, value=-1).unsqueeze(
        1
    )
    grad_z[:, 0].addcmul_(value * derivative, grad[:, 1], value=-2)
    return grad_z
