"""The thread that writes the files of a run during training."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Queue

from deepmd_ema.distributed.world import ANNOUNCED, World
from deepmd_ema.errors import RankLostError

# a tenth of a core where other threads want all of them; measured: the stall of a save is halved
NICENESS = 10
_NAME = "dp-ema-writer"


class Writer:
    """Writes files in a thread, in the order of the jobs: on rank 0 alone, or on every rank.

    Other ranks keep in step with rank 0. The files of one step may wait together, because they
    share their tensors. Those of a later step wait for them in :meth:`begin`, before their tensors
    are copied, so that host memory holds the state of one step at most. What a job refers to must
    stay as it is until the next :meth:`begin` of another step, :meth:`wait` or :meth:`finish`.

    After a job has failed, all others are dropped; its error is raised once, at the next call of
    training.

    Args:
        world: the processes of the run.
        everywhere: whether every rank writes, and does the same jobs in the same order.

    Attributes:
        steps: number of steps of which files were written.
        waits: how often training waited for files of an earlier step.
        waited_s: how long it waited for them, and at its end, in seconds.
        written_s: seconds that the thread took.
        error: what waits to be raised, on this rank.
    """

    def __init__(self, world: World, everywhere: bool = False) -> None:
        self.steps = 0
        self.waits = 0
        self.waited_s = 0.0
        self.written_s = 0.0
        self.error: BaseException | None = None
        self._world = world
        self._writes = everywhere or world.is_main
        self._step: int | None = None  # the step whose tensors may be copied
        self._last: int | None = None  # the last step that had a job
        self._jobs: Queue[Callable[[], None] | None] = Queue()  # None ends the thread
        self._thread: threading.Thread | None = None
        self._has_given_up = False

    def begin(self, step: int | None = None) -> None:
        """Wait until all files of earlier steps are written.

        Every rank must call this before it copies tensors for ``step``. Without a step it waits for
        nothing, and raises what a job has raised.

        Raises:
            UserError: what a job raised, where it did; on other ranks :class:`RankLostError`.
        """
        with self._world.all_ranks_ok():
            if step not in (None, self._step):
                self.waits += self._jobs.unfinished_tasks > 0
                self.wait()
                self._step = step
            self._raise()

    def submit(self, *jobs: Callable[[], None]) -> None:
        """Have ``jobs`` done after those before them; ranks that do not write do nothing."""
        if not self._writes or self._has_given_up:
            return
        if self._step != self._last:
            self.steps += 1
            self._last = self._step
        for job in jobs:
            self._jobs.put(job)
        if self._thread is None:
            # a daemon: a process that is to end at once does not wait for a disk that hangs
            self._thread = threading.Thread(target=self._work, name=_NAME, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until every file is written or given up.

        Call it before files of the run are read.
        """
        began = time.perf_counter()
        self._jobs.join()
        self.waited_s += time.perf_counter() - began

    def finish(self) -> None:
        """Wait until every file is written; every rank must call this.

        Raises:
            UserError: what a job raised, where it did; on other ranks :class:`RankLostError`.
        """
        with self._world.all_ranks_ok():
            self.wait()
            self._raise()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait until every file is written or given up, and end the thread."""
        self.wait()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _raise(self) -> None:
        # RankLostError means that a job has failed on another rank. That rank raises its own error
        # here, and all_ranks_ok() informs this one: both must be in the same collective.
        if self.error is not None and not isinstance(self.error, RankLostError):
            error, self.error = self.error, None
            raise error

    def _work(self) -> None:
        # Training goes first where all cores train; nothing is lost, because it waits for files at
        # its next save. Linux alone gives the threads of a process priorities of their own.
        if sys.platform == "linux":
            with suppress(OSError):  # a container may forbid it
                thread = threading.get_native_id()
                priority = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
                os.setpriority(os.PRIO_PROCESS, thread, priority)
        while (job := self._jobs.get()) is not None:
            began = time.perf_counter()
            if not self._has_given_up:
                try:
                    job()
                # whatever it is, it is raised again in the thread of training
                except BaseException as error:
                    self.error = error
                    self._has_given_up = True
                    vars(error).pop(
                        ANNOUNCED, None
                    )  # it is announced to other ranks once more
            del job  # else its tensors would stay until the next one
            self.written_s += time.perf_counter() - began
            self._jobs.task_done()
        self._jobs.task_done()
