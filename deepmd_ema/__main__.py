"""The command: ``dp-ema``, ``python -m deepmd_ema``, or ``torchrun -m deepmd_ema`` on ranks."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Run the command line and return its exit code."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", ""))
    if (
        rank in ("0", "1")
        and os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS")) != "1"
    ):
        # A launcher ends the other ranks when one was killed, also while they are loading. Rank 0
        # reports it, and rank 1 as well, because the killed one may be rank 0.
        def end(number: int, frame: FrameType | None) -> None:
            os.write(
                2,
                f"dp-ema (rank {rank}): stopped by {signal.Signals(number).name}\n".encode(),
            )
            os._exit(128 + number)

        signal.signal(signal.SIGTERM, end)
    from deepmd_ema.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
