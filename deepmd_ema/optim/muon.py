"""AdaMuon and HybridMuon: momentum of matrices made orthogonal, Adam for everything else.

Matrices are made orthogonal by polynomials of themselves, the Newton-Schulz iterations of Muon.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema.distributed.tensors import on_device
from deepmd_ema.model.ops.cpu.product import products
from deepmd_ema.optim.guarded import (
    WEIGHT,
    GuardedOptimizer,
    Out,
    ParameterVector,
    Values,
    adam_state,
)
from deepmd_ema.optim.stacks import Shape, Stacks

Coefficients = Sequence[tuple[float, float, float]]
"""a, b and c of each step ``X <- a X + b (X X^T) X + c (X X^T)^2 X``."""

# Muon (Keller Jordan et al., 2024): steep at 0; singular values end between about 0.7 and 1.2
QUINTIC = (3.4445, -4.7750, 2.0315)
MUON: Coefficients = (QUINTIC,) * 5
# Eight steep steps, then two of 2 x - 1.5 x^3 + 0.5 x^5, which has 1 as a fixed point: singular
# values end at 1.
CONVERGED: Coefficients = (QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2
# Singular values are taken this much larger, so that rounding does not leave the interval in which
# the polynomials of Polar Express converge.
_SAFETY = 1.05
# Polar Express (Amsel et al., arXiv:2505.16932, algorithm 1)
POLAR_EXPRESS: Coefficients = tuple(
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
# Gram Newton-Schulz: the step before which the Gram matrix is taken anew, against rounding
RESTART = 2
NORM_FLOOR = 1e-7  # Muon (Keller Jordan et al., 2024): a matrix of zeros stays zero

RMS = 0.2  # AdaMuon, algorithm 1: the root mean square of an update of Adam
EPS = 1e-8  # AdaMuon, algorithm 1: keeps both denominators from zero
HYBRID_ADAM_EPS = 1e-20  # DeePMD-kit's HybridMuon
MAGMA_MEMORY = 0.9  # Magma (arXiv:2602.15322), algorithm 1: share of the score that stays in a step
MAGMA_TEMPERATURE = 2.0  # Magma, algorithm 1: the divisor of a cosine
MAGMA_FIRST = 0.5  # the score before the first step
MAGMA_LEAST = 0.1  # the damping of an update that points against the gradient
GRAM, POLYNOMIAL = "gram", "polynomial"  # ways in which a matrix is made orthogonal
TINY = 1e-12  # least product of two lengths that a cosine is divided by

# B matrices of R rows and C columns


class AdaMuon(GuardedOptimizer):
    """AdaMuon (arXiv:2507.11005, algorithm 1) for matrices, Adam for scalars and vectors.

    Its numbers are those of DeePMD-kit. With the gradient g of a matrix of R rows and C columns (an
    array of more dims: its first, and all others):

        m <- momentum * m + (1 - momentum) * g
        O  = NewtonSchulz(sign(momentum * m + (1 - momentum) * g))
        v <- momentum * v + (1 - momentum) * O^2             (per element)
        H  = O / (sqrt(v) + eps)
        w <- (1 - lr * weight_decay) * w - lr * a * 0.2 * sqrt(R * C) / |H| * H

    a is ``sqrt(max(1, R / C))`` with ``lr_adjust > 0``, when Adam has the rate ``lr / lr_adjust``;
    else ``lr_adjust_coeff * sqrt(max(R, C))``, and Adam has ``lr``. The direction is taken in
    bfloat16, v and the update in float32, for weights of any precision. Sharded matrices are
    gathered for it.

    Args:
        params: parameters that are trained.
        options: those of the section AdaMuon, and ``lr``.
    """

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zero moments."""
        if not self.kind(p, group):
            return adam_state(p)
        return {
            "momentum": torch.zeros_like(p),
            "second_moment": torch.zeros_like(p, dtype=torch.float32),
        }

    def kind(self, p: Tensor, group: dict[str, Any]) -> Hashable:
        """Return whether a parameter has two dims or more."""
        return p.ndim > 1

    def vector(
        self, parameters: Sequence[Tensor], group: dict[str, Any]
    ) -> ParameterVector:
        """Return parameters of one kind, as matrices where they are."""
        if not self.kind(parameters[0], group):
            return super().vector(parameters, group)
        # one matrix each, whose rows are the first dim
        shapes = [(1, len(p), p.numel() // max(1, len(p))) for p in parameters]
        scales = [
            RMS * math.sqrt(rows * columns) * matrix_scale(group, rows, columns)
            for _, rows, columns in shapes
        ]
        return MatrixVector(parameters, self.state, shapes, scales)

    def updated(
        self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]
    ) -> Values:
        """Return new weights and states by the formulas of the class."""
        if not isinstance(vector, MatrixVector):
            return self.adam_updated(vector, values, out, group)
        lr = group["lr"]
        beta = group["momentum"]
        gradient = vector.gradient()  # (N,), in the precision of the weights
        momentum = torch.lerp(
            values["momentum"], gradient, 1 - beta, out=out["momentum"]
        )
        # Whole matrices from here on, also of sharded parameters: the orthogonal factor of some
        # rows is not those rows of the orthogonal factor. Signs lose nothing in bfloat16.
        signs = torch.lerp(gradient, momentum, beta).sign().to(torch.bfloat16)
        factors = [
            newton_schulz(stack)
            for stack in vector.stacks.stack([vector.full(signs)])[0]
        ]
        # back to the entries of this rank, (N,)
        factor = vector.own(vector.stacks.flatten(factors)).to(torch.float32)
        second = torch.mul(values["second_moment"], beta, out=out["second_moment"])
        second = torch.addcmul(
            second, factor, factor, value=1 - beta, out=out["second_moment"]
        )
        scaled = factor / (second.sqrt() + EPS)
        # one rate for each matrix, (P,), with its norm on all ranks
        rates = (vector.norms(scaled) + EPS).reciprocal() * (vector.scales * lr).to(
            torch.float32
        )
        weights = self.decayed(values[WEIGHT], lr, group["weight_decay"], out[WEIGHT])
        weights = torch.sub(weights, scaled * vector.per_entry(rates), out=out[WEIGHT])
        return {WEIGHT: weights, "momentum": momentum, "second_moment": second}


class HybridMuon(GuardedOptimizer):
    """HybridMuon of DeePMD-kit: Muon, damped as in Magma, with Adam beside it.

    Muon is by Keller Jordan et al., 2024. Dims of size 1 do not count here. Parameters of fewer
    than two other dims go to Adam, and so do those whose name (its last part that is no number, in
    any case) has ``bias`` in it or begins with ``adam_``, all without weight decay; names that
    begin with ``adamw_`` go to AdamW. The remaining ones are matrices of R rows and C columns, by
    ``muon_mode``: ``flat``, all dims but the last are rows;
    ``slice``, the last two, one matrix for each index of those before; ``2d``, more than two dims
    go to AdamW. With the gradient g of a matrix:

        m <- momentum * m + (1 - momentum) * g
        O  = orthogonal factor of (momentum * m + (1 - momentum) * g)
        w <- (1 - lr * weight_decay) * w - lr * a * d * O

    a is ``sqrt(max(1, R / C))`` with ``lr_adjust > 0``, when Adam has the rate ``lr / lr_adjust``;
    else ``lr_adjust_coeff * sqrt(max(R, C))`` (Moonlight, arXiv:2502.16982, equation 4), and Adam
    has ``lr``. With ``magma_muon`` d is ``0.1 + 0.9 s`` for the score s of the matrix, at first
    0.5; without it 1:

        s <- 0.9 * s + 0.1 * q(cos(m, g))
        q(x) = (f(x) - f(-1)) / (f(1) - f(-1))      f(x) = 1 / (1 + exp(-x / 2))

    The orthogonal factor of a matrix that is not square comes from five steps of
    :func:`gram_newton_schulz` with ``enable_gram``, else from ten of :func:`newton_schulz`.

    Args:
        params: groups of parameters that are trained, from :func:`routed`.
        options: those of the section HybridMuon, and ``lr``.
    """

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zero moments, and scores of one half."""
        if not self.kind(p, group):
            return adam_state(p)
        momentum = {"momentum": torch.zeros_like(p)}
        if not group["magma_muon"]:
            return momentum
        # one score for each matrix of the parameter; with `slice` there may be several
        count = view_shape(tuple(p.shape), group["muon_mode"])[0]
        return {
            **momentum,
            "score": torch.full(
                (count,), MAGMA_FIRST, dtype=torch.float32, device=p.device
            ),
        }

    def kind(self, p: Tensor, group: dict[str, Any]) -> Hashable:
        """Return whether the group of a parameter is that of the matrices."""
        return group["route"] == "muon"

    def vector(
        self, parameters: Sequence[Tensor], group: dict[str, Any]
    ) -> ParameterVector:
        """Return parameters of one group, as matrices where they are."""
        if not self.kind(parameters[0], group):
            return super().vector(parameters, group)
        shapes = [view_shape(tuple(p.shape), group["muon_mode"]) for p in parameters]
        scales = [matrix_scale(group, rows, columns) for _, rows, columns in shapes]
        return MatrixVector(
            parameters, self.state, shapes, scales, group["enable_gram"]
        )

    def updated(
        self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]
    ) -> Values:
        """Return new weights and states by the formulas of the class."""
        if not isinstance(vector, MatrixVector):
            decay = group["weight_decay"] if group["route"] == "adamw" else 0.0
            return self.adam_updated(vector, values, out, group, HYBRID_ADAM_EPS, decay)
        lr = group["lr"]
        beta = group["momentum"]
        gradient = vector.gradient()
        momentum = torch.lerp(
            values["momentum"], gradient, 1 - beta, out=out["momentum"]
        )
        new = {"momentum": momentum}
        stacks = vector.stacks
        dtype = gradient.dtype
        # Magma compares momentum and gradient of whole matrices, so these are stacked as well. All
        # that is gathered and stacked goes there in one call: a launch costs more than the copy.
        wanted = [
            torch.lerp(gradient, momentum, beta),
            *([momentum, gradient] if group["magma_muon"] else []),
        ]
        updates, *means_and_gradients = stacks.stack([vector.full(t) for t in wanted])
        # (B, R, C) for each stack
        directions = [
            gram_newton_schulz(t).to(dtype)
            if stack.kind == GRAM
            else newton_schulz(t, CONVERGED)
            for stack, t in zip(stacks.stacks, updates)
        ]
        directions = [
            (d * scale).to(d.dtype)
            for d, scale in zip(directions, vector.scales_in_stacks)
        ]
        if group["magma_muon"]:
            # (M,), from the order of the stacks to that of the parameters, in which scores are
            cosines = cosines_of(*means_and_gradients).index_select(0, stacks.order)
            # the least and the largest value of f, so that q goes from 0 to 1
            low, high = (1 / (1 + math.exp(-x / MAGMA_TEMPERATURE)) for x in (-1, 1))
            agreement = (torch.sigmoid(cosines / MAGMA_TEMPERATURE) - low) / (
                high - low
            )
            new["score"] = score = (
                MAGMA_MEMORY * values["score"] + (1 - MAGMA_MEMORY) * agreement
            )
            damping = MAGMA_LEAST + (1 - MAGMA_LEAST) * score
            pairs = zip(directions, stacks.matrices)
            directions = [
                d * damping[chosen].to(d.dtype)[:, None, None] for d, chosen in pairs
            ]
        direction = vector.own(stacks.flatten([d.to(dtype) for d in directions]))
        weights = self.decayed(values[WEIGHT], lr, group["weight_decay"], out[WEIGHT])
        if weights.is_cpu and not isinstance(lr, Tensor):  # one pass over memory
            new[WEIGHT] = torch.add(weights, direction, alpha=-lr, out=out[WEIGHT])
        else:  # the same bits for a rate of the host and of the device
            new[WEIGHT] = torch.sub(weights, direction * lr, out=out[WEIGHT])
        return new


class MatrixVector(ParameterVector):
    """Parameters that are matrices, as one vector and in stacks.

    Args:
        parameters: of one dtype.
        states: of each parameter.
        shapes: number, rows and columns of the matrices of each.
        scales: factor of the update of these matrices.
        gram: whether matrices that are not square are made orthogonal by their Gram matrices.

    Attributes:
        stacks: of the matrices.
        scales: of each matrix, (M,) float64.
        scales_in_stacks: the same for each stack, (B, 1, 1), in the precision of its directions, at
            least float32.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        states: Mapping[Tensor, Mapping[str, Tensor]],
        shapes: Sequence[Shape],
        scales: Sequence[float],
        gram: bool = False,
    ) -> None:
        super().__init__(parameters, states)
        device = parameters[0].device
        # The Gram matrix of a square matrix is as large as the matrix: it saves nothing.
        kinds = (
            POLYNOMIAL,
            GRAM if gram else POLYNOMIAL,
        )  # for square matrices, and the rest
        self.stacks = Stacks(
            shapes,
            lambda rows, columns: kinds[rows != columns],
            device,
            fill=device.type != "cpu",
        )
        # a parameter that is several matrices (`slice`) has one scale, repeated here for each
        factors = [
            scale for shape, scale in zip(shapes, scales) for _ in range(shape[0])
        ]
        self.scales = on_device(torch.tensor(factors, dtype=torch.float64), device)
        self.scales_in_stacks = []
        for stack, chosen in zip(self.stacks.stacks, self.stacks.matrices):
            # in the precision of the directions of this stack, but in bfloat16 a scale would have
            # three digits
            dtype = parameters[0].dtype if stack.kind == GRAM else torch.bfloat16
            stack_scales = self.scales[chosen].to(
                torch.promote_types(dtype, torch.float32)
            )
            self.scales_in_stacks.append(stack_scales[:, None, None])


