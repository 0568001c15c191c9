"""AdaMuon and HybridMuon: momentum of matrices made orthogonal, and Adam for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema.dist.dtensor import from_local, full_tensor, shard_like
from deepmd_ema.optim.guarded import GuardedOptimizer, adam_state, adam_update, batches, shards
from deepmd_ema.optim.orthogonal import CONVERGED, gram_newton_schulz, newton_schulz

RMS = 0.2  # AdaMuon, algorithm 1: the root mean square of an update of Adam
EPS = 1e-8  # AdaMuon, algorithm 1: keeps both denominators from zero
HYBRID_ADAM_EPS = 1e-20  # DeePMD-kit's HybridMuon
MAGMA_MEMORY = 0.9  # Magma (arXiv:2602.15322), algorithm 1: what of the score stays at a step,
MAGMA_TEMPERATURE = 2.0  # and by what a cosine is divided
MAGMA_FIRST = 0.5
MAGMA_LEAST = 0.1  # the damping of an update that points against the gradient
TINY = 1e-12  # least product of two lengths that a cosine is divided by


class AdaMuon(GuardedOptimizer):
    """AdaMuon (arXiv:2507.11005, algorithm 1) for matrices, Adam for scalars and vectors, as in DeePMD-kit.

    With the gradient g of a matrix of R rows and C columns (an array of more dims: its first, and all others):

        m <- momentum * m + (1 - momentum) * g
        O  = NewtonSchulz(sign(momentum * m + (1 - momentum) * g))
        v <- momentum * v + (1 - momentum) * O^2             (per element)
        H  = O / (sqrt(v) + eps)
        w <- (1 - lr * weight_decay) * w - lr * a * 0.2 * sqrt(R * C) / |H| * H

    a is ``sqrt(max(1, R / C))`` with ``lr_adjust > 0``, when Adam has the rate ``lr / lr_adjust``; else
    ``lr_adjust_coeff * sqrt(max(R, C))``, and Adam has ``lr``. The direction is taken in bfloat16, v and the update in
    float32, for weights of any precision. Sharded matrices are gathered for it.

    Args:
        params: parameters that are trained.
        options: those of the section AdaMuon, and ``lr``.
    """

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zero moments."""
        if p.ndim < 2:
            return adam_state(p)
        return {"momentum": torch.zeros_like(p), "second_moment": torch.zeros_like(p, dtype=torch.float32)}

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update parameters and states by the formulas of the class."""
        adam_update([p for p in parameters if p.ndim < 2], group, self.state)
        lr, beta = group["lr"], group["momentum"]
        for batch in batches([p for p in parameters if p.ndim > 1], one_matrix):
            _, rows, columns = one_matrix(batch[0])
            gradients, weights = shards(p.grad for p in batch), shards(batch)
            momenta, seconds = (shards(self.state[p][key] for p in batch) for key in ("momentum", "second_moment"))
            torch._foreach_lerp_(momenta, gradients, 1 - beta)
            signs = [t.sign().to(torch.bfloat16) for t in torch._foreach_lerp(gradients, momenta, beta)]
            factors = own_parts(newton_schulz(full_matrices(signs, batch, one_matrix)).to(torch.float32), batch)
            torch._foreach_mul_(seconds, beta)
            torch._foreach_addcmul_(seconds, factors, factors, value=1 - beta)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            size = RMS * math.sqrt(rows * columns) * matrix_scale(rows, columns, group)
            for p, weight, factor, second in zip(batch, weights, factors, seconds):
                scaled = factor / (second.sqrt() + EPS)
                norm = full_tensor(torch.linalg.vector_norm(from_local(scaled, p)))
                weight.sub_(scaled * (lr * size / (norm + EPS)))


class HybridMuon(GuardedOptimizer):
    """HybridMuon of DeePMD-kit: Muon (Keller Jordan et al., 2024), damped as in Magma, with Adam beside it.

    Dims of size 1 do not count here. Parameters of fewer than two other dims go to Adam, and so do those whose name
    (its last part that is no number, in any case) has ``bias`` in it or begins with ``adam_``, all without weight
    decay; names that begin with ``adamw_`` go to AdamW. The others are matrices of R rows and C columns: ``flat``, all
    dims but the last are rows; ``slice``, the last two, one matrix for each index of those before; ``2d``, more than
    two dims go to AdamW. With the gradient g of a matrix:

        m <- momentum * m + (1 - momentum) * g
        O  = orthogonal factor of (momentum * m + (1 - momentum) * g)
        w <- (1 - lr * weight_decay) * w - lr * a * d * O

    a is ``sqrt(max(1, R / C))`` with ``lr_adjust > 0``, when Adam has the rate ``lr / lr_adjust``; else
    ``lr_adjust_coeff * sqrt(max(R, C))`` (Moonlight, arXiv:2502.16982, equation 4), and Adam has ``lr``.
    With ``magma_muon`` d is ``0.1 + 0.9 s`` for the score s of the matrix, at first 0.5; without it 1:

        s <- 0.9 * s + 0.1 * q(cos(m, g))      q(x) = (f(x) - f(-1)) / (f(1) - f(-1))      f(x) = 1 / (1 + exp(-x / 2))

    The orthogonal factor of a matrix that is not square comes from five steps of :func:`gram_newton_schulz` with
    ``enable_gram``, else from ten of :func:`newton_schulz`.

    Args:
        params: groups of parameters that are trained, from :func:`routed`.
        options: those of the section HybridMuon, and ``lr``.
    """

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zero moments, and scores of one half."""
        if group["route"] != "muon":
            return adam_state(p)
        momentum = {"momentum": torch.zeros_like(p)}
        if not group["magma_muon"]:
            return momentum
        count = view_shape(tuple(p.shape), group["muon_mode"])[0]
        return {**momentum, "score": torch.full((count,), MAGMA_FIRST, dtype=torch.float32, device=p.device)}

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update parameters and states by the formulas of the class."""
        if group["route"] != "muon":
            decay = group["weight_decay"] if group["route"] == "adamw" else 0.0
            adam_update(parameters, group, self.state, HYBRID_ADAM_EPS, decay)
            return
        lr, beta = group["lr"], group["momentum"]

        def shape_of(p: Tensor) -> tuple[int, int, int]:
            return view_shape(tuple(p.shape), group["muon_mode"])

        for batch in batches(parameters, lambda p: shape_of(p)[1:]):
            _, rows, columns = shape_of(batch[0])
            gradients, weights = shards(p.grad for p in batch), shards(batch)
            momenta = shards(self.state[p]["momentum"] for p in batch)
            torch._foreach_lerp_(momenta, gradients, 1 - beta)
            direction = full_matrices(torch._foreach_lerp(gradients, momenta, beta), batch, shape_of)
            if group["enable_gram"] and rows != columns:
                direction = gram_newton_schulz(direction).to(weights[0].dtype)
            else:
                direction = newton_schulz(direction, CONVERGED)
            direction = direction * matrix_scale(rows, columns, group)
            if group["magma_muon"]:
                scores = [self.state[p]["score"] for p in batch]
                means, unaveraged = (full_matrices(t, batch, shape_of) for t in (momenta, gradients))
                score = magma_score(means, unaveraged, torch.cat(scores))
                torch._foreach_copy_(scores, score.split([len(t) for t in scores]))
                damping = MAGMA_LEAST + (1 - MAGMA_LEAST) * score
                direction = direction * damping.to(direction.dtype)[:, None, None]
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_add_(weights, own_parts(direction.to(weights[0].dtype), batch), alpha=-lr)


def full_matrices(
    parts: Sequence[Tensor], batch: Sequence[Tensor], shape_of: Callable[[Tensor], tuple[int, int, int]]
) -> Tensor:
    """Return the matrices (B, R, C) of all parameters of a batch, gathered from all ranks if these are sharded.

    Args:
        parts: one for each parameter, of the shape of its part on this rank.
        batch: parameters, whose matrices are of one shape.
        shape_of: returns how many matrices of how many rows and columns a parameter is.
    """
    return torch.cat([full_tensor(from_local(t, p)).reshape(shape_of(p)) for t, p in zip(parts, batch)])


def own_parts(matrices: Tensor, batch: Sequence[Tensor]) -> list[Tensor]:
    """Return the result of :func:`full_matrices` as parts of the parameters on this rank."""
    full = matrices.reshape(-1).split([p.numel() for p in batch])
    return [shard_like(t.view(p.shape), p) for t, p in zip(full, batch)]


def one_matrix(p: Tensor) -> tuple[int, int, int]:
    """Return the shape of a parameter as one matrix, whose rows are its first dim: 1, R, C."""
    return 1, p.shape[0], p.numel() // max(1, p.shape[0])


def matrix_scale(rows: int, columns: int, group: dict[str, Any]) -> float:
    """Return the factor by which the update of a matrix of this shape is multiplied."""
    if group["lr_adjust"] > 0:
        return math.sqrt(max(1.0, rows / columns))
    return float(group["lr_adjust_coeff"] * math.sqrt(max(rows, columns)))


def routed(named_parameters: Mapping[str, nn.Parameter], mode: str) -> list[dict[str, Any]]:
    """Return the parameters in groups with the key ``route``; those of a group stay in their order."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, p in named_parameters.items():
        groups.setdefault(route(name, tuple(p.shape), mode), []).append(p)
    return [{"params": parameters, "route": kind} for kind, parameters in groups.items()]


