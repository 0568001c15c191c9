"""The exchange of live weights with an average, complete or undone, and reading both wherever they are."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema.averaging.average import Average
from deepmd_ema.averaging.binding import Shard
from deepmd_ema.dist.dtensor import full_tensor
from deepmd_ema.dist.launch import END_SIGNALS
from deepmd_ema.dist.own_rows import OwnRows


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

    @property
    def aside(self) -> Iterable[Tensor]:
        """Live weights that do not stand in the average meanwhile."""
        return self._aside.values()

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


def full_tensors(
    average: Average | None,
    exchange: Exchange | None,
    shards: Sequence[Shard],
    keep: bool,
    copy: Callable[[Tensor], Tensor] | None = None,
    own_rows: OwnRows | None = None,
) -> dict[str, Any]:
    """Return the tensors of ``shards`` under ``average``, or live where it has none or has not started; all whole.

    Gathered tensors go to host memory, so that the whole model is never on a device that holds a part of it.

    Args:
        average: of the weights, or None for the live ones.
        exchange: the average that is in the place of the live weights, if there is one.
        shards: what is wanted.
        keep: whether this process wants the tensors; else it only takes part in the collectives.
        copy: makes copies of what is in the memory of the model or of an average; None: it is returned itself.
        own_rows: takes the rows that this process writes, which are returned instead.
    """
    # by first name: the shard as it is held there, and what reads it; later entries take the place of earlier ones
    reads: dict[str, tuple[Shard, Callable[[], Tensor]]] = {
        shard.names[0]: (shard, partial(shard.as_tensor, shard.local)) for shard in shards
    }
    if exchange is not None:
        own = exchange.average.storage.shards
        reads |= {shard.names[0]: (shard, partial(exchange.live, i)) for i, shard in enumerate(own)}
    if average is not None and average.started:
        average.flush()
        is_swapped = exchange is not None and exchange.average is average
        place = exchange.averaged if exchange is not None and is_swapped else average.storage.as_tensor
        own = average.storage.shards
        reads |= {shard.names[0]: (shard, partial(place, i)) for i, shard in enumerate(own)}
    held = {_memory_of(shard.local) for shard in shards}
    for own_average in filter(None, (average, exchange.average if exchange is not None else None)):
        held |= {_memory_of(buffer.flat) for buffer in own_average.storage.buffers}
    held |= {_memory_of(tensor) for tensor in exchange.aside} if exchange is not None else set()
    found: dict[str, Any] = {}
    for wanted in shards:
        shard, read = reads[wanted.names[0]]
        tensor = read()
        if own_rows is not None:
            found |= dict.fromkeys(wanted.names, own_rows(tensor))
            continue
        tensor = full_tensor(tensor)  # also without `keep`: it is a collective where shards are gathered
        if keep:
            if copy is not None and _memory_of(tensor) in held:
                tensor = copy(tensor)
            found |= dict.fromkeys(wanted.names, tensor.cpu() if shard.is_sharded else tensor)
    return found


def reshard(modules: Iterable[nn.Module]) -> None:
    """Drop the gathered weights of sharded modules; they would hide what is copied into the shards."""
    for module in modules:
        for part in module.modules():
            drop = getattr(part, "reshard", None)  # an FSDPModule
            if callable(drop):
                drop()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the body is done, then deliver them as they would have been."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    arrived: list[int] = []
    held = {s: h for s in (signal.SIGINT, *END_SIGNALS) if callable(h := signal.getsignal(s))}
    for s in held:
        signal.signal(s, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for s, handler in held.items():
            signal.signal(s, handler)
        with ExitStack() as deliveries:  # each one, also after one whose handler raises
            for number in reversed(arrived):
                deliveries.callback(signal.raise_signal, number)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _swap(one: Tensor, other: Tensor) -> None:
    held = one.detach().clone()
    one.copy_(other)
    other.copy_(held)
