"""The exchange of live weights with an average, complete or undone, whatever interrupts it."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from deepmd_ema.averaging.average import Average


class Exchange:
    """An average in the place of the live weights, shard by shard, in place.

    Where both have one precision they change places, which takes memory for one tensor. An average in another
    precision, or gathered, does not fit into the live tensor: there the live weights are set aside, on the device of
    the average. Every rank must call each method when weights are sharded.

    Args:
        average: what is exchanged.
    """

    def __init__(self, average: Average) -> None:
        self.average = average
        self._done = 0  # shards exchanged so far: what failed on the way is undone from here
        self._aside: dict[int, Tensor] = {}

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the average into the weights; if it fails on the way, :meth:`swap_out` undoes what was done."""
        if not self.average.started:
            return  # it still is the live weights
        self.average.flush()
        storage = self.average.storage
        for i, (shard, mine) in enumerate(zip(storage.shards, storage.tensors)):
            average = storage.local_shard(i)
            if average is mine and mine.dtype == shard.local.dtype:
                _swap(shard.local, mine)
            else:
                self._aside[i] = shard.local.detach().to(mine.device, copy=True)
                shard.local.copy_(average)
            shard.all_gather_into_param()
            self._done += 1

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the live weights back."""
        storage = self.average.storage
        while self._done:
            i = self._done - 1
            shard = storage.shards[i]
            if i in self._aside:
                shard.local.copy_(self._aside.pop(i))
            else:
                _swap(shard.local, storage.tensors[i])
            shard.all_gather_into_param()
            self._done = i

    def live(self, i: int) -> Tensor:
        """Return the raw weights of shard ``i``, wherever they are now; whole."""
        storage = self.average.storage
        part = self._aside.get(i, storage.tensors[i]) if i < self._done else storage.shards[i].local
        return storage.shards[i].full_tensor(part)

    def averaged(self, i: int) -> Tensor:
        """Return the average of shard ``i``, wherever it is now; whole."""
        storage = self.average.storage
        in_weights = i < self._done and i not in self._aside
        return storage.shards[i].full_tensor(storage.shards[i].local) if in_weights else storage.averaged(i)


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


def _swap(one: Tensor, other: Tensor) -> None:
    held = one.detach().clone()
    one.copy_(other)
    other.copy_(held)
