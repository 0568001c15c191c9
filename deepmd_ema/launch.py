"""How this process was launched: which of how many it is. Free of torch, so that the command line can ask at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were launched together.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        local_rank: of this process on its machine, from 0.
        launched: whether a launcher has said so, or this is an ordinary process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return what ``torchrun`` or ``srun`` has set in ``environ``.

    Under ``srun`` the user sets ``MASTER_ADDR`` and ``MASTER_PORT``; a SLURM job without them is one process.
    """
    if "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        rank, size, local = (int(environ.get(name, default)) for name, default in _TORCHRUN)
        return Launch(rank, size, local, launched=True)
    if "SLURM_PROCID" in environ and all(name in environ for name in MEETING):
        rank, size, local = (int(environ.get(name, default)) for name, default in _SLURM)
        return Launch(rank, size, local, launched=True)
    return Launch()


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
_SLURM = (("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_LOCALID", "0"))
