"""The loggers of a run, none of which can end it."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from deepmd_ema.config import RunConfig, to_dict
from deepmd_ema.config.messages import dotted
from deepmd_ema.config.outputs import LOGGED
from deepmd_ema.config.schema.loggers import LoggedRun, Logger
from deepmd_ema.errors import ConfigError, reason_of
from deepmd_ema.files import part_of
from deepmd_ema.report.loggers.tensorboard import TensorBoardLogger
from deepmd_ema.report.tables import ValuesByTask

logger = logging.getLogger(__name__)


def loggers_of(config: RunConfig) -> dict[str, Logger]:
    """Return new loggers of a run, by the option that requests them."""
    training = config.training
    found: dict[str, Logger] = {}
    if training.tensorboard:
        board = TensorBoardLogger(log_dir=training.tensorboard_log_dir, freq=training.tensorboard_freq)
        found["training.tensorboard"] = board
    for number, section in enumerate(training.loggers):
        found[dotted(("training", "loggers", number))] = replace(section)  # the config stays as it is
    return found


def check_packages(config: RunConfig) -> None:
    """Check that the packages of all loggers are installed.

    Raises:
        ConfigError: naming each that is missing, and how to install it.
    """
    problems = [
        f'{place} ("{one.type}"): the package {module} is not installed. Install it with `pip install '
        f'"{package}"`, or remove the option.'
        for place, one in loggers_of(config).items()
        for module, package in one.needs.items()
        if not _is_installed(module)
    ]
    if problems:
        raise ConfigError(problems)


def named(group: str, weights: str, errors: ValuesByTask) -> dict[str, float]:
    """Return errors by the names that loggers get: ``train/live/rmse_f``, of a task ``train/live/water/rmse_f``."""
    return {
        "/".join(filter(None, (group, weights, task, name))): value
        for task, of_task in errors.items()
        for name, value in of_task.items()
    }


def _is_installed(module: str) -> bool:
    found = find_spec(module)
    return found is not None and found.origin is not None  # a folder without code, as wandb makes one, has no origin


@dataclass
class _Active:
    """A logger that has started.

    Attributes:
        to: the logger.
        earlier: last step of each value that was logged before the restart.
        last: last step of each value that was logged.
    """

    to: Logger
    earlier: Mapping[str, int]
    last: dict[str, int]


class Loggers:
    """The loggers of a run on rank 0.

    What a logger returns as its id is kept in the file ``.dp-ema.logged``, with the last step of each value, so that a
    restart continues and logs nothing twice.

    Args:
        config: of the run.
        run_id: of its trajectory of weights: what another one has logged is not continued.
    """

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self._config, self._run_id = config, run_id
        self._active: dict[str, _Active] = {}
        self._logged: dict[str, dict[str, Any]] = {}  # id and last steps of each logger that a restart can continue

    def start(self, step: int) -> None:
        """Start all loggers of a run that has done ``step`` steps."""
        loggers, types = loggers_of(self._config), Counter[str]()
        self._logged = self._read() if step and loggers else {}
        for place, to in loggers.items():
            key, types[to.type] = f"{to.type}-{types[to.type]}", types[to.type] + 1
            known = self._logged.get(key, {"id": None, "last": {}})
            with self._reported(place, to):
                found = to.start(LoggedRun(to_dict(self._config), step, Path.cwd(), known["id"]))
                last = dict(known["last"]) if found is not None and found == known["id"] else {}
                self._active[place] = _Active(to, dict(last), last)
                if found is not None:
                    self._logged[key] = {"id": found, "last": last}
        self._write()

    def log(self, step: int, values: Mapping[str, float], to: Callable[[Logger], bool] = lambda _: True) -> None:
        """Log the values that are finite, of steps that were not logged before a restart, to some of the loggers."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for place, active in list(self._active.items()):
            if to(active.to):
                new = {name: value for name, value in finite.items() if step > active.earlier.get(name, -1)}
                with self._reported(place, active.to):
                    if new:
                        active.to.log(step, new)
                        active.last |= dict.fromkeys(new, step)
        self._write()

    def takes_training_errors(self, step: int) -> Callable[[Logger], bool] | None:
        """Return whether a logger has a point of training errors at a step; None if no logger has one."""

        def is_due(to: Logger) -> bool:
            return to.freq is not None and (step == 1 or step % to.freq == 0)

        return is_due if any(is_due(active.to) for active in self._active.values()) else None

    def finish(self, status: str) -> None:
        """Finish all loggers."""
        for place, active in list(self._active.items()):
            with self._reported(place, active.to):
                active.to.finish(status)
        self._active.clear()

    @contextmanager
    def _reported(self, place: str, to: Logger) -> Iterator[None]:
        """Report an exception of a logger, which is not called again."""
        try:
            yield
        except Exception as error:  # whatever the code of others raises
            self._active.pop(place, None)
            reason = shorten(f"{type(error).__name__}: {reason_of(error)}", 300)
            logger.warning('%s ("%s"): %s. The run continues without this logger.', place, to.type, reason)

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return ids and last steps in the file of the continued run; nothing if it is of another one, or damaged."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(Path(LOGGED).read_text(encoding="utf-8"))
            if found["run"] == self._run_id:
                return {key: {"id": str(of["id"]), "last": dict(of["last"])} for key, of in found["loggers"].items()}
        return {}

    def _write(self) -> None:
        if self._logged:
            part = part_of(Path(LOGGED))
            with suppress(OSError):  # a disk that is full ends the run elsewhere
                # not flushed to the disk, which takes milliseconds: after a power cut some values are logged twice
                part.write_text(json.dumps({"run": self._run_id, "loggers": self._logged}), encoding="utf-8")
                os.replace(part, LOGGED)
