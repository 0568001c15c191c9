"""Matrices made orthogonal by polynomials of themselves: the Newton-Schulz iterations of Muon."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_ema.model.ops.cpu.product import products

Coefficients = Sequence[tuple[float, float, float]]
"""a, b and c of each step ``X <- a X + b (X X^T) X + c (X X^T)^2 X``."""

QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon (Keller Jordan et al., 2024): steep at 0, ends between about 0.7 and 1.2
MUON: Coefficients = (QUINTIC,) * 5
# eight steep steps and two of 2 x - 1.5 x^3 + 0.5 x^5, which has 1 as a fixed point: singular values end at 1
CONVERGED: Coefficients = (QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2
_SAFETY = 1.05  # singular values are taken this much larger, so that rounding does not leave the interval
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
RESTART = 2  # Gram Newton-Schulz: the step before which the Gram matrix is taken anew, against rounding
NORM_FLOOR = 1e-7  # Muon (Keller Jordan et al., 2024): a matrix of zeros stays zero

# B matrices of R rows and C columns


def newton_schulz(matrices: Tensor, coefficients: Coefficients = MUON) -> Tensor:
    """Return, nearly, the orthogonal factors U V^T of matrices U S V^T, in bfloat16.

    The steps begin with ``X = matrix / |matrix|`` (Frobenius norm). A matrix of zeros stays zero.

    Args:
        matrices: (B, R, C).
        coefficients: of the steps.
    """
    x = matrices.to(torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=NORM_FLOOR)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def gram_newton_schulz(matrices: Tensor, coefficients: Coefficients = POLAR_EXPRESS) -> Tensor:
    """Return the same as :func:`newton_schulz`, by fewer operations when R and C are far apart.

    On CUDA it is in float16, else in float32.

    A step only multiplies X from the left, by a polynomial of ``G = X X^T``. So the steps are taken on G, whose size is
    the smaller of R and C, and their product is applied to X at the end, and once in between (Dao et al., 2026, "Gram
    Newton-Schulz").

    Args:
        matrices: (B, R, C).
        coefficients: of the steps.
    """
    x = matrices.to(torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + NORM_FLOOR)
    x = x.to(torch.float16) if x.is_cuda else x  # a CPU multiplies float16 ten times slower than float32
    for part in (coefficients[:RESTART], coefficients[RESTART:]):
        x = products(_left_factor(products(x, x.mT), part), x)
    return x.mT if tall else x


def _left_factor(gram: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the product of the steps on a matrix with this Gram matrix (B, n, n)."""
    product = None
    for k, (a, b, c) in enumerate(coefficients):
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # without its multiple a of the identity
        if product is None:
            product = step.clone()
            product.diagonal(dim1=1, dim2=2).add_(a)
        else:
            product = torch.baddbmm(product, product, step, beta=a)
        if k + 1 < len(coefficients):
            half = torch.baddbmm(gram, gram, step, beta=a)
            gram = torch.baddbmm(half, step, half, beta=a)
    assert product is not None, "there is a step"
    return product
