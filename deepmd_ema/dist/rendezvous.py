"""Where the ranks of a run find each other, and which of them says why it ended."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from deepmd_ema.errors import Interrupted, RankLostError, UserError
from deepmd_ema.dist.launch import MEETING, Launch

MEETING_S = 300.0  # for all ranks to come: more than the start of a job on many machines takes
NEWS_S = 2.0  # that a rank which was left alone waits for the one that knows why
SEE_OFF_S = 1.0  # that rank 0 waits for others to hear from it
HEAD_START_S = 0.3  # for the rank that knows why to end first, so that a launcher names it
_LONGEST_PAUSE_S = 0.5  # between two questions


class Meeting:
    """A notice board that every rank reads and writes, until the process that holds it ends.

    Under ``torchrun`` its agent holds it; without, rank 0 does.
    """

    def __init__(self, launch: Launch, store: dist.Store, address: tuple[str, int], hosted: bool) -> None:
        self.store = store
        self._launch, self._address, self._hosted = launch, address, hosted

    def come(self) -> None:
        """Wait until all ranks are here.

        Raises:
            UserError: naming who is missing, or came twice.
        """
        rank, size = self._launch.rank, self._launch.size
        if self.store.add(_came(rank), 1) > 1:
            raise UserError(
                f"another process has come as rank {rank} already: RANK is the same twice, or two runs have the same "
                f"MASTER_PORT = {self._address[1]}. Give every process its own RANK and every run its own port."
            )
        self.store.set(_who(rank), f"process {os.getpid()} on {socket.gethostname()}")
        if _wait_for(lambda: not self._is_open() or not self._missing(_came), MEETING_S) and self._is_open():
            return
        missing = self._missing(_came) if self._is_open() else [0]
        if rank > 0 and rank > min(set(range(size)) - set(missing)):
            raise RankLostError("the ranks did not find each other")  # the first that is here says it
        raise UserError(
            f"started as rank {rank} of {size}, but {_named(missing)} did not come within {MEETING_S:.0f} s. "
            "WORLD_SIZE must be the number of processes that are started; look for messages of those that are missing."
        )

    def take_the_word(self) -> bool:
        """Whether this rank is the first to say why the run ends."""
        try:
            if not self._is_open():
                return True
            self.store.set(_left(self._launch.rank), "")
            return self.store.add("word", 1) == 1
        except RuntimeError:  # closed in between
            return True

    def last_words(self) -> str | None:
        """Return what to say where another rank has ended, or None where it has been said; takes a moment at most."""
        try:
            if self._is_open():
                return self._news()
        except RuntimeError:  # closed in between
            pass
        # one line is enough, though nobody can be asked any more
        return "rank 0 has ended; if it left no message, it was killed." if self._launch.rank == 1 else None

    def see_off(self) -> None:
        """Hold the board for a moment, for those who are about to read it."""
        if self._hosted:
            _wait_for(lambda: not self._missing(_left), SEE_OFF_S)

    def _news(self) -> str | None:
        self.store.set(_left(self._launch.rank), "")
        _wait_for(lambda: not self._is_open() or self.store.check(["word"]), NEWS_S)
        if self.store.add("word", 1) > 1:
            time.sleep(HEAD_START_S)
            return None
        lost = self._missing(_left)
        places = ", ".join(f"rank {k} ({self.store.get(_who(k)).decode()})" for k in lost[:4])
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        return (
            f"{places or 'another rank'}{more} ended without a message or does not answer: killed by hand, by the "
            "system for want of memory, or its machine is gone. Checkpoints on the disk are whole."
        )

    def _missing(self, key: Callable[[int], str]) -> list[int]:
        ranks = range(self._launch.size)
        if self.store.check([key(k) for k in ranks]):
            return []
        return [k for k in ranks if not self.store.check([key(k)])]

    def _is_open(self) -> bool:
        # asked before the store is: that one fills the screen when its host is gone
        return self._hosted or _listens(self._address)


@contextmanager
def meet(launch: Launch, environ: Mapping[str, str] = os.environ) -> Iterator[Meeting]:
    """Find the other ranks; on an error in the body, settle which of them tells it: ``says`` of the error.

    Raises:
        UserError: if the environment does not say where the ranks meet, or they do not.
    """
    address = _address(launch, environ)
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = Meeting(launch, _open_store(launch, address, agent, environ), address, launch.rank == 0 and not agent)
    try:
        meeting.come()
        yield meeting
    except Interrupted:
        raise  # all ranks have it, and rank 0 says it
    except RankLostError as error:
        _be_left_in_peace()
        words = meeting.last_words()
        meeting.see_off()
        raise _saying(RankLostError(words or str(error)), words is not None) from error
    except (Exception, KeyboardInterrupt) as error:
        _be_left_in_peace()
        says = meeting.take_the_word()
        meeting.see_off()
        raise _saying(error, says)  # noqa: B904 - it is the same error


def _saying(error: BaseException, says: bool) -> BaseException:
    error.says = says  # type: ignore[attr-defined]
    return error


def _be_left_in_peace() -> None:
    """Let no launcher that ends the others cut off the last words of this rank."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _address(launch: Launch, environ: Mapping[str, str]) -> tuple[str, int]:
    rank, size = launch.rank, launch.size
    missing = [name for name in MEETING if name not in environ]
    if missing:
        raise UserError(
            f"started as rank {rank} of {size}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "set, so the ranks cannot meet. Launch with torchrun, or set MASTER_ADDR to the first machine and "
            "MASTER_PORT to a free port of it."
        )
    host, port = (environ[name] for name in MEETING)
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_PORT = {port!r}: expected a port number, 1 to 65535, that is free on {host}.")
    return host, int(port)


def _open_store(launch: Launch, address: tuple[str, int], agent: bool, environ: Mapping[str, str]) -> dist.Store:
    host, port = address
    hosts = launch.rank == 0 and not agent
    if hosts and _listens(address):
        raise UserError(f"MASTER_PORT = {port}: in use on {host}. Choose another port; every run needs its own.")
    if not hosts and not _wait_for(lambda: _listens(address), MEETING_S):
        raise UserError(
            f"rank {launch.rank} of {launch.size}: nobody has answered at {host}:{port} within {MEETING_S:.0f} s. "
            "MASTER_ADDR and MASTER_PORT must be those of the machine of rank 0, and rank 0 must be running."
        )
    try:
        patience = timedelta(seconds=MEETING_S)
        store = dist.TCPStore(host, port, launch.size, is_master=hosts, timeout=patience, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        reason = str(error).splitlines()[0]
        raise UserError(f"rank {launch.rank} of {launch.size}: cannot meet at {host}:{port} ({reason}).") from error
    return dist.PrefixStore(f"dp-ema/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def _wait_for(question: Callable[[], bool], seconds: float) -> bool:
    """Ask until the answer is yes or the time is over; unlike a wait inside torch, Ctrl-C ends it."""
    began = time.monotonic()
    while not question():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        time.sleep(min(_LONGEST_PAUSE_S, 0.02 + waited / 10))
    return True


def _named(ranks: Iterable[int]) -> str:
    names = [str(k) for k in ranks]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:8])}{more}"


def _came(rank: int) -> str:
    return f"came {rank}"


def _who(rank: int) -> str:
    return f"who {rank}"


def _left(rank: int) -> str:
    return f"left {rank}"
