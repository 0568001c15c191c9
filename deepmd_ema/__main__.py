"""``python -m deepmd_ema`` is ``dp-ema``; ``torchrun -m deepmd_ema`` starts it on several processes."""

from __future__ import annotations

from deepmd_ema.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
