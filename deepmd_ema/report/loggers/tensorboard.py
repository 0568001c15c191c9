"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import file_name, option
from deepmd_ema.config.schema.loggers import LoggedRun, Logger


@dataclass(kw_only=True)
class TensorBoardLogger(Logger):
    """Files for TensorBoard; `training.tensorboard` is a short form of it, with `freq` 1."""

    type: ClassVar[str] = "tensorboard"
    needs: ClassVar[Mapping[str, str]] = {"tensorboard": "dp-ema[tensorboard]"}

    log_dir: str = option("log", check=file_name, doc="Folder of the files.")

    def start(self, run: LoggedRun) -> None:
        """Open the files; points after a restart replace those of the earlier run that are later."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self.log_dir, purge_step=run.step + 1 if run.step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points."""
        for name, value in values.items():
            self._writer.add_scalar(_tag(name), value, step)

    def finish(self, status: str) -> None:
        """Close the files."""
        self._writer.close()


def _tag(name: str) -> str:
    """Return the tag of a value: DeePMD-kit's ``Default/rmse_f``, or that of the task, for training errors."""
    if name == "lr":
        return "Default/lr"
    group, weights, error = name.split("/", 2)
    if (group, weights) == ("train", "live"):
        return error if "/" in error else f"Default/{error}"
    return f"validation/{weights}/{error}" if group == "val" else name
