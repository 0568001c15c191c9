"""The exchange of live weights with an average, complete or undone, and reading both wherever they are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.averaging.average import Average
from deepmd_ema.averaging.binding import Shard
from deepmd_ema.dist.launch import END_SIGNALS, handling
from deepmd_ema.dist.saved_tensors import Take


class Exchange:
    """An average in the place of the live weights, shard by shard, in place.

    Where both have one precision they change places, which takes memory for one tensor. An average in another
    precision, or gathered, does not fit into the live tensor: there the live weights are copied to the device of
    the average. Every rank must call each method when weights are sharded.

    Args:
        average: what is exchanged.
    """

    def __init__(self, average: Average) -> None:
        self.average = average
        self._done = 0  # shards exchanged so far; swap_out() undoes these after a failure
        self._aside: dict[int, Tensor] = {}

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the average into the weights; after a failure :meth:`swap_out` undoes what was done."""
        if not self.average.started:
            return  # it still is the live weights
        self.average.flush()
        storage = self.average.storage
        for i, (shard, mine) in enumerate(zip(storage.shards, storage.tensors)):
            average = storage.local_shard(i)
            if average is mine and mine.dtype == shard.local.dtype:  # else rounding would lose the average
                _swap(shard.local, mine)
            else:
                self._aside[i] = shard.local.detach().to(mine.device, copy=True)
                shard.local.copy_(average)
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
            self._done = i

    def live(self, i: int) -> Tensor:
        """Return the raw weights of shard ``i``, wherever they are now, sharded as the parameter is."""
        storage = self.average.storage
        part = self._aside.get(i, storage.tensors[i]) if i < self._done else storage.shards[i].local
        return storage.shards[i].as_tensor(part)

    def averaged(self, i: int) -> Tensor:
        """Return the average of shard ``i``, wherever it is now, sharded as the parameter is or whole."""
        storage = self.average.storage
        in_weights = i < self._done and i not in self._aside
        return storage.shards[i].as_tensor(storage.shards[i].local) if in_weights else storage.as_tensor(i)


def taken(average: Average | None, exchange: Exchange | None, shards: Sequence[Shard], take: Take) -> dict[str, Any]:
    """Return ``shards`` under ``average`` as this rank saves them, live where it has none or has not started.

    Every rank must call this when weights are sharded.

    Args:
        average: of the weights, or None for the live ones.
        exchange: the average that is in the place of the live weights, if there is one.
        shards: what is wanted.
        take: what is saved of a tensor.

    Returns:
        By every name of a shard; nothing where ``take`` keeps nothing.
    """
    # by first name; later entries take the place of earlier ones
    reads: dict[str, Callable[[], Tensor]] = {s.names[0]: partial(s.as_tensor, s.local) for s in shards}
    if exchange is not None:
        own = exchange.average.storage.shards
        reads |= {shard.names[0]: partial(exchange.live, i) for i, shard in enumerate(own)}
    if average is not None and average.started:
        average.flush()
        is_swapped = exchange is not None and exchange.average is average
        place = exchange.averaged if exchange is not None and is_swapped else average.storage.as_tensor
        reads |= {shard.names[0]: partial(place, i) for i, shard in enumerate(average.storage.shards)}
    found: dict[str, Any] = {}
    for shard in shards:
        kept = take(reads[shard.names[0]]())
        if kept is not None:
            found |= dict.fromkeys(shard.names, kept)
    return found


@contextmanager
def signals_wait() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the body is done, then deliver them as they would have been."""
    arrived: list[int] = []
    held = [s for s in (signal.SIGINT, *END_SIGNALS) if callable(signal.getsignal(s))]
    try:
        with handling(held, lambda number, _frame: arrived.append(number)):
            yield
    finally:
        with ExitStack() as deliveries:  # each one, also after one whose handler raises
            for number in reversed(arrived):
                deliveries.callback(signal.raise_signal, number)


def _swap(one: Tensor, other: Tensor) -> None:
    held = one.detach().clone()
    one.copy_(other)
    other.copy_(held)
