"""The processes of a run: rank and device of this one, their exchange, and their common end."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepmd_ema.distributed.launch import ADDRESS, END_SIGNALS, Launch
from deepmd_ema.distributed.rendezvous import (
    Rendezvous,
    cause_of,
    is_peer_lost,
    watched_peer,
)
from deepmd_ema.errors import RankLostError, ReportedElsewhere, UserError
from deepmd_ema.utils import keep_freed_memory

T = TypeVar("T")

# With gloo a rank that ends is noticed at once, because its connections close; the limits are for
# one that hangs or whose machine is gone. NCCL does not notice an end: there a thread does
# (watched_peer).
# limit of a collective, and of work that one rank does alone during training: writing files
STEP_TIMEOUT = timedelta(minutes=30)
# limit of work that rank 0 does alone before training: reading all data
PREPARATION_TIMEOUT = timedelta(hours=24)
ANNOUNCED = "all_ranks_know"  # attribute of an error that all_ranks_ok has raised


@dataclass(frozen=True)
class World(Launch):
    """The processes that train together. With one process every method returns immediately.

    Made once, by :func:`open_world`, and handed down; nothing else reads the environment. Methods
    are collectives: every rank must call each of them in the same order. They raise an error of
    torch if another rank has ended.

    Attributes:
        device: of this rank; tensors that are exchanged are moved there.
        cpu_group: gloo group for control messages; None means the default group, which is gloo
            itself on CPUs.
        long_timeout_group: gloo group for waiting until rank 0 has prepared the run.
        rendezvous: where the ranks agree on who reports an error; None for one process.
    """

    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    cpu_group: dist.ProcessGroup | None = None
    long_timeout_group: dist.ProcessGroup | None = None
    rendezvous: Rendezvous | None = None

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks, detached, without waiting for the device."""
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def all_reduce_max(
        self, numbers: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> list[int]:
        """Return the largest over the ranks of each of ``numbers``, as many on every rank.

        Waits for the ranks, but not for the device.
        """
        if self.size == 1 or not numbers:
            return list(numbers)
        largest = torch.tensor(numbers)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group or self.cpu_group)
        return largest.tolist()

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Return the value of ``make()`` of rank 0; other ranks do not call it.

        Raises:
            UserError: what ``make`` raised on rank 0; on other ranks :class:`RankLostError`.
        """
        if self.size == 1:
            return make()
        # The ranks first meet in a group with a timeout of a day, in which `make` may read all
        # data; the value is then sent at once.
        box: list[Any] = [None]
        with self.all_ranks_ok(self.long_timeout_group):
            if self.is_main:
                box[0] = make()
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, in their order, and nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(
            value, values if self.is_main else None, group=self.cpu_group
        )
        return values

    def for_writer(self) -> World:
        """Return the same processes with a group of their own, for the thread that writes files.

        A collective.
        """
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=STEP_TIMEOUT)
        return replace(self, cpu_group=group, long_timeout_group=group)

    @contextmanager
    def all_ranks_ok(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Run the body on every rank, and end all ranks if it fails on one.

        Args:
            group: whose timeout is the longest that a rank waits for others; that of a step by
                default.

        Raises:
            RankLostError: where the body succeeded, if it failed on another rank, which raises its
                own error.
        """
        if self.size == 1:
            yield
            return
        assert self.rendezvous is not None
        own_error: Exception | None = None
        try:
            yield
        except Exception as error:
            # Nobody is left who could take part in a collective, or a body inside of this one has
            # informed the others.
            if is_peer_lost(error) or getattr(error, ANNOUNCED, False):
                raise
            own_error = error
        # The ranks exchange the number of the rank that failed, plus 1; of several the largest. If
        # this fails as well, the own error is the one to report.
        failed = 0
        try:
            if own_error is not None:
                self.rendezvous.announce(own_error)
            (failed,) = self.all_reduce_max(
                [0 if own_error is None else self.rank + 1], group
            )
        except RuntimeError:
            if own_error is None:
                raise
        if own_error is not None:
            setattr(own_error, ANNOUNCED, True)
            raise own_error
        if failed:
            raise RankLostError(
                f"ended because rank {failed - 1} could not continue; its message gives the reason"
            )


