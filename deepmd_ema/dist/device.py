"""The device a process computes on."""

from __future__ import annotations

import torch

from deepmd_ema.errors import UserError


def select_device(name: str | None = None, local_rank: int = 0) -> torch.device:
    """Return the device called ``name``; without one CUDA where there is a GPU, else the CPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``.
        local_rank: of this process on its machine: which GPU ``cuda`` without a number is; where a launcher shows each
            process a GPU of its own, that one.

    Raises:
        UserError: if the device is unknown or absent on this machine, or there are fewer GPUs than local ranks.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda" if visible else "cpu"
    if name == "cuda" and visible > 1 and local_rank >= visible:
        raise UserError(
            f"--device cuda: there is no GPU for local rank {local_rank}, this machine shows {visible} GPUs. Start "
            f"{visible} processes per machine, or fewer, or show each process one GPU (srun --gpus-per-task=1)."
        )
    try:
        chosen = torch.device(f"cuda:{0 if visible == 1 else local_rank}" if name == "cuda" else name)
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
