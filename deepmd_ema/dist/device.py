"""The device a process computes on."""

from __future__ import annotations

import torch

from deepmd_ema.errors import UserError


def select_device(name: str | None = None, local_rank: int = 0) -> torch.device:
    """Return the device called ``name``; without one CUDA where there is a GPU, else the CPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``.
        local_rank: of this process on its machine: which GPU ``cuda`` without a number is.

    Raises:
        UserError: if the device is unknown or absent on this machine.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: unknown device. Use cpu, cuda or cuda:0.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: no CUDA device is visible to torch {torch.__version__}. Use --device cpu.")
    try:
        torch.zeros((), dtype=torch.float64, device=chosen).item()
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise UserError(f"--device {name}: is not usable here ({reason}). Use cpu, cuda or cuda:0.") from error
    return chosen