def matrix_scale(group: dict[str, Any], rows: int, columns: int) -> float:
    """Return the factor by which the update of a matrix of this shape is multiplied."""
    if group["lr_adjust"] > 0:
        return math.sqrt(max(1.0, rows / columns))
    return float(group["lr_adjust_coeff"] * math.sqrt(max(rows, columns)))


def routed(
    named_parameters: Mapping[str, nn.Parameter], mode: str
) -> list[dict[str, Any]]:
    """Return the parameters in groups with the key ``route``, in which they keep their order."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, p in named_parameters.items():
        groups.setdefault(route(name, tuple(p.shape), mode), []).append(p)
    return [
        {"params": parameters, "route": kind} for kind, parameters in groups.items()
    ]


def route(name: str, shape: tuple[int, ...], mode: str) -> str:
    """Return the route of a parameter, by the rules of :class:`HybridMuon`.

    It is ``muon``, ``adam`` or ``adamw``.
    """
    # numbers are places in lists of modules, as in `layers.0`, and say nothing of the parameter
    parts = [part for part in name.split(".") if not part.isdigit()]
    last = parts[-1].lower() if parts else ""
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


def cosines_of(means: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return the cosine between momentum and gradient of each matrix, (M,) in float32.

    Args:
        means: stacks (B, R, C) of the momentum.
        gradients: the same stacks.
    """
    product = torch.cat([(m * g).sum((1, 2)) for m, g in zip(means, gradients)])
    mean_norms, gradient_norms = (
        torch.cat([torch.linalg.vector_norm(t, dim=(1, 2)) for t in stacks])
        for stacks in (means, gradients)
    )
    lengths = mean_norms * gradient_norms
    # the order of the result is that of the stacks; rounding may take a cosine beyond 1
    return (product / lengths.clamp(min=TINY)).clamp(-1, 1).to(torch.float32)


