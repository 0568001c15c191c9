"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from deepmd_ema.config.fields import option
from deepmd_ema.config.schema.loggers import FAILED, FINISHED, INTERRUPTED, LoggedRun, Logger

_PARAMS_AT_ONCE = 100  # a request takes no more
_STATUS = {FINISHED: "FINISHED", INTERRUPTED: "KILLED", FAILED: "FAILED"}


@dataclass(kw_only=True)
class MlflowLogger(Logger):
    """A run of MLflow, which a restart continues."""

    type: ClassVar[str] = "mlflow"
    needs: ClassVar[Mapping[str, str]] = {"mlflow": "dp-ema[mlflow]"}

    tracking_uri: str | None = option(
        None, doc="Where MLflow keeps its runs: the address of a server or a folder; null: `MLFLOW_TRACKING_URI`."
    )
    experiment: str | None = option(
        None, doc="Experiment of the run, which is made if there is none; null: `MLFLOW_EXPERIMENT_NAME`, or `Default`."
    )
    name: str | None = option(None, doc="Name of the run; null: one is made up.")

    def start(self, run: LoggedRun) -> str:
        """Begin or continue a run; return its id. The options are its parameters and the file ``input.json``."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(self.tracking_uri)
        if run.id is not None:
            client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return run.id
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        self._id = str(client.create_run(experiment, run_name=self.name).info.run_id)
        params = [Param(key, value) for key, value in _flat(run.config)]
        for begin in range(0, len(params), _PARAMS_AT_ONCE):
            client.log_batch(self._id, params=params[begin : begin + _PARAMS_AT_ONCE])
        client.log_dict(self._id, dict(run.config), "input.json")
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of ``step``."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, status: str) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, _STATUS[status])


def _flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options by dotted path, with their values as text of at most 500 characters, which all stores take."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, str(value)[:500]
