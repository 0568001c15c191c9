"""Threads that watch other ranks: for one that does not answer, and for one that has ended, which NCCL does not report."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from deepmd_ema.dist.launch import Launch, write_error_file
from deepmd_ema.dist.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 30.0
MAX_MISSED_BEATS = 4  # that is 2 min: a machine that is busy with other things does not take so long
WATCH_TIMEOUT = timedelta(days=365)  # of the message that comes when a rank ends as it should
REACT_S = 3.0  # for the main thread to notice the loss by itself
EXIT_LOST = 1


@contextmanager
def watched_peers(rendezvous: Rendezvous, launch: Launch) -> Iterator[None]:
    """Watch the next rank in a thread while the body runs. A collective at both ends.

    The connections of gloo close when a process ends, however that happens. The thread of rank k waits for a message of
    rank k + 1, which that rank sends at its end; if the connection closes instead, the main thread may wait for ever in
    a collective of NCCL, so the thread reports the loss and ends the process. The rank before then notices that in
    turn.
    """
    group = dist.new_group(backend="gloo", timeout=WATCH_TIMEOUT)
    has_left = threading.Event()

    def watch() -> None:
        try:
            dist.recv(torch.zeros(1), src=(launch.rank + 1) % launch.size, group=group)
        except RuntimeError as error:
            if has_left.wait(REACT_S):
                return  # the main thread reports it, or another error
            report = rendezvous.report_of(dist.DistNetworkError(str(error)))
            if report is not None:
                message = f"dp-ema (rank {launch.rank}): {report}"
                os.write(2, f"{message}\n".encode())
                write_error_file(message)
            os._exit(EXIT_LOST)

    thread = threading.Thread(target=watch, name="dp-ema-peer-watch", daemon=True)
    thread.start()
    try:
        yield
        dist.send(torch.zeros(1), dst=(launch.rank - 1) % launch.size, group=group)
    finally:
        has_left.set()
    thread.join()


@contextmanager
def heard_peers(rendezvous: Rendezvous, launch: Launch) -> Iterator[None]:
    """Have rank 0 log a line about each rank that does not answer while the body runs: it is stopped, or cut off.

    A thread of each rank counts in the store. The others wait for a rank that is stopped until a timeout of half an hour.
    """
    has_left, ranks = threading.Event(), range(1, launch.size)
    store = rendezvous.store

    def watch() -> None:
        beats, missed = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        with suppress(RuntimeError):  # the host of the store has ended
            while not has_left.wait(BEAT_INTERVAL_S):
                if not launch.is_main:
                    store.add(f"beat {launch.rank}", 1)
                for k in ranks if launch.is_main else ():
                    before, beats[k] = beats[k], store.add(f"beat {k}", 0)
                    missed[k] = missed[k] + 1 if beats[k] == before else 0
                    if missed[k] and missed[k] % MAX_MISSED_BEATS == 0:
                        place, minutes = store.get(f"joined {k}").decode(), missed[k] * BEAT_INTERVAL_S / 60
                        text = "waiting for rank %d (%s) for %.2g min: it is stopped, or cannot be reached"
                        logger.warning(text, k, place, minutes)

    thread = threading.Thread(target=watch, name="dp-ema-peer-beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_left.set()
        thread.join(REACT_S)  # the store does not answer where its host is stopped
