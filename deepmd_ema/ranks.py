"""The processes of a run: which one this is, what they tell each other, and how they end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepmd_ema.errors import RankLostError, UserError
from deepmd_ema.launch import MEETING, Launch

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=2)  # for a rank that is busy alone, such as the chief while it reads the data


@dataclass(frozen=True)
class Ranks:
    """The processes that train together; one alone is done at once with everything.

    Every rank must call each method in the same order.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        device: where tensors must be to be exchanged.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    @property
    def chief(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, detached; nothing waits for the device."""
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        with _blaming_others():
            dist.all_reduce(total)
        return total.to(values.device)

    def most(self, number: int) -> int:
        """Return the largest ``number`` of all ranks; waits for the device."""
        if self.size == 1:
            return number
        found = torch.tensor(number, device=self.device)
        with _blaming_others():
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return int(found)

    def from_chief(self, make: Callable[[], T]) -> T:
        """Return what ``make`` gives on the chief; other ranks do not call it.

        Raises:
            UserError: what the chief raised; on other ranks :class:`RankLostError`.
        """
        if self.size == 1:
            return make()
        box: list[Any] = [None]
        with self.together():
            if self.chief:
                box[0] = make()
        with _blaming_others():
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, thing: Any) -> list[Any]:
        """Return the ``thing`` of every rank on the chief, an empty list elsewhere."""
        if self.size == 1:
            return [thing]
        things: list[Any] | None = [None] * self.size if self.chief else None
        with _blaming_others():
            dist.gather_object(thing, things)
        return things or []

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on every rank, and end all of them if it fails on one.

        Raises:
            RankLostError: where the body went well, if it failed on another rank; that one raises its own error.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except RankLostError:
            raise
        except Exception as problem:
            error = problem
        try:
            lost = self.most(self.rank + 1 if error is not None else 0)
        except RankLostError:
            if error is None:
                raise
        if error is not None:
            raise error
        if lost:
            raise RankLostError(f"ended because rank {lost - 1} could not go on; its message says why")


@contextmanager
def open_ranks(device: torch.device, launch: Launch, environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Join the processes that were launched together, and leave them at the end; NCCL on GPUs, gloo on CPUs.

    Raises:
        UserError: if the environment does not say where the ranks meet, or they do not.
    """
    rank, size = launch.rank, launch.size
    if not launch.launched or (size == 1 and any(name not in environ for name in MEETING)):
        yield Ranks(device=device)
        return
    missing = [name for name in MEETING if name not in environ]
    if missing:
        raise UserError(
            f"started as rank {rank} of {size}, but {' and '.join(missing)} are not set, so the ranks cannot meet. "
            "Launch with torchrun, or set them to the first machine and a free port."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = dist.TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            size,
            is_master=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=LONGEST_WAIT,
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        reason = str(error).splitlines()[0]
        raise UserError(f"rank {rank} of {size}: the ranks did not find each other ({reason}).") from error
    yield Ranks(rank, size, device)
    dist.destroy_process_group()  # not after an error: other ranks may be gone, and it would wait for them


@contextmanager
def _blaming_others() -> Iterator[None]:
    """Turn a broken connection into the news that another rank has ended."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one, and gloo raises it bare
        raise RankLostError("ended because another rank did; its message, if it left one, says why") from error
