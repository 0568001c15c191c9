"""Several processes that train together: forked from a server that has torch loaded."""

import gc
import io
import json
import logging
import multiprocessing
import os
import shutil
import socket
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

# what training imports, and the part of torch that it imports late
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.optim",
    "h5py",
    "vesin",
    "deepmd_ema.training.run",
]
LIMIT_S = 200  # a machine that is busy with other things takes ten times as long
PATIENCE_S = 60  # with the others, once one has failed


@dataclass(frozen=True)
class Ended:
    """The end of one process: the result of its function, or the name and message of its error; and
    what it logged.
    """

    value: Any = None
    error: str | None = None
    message: str = ""
    log: str = ""


def run_ranks(size, function, *args, limit=LIMIT_S, may_fail=False):
    """Run ``function(*args)`` in ``size`` processes that have the environment of a launcher; return
    how each ended.

    The function must be one of a module of this folder. After ``limit`` seconds every process is
    killed. As in other tests, warnings are errors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, ends, processes = free_port(), [], []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            ends.append(mine)
            environ = launcher_environment(rank, size, port)
            processes.append(
                context.Process(target=_enter, args=(theirs, environ, function, args))
            )
            processes[-1].start()
            theirs.close()
        found = _collect(ends, limit)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()
    bad = [
        f"rank {rank}: {e.error}: {e.message}"
        for rank, e in enumerate(found)
        if e.error is not None
    ]
    assert may_fail or not bad, "\n".join(bad)
    return found


def train(folder, size, config=None, limit=LIMIT_S, may_fail=False, origin=None, **how):
    """Train in ``folder``, with the files of ``origin``, on ``size`` processes, on ``config`` if it
    is given.

    Returns:
        How each ended; its value is that of :func:`train_here`.
    """
    folder = Path(folder)
    if origin is not None:
        shutil.copytree(origin, folder, symlinks=True)
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "input.json").write_text(json.dumps(config))
    return run_ranks(size, train_here, str(folder), how, limit=limit, may_fail=may_fail)


def train_here(folder, how):
    """Train in ``folder`` as one rank; return what it held at the end (digests, sizes) and what it
    took part in.
    """
    from deepmd_ema.training import saver
    from deepmd_ema.training.run import run_training
    from deepmd_ema.training.trainer import Callback

    report: dict[str, Any] = {}
    counts = Counter()
    os.chdir(folder)
    make = saver.StateBuilder.weights

    def make_and_count(self, weights, *given, **how):
        counts["written", weights] += 1
        return make(self, weights, *given, **how)

    class Look(Callback):
        def in_validation(self, trainer, weights):
            counts["validated", weights] += 1

        def on_end(self, trainer):
            report.update(_holdings(trainer))

    with mock.patch.object(saver.StateBuilder, "weights", make_and_count):
        run_training("input.json", **{"device": "cpu", "callback": Look(), **how})
    return {**report, "counts": dict(counts)}


def launcher_environment(rank, size, port):
    """Return the environment that a launcher sets for one process of ``size`` on this machine."""
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        **address,
    }


def free_port():
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _holdings(trainer):
    """Return digests and element counts of what this process holds of the live weights and of each
    average.
    """
    from deepmd_ema.distributed.tensors import content_digest, local_shard

    bank = trainer.bank
    held = {"live": [local_shard(p) for p in trainer.saver.builder.models.parameters()]}
    held |= {name: bank[name].tensors for name in bank.names}
    return {
        "digests": {
            name: content_digest([t.detach().cpu() for t in tensors])
            for name, tensors in held.items()
        },
        "elements": {
            name: sum(t.numel() for t in tensors) for name, tensors in held.items()
        },
        "facts": {name: bank.info(name) for name in bank.names},
    }


def _enter(connection, environ, function, args):
    gc.freeze()  # what the server has loaded is not collected, nor copied by a collection
    os.environ.update(environ)
    warnings.simplefilter("error")
    # of torch, with Python 3.13.0
    warnings.filterwarnings("ignore", "Guards may run slower on Python")
    text = io.StringIO()
    logger = logging.getLogger("deepmd_ema")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(text))
    try:
        answer = function(*args), None, ""
    except BaseException as error:
        ours = type(error).__module__.startswith("deepmd_ema")
        answer = (
            None,
            type(error).__name__,
            str(error) if ours else traceback.format_exc(),
        )
    connection.send(Ended(*answer, text.getvalue()))
    connection.close()
    os._exit(0)  # what a broken run has left open is not waited for


def _answer(connection):
    try:
        return connection.recv()
    except EOFError:
        return Ended(error="Killed", message="it ended without a word")


def _collect(ends, limit):
    found = {}
    last = time.monotonic() + limit
    while len(found) < len(ends):
        if any(ended.error for ended in found.values()):
            last = min(last, time.monotonic() + PATIENCE_S)
        ready = wait(
            [c for c in ends if c not in found],
            timeout=max(0.0, last - time.monotonic()),
        )
        if not ready:
            break
        for connection in ready:
            found[connection] = _answer(connection)
    late = Ended(error="TimeoutError", message=f"not done after {limit} s")
    return [found.get(connection, late) for connection in ends]
