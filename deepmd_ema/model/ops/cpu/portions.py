"""Portions of arrays that stay in the cache of a CPU."""

from __future__ import annotations

import torch


def portions(count: int, numbers: int, in_cache: int) -> list[slice]:
    """Return slices of ``count`` rows.

    Args:
        count: rows.
        numbers: that an evaluation has for each row.
        in_cache: numbers of a portion, for each thread.
    """
    step = max(1, in_cache * torch.get_num_threads() // max(1, numbers))
    return [slice(start, start + step) for start in range(0, count, step)] if numbers else []


def backward_pass() -> int:
    """Return a number of the backward pass that is under way."""
    return int(torch._C._current_graph_task_id())