def route(name: str, shape: tuple[int, ...], mode: str) -> str:
    """Return ``muon``, ``adam`` or ``adamw`` for a parameter, by the rules of :class:`HybridMuon`."""
    words = [word for word in name.split(".") if not word.isdigit()]
    last = words[-1].lower() if words else ""
    if "bias" in last or last.startswith("adam_"):
        return "adam"
    if last.startswith("adamw_"):
        return "adamw"
    rank = sum(size != 1 for size in shape)
    if rank < 2:
        return "adam"
    return "adamw" if mode == "2d" and rank > 2 else "muon"


def view_shape(shape: tuple[int, ...], mode: str) -> tuple[int, int, int]:
    """Return the number, rows and columns of the matrices that a parameter is split into."""
    sizes = [size for size in shape if size != 1]
    if mode == "flat":
        return 1, math.prod(sizes[:-1]), sizes[-1]
    return math.prod(sizes[:-2]), sizes[-2], sizes[-1]


def magma_score(means: Tensor, gradients: Tensor, score: Tensor) -> Tensor:
    """Return the new score of each matrix: how well its gradient agrees with the mean of gradients.

    Args:
        means: (B, R, C).
        gradients: (B, R, C).
        score: (B,) float32.
    """
    product = (means * gradients).sum((1, 2))
    lengths = torch.linalg.vector_norm(means, dim=(1, 2)) * torch.linalg.vector_norm(gradients, dim=(1, 2))
    cosine = (product / lengths.clamp(min=TINY)).clamp(-1, 1).to(torch.float32)
    low, high = (1 / (1 + math.exp(-x / MAGMA_TEMPERATURE)) for x in (-1, 1))
    now = (torch.sigmoid(cosine / MAGMA_TEMPERATURE) - low) / (high - low)
    return MAGMA_MEMORY * score + (1 - MAGMA_MEMORY) * now
