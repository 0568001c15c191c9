"""What guards an exchange of the weights: signals that wait, and weights that are not hidden by gathered copies."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn


def reshard(modules: Iterable[nn.Module]) -> None:
    """Drop the gathered weights of sharded modules; they would hide what is copied into the shards."""
    for module in modules:
        for part in module.modules():
            drop = getattr(part, "reshard", None)  # an FSDPModule
            if callable(drop):
                drop()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the body is done, then deliver them as they would have been."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    arrived: list[int] = []
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    held = {s: h for s, h in handlers.items() if callable(h)}
    for s in held:
        signal.signal(s, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for s, handler in held.items():
            signal.signal(s, handler)
        for number in arrived:
            signal.raise_signal(number)