def newton_schulz(matrices: Tensor, coefficients: Coefficients = MUON) -> Tensor:
    """Return, nearly, the orthogonal factors U V^T of matrices U S V^T, in bfloat16.

    The steps begin with ``X = matrix / |matrix|`` (Frobenius norm). A matrix of zeros stays zero.

    Args:
        matrices: (B, R, C).
        coefficients: of the steps.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x, norms = _wide(matrices.to(torch.bfloat16))
    x = x / norms.clamp(min=NORM_FLOOR)  # the largest singular value is at most 1
    for a, b, c in coefficients:
        # a X + (b G + c G^2) X with the Gram matrix G of the shorter side, in three products
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
        )
    return x.mT if is_tall else x


def gram_newton_schulz(
    matrices: Tensor, coefficients: Coefficients = POLAR_EXPRESS
) -> Tensor:
    """Return the same as :func:`newton_schulz`, by fewer operations when R and C are far apart.

    On CUDA it is in float16, else in float32.

    A step only multiplies X from the left, by a polynomial of ``G = X X^T``. So the steps are taken
    on G, whose size is the smaller of R and C, and their product is applied to X at the end, and
    once in between (Dao et al., 2026, "Gram Newton-Schulz").

    Args:
        matrices: (B, R, C).
        coefficients: of the steps.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x, norms = _wide(matrices.to(torch.float32))
    x = x / (norms + NORM_FLOOR)
    # a CPU multiplies float16 ten times slower than float32
    x = x.to(torch.float16) if x.is_cuda else x
    for part in (coefficients[:RESTART], coefficients[RESTART:]):
        x = products(_left_factor(products(x, x.mT), part), x)
    return x.mT if is_tall else x


def _wide(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices with the longer side as columns, and their Frobenius norms (B, 1, 1)."""
    x = x.mT if x.shape[1] > x.shape[2] else x
    return x, torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)


def _left_factor(gram: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the product of the steps on a matrix with this Gram matrix (B, n, n)."""
    # A step multiplies X by S + a I with S = b G + c G^2, and G by its square: all of them are
    # polynomials of one G, which commute, so that the order of the products does not matter.
    product = None
    for k, (a, b, c) in enumerate(coefficients):
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # S, without a I
        if product is None:
            product = step.clone()
            product.diagonal(dim1=1, dim2=2).add_(a)
        else:
            product = torch.baddbmm(product, product, step, beta=a)
        if k + 1 < len(coefficients):
            # G <- (S + a I) G (S + a I), in two products; the last step needs no further G
            half = torch.baddbmm(gram, gram, step, beta=a)
            gram = torch.baddbmm(half, step, half, beta=a)
    assert product is not None, "there is a step"
    return product