@contextmanager
def open_world(device: str | None, launch: Launch) -> Iterator[World]:
    """Join the processes that were launched together, and leave them at the end.

    They communicate through NCCL on GPUs, and through gloo on CPUs. An error on one rank ends all,
    and one of them reports it.

    Args:
        device: name of the device of this rank, or None to choose.
        launch: rank of this process and number of ranks.

    Raises:
        UserError: if the environment does not say where the ranks meet, or they do not.
        RankLostError: where this rank is to report that another one has ended without a message.
        ReportedElsewhere: from the error of the body, where another rank reports why the run ends.
    """
    if str(device).startswith("cpu") or not torch.cuda.is_available():
        # before the store and gloo start threads: glibc documents mallopt as unsafe beside others
        keep_freed_memory()
    if not launch.launched or (
        launch.size == 1 and any(name not in os.environ for name in ADDRESS)
    ):
        yield World(**vars(launch), device=select_device(device, launch.local_rank))
        return
    rendezvous = Rendezvous(launch)
    try:
        chosen = select_device(device, launch.local_rank)
        cuda = chosen.type == "cuda"
        if cuda:
            torch.cuda.set_device(chosen)
        # after what a rank may lack: connecting to a rank that has ended takes until a timeout
        rendezvous.meet()

        def connect() -> None:
            if cuda:
                torch.cuda.set_device(chosen)  # a new thread begins with the first GPU
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                timeout=STEP_TIMEOUT,
                rank=launch.rank,
                world_size=launch.size,
                # one client answers one thread at a time, and this one may wait for long
                store=rendezvous.store.clone(),  # type: ignore[attr-defined]
                # NCCL then connects here and not within the first step
                device_id=chosen if cuda else None,
            )

        try:
            # In a daemon thread, as those of this pool are: torch may wait for half an hour for a
            # rank that has been killed, and in the main thread Python would handle no signal.
            with ThreadPool(1) as pool:
                pool.apply(connect)
            cpu_group = (
                dist.new_group(backend="gloo", timeout=STEP_TIMEOUT) if cuda else None
            )
            long_timeout_group = dist.new_group(
                backend="gloo", timeout=PREPARATION_TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            if is_peer_lost(error):
                raise
            raise UserError(
                f"rank {launch.rank} of {launch.size}: the ranks cannot exchange tensors "
                f"({cause_of(error)}). On several machines set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the network interface between them; every rank needs a GPU "
                "of its own."
            ) from error
        world = World(
            **vars(launch),
            device=chosen,
            cpu_group=cpu_group,
            long_timeout_group=long_timeout_group,
            rendezvous=rendezvous,
        )
        default_group = dist.group.WORLD
        with (
            watched_peer(rendezvous, launch)
            if cuda and launch.size > 1
            else nullcontext()
        ):
            yield world
        rendezvous.close()
        # Not after an error: other ranks may have ended, and this would wait for them.
        dist.destroy_process_group()
        # The destructor of a group joins its threads, which may need the interpreter lock. A DDP
        # module that outlives the group would run it while holding the lock, and hang now and then
        # (pytorch issue 56297). So modules go first, and the last reference is a Python one, whose
        # deletion releases the lock.
        gc.collect()
        del default_group
    except (Exception, KeyboardInterrupt) as error:
        if threading.current_thread() is threading.main_thread():
            for number in (
                END_SIGNALS
            ):  # a launcher that ends the others would cut the report off
                signal.signal(number, signal.SIG_IGN)
        report = rendezvous.report_of(error)
        if report is error:
            raise
        raise (report or ReportedElsewhere()) from error


def select_device(name: str | None = None, local_rank: int = 0) -> torch.device:
    """Return the device called ``name``; without one CUDA where there is a GPU, else the CPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``.
        local_rank: of this process on its machine: which GPU ``cuda`` without a number is; where a
            launcher shows each process a GPU of its own, that one.

    Raises:
        UserError: if the device is unknown or absent on this machine, or there are fewer GPUs than
            local ranks.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda" if visible else "cpu"
    if name == "cuda" and visible > 1 and local_rank >= visible:
        raise UserError(
            f"--device cuda: there is no GPU for local rank {local_rank}, this machine shows "
            f"{visible} GPUs. Start {visible} processes per machine, or fewer, or show each "
            "process one GPU (srun --gpus-per-task=1)."
        )
    # a launcher may show each process a GPU of its own, which is number 0 there
    place = f"cuda:{0 if visible == 1 else local_rank}" if name == "cuda" else name
    try:
        chosen = torch.device(place)
        # DP models need float64, which some devices do not have; item() waits, so that errors of
        # the device come here
        torch.zeros((), dtype=torch.float64, device=chosen).item()
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        reason = (
            str(error).splitlines()[0].split(". ")[0]
            if str(error)
            else type(error).__name__
        )
        raise UserError(
            f"--device {name}: is not usable here ({reason}). Use cpu, cuda or cuda:0."
        ) from error
    return chosen
