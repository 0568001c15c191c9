"""Rendezvous of the ranks of a run, the watch on others, and the rank that reports its end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from deepmd_ema.distributed.launch import ADDRESS, Launch, write_error_file
from deepmd_ema.errors import Interrupted, RankLostError, Terminated, UserError
from deepmd_ema.text import first_few, printable

# Times to wait, in seconds:
JOIN_S = (
    300.0  # for all ranks to join: more than the start of a job on many machines takes
)
GRACE_S = 3.0  # for a rank that has not been heard of since another one failed: it may be dead
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
FOREVER = timedelta(days=365)  # for messages that come when a run ends
EXIT_LOST = 1
_RUNS = count()  # of this process


class Rendezvous:
    """The key-value store of a run.

    torchrun's agent hosts it; without an agent rank 0 does, until it ends.

    Keys: ``joined K`` of rank K (its process and machine), ``ending K``, ``error``, the number of
    ranks that wanted to report one, and ``reported K``, which informs rank K that the first of them
    does. Methods raise a RuntimeError of torch where the host of the store has ended.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._is_reporter = False
        self._announced: Exception | None = (
            None  # an error of this rank, which it reports
        )
        self._is_reported = threading.Event()
        me = f"rank {launch.rank} of {launch.size}"
        if missing := [name for name in ADDRESS if name not in os.environ]:
            raise UserError(
                f"started as {me}, but {missing[0]} is not set, so the ranks cannot meet. Launch "
                "with torchrun, or set MASTER_ADDR to the first machine and MASTER_PORT to a free "
                "port of it."
            )
        host, number = (os.environ[name] for name in ADDRESS)
        self._address = host, port = host, int(number)
        is_host = (
            launch.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )
        try:
            # tried first: torch prints a trace where it cannot connect
            if not is_host and not _wait_for(self._is_up, JOIN_S):
                raise RuntimeError(f"nobody has answered within {JOIN_S:.0f} s")
            limit = timedelta(seconds=JOIN_S)
            store = dist.TCPStore(
                host, port, launch.size, is_host, timeout=limit, wait_for_workers=False
            )
        except (
            RuntimeError,
            ValueError,
        ) as error:  # torch's DistError is a RuntimeError
            raise UserError(
                f"{me}: cannot meet at {host}:{port} ({cause_of(error)}). MASTER_ADDR and "
                "MASTER_PORT must be those of the machine of rank 0, which must be running; every "
                "run needs a port of its own."
            ) from error
        # an agent keeps its store, with the keys of earlier runs: of ranks that it has started
        # again, and of these processes
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"dp-ema/{attempt}/{next(_RUNS)}", store)
        # a client of its own: another one answers one thread at a time
        listener = self.store.clone()  # type: ignore[attr-defined]
        self._listening = threading.Thread(
            target=self._listen, args=(listener,), name="dp-ema-report", daemon=True
        )
        self._listening.start()

    def meet(self) -> None:
        """Wait until all ranks have joined.

        Raises:
            UserError: naming the ranks that are missing, or came twice.
            RankLostError: if another rank reports an error.
        """
        rank, size = self._launch.rank, self._launch.size
        me = f"process {os.getpid()} on {socket.gethostname()}"
        if self.store.compare_set(f"joined {rank}", "", me).decode() != me:
            raise UserError(
                f"another process has come as rank {rank} already: RANK is the same twice, or two "
                f"runs have the same MASTER_PORT = {self._address[1]}. Give every process its own "
                "RANK and every run its own port."
            )
        _wait_for(
            lambda: self._is_reported.is_set() or not self._missing("joined"), JOIN_S
        )
        missing = self._missing("joined")
        if not missing:
            return
        if self._is_reported.is_set():
            raise RankLostError(
                "ended because another rank could not continue; its message gives the reason"
            )
        raise UserError(
            f"started as rank {rank} of {size}, but rank "
            f"{first_few([str(k) for k in missing], 8)} did not come within {JOIN_S:.0f} s. "
            "WORLD_SIZE must be the number of processes that are started; look for messages of "
            "those that are missing."
        )

    def announce(self, error: Exception) -> None:
        """Claim the report of the end of the run for ``error`` of this rank.

        Called before other ranks learn that this one has failed: however late it comes to
        :meth:`report_of`, they leave the report to it.
        """
        if self._claim():
            self._announced = error

    def report_of(self, error: BaseException) -> BaseException | None:
        """Return the error that this rank reports for ``error``, or None if another one reports."""
        rank = self._launch.rank
        if isinstance(error, Interrupted):  # every rank was interrupted
            self.close()
            return error if rank == 0 else None
        # Every rank comes here with its own error, or with one of the collective that another rank
        # did not enter. The first that claims the report makes it.
        lost = is_peer_lost(error)
        if self._announced is not None:
            # this rank has claimed it before, and others may have ended since then
            return self._announced if lost else error
        try:
            # checked first, because the store would wait minutes for a machine that is gone
            if self._is_up():
                self.store.set(f"ending {rank}", "")
                # A rank that knows why has claimed the report before this one lost it. A rank that
                # was killed is known when the others have come.
                if lost:
                    _wait_for(
                        lambda: (
                            self._is_reported.is_set() or not self._missing("ending")
                        ),
                        GRACE_S,
                    )
                if not self._claim():
                    # torchrun names the rank that ended first as the root cause
                    time.sleep(MAX_POLL_INTERVAL_S)
                    return None
                return self._lost_error(error) if lost else error
        except RuntimeError:  # the store was closed in between
            pass
        # Rank 0 held the store and has ended: it has reported why, or was killed. Nobody can report
        # more, but one message is enough.
        self._listening.join(GRACE_S)
        if self._is_reported.is_set():
            return None
        if not lost:
            return error
        if rank != 1:
            return None
        text = "rank 0 has ended; if it left no message, it was killed."
        # by a user, as all ranks, or by a launcher that ends those that are left
        if isinstance(error, Terminated):
            return Terminated(f"{error}; {text}", error.signal_number)
        return RankLostError(text)

    def close(self) -> None:
        """End the thread of this rank, where the run ends without an error."""
        with suppress(
            RuntimeError
        ):  # the host of the store has ended, and so has the thread
            self.store.set(f"reported {self._launch.rank}", "")
        self._listening.join(
            GRACE_S
        )  # the store does not answer where its host is stopped

    def _listen(self, store: dist.Store) -> None:
        # The store sends the answer by itself: this rank has it even where its main thread hangs in
        # a collective, and where the rank that reports is the host of the store and ends.
        with suppress(RuntimeError):  # the host has ended
            store.wait([f"reported {self._launch.rank}"], FOREVER)
            self._is_reported.set()

    def _claim(self) -> bool:
        """Whether this rank reports why the run ends: the first that claims it does."""
        if not self._is_reporter and self.store.add("error", 1) == 1:
            self._is_reporter = True
            # rank 0 last: it may be the host of the store, and then ends
            for k in reversed(range(self._launch.size)):
                self.store.set(f"reported {k}", "")
        self._listening.join(GRACE_S)
        return self._is_reporter

    def _lost_error(self, error: BaseException) -> BaseException:
        """Return the report of a rank that lost others, which have ended without a message."""
        # only ranks that joined: get() would wait for the others
        came = (k for k in self._missing("ending") if self.store.check([f"joined {k}"]))
        names = [f"rank {k} ({self.store.get(f'joined {k}').decode()})" for k in came]
        places = first_few(names, 4) or "another rank"
        if isinstance(error, Terminated):
            # sent by a user to all ranks, or by a launcher to those that are left
            hint = (
                f" {places} did not answer: if it was killed, the launcher has ended the others."
                if names
                else ""
            )
            return Terminated(f"{error}.{hint}", error.signal_number)
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


