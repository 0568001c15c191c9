"""Loggers of a run, none of which can end it: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar

from deepmd_ema.config.fields import file_name, option
from deepmd_ema.config.messages import dotted
from deepmd_ema.config.outputs import LOGGED
from deepmd_ema.config.schema.loggers import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    LoggedRun,
    Logger,
)
from deepmd_ema.errors import ConfigError, reason_of
from deepmd_ema.files import part_of

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig

logger = logging.getLogger(__name__)


class Loggers:
    """The loggers of a run on rank 0.

    The file ``.dp-ema.logged`` has the id that a logger returns, and the last step of each value,
    so that a restart continues and logs nothing twice.

    Args:
        config: of the run.
        run_id: of its trajectory of weights: values of another trajectory are not continued.
    """

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self._config = config
        self._run_id = run_id
        # by option, a logger and the last step of each value
        self._active: dict[str, tuple[Logger, dict[str, int]]] = {}
        # by type and number, id and last steps of each logger that a restart can continue
        self._logged: dict[str, dict[str, Any]] = {}

    def start(self, step: int) -> None:
        """Start all loggers of a run that has done ``step`` steps."""
        from deepmd_ema.config import to_dict

        loggers = loggers_of(self._config)
        if step and loggers:
            # the file may be damaged
            with suppress(OSError, ValueError, TypeError, KeyError):
                stored = json.loads(Path(LOGGED).read_text(encoding="utf-8"))
                if stored["run"] == self._run_id:
                    self._logged = {
                        key: {"id": str(entry["id"]), "last": dict(entry["last"])}
                        for key, entry in stored["loggers"].items()
                    }
        numbers = Counter[str]()
        for place, to in loggers.items():
            # the number distinguishes loggers of one type, whatever else is added to the list
            key = f"{to.type}-{numbers[to.type]}"
            numbers[to.type] += 1
            earlier = self._logged.get(key, {"id": None, "last": {}})
            with self._reported(place, to):
                run = to.start(
                    LoggedRun(to_dict(self._config), step, Path.cwd(), earlier["id"])
                )
                # a logger that has begun another run lacks the values of the earlier one
                last = (
                    earlier["last"] if run is not None and run == earlier["id"] else {}
                )
                self._active[place] = to, last
                if run is not None:
                    self._logged[key] = {"id": run, "last": last}
        self._write()

    def log(
        self,
        step: int,
        values: Mapping[str, float],
        to: Callable[[Logger], bool] = lambda _: True,
    ) -> None:
        """Log the finite values of a step that were not logged before a restart.

        Args:
            step: optimizer steps so far.
            values: by name.
            to: whether a logger takes them.
        """
        # a copy of the list, from which a logger that fails is removed
        for place, (target, last) in list(self._active.items()):
            new = {
                n: v
                for n, v in values.items()
                if math.isfinite(v) and step > last.get(n, -1)
            }
            if new and to(target):
                with self._reported(place, target):
                    target.log(step, new)
                    last |= dict.fromkeys(new, step)
        self._write()

    def takes_training_errors(self, step: int) -> Callable[[Logger], bool] | None:
        """Return whether a logger takes training errors of a step; None if no logger does."""

        def is_due(to: Logger) -> bool:
            return to.freq is not None and (step == 1 or step % to.freq == 0)

        return (
            is_due
            if any(is_due(target) for target, _ in self._active.values())
            else None
        )

    def finish(self, status: str) -> None:
        """Finish all loggers."""
        for place, (target, _) in list(self._active.items()):
            with self._reported(place, target):
                target.finish(status)
        self._active.clear()

    @contextmanager
    def _reported(self, place: str, to: Logger) -> Iterator[None]:
        """Report an exception of a logger, which is not called again."""
        try:
            yield
        except Exception as error:  # the code of another package may raise any of them
            self._active.pop(place, None)
            reason = shorten(f"{type(error).__name__}: {reason_of(error)}", 300)
            logger.warning(
                '%s ("%s"): %s. The run continues without this logger.',
                place,
                to.type,
                reason,
            )

    def _write(self) -> None:
        if self._logged:
            part = part_of(Path(LOGGED))
            with suppress(OSError):  # a disk that is full ends the run elsewhere
                # not flushed to the disk, which takes milliseconds: after a power cut some values
                # are logged twice
                part.write_text(
                    json.dumps({"run": self._run_id, "loggers": self._logged}),
                    encoding="utf-8",
                )
                os.replace(part, LOGGED)


def loggers_of(config: RunConfig) -> dict[str, Logger]:
    """Return new loggers of a run, by the option that requests them.

    Raises:
        ConfigError: naming each package that is missing, and how to install it.
    """
    training = config.training
    loggers: dict[str, Logger] = {}
    if training.tensorboard:
        board = TensorBoardLogger(
            log_dir=training.tensorboard_log_dir, freq=training.tensorboard_freq
        )
        loggers["training.tensorboard"] = board
    for number, section in enumerate(training.loggers):
        # a copy: loggers have a state, which the config must not get
        loggers[dotted(("training", "loggers", number))] = replace(section)
    problems = [
        f'{place} ("{target.type}"): the package {module} is not installed. Install it with `pip '
        f'install "{package}"`, or remove the option.'
        for place, target in loggers.items()
        for module, package in target.needs.items()
        # a folder without code, as wandb makes one for its files, has no origin
        if getattr(find_spec(module), "origin", None) is None
    ]
    ConfigError.raise_if_any(problems)
    return loggers


def named(
    group: str, weights: str, errors: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return errors by the names that loggers get.

    They are ``train/live/rmse_f``, or ``train/live/water/rmse_f`` where there are tasks.
    """
    return {
        "/".join(filter(None, (group, weights, task, name))): value
        for task, values in errors.items()
        for name, value in values.items()
    }


