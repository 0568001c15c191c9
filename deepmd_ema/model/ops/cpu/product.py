"""Products of matrices in eager mode, by the library that is fastest for their precision."""

from __future__ import annotations

import torch
from torch import Tensor

# N rows, K columns of the first, M columns of the second

MIN_WORK = 1 << 20  # N K M, below which the call of the other library costs more than it saves


# torch has MKL multiply float32, which uses half of the width of the vector units of processors of other makers.
# oneDNN, which torch has beside it for inference, uses all: 400 instead of 190 GFLOP/s on two cores of an AMD Zen 5
def _has_onednn() -> bool:
    """Whether the operation exists and multiplies as expected: it is private to torch, and may change."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    try:
        return torch.equal(_by_onednn(a, b), a @ b)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    # it multiplies by the transpose of its second argument, the weight of a linear layer
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return found


def _is_intel() -> bool:
    """Whether the processor is of Intel, on which MKL is the faster one: fitting networks take 0.70 of the time."""
    try:
        with open("/proc/cpuinfo") as file:
            return "GenuineIntel" in file.read(1000)
    except OSError:
        return False


USES_ONEDNN = not _is_intel() and _has_onednn()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` (N, M) of matrices (N, K) and (K, M), without a gradient of its own."""
    single = a.dtype == torch.float32 and a.device.type == "cpu"
    if not (USES_ONEDNN and single and a.numel() * b.shape[1] >= MIN_WORK):
        return torch.mm(a, b)
    return _by_onednn(a, b)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` (B, N, M) of matrices (B, N, K) and (B, K, M), without a gradient of its own."""
    # oneDNN has no product of batches here: a loop pays as soon as each matrix alone is large enough
    each = USES_ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu" and a[0].numel() * b.shape[2] >= MIN_WORK
    return torch.stack([product(x, y) for x, y in zip(a, b)]) if each else torch.bmm(a, b)
