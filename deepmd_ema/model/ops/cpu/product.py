"""Products of matrices in eager mode, by the library that is fastest for their precision."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# N rows, K columns of the first, M columns of the second

MIN_WORK = (
    1 << 20
)  # N K M, below which the call of the other library costs more than it saves


@cache
def uses_onednn() -> bool:
    """Whether float32 is multiplied by oneDNN, which torch has beside MKL for inference.

    MKL uses half of the width of the vector units of processors of other makers than Intel: 190
    instead of 400 GFLOP/s on two cores of an AMD Zen 5. On those of Intel it is the faster one:
    fitting networks take 0.70 of the time. The operation is private to torch, and may change: it
    must multiply as expected.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    # [[0, 1, 2], [3, 4, 5]] and so on: small integers, whose products are exact in any order
    a = torch.arange(6.0).view(2, 3)
    b = torch.arange(12.0).view(3, 4)
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
        return not is_intel and torch.equal(by_onednn(a, b), a @ b)
    except (OSError, AttributeError, RuntimeError, TypeError):
        return False


def by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of matrices in float32."""
    # it multiplies by the transpose of its second argument, the weight of a linear layer
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return result


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` (..., N, M) of matrices or stacks of them, without a gradient.

    They are (..., N, K) and (..., K, M).
    """
    single = a.dtype == torch.float32 and a.device.type == "cpu"
    is_stack = a.ndim > 2
    if not (
        single and a.shape[-2] * a.shape[-1] * b.shape[-1] >= MIN_WORK and uses_onednn()
    ):
        return torch.bmm(a, b) if is_stack else torch.mm(a, b)
    # oneDNN has no product of batches here: a loop pays as soon as each matrix alone is large
    # enough
    return (
        torch.stack([by_onednn(x, y) for x, y in zip(a, b)])
        if is_stack
        else by_onednn(a, b)
    )