@dataclass(kw_only=True)
class TensorBoardLogger(Logger):
    """Files for TensorBoard; `training.tensorboard` is a short form of it, with `freq` 1."""

    type: ClassVar[str] = "tensorboard"
    needs: ClassVar[Mapping[str, str]] = {"tensorboard": "dp-ema[tensorboard]"}

    log_dir: str = option("log", check=file_name, doc="Folder of the files.")

    def start(self, run: LoggedRun) -> None:
        """Open the files; after a restart, later points of the earlier run are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            self.log_dir, purge_step=run.step + 1 if run.step else None
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points; training errors have the tags of DeePMD-kit, such as ``Default/rmse_f``."""
        for name, value in values.items():
            tag = re.sub("^val/", "validation/", name.removeprefix("train/live/"))
            self._writer.add_scalar(
                tag if "/" in tag else f"Default/{tag}", value, step
            )

    def finish(self, status: str) -> None:
        """Close the files."""
        self._writer.close()


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """A run of Weights & Biases, which a restart continues; log in before, with `wandb login` or
    `WANDB_API_KEY`.
    """

    type: ClassVar[str] = "wandb"
    needs: ClassVar[Mapping[str, str]] = {"wandb": "dp-ema[wandb]"}

    project: str | None = option(
        None, doc="Project of the run; null: `WANDB_PROJECT`, or what wandb takes."
    )
    entity: str | None = option(
        None, doc="User or team that has the project; null: your default."
    )
    name: str | None = option(None, doc="Name of the run; null: one is made up.")
    tags: list[str] = option([], doc="Tags of the run.")
    mode: str | None = option(
        None,
        choices=("online", "offline"),
        doc="`offline` keeps the values in the folder `wandb`, for `wandb sync`; null: "
        "`WANDB_MODE`, or `online`.",
    )

    def start(self, run: LoggedRun) -> str:
        """Begin or continue a run; return its id."""
        import wandb

        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name,
            tags=self.tags,
            mode=self.mode,
            config=dict(run.config),
            id=run.id,
            resume="allow" if run.id else None,
        )
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the row of ``step``."""
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Wait until everything is sent, and mark the run."""
        self._run.finish(exit_code=0 if status == FINISHED else 1)


@dataclass(kw_only=True)
class MlflowLogger(Logger):
    """A run of MLflow, which a restart continues."""

    type: ClassVar[str] = "mlflow"
    needs: ClassVar[Mapping[str, str]] = {"mlflow": "dp-ema[mlflow]"}

    tracking_uri: str | None = option(
        None,
        doc="Where MLflow keeps its runs: the address of a server or a folder; null: "
        "`MLFLOW_TRACKING_URI`.",
    )
    experiment: str | None = option(
        None,
        doc="Experiment of the run, which is made if there is none; null: "
        "`MLFLOW_EXPERIMENT_NAME`, or `Default`.",
    )
    name: str | None = option(None, doc="Name of the run; null: one is made up.")

    def start(self, run: LoggedRun) -> str:
        """Begin or continue a run; return its id.

        The options are its parameters and the file ``input.json``.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(self.tracking_uri)
        if run.id is not None:
            client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return run.id
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        existing = client.get_experiment_by_name(name)
        experiment = (
            client.create_experiment(name)
            if existing is None
            else existing.experiment_id
        )
        self._id = str(client.create_run(experiment, run_name=self.name).info.run_id)
        params = [Param(key, value) for key, value in _flat(run.config)]
        for begin in range(0, len(params), 100):  # a request takes no more
            client.log_batch(self._id, params=params[begin : begin + 100])
        client.log_dict(self._id, dict(run.config), "input.json")
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of ``step``."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, [Metric(name, value, now, step) for name, value in values.items()]
        )

    def finish(self, status: str) -> None:
        """Set the status of the run."""
        ended = {FINISHED: "FINISHED", INTERRUPTED: "KILLED", FAILED: "FAILED"}
        self._client.set_terminated(self._id, ended[status])


def _flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options by dotted path, with values as text of at most 500 characters.

    All stores of MLflow take so many.
    """
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, str(value)[:500]
