"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option
from deepmd_ema.config.schema.loggers import FINISHED, LoggedRun, Logger


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """A run of Weights & Biases, which a restart continues; log in before, with `wandb login` or `WANDB_API_KEY`."""

    type: ClassVar[str] = "wandb"
    needs: ClassVar[Mapping[str, str]] = {"wandb": "dp-ema[wandb]"}

    project: str | None = option(None, doc="Project of the run; null: `WANDB_PROJECT`, or what wandb takes.")
    entity: str | None = option(None, doc="User or team that has the project; null: your default.")
    name: str | None = option(None, doc="Name of the run; null: one is made up.")
    tags: list[str] = option([], doc="Tags of the run.")
    mode: str | None = option(
        None,
        choices=("online", "offline"),
        doc="`offline` keeps the values in the folder `wandb`, for `wandb sync`; null: `WANDB_MODE`, or `online`.",
    )

    def start(self, run: LoggedRun) -> str:
        """Begin or continue a run; return its id."""
        import wandb

        self._run = wandb.init(
            project=self.project, entity=self.entity, name=self.name, tags=self.tags, mode=self.mode,
            config=dict(run.config), id=run.id, resume="allow" if run.id else None,
        )  # fmt: skip
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the row of ``step``."""
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Wait until everything is sent, and mark the run."""
        self._run.finish(exit_code=0 if status == FINISHED else 1)
