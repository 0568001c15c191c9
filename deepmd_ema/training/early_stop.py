"""Early stopping: whether the errors of full validation no longer fall."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.config.schema.training import EarlyStopConfig
from deepmd_ema.errors import counted
from deepmd_ema.metrics import Errors
from deepmd_ema.model.model_set import nested, unnested
from deepmd_ema.report.table import show_metric

logger = logging.getLogger(__name__)

Row: TypeAlias = tuple[str, str]
"""Name of the weights, and of the task, which is empty in a run of one."""


class EarlyStop:
    """Counts the full validations since the last improvement of any watched error.

    An error is an improvement if it is the first of its weights and task, or lower than at their last improvement by
    more than ``min_delta``. Errors that are not finite are none. All ranks have the same errors, and so decide alike.

    Args:
        config: patience, metric, ``min_delta`` and weights.
        metric: taken if the config names none.

    Attributes:
        waited: full validations since the last improvement.
        improvements: error and step of the last one, by weights and task.
    """

    def __init__(self, config: EarlyStopConfig, metric: Metric) -> None:
        self._config, self._metric = config, config.metric or metric
        self.waited = 0
        self.improvements: dict[Row, tuple[float, int]] = {}

    @property
    def is_met(self) -> bool:
        """Whether the run ends."""
        return self.waited >= self._config.patience

    def add(self, step: int, errors: Mapping[Row, Errors]) -> None:
        """Take the errors of the full validation after ``step``."""
        self.waited += 1
        for row, found in errors.items():
            if self._config.weights not in (None, row[0]):
                continue
            value, (before, _) = found.metric(self._metric), self.improvements.get(row, (math.inf, 0))
            if math.isfinite(value) and value < before - self._config.min_delta:
                self.improvements[row] = (value, step)
                self.waited = 0

    def describe(self) -> str:
        """Return the reason for the end, with the last improvements."""
        delta = self._config.min_delta
        by = f" by more than {show_metric(self._metric, delta)}" * (delta > 0)
        rows = [
            f"{' '.join(filter(None, reversed(row)))} {show_metric(self._metric, value)} after step {step:,}"
            for row, (value, step) in self.improvements.items()
        ]
        since = f"{self._metric} has not fallen{by} in the last {counted(self.waited, 'full validation')}"
        return f"{since}; last improvements: {', '.join(rows) or 'none'}"

    def state_dict(self) -> dict[str, Any]:
        """Return metric, count and last improvements."""
        found: dict[str, dict[str, list[float]]] = {}
        for (weights, task), record in self.improvements.items():
            found.setdefault(weights, {})[task] = list(record)
        return {
            "metric": str(self._metric),
            "waited": self.waited,
            "improvements": {weights: unnested(of_task) for weights, of_task in found.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Continue from ``state``; another metric starts anew, as do rows that it does not name."""
        if state["metric"] != self._metric:
            text = "validating.early_stop: %s counts now, %s before: its full validations are counted anew"
            logger.warning(text, self._metric, state["metric"])
            return
        self.waited = state["waited"]
        for weights, task in rows:
            record = nested(state["improvements"].get(weights, {}), (task,)).get(task)
            if record:
                self.improvements[weights, task] = (float(record[0]), int(record[1]))
