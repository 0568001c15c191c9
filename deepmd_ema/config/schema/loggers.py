"""The sections of ``training.loggers``: what else records the values of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deepmd_ema.config.fields import option, positive_int
from deepmd_ema.config.registry import Registry

# values of `status` of Logger.finish
FINISHED = "finished"
INTERRUPTED = "interrupted"
FAILED = "failed"


@dataclass(frozen=True)
class LoggedRun:
    """The facts that a logger starts with.

    Attributes:
        config: the normalized input, as in ``out.json``.
        step: optimizer steps done before; above 0 at a restart.
        folder: folder of the run.
        id: value that :meth:`Logger.start` has returned for the part of the run that is continued;
            None for a new run.
    """

    config: Mapping[str, Any]
    step: int
    folder: Path
    id: str | None


@dataclass(kw_only=True)
class Logger(ABC):
    """Base class of loggers: their section in the input, and methods that take values of a run.

    An object serves one run, on rank 0. If a method raises an exception, this is reported once and
    the logger is not called again; training continues. Its package is imported in :meth:`start`, so
    that checking an input starts fast::

        @dataclass(kw_only=True)
        class FileLogger(Logger):
            type: ClassVar[str] = "file"
            path: str = option("values.txt", doc="File of the values.")

            def start(self, run):
                self._file = open(run.folder / self.path, "a")

            def log(self, step, values):
                print(step, values, file=self._file)

            def finish(self, status):
                self._file.close()

    Attributes:
        needs: modules that :meth:`start` imports, each with what pip installs; looked for before a
            training.
    """

    type: ClassVar[str]
    needs: ClassVar[Mapping[str, str]] = {}

    freq: int | None = option(
        None,
        "Steps between two points of the training errors and the learning rate; null: `disp_freq`.",
        positive_int,
        unit="steps",
    )

    @abstractmethod
    def start(self, run: LoggedRun) -> str | None:
        """Begin, or continue the run ``run.id``.

        Returns:
            An identifier by which a restart can continue; values of steps that it has are then not
            logged again. None: there is none, and a restart begins anew.
        """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values after ``step`` optimizer steps.

        It is called several times for a step, each time with other names.

        Names are ``lr``; ``train/W/E``, an error of the training batch; ``batch/W/E``, of the
        validation batches of a displayed line; ``val/W/E``, of a full validation. W is ``live`` or
        the name of an average, followed by that of the task if there are several; E is as in
        ``lcurve.out``: ``train/live/rmse_f``, ``val/ema/ice/mae_e_peratom``. Units are eV and
        angstrom. All values are finite.
        """

    def finish(self, status: str) -> None:  # noqa: B027 - nothing to do by default
        """End with the run.

        Args:
            status: ``finished``, ``interrupted`` (it can be continued) or ``failed``.
        """


LOGGERS = Registry(
    {
        "tensorboard": "deepmd_ema.report.loggers:TensorBoardLogger",
        "wandb": "deepmd_ema.report.loggers:WandbLogger",
        "mlflow": "deepmd_ema.report.loggers:MlflowLogger",
    },
    group="deepmd_ema.loggers",
    base=Logger,
)
