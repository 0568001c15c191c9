"""Locks of folders and files that name their holder, on one machine and on several."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from deepmd_ema.errors import UserError
from deepmd_ema.files import (
    UNSUPPORTED,
    is_running,
    this_machine,
    time_in,
    writing,
)

logger = logging.getLogger(__name__)

# Seconds between two signs of life of a run, and for which they are watched from another machine:
# network file systems show them late.
BEAT_S = 15.0
WATCH_S = 70.0
# seconds without a sign of life after which a run on another machine has ended, by the clock of the
# file system
GONE_S = 3600.0
# seconds without one after which a reader shows a run as ended, by the clock of this machine
SILENT_S = 300.0
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names.

    Attributes:
        machine: identifier of its machine since its start.
        host: name of the machine.
        pid: its number there.
        since: local time at which it took the lock.
        is_alive: whether it seems to run.
    """

    machine: str
    host: str
    pid: int
    since: str
    is_alive: bool = True


def read_holder(path: Path) -> Holder | None:
    """Return the holder of a lock, without touching it; None if nobody holds it."""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        facts = json.loads(path.read_bytes())
        machine = str(facts["machine"])
        pid = int(facts["pid"])
        silent = time.time() - path.stat().st_mtime
        is_alive = is_running(pid) if machine == this_machine() else silent < SILENT_S
        return Holder(machine, str(facts["host"]), pid, str(facts["since"]), is_alive)
    return None


@contextmanager
def locked(paths: Iterable[Path]) -> Iterator[None]:
    """Hold the locks ``paths``, files that are made and removed again.

    The system frees those of a killed process. A lock file names its holder. The system's own lock
    on it decides on one machine, and on several where the file system supports such locks. Where it
    does not, a run on another machine is recognized by its heartbeat: the modification time of the
    file, which a thread updates.

    Raises:
        UserError: if another run holds one of them; the message names its process and machine.
    """
    ended_runs: set[tuple[str, int]] = (
        set()
    )  # a run that held several locks is waited for once
    with ExitStack() as stack:
        handles = [stack.enter_context(_held(path, ended_runs)) for path in paths]
        ended = threading.Event()
        beats = threading.Thread(
            target=_beat, args=(handles, ended), name="dp-ema-lock", daemon=True
        )
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()


@contextmanager
def _held(path: Path, ended_runs: set[tuple[str, int]]) -> Iterator[int]:
    """Hold one lock, see :func:`locked`, and yield its open file.

    Holders that have ended join ``ended_runs``.
    """
    handle, is_locked = _open_locked(path)
    try:
        if holder := read_holder(path):
            _check_ended(path, holder, is_locked, ended_runs)
        try:
            me = Holder(
                this_machine(),
                socket.gethostname(),
                os.getpid(),
                datetime.now().isoformat(" ", "seconds"),
            )
            with writing(path):
                os.truncate(handle, 0)
                os.write(handle, json.dumps(asdict(me)).encode())
            yield handle
        finally:
            with suppress(OSError):
                # while it is held: a process that waits for it sees that the name is gone
                path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _open_locked(path: Path) -> tuple[int, bool]:
    """Open a lock file; return it, and whether the system's own lock is held.

    The system frees its lock when the holder ends, however that happens: what the file names is for
    messages then, and decides only where the file system has no such locks.
    """
    while True:
        with writing(path):
            handle = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
        is_locked = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(handle)
                if error.errno in _BUSY:
                    raise _in_use(path, read_holder(path)) from None
                raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle, is_locked
        # the holder has removed the file after it was opened: a lock on a file without a name keeps
        # nobody away
        os.close(handle)


def _check_ended(
    path: Path, holder: Holder, is_locked: bool, ended_runs: set[tuple[str, int]]
) -> None:
    """Raise an error if the holder that a lock file names still runs: a killed one leaves it."""
    run, is_alive = (holder.machine, holder.pid), False
    if holder.machine == this_machine():
        is_alive = holder.is_alive and not is_locked and holder.pid != os.getpid()
    elif run not in ended_runs:
        # the system's lock may be local to each machine, so that only the heartbeat shows life
        silent = time_in(path.parent) - path.stat().st_mtime
        if silent < GONE_S:
            logger.warning(
                "%s: process %s on %s held this lock, with a sign of life %.0f s ago, and can be "
                "checked only on its own machine. Waiting up to %.0f s for another sign; this run "
                "begins if there is none. If you know that it has ended, stop this run, remove the "
                "file and start again.",
                path.absolute(),
                holder.pid,
                holder.host,
                max(0.0, silent),
                WATCH_S,
            )
            is_alive = _shows_life(path)
    if is_alive:
        raise _in_use(path, holder)
    ended_runs.add(run)
    logger.info(
        "the lock of process %s on %s, which has ended, is taken over",
        holder.pid,
        holder.host,
    )


def _shows_life(path: Path) -> bool:
    """Whether the time of a lock file moves while it is watched; no clocks are compared."""
    before, end = os.stat(path).st_mtime_ns, time.monotonic() + WATCH_S
    while time.monotonic() < end:
        time.sleep(min(1.0, WATCH_S / 10))
        with suppress(FileNotFoundError):
            # network file systems ask the server anew when a file is opened
            os.close(os.open(path, os.O_RDONLY))
            if os.stat(path).st_mtime_ns != before:
                return True
    return False


def _in_use(path: Path, holder: Holder | None) -> UserError:
    who = (
        f"process {holder.pid} on {holder.host}, since {holder.since}"
        if holder
        else "it does not say which"
    )
    return UserError(
        f"{path.absolute().parent}: another run writes here ({who}). Each would destroy files of "
        "the other: wait until it has ended, or start this run in another folder."
    )


def _beat(handles: Iterable[int], ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        for handle in handles:
            with suppress(OSError):
                os.utime(handle)