@contextmanager
def watched_peer(rendezvous: Rendezvous, launch: Launch) -> Iterator[None]:
    """End this process if the next rank ends while the body runs. A collective at both ends.

    Needed with NCCL, which does not report that a rank has ended: the main thread may wait for ever
    in a collective. The connections of gloo close when a process ends, however that happens. A
    thread of rank k waits for a message of rank k + 1, which that rank sends at its end; if the
    connection closes instead, the thread reports the loss and ends the process. The rank before
    then notices that in turn.
    """
    has_left = threading.Event()
    group = dist.new_group(backend="gloo", timeout=FOREVER)

    def watch() -> None:
        try:
            dist.recv(torch.zeros(1), src=(launch.rank + 1) % launch.size, group=group)
        except RuntimeError as error:
            if has_left.wait(GRACE_S):
                return  # the main thread has noticed it, and reports it or another error
            report = rendezvous.report_of(dist.DistNetworkError(str(error)))
            if report is not None:
                # written to the descriptor, because _exit() flushes no stream
                message = printable(f"dp-ema (rank {launch.rank}): {report}")
                os.write(2, f"{message}\n".encode())
                write_error_file(message)
            os._exit(EXIT_LOST)

    thread = threading.Thread(target=watch, name="dp-ema-peer", daemon=True)
    thread.start()
    try:
        yield
        dist.send(torch.zeros(1), dst=(launch.rank - 1) % launch.size, group=group)
    finally:
        has_left.set()
    thread.join()


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
