"""Guards around loading and evaluating models: modes of torch that callers have set, and forked processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

logger = logging.getLogger(__name__)

_THREADS_OF = os.getpid()  # the process in which torch may have started threads


@contextmanager
def without_modes(device: torch.device | None = None) -> Iterator[None]:
    """Switch off inference mode, autocast on ``device`` and a default device of the caller within it."""
    with ExitStack() as stack:
        # checked first: to enter them takes time in each step of MD
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if device is not None and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def refrain_from_lost_threads() -> None:
    """Let torch compute with one thread in a process that forked: it would wait for the threads of its parent."""
    if os.getpid() != _THREADS_OF and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logger.warning(
            "this process was forked from another that uses torch, whose threads it does not have: torch computes "
            "with one thread here. Start processes with multiprocessing.set_start_method('spawn') to have more."
        )
