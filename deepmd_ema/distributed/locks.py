"""Locks: a place has one run at a time, on this machine or on any other that shares the file system."""

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
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from deepmd_ema.distributed.files import is_running, this_machine, time_in, writing
from deepmd_ema.errors import UserError

logger = logging.getLogger(__name__)

BEAT_S = 15.0  # between two signs of life of a run
WATCH_S = 70.0  # that those of a run on another machine are watched for: network file systems show them late
GONE_S = 3600.0  # without a sign of life, by the clock of the file system
SILENT_S = 300.0  # without a sign of life, by the clock of this machine, after which a reader says so
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of the file system


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
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder, silent = _holder(handle), time.time() - os.fstat(handle).st_mtime
    finally:
        os.close(handle)
    if holder is None:
        return None
    is_here = holder.machine == this_machine()
    return replace(holder, is_alive=is_running(holder.pid) if is_here else silent < SILENT_S)


@contextmanager
def locked(paths: Iterable[Path]) -> Iterator[None]:
    """Hold the locks ``paths``, files that are made and removed again; the system frees those of a killed process.

    A lock file names its holder. The system's own lock on it decides on one machine, and on several where the file
    system supports such locks. Where it does not, a run on another machine is recognized by its heartbeat: the
    modification time of the file, which a thread updates.

    Raises:
        UserError: if another run holds one of them; the message names its process and machine.
    """
    ended_runs: set[tuple[str, int]] = set()  # a run that held several locks is waited for once
    with ExitStack() as stack:
        handles = []
        for path in paths:
            handles.append(_take(path, ended_runs))
            stack.callback(_release, path, handles[-1])
            me = Holder(this_machine(), socket.gethostname(), os.getpid(), datetime.now().isoformat(" ", "seconds"))
            with writing(path):
                os.truncate(handles[-1], 0)
                os.write(handles[-1], json.dumps(asdict(me)).encode())
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(handles, ended), name="dp-ema-lock", daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()


def _take(path: Path, ended_runs: set[tuple[str, int]]) -> int:
    """Return the open file of a lock that nobody else holds."""
    while True:
        with writing(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            is_sure = True  # whether the system's lock decides for processes of this machine
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _BUSY:
                    raise _in_use(path, _holder(handle)) from None
                if error.errno not in _NO_LOCKS:
                    raise
                is_sure = False
            with suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == os.stat(path).st_ino:
                    holder = _holder(handle)
                    if holder is not None:
                        _refuse_living(holder, handle, path, is_sure, ended_runs)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder has removed it in between


def _release(path: Path, handle: int) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)  # while it is held: who waits for it sees that the name is gone
    os.close(handle)


def _refuse_living(holder: Holder, handle: int, path: Path, is_sure: bool, ended_runs: set[tuple[str, int]]) -> None:
    """Check that whoever the lock file names has ended, and note it in ``ended_runs``."""
    run = holder.machine, holder.pid
    if holder.machine == this_machine():
        if not is_sure and holder.pid != os.getpid() and is_running(holder.pid):
            raise _in_use(path, holder)
    elif run not in ended_runs and (silent := time_in(path.parent) - os.fstat(handle).st_mtime) < GONE_S:
        logger.warning(
            "%s: process %s on %s held this lock, with a sign of life %.0f s ago, and can be checked only on its own "
            "machine. Waiting up to %.0f s for another sign; this run begins if there is none. If you know that it has "
            "ended, stop this run, remove the file and start again.",
            path.absolute(), holder.pid, holder.host, max(0.0, silent), WATCH_S,
        )  # fmt: skip
        if _shows_life(path):
            raise _in_use(path, holder)
    ended_runs.add(run)
    logger.info("the lock of process %s on %s, which has ended, is taken over", holder.pid, holder.host)


def _shows_life(path: Path) -> bool:
    """Whether the time of a lock file moves while it is watched; no clocks are compared."""
    before, end = os.stat(path).st_mtime_ns, time.monotonic() + WATCH_S
    while time.monotonic() < end:
        time.sleep(min(1.0, WATCH_S / 10))
        with suppress(FileNotFoundError):
            os.close(os.open(path, os.O_RDONLY))  # network file systems ask the server anew when a file is opened
            if os.stat(path).st_mtime_ns != before:
                return True
    return False


def _holder(handle: int) -> Holder | None:
    """Return the holder that the lock file names; None where it names none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(os.pread(handle, 4096, 0))
        machine, host, since = (str(facts[key]) for key in ("machine", "host", "since"))
        return Holder(machine, host, int(facts["pid"]), since)
    return None


def _in_use(path: Path, holder: Holder | None) -> UserError:
    who = f"process {holder.pid} on {holder.host}, since {holder.since}" if holder else "it does not say which"
    return UserError(
        f"{path.absolute().parent}: another run writes here ({who}). Each would destroy files of the other: wait until "
        "it has ended, or start this run in another folder."
    )


def _beat(handles: Iterable[int], ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        for handle in handles:
            with suppress(OSError):
                os.utime(handle)
