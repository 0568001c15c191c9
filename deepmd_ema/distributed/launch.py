"""Rank and number of ranks of this process, from its launcher.

Does not import torch, so that commands start fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from deepmd_ema.errors import Terminated, UserError
from deepmd_ema.text import show_text

PORT, LAST_PORT = "MASTER_PORT", 65535
ADDRESS = ("MASTER_ADDR", PORT)
# rank, number of ranks, rank on this machine; the first that a launcher sets wins
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# Signals of a launcher, of a terminal that is closed, and of batch systems before they kill: Slurm
# sends the signal of its option --signal, LSF and Grid Engine send SIGUSR2, SIGUSR1 or, at a limit
# of processor time, SIGXCPU. Not every system has all.
_NAMES = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
END_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# seconds of Python code before another thread gets its turn; with 5 ms, the default, a step waits
# for the loader at each call
TURN_S = 5e-4


@contextlib.contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Have ``handler`` called at these signals in the body; in the main thread only.

    One that is ignored stays so, but for SIGTERM and SIGINT: ``nohup`` has SIGHUP ignored, ``trap
    '' USR1`` SIGUSR1.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    always = (signal.SIGTERM, signal.SIGINT)
    taken = [
        n for n in numbers if n in always or signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, old in before.items():
            # an error keeps what the rendezvous has set: a rank that reports one ignores them until
            # it has ended
            if signal.getsignal(number) == handler:
                signal.signal(number, old)


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were launched together.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        local_rank: of this process on its machine, from 0.
        local_size: number of processes on this machine; all of them where the launcher does not
            say.
        launched: whether a launcher has started this process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the ranks and sizes that ``torchrun`` or ``srun`` has set in ``environ``.

    Under ``srun`` the user sets ``MASTER_ADDR`` and ``MASTER_PORT``; a SLURM job without them is
    one process.

    Raises:
        UserError: if what is set makes no sense.
    """
    if "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        names = TORCHRUN
    elif "SLURM_PROCID" in environ and all(name in environ for name in ADDRESS):
        names = SLURM
    else:
        return Launch()
    most = 10**9 - 1
    limits = {
        names[0]: (0, most),
        names[1]: (1, most),
        names[2]: (0, most),
        PORT: (1, LAST_PORT),
    }
    # Defaults of rank, number of ranks, local rank and port: those of a process alone, and a port
    # that passes, as the rendezvous reports a missing one.
    values = [environ.get(name, default) for name, default in zip(limits, "0101")]
    problems = []
    for (name, (low, high)), value in zip(limits.items(), values):
        # isdecimal() is true for the digits of every alphabet, and int() refuses thousands of them
        if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
            problems.append(
                f"{name} = {show_text(value)}: expected a whole number, {low} to {high}."
            )
    UserError.raise_if_any(problems)
    rank = int(values[0])
    size = int(values[1])
    if size > 1 and names[0] not in environ:
        raise UserError(
            f"{names[1]} = {size}, but {names[0]} is not set: which one is this process? Use "
            "torchrun."
        )
    if rank >= size:
        raise UserError(
            f"{names[0]} = {rank}: expected 0 to {size - 1}, because {names[1]} = {size}."
        )
    # SLURM writes 4(x2),3 for two machines with 4 tasks and one with 3: the first number will do
    tasks = environ.get("LOCAL_WORLD_SIZE", environ.get("SLURM_TASKS_PER_NODE", ""))
    number = re.match(r"[1-9][0-9]{0,8}", tasks)
    local_size = int(number[0]) if number else size
    return Launch(rank, size, int(values[2]), local_size, launched=True)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise :class:`Terminated`, as a handler of ``END_SIGNALS`` where there are other ranks.

    torchrun sends it to the ranks that are left when one has ended. By default they would end
    without a message.
    """
    raise Terminated(signal_number=number)


def launch_ranks(
    number: str, launch: Launch, arguments: Sequence[str], device: str | None = None
) -> NoReturn:
    """Replace this process by torchrun, which starts ``dp-ema ARGUMENTS`` on this machine.

    Its signals and exit codes are those of this process.

    Args:
        number: of processes; ``gpu``: one per GPU; ``auto``: the same, or one where there is no
            GPU.
        launch: of this process, which no launcher may have started.
        arguments: the command line, from which ``--nproc-per-node`` is removed.
        device: that the command line names; on ``cpu`` ``auto`` is one process, and any number is
            possible.

    Raises:
        UserError: if a launcher has started this process, or there is no GPU or not so many.
    """
    option = f"--nproc-per-node {number}"
    if launch.launched:
        raise UserError(
            f"{option}: a launcher has started this process already. Leave it out."
        )
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if number == "gpu" and not gpus:
        raise UserError(
            f"{option}: there is no GPU here, or --device cpu is given. Give a number of processes."
        )
    size = int(number) if number.isdecimal() else max(1, gpus)
    if 0 < gpus < size:
        raise UserError(
            f"{option}: there are {gpus} GPUs here. Give {gpus} or fewer, or --device cpu."
        )
    rest = list(arguments)
    # "--nproc-per-node 2" are two arguments, "--nproc-per-node=2" is one
    at = next(
        k for k, text in enumerate(rest) if text.split("=")[0] == "--nproc-per-node"
    )
    del rest[at : at + (1 if "=" in rest[at] else 2)]
    # torchrun ends at other signals without informing the ranks
    forwarded = ["SIGINT", "SIGQUIT", *(number.name for number in END_SIGNALS)]
    environ = {"PET_SIGNALS_TO_HANDLE": ",".join(forwarded), **os.environ}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
    ]
    os.execve(sys.executable, [*launcher, "-m", "deepmd_ema", *rest], environ)


def write_error_file(message: str, environ: Mapping[str, str] = os.environ) -> None:
    """Let torchrun, if it has started this process, show ``message`` as the root cause."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        import json

        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            # later lines begin below the first one on that page
            json.dump(
                {
                    "message": message.replace("\n", "\n" + " " * 14),
                    "timestamp": int(time.time()),
                },
                file,
            )
