"""Errors with options of AdamWScheduleFree: power of the weights of late points, beta1 and learning rate.

usage: python benchmarks/schedule_free_options.py --sources DIR --work DIR [--sets NAME ...] [--seed 4] [--output PAGE]

One run of 8,000 steps for each row of CHOICES and set, otherwise as "schedule-free, late" of anytime.py, with a seed
that anytime.py does not measure; errors of the averaged point on its reporting frames. What is finished in --work is
not done again.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anytime
import common
from divided_sets import SETS

NAMES = ("acac", "molecules", "alloys")
STEPS = 8000
CHOICES = (  # r, adam_beta1, learning rate
    (0, 0.9, 0.01),
    (0, 0.98, 0.01),
    (2, 0.95, 0.01),
    (4, 0.9, 0.01),
    (4, 0.98, 0.01),
    (10, 0.9, 0.01),
    (10, 0.95, 0.01),
    (10, 0.98, 0.005),
    (10, 0.98, 0.01),
    (10, 0.98, 0.02),
    (10, 0.99, 0.01),
    (10, 0.99, 0.02),
    (10, 0.99, 0.04),
    (10, 0.995, 0.02),
    (30, 0.9, 0.01),
    (30, 0.95, 0.01),
)


@dataclass(frozen=True)
class Trial(anytime.Job):
    """One run; ``choice`` is a row of CHOICES."""

    choice: tuple[float, float, float]

    @property
    def place(self) -> Path:
        """Folder of its files."""
        return self.work / "-".join([self.name, str(self.seed), *(f"{value:g}" for value in self.choice)])

    @property
    def config(self) -> dict[str, Any]:
        """The input."""
        r, beta1, rate = self.choice
        config = super().config
        config["optimizer"] |= {"r": r, "adam_beta1": beta1}
        config["learning_rate"] |= {"start_lr": rate, "stop_lr": rate}
        return config


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder with the clones of init_sets.py")
    parser.add_argument("--work", type=Path, default=common.RUNS / "schedule_free", help="folder of the runs")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=NAMES)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--output", type=Path, help="also write the table here")
    args = parser.parse_args()
    args.work = args.work.resolve()
    import torch

    torch.set_num_threads(1)
    logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
    rows = []
    for choice in CHOICES:
        cells = []
        for name in args.sets:
            trial = Trial(name, args.seed, anytime.LATE, STEPS, args.work, choice)
            if trial.result() is None:
                anytime.do(trial, args.sources)
            found = trial.result()
            assert found is not None
            cells.append(" / ".join(f"{found['errors'][anytime.CHOSEN][quantity]:.3g}" for quantity in anytime.METRICS))
        rows.append([*(f"{value:g}" for value in choice), *cells])
        common.publish(common.table(["r", "adam_beta1", "rate", *args.sets], rows), args.output)


if __name__ == "__main__":
    main()
