"""How this process was launched: which of how many it is. Free of torch, so that the command line can ask at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from deepmd_ema.errors import UserError

MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were launched together.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        local_rank: of this process on its machine, from 0.
        launched: whether a launcher has said so, or this is an ordinary process.
        local_size: number of processes on this machine; all of them where the launcher does not say.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False
    local_size: int = 1


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return what ``torchrun`` or ``srun`` has set in ``environ``.

    Under ``srun`` the user sets ``MASTER_ADDR`` and ``MASTER_PORT``; a SLURM job without them is one process.

    Raises:
        UserError: if what is set makes no sense.
    """
    if "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        return _read(environ, _TORCHRUN)
    if "SLURM_PROCID" in environ and all(name in environ for name in MEETING):
        return _read(environ, _SLURM)
    return Launch()


def speaker(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return what :func:`find_launch` does, and an ordinary process where that fails: for messages."""
    try:
        return find_launch(environ)
    except UserError:
        return Launch()


def _read(environ: Mapping[str, str], names: tuple[tuple[str, str], ...]) -> Launch:
    found = {name: environ.get(name, default) for name, default in names}
    wrong = [f"{name} = {value!r}: expected a whole number." for name, value in found.items() if not value.isdigit()]
    if wrong:
        raise UserError(wrong)
    rank, size, local = map(int, found.values())
    (rank_name, _), (size_name, _), _ = names
    if size > 1 and rank_name not in environ:
        raise UserError(f"{size_name} = {size}, but {rank_name} is not set: which one is this process? Use torchrun.")
    if rank >= size:
        raise UserError(f"{rank_name} = {rank}: expected 0 to {size - 1}, because {size_name} = {size}.")
    together = re.match(r"[1-9][0-9]*", environ.get("LOCAL_WORLD_SIZE", environ.get("SLURM_TASKS_PER_NODE", "")))
    return Launch(rank, size, local, launched=True, local_size=int(together[0]) if together else size)


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
_SLURM = (("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_LOCALID", "0"))
