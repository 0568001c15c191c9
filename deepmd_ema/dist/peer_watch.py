"""A thread that ends this process when another rank has ended, which NCCL does not report."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from deepmd_ema.dist.launch import Launch, write_error_file
from deepmd_ema.dist.rendezvous import Rendezvous

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
