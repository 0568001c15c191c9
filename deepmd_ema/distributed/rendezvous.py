"""Rendezvous of the ranks of a run, the watch on others, and the rank that reports its end."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from deepmd_ema.distributed.launch import ADDRESS, Launch, write_error_file
from deepmd_ema.errors import Interrupted, RankLostError, Terminated, UserError
from deepmd_ema.text import first_few, printable

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Times to wait, in seconds:
JOIN_S = 300.0  # for all ranks to join: more than the start of a job on many machines takes
PEER_ERROR_S = 3.0  # for a rank that has not been heard of since another one failed: it may be dead
LINGER_S = 10.0  # for a rank that is known to end, or to know why: a loaded machine takes seconds
# for the rank that knows why to end first: torchrun names the first that ended as the root cause
HEAD_START_S = 0.3
MAX_POLL_INTERVAL_S = 0.5
# words in errors of NCCL that name a lost rank; it writes "socket" and "system error" for faults of
# its own too
LOST_PEER = (
    "remote process",
    "remoteerror",
    "connection closed",
    "connection reset",
    "aborted",
    "timeout",
    "timed out",
)
BEAT_INTERVAL_S = 30.0
MAX_MISSED_BEATS = 4  # 2 min: a machine that is busy with other things does not take so long
WATCH_TIMEOUT = timedelta(days=365)  # the message comes when a rank ends as it should
NOTICE_S = 3.0  # for the main thread to notice a loss by itself
EXIT_LOST = 1


class Rendezvous:
    """The key-value store of a run.

    torchrun's agent hosts it; without an agent rank 0 does, until it ends.

    Keys: ``joined K`` and ``ready K`` of rank K (its process and machine), ``ending K``, ``left K``
    (it will not ask the store any more), and ``error``, the number of ranks that wanted to report
    one. Methods raise a RuntimeError of torch where the host of the store has ended.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        me = f"rank {launch.rank} of {launch.size}"
        if missing := [name for name in ADDRESS if name not in os.environ]:
            raise UserError(
                f"started as {me}, but {missing[0]} is not set, so the ranks cannot meet. Launch "
                "with torchrun, or set MASTER_ADDR to the first machine and MASTER_PORT to a free "
                "port of it."
            )
        host, number = (os.environ[name] for name in ADDRESS)
        self._address = host, port = host, int(number)
        self._is_host = launch.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            # tried first: torch prints a trace where it cannot connect
            if not self._is_host and not _wait_for(self._is_up, JOIN_S):
                raise RuntimeError(f"nobody has answered within {JOIN_S:.0f} s")
            limit = timedelta(seconds=JOIN_S)
            store = dist.TCPStore(
                host, port, launch.size, self._is_host, timeout=limit, wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            raise UserError(
                f"{me}: cannot meet at {host}:{port} ({cause_of(error)}). MASTER_ADDR and "
                "MASTER_PORT must be those of the machine of rank 0, which must be running; every "
                "run needs a port of its own."
            ) from error
        # an agent that starts the ranks again keeps its store, with the keys of the first attempt
        self.store = dist.PrefixStore(
            f"dp-ema/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
        )

    def meet(self, key: str) -> None:
        """Wait until all ranks have come to ``key``.

        It is ``joined`` at first, and ``ready`` before they exchange tensors.

        Raises:
            UserError: naming the ranks that are missing, or came twice.
            RankLostError: if another rank has ended, or reports the missing ones.
        """
        rank, size = self._launch.rank, self._launch.size
        me = f"process {os.getpid()} on {socket.gethostname()}"
        if self.store.compare_set(f"{key} {rank}", "", me).decode() != me:
            raise UserError(
                f"another process has come as rank {rank} already: RANK is the same twice, or two "
                f"runs have the same MASTER_PORT = {self._address[1]}. Give every process its own "
                "RANK and every run its own port."
            )
        answered = _wait_for(lambda: not self._missing(key) or self.store.check(["error"]), JOIN_S)
        if not (missing := self._missing(key)):
            return
        # the first of the ranks that came reports who is missing
        reporter = min(set(range(size)) - set(missing))
        if answered or rank > reporter:
            raise RankLostError(
                "ended because another rank could not continue; its message gives the reason"
            )
        raise UserError(
            f"started as rank {rank} of {size}, but rank "
            f"{first_few([str(k) for k in missing], 8)} did not come within {JOIN_S:.0f} s. "
            "WORLD_SIZE must be the number of processes that are started; look for messages of "
            "those that are missing."
        )

    def report_of(self, error: BaseException) -> BaseException | None:
        """Return the error that this rank reports for ``error``, or None if another one reports."""
        rank = self._launch.rank
        if isinstance(error, Interrupted):  # every rank was interrupted
            return error if rank == 0 else None
        # Every rank comes here with its own error, or with one of the collective that another rank
        # did not enter. The first that adds to "error" reports.
        lost = is_peer_lost(error)
        # an error of our own class: the rank that failed has announced it, and is about to report
        patience = LINGER_S if isinstance(error, RankLostError) else PEER_ERROR_S
        try:
            # checked first, because the store would wait minutes for a machine that is gone
            if self._is_up():
                self.store.set(f"ending {rank}", "")
                if lost:  # a rank that knows why comes first, if there is one
                    _wait_for(
                        lambda: self.store.check(["error"]) or not self._missing("ending"), patience
                    )
                is_first = self.store.add("error", 1) == 1
                if lost and is_first:
                    error = self._lost_error(error)
                # the last word to the store, because its host ends when all have left
                self.store.set(f"left {rank}", "")
                if lost and not is_first:
                    time.sleep(HEAD_START_S)
                if self._is_host:
                    _wait_for(lambda: not self._missing("left"), PEER_ERROR_S)
                    _wait_for(
                        lambda: set(self._missing("left")) <= set(self._missing("ending")), LINGER_S
                    )
                return error if is_first else None
        except RuntimeError:  # the store was closed in between
            pass
        # Rank 0 held the store and has ended: nobody can report more, but one message is enough.
        if not lost:
            return error
        if rank != 1:
            return None
        text = "rank 0 has ended; if it left no message, it was killed."
        # by a user, as all ranks, or by a launcher that ends those that are left
        if isinstance(error, Terminated):
            return Terminated(f"{error}; {text}", error.signal_number)
        return RankLostError(text)

    def _lost_error(self, error: BaseException) -> BaseException:
        """Return the report of a rank that lost others, which have ended without a message."""
        # only ranks that joined: get() would wait for the others
        came = (k for k in self._missing("ending") if self.store.check([f"joined {k}"]))
        names = [f"rank {k} ({self.store.get(f'joined {k}').decode()})" for k in came]
        places = first_few(names, 4) or "another rank"
        if isinstance(error, Terminated):
            # sent by a user to all ranks, or by a launcher to those that are left
            silent = (
                f" {places} did not answer: if it was killed, the launcher has ended the others."
                if names
                else ""
            )
            return Terminated(f"{error}.{silent}", error.signal_number)
        return RankLostError(
            f"{places} ended without a message or does not answer: killed by a user, by the "
            "system for lack of memory, or its machine is gone. Checkpoints on the disk are whole."
        )

    def _is_up(self) -> bool:
        """Whether somebody listens at the address of the store, which is known within 5 s."""
        try:
            socket.create_connection(self._address, timeout=5).close()
        except OSError:
            return False
        return True

    def _missing(self, key: str) -> list[int]:
        """Return the ranks that have not set ``key``."""
        ranks = range(self._launch.size)
        # one question for all: there may be thousands
        if self.store.check([f"{key} {k}" for k in ranks]):
            return []
        return [k for k in ranks if not self.store.check([f"{key} {k}"])]


def in_thread(work: Callable[[], T]) -> T:
    """Return ``work()``, done in a thread.

    A signal ends the wait for it; in the main thread Python would run no handler inside torch.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # a daemon: torch may wait for half an hour for a rank that has been killed
    threading.Thread(target=run, name="dp-ema-connect", daemon=True).start()
    return done.result()


@contextmanager
def watched_peers(rendezvous: Rendezvous, launch: Launch, nccl: bool) -> Iterator[None]:
    """Watch the other ranks while the body runs. A collective at both ends with NCCL.

    Rank 0 logs a line about each rank that does not answer: it is stopped, or cut off. A thread of
    each rank counts in the store. The others wait for a rank that is stopped until a timeout of
    half an hour.

    With NCCL another thread watches the next rank. The connections of gloo close when a process
    ends, however that happens. The thread of rank k waits for a message of rank k + 1, which that
    rank sends at its end; if the connection closes instead, the main thread may wait for ever in a
    collective of NCCL, so the thread reports the loss and ends the process. The rank before then
    notices that in turn.
    """
    has_left, store = threading.Event(), rendezvous.store
    group = dist.new_group(backend="gloo", timeout=WATCH_TIMEOUT) if nccl else None

    # Each rank counts up its key, and rank 0 compares the counts: clocks of machines differ.
    def hear() -> None:
        beats, missed = Counter[int](), Counter[int]()
        with suppress(RuntimeError):  # the host of the store has ended
            while not has_left.wait(BEAT_INTERVAL_S):
                if not launch.is_main:
                    store.add(f"beat {launch.rank}", 1)
                for k in range(1, launch.size) if launch.is_main else ():
                    before, beats[k] = beats[k], store.add(f"beat {k}", 0)
                    missed[k] = missed[k] + 1 if beats[k] == before else 0
                    if missed[k] and missed[k] % MAX_MISSED_BEATS == 0:
                        place = store.get(f"joined {k}").decode()
                        minutes = missed[k] * BEAT_INTERVAL_S / 60
                        text = (
                            "waiting for rank %d (%s) for %.2g min: it is stopped, or cannot be "
                            "reached"
                        )
                        logger.warning(text, k, place, minutes)

    def watch() -> None:
        try:
            dist.recv(torch.zeros(1), src=(launch.rank + 1) % launch.size, group=group)
        except RuntimeError as error:
            if has_left.wait(NOTICE_S):
                return  # the main thread reports it, or another error
            report = rendezvous.report_of(dist.DistNetworkError(str(error)))
            if report is not None:
                # written to the descriptor, because _exit() flushes no stream
                message = printable(f"dp-ema (rank {launch.rank}): {report}")
                os.write(2, f"{message}\n".encode())
                write_error_file(message)
            os._exit(EXIT_LOST)

    hearing = threading.Thread(target=hear, name="dp-ema-peers", daemon=True)
    watching = threading.Thread(target=watch, name="dp-ema-peers", daemon=True)
    hearing.start()
    if nccl:
        watching.start()
    try:
        yield
        if nccl:
            dist.send(torch.zeros(1), dst=(launch.rank - 1) % launch.size, group=group)
    finally:
        has_left.set()
        hearing.join(NOTICE_S)  # the store does not answer where its host is stopped
    if nccl:
        watching.join()


def is_peer_lost(error: BaseException) -> bool:
    """Whether ``error`` is the news that another rank has ended."""
    # NCCL raises it for its own faults too, such as a wrong driver
    if isinstance(error, dist.DistBackendError):
        return any(word in str(error).lower() for word in LOST_PEER)
    if isinstance(error, RankLostError | Terminated | dist.DistError):
        return True
    # gloo raises a bare RuntimeError that begins with the path of its source file; "enforce fail"
    # is a wrong setting
    return (
        isinstance(error, RuntimeError)
        and "gloo" in str(error)
        and "enforce fail" not in str(error)
    )


def cause_of(error: BaseException) -> str:
    """Return the line of an error of torch that names its cause."""
    # NCCL names its own reason after "Last error:", and torch the failed call before it
    parts = [part.strip() for part in str(error).split("Last error:", 1)]
    return (parts[-1] or parts[0] or type(error).__name__).splitlines()[0]


def _wait_for(question: Callable[[], bool], seconds: float) -> bool:
    """Ask until the answer is yes or the time is over; Ctrl-C ends it, unlike a wait of torch."""
    began = time.monotonic()
    while not question():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        time.sleep(min(MAX_POLL_INTERVAL_S, 0.02 + waited / 10))
    return True
