"""The processes of a run: which one this is, what they tell each other, and how they end together."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepmd_ema.errors import RankLostError, UserError
from deepmd_ema.dist.launch import MEETING, Launch
from deepmd_ema.dist.rendezvous import Meeting, meet
from deepmd_ema.dist.device import keep_freed_memory, select_device

T = TypeVar("T")

# A rank that ends is noticed at once, because its connections close; time limits are for one whose machine is gone, or
# that hangs. NCCL does not notice: there the launcher ends the others, or this limit.
LONGEST_STEP = timedelta(minutes=30)  # of an exchange, and of what one rank does alone inside a run: writing files
LONGEST_PREPARATION = timedelta(hours=24)  # of what rank 0 does alone before: reading all data
_LOST = re.compile(r"\bgloo\b|NCCL|Connection (?:closed|reset)|Broken pipe|Socket")


@dataclass(frozen=True)
class World:
    """The processes that train together; one alone is done at once with everything.

    Every rank must call each method in the same order.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        device: where tensors must be to be exchanged.
        cpu_group: for what ranks tell each other beside their tensors, in host memory; None for the group of the tensors.
        long_timeout_group: the same, where rank 0 may be busy alone for long.
        local_size: number of processes on this machine.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    cpu_group: dist.ProcessGroup | None = None
    long_timeout_group: dist.ProcessGroup | None = None
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, detached; nothing waits for the device."""
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        with _blaming_others():
            dist.all_reduce(total)
        return total.to(values.device)

    def all_reduce_max(self, number: int) -> int:
        """Return the largest ``number`` of all ranks; waits for them, but not for the device."""
        return number if self.size == 1 else _most(number, self.cpu_group)

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Return what ``make`` gives on rank 0; other ranks do not call it.

        Raises:
            UserError: what rank 0 raised; on other ranks :class:`RankLostError`.
        """
        if self.size == 1:
            return make()
        box: list[Any] = [None]
        with _together(self.rank, self.long_timeout_group):
            if self.is_main:
                box[0] = make()
        with _blaming_others():
            dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]

    @contextmanager
    def all_ranks_ok(self) -> Iterator[None]:
        """Run the body on every rank, and end all of them if it fails on one.

        Raises:
            RankLostError: where the body went well, if it failed on another rank; that one raises its own error.
        """
        if self.size == 1:
            yield
            return
        with _together(self.rank, self.cpu_group):
            yield


@contextmanager
def open_world(
    device: torch.device | str | None, launch: Launch, environ: Mapping[str, str] = os.environ
) -> Iterator[World]:
    """Join the processes that were launched together, and leave them at the end; NCCL on GPUs, gloo on CPUs.

    An error on one rank ends all. Where there are several, the error has an attribute ``says``: whether this rank is
    the one that tells it.

    Args:
        device: where this rank computes, or its name, or None to choose.
        launch: which rank of how many this is.
        environ: where the ranks meet.

    Raises:
        UserError: if the environment does not say where the ranks meet, or they do not.
        RankLostError: if another rank has ended.
    """
    if str(device).startswith("cpu") or not torch.cuda.is_available():
        # before the store and gloo start threads: glibc calls mallopt unsafe once there are others
        keep_freed_memory()
    if not launch.launched or (launch.size == 1 and any(name not in environ for name in MEETING)):
        yield World(device=_device(device))
        return
    with meet(launch, environ) as meeting, _blaming_others(_LOST):
        ranks = _join(_device(device), launch, meeting)
        group = dist.group.WORLD
        yield ranks
        # not after an error: other ranks may be gone, and it would wait for them
        dist.destroy_process_group()
        # A DDP module that outlived the group would end it, holding the interpreter lock that the group's threads may
        # be waiting for, and wait for them: so this is done here, where the lock is given away.
        gc.collect()
        del group


def _device(device: torch.device | str | None) -> torch.device:
    return device if isinstance(device, torch.device) else select_device(device)


def _join(device: torch.device, launch: Launch, meeting: Meeting) -> World:
    rank, size, cuda = launch.rank, launch.size, device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=meeting.store, rank=rank, world_size=size, timeout=LONGEST_STEP
        )
        cpu_group = dist.new_group(backend="gloo", timeout=LONGEST_STEP) if cuda else None
        long_timeout_group = dist.new_group(backend="gloo", timeout=LONGEST_PREPARATION)
    except (RuntimeError, ValueError) as error:
        if _LOST.search(str(error)):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {rank} of {size}: the ranks cannot exchange tensors ({reason}). On several machines set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface between them."
        ) from error
    return World(rank, size, device, cpu_group, long_timeout_group, launch.local_size)


def _most(number: int, group: dist.ProcessGroup | None) -> int:
    found = torch.tensor(number)
    with _blaming_others():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)


@contextmanager
def _together(rank: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    error: Exception | None = None
    try:
        with _blaming_others(_LOST):
            yield
    except RankLostError:
        raise
    except Exception as problem:
        error = problem
    try:
        lost = _most(rank + 1 if error is not None else 0, group)
    except RankLostError:
        if error is None:
            raise
    if error is not None:
        raise error
    if lost:
        raise RankLostError(f"ended because rank {lost - 1} could not go on; its message says why")


@contextmanager
def _blaming_others(words: re.Pattern[str] | None = None) -> Iterator[None]:
    """Turn a broken connection into the news that another rank has ended; an error is one if it has ``words``."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one, and gloo raises it bare
        if words is not None and not isinstance(error, dist.DistError) and not words.search(str(error)):
            raise
        raise RankLostError("ended because another rank did; its message, if it left one, says why") from error
