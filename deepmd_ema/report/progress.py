"""Progress of a run: a bar or plain lines, and times of its parts."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tqdm import tqdm

from deepmd_ema.report.tables import ValuesByTask, show_metric

if TYPE_CHECKING:
    from deepmd_ema.metrics import Errors

logger = logging.getLogger(__name__)

_CATEGORIES = ("data", "step", "validation", "checkpoint")
_SLOW_DATA = 0.1  # share of the time above which waiting for data deserves a hint


class Progress:
    """A bar on a terminal with loss, learning rate, steps per second and time left; log lines everywhere.

    Args:
        num_steps: steps of the whole run.
        interactive: whether to draw a bar; None: if stderr is a terminal.
        frames_per_step: mean number of frames in a step of all ranks together; None leaves frames per second out.
    """

    def __init__(self, num_steps: int, interactive: bool | None = None, frames_per_step: float | None = None) -> None:
        self._num_steps, self._frames = num_steps, frames_per_step
        self._interactive = sys.stderr.isatty() if interactive is None else interactive
        self._bar: tqdm | None = None
        self._validated = ""
        self._step = self._shown = 0
        # the first interval, in which things are prepared, counts only until there is another
        self._begun, self._counted_steps, self._counted_seconds = False, 0, 0.0

    def start_at(self, step: int) -> None:
        """Count from ``step``, at a restart."""
        self._step = self._shown = step

    def advance(self, step: int) -> None:
        """Note that ``step`` is done."""
        if self._interactive:
            if self._bar is None:
                self._bar = tqdm(
                    total=self._num_steps,
                    initial=self._step,
                    unit="step",
                    # a terminal that does not know its width (a recording, some containers) reports 0
                    **({"dynamic_ncols": True} if _has_width() else {"ncols": 80, "nrows": 24}),
                    smoothing=0,
                    file=sys.stderr,
                )
            self._bar.update(step - self._step)
        self._step = step

    def show(
        self,
        step: int,
        lr: float,
        training: ValuesByTask,
        validation: ValuesByTask,
        seconds_per_step: float,
        split: str = "",
    ) -> None:
        """Log the errors of a displayed step, the time of its interval, and when the run will end."""
        for task, of_task in training.items():
            _log(step, task, "trn", of_task, f", lr = {lr:8.2e}")
            _log(step, task, "val", validation.get(task, {}))
        # the first step prepares memory and caches: its time says nothing of the others
        is_known = self._begun or step - self._shown > 1
        left = self._mean_seconds(step, seconds_per_step) * (self._num_steps - step)
        end = (datetime.now() + timedelta(seconds=left)).strftime("%Y-%m-%d %H:%M")
        rate = 1 / seconds_per_step if seconds_per_step > 0 else 0.0
        logger.info(
            "Batch %7d: total wall time = %.2f s (%.1f steps/s%s%s)%s",
            step,
            seconds_per_step * (step - self._shown),
            rate,
            f", {rate * self._frames:.4g} frames/s" if self._frames is not None else "",
            f"; {split}" if split else "",
            f", eta = {timedelta(seconds=int(left))} at {end}" if is_known else "",
        )
        self._shown = step
        if self._bar is not None:
            losses = [
                f"{task} {values.get('rmse', next(iter(values.values()))):.2e}".strip()
                for task, values in training.items()
                if values
            ]
            self._bar.set_postfix_str(f"rmse {', '.join(losses)}, lr {lr:.1e}{self._validated}", refresh=False)

    def _mean_seconds(self, step: int, seconds_per_step: float) -> float:
        """Return the mean duration of a step of the run, which ends an interval of steps that took this long each.

        One interval says little of those that follow: it may hold a validation and a checkpoint, or none.
        """
        steps = step - self._shown
        if self._begun:
            self._counted_steps += steps
            self._counted_seconds += steps * seconds_per_step
        self._begun = True
        return self._counted_seconds / self._counted_steps if self._counted_steps else seconds_per_step

    def show_average(self, step: int, name: str, errors: ValuesByTask) -> None:
        """Log the displayed errors of an average on the same batches."""
        for task, of_task in errors.items():
            _log(step, task, name, of_task)

    def show_validation(self, step: int, results: Mapping[str, Errors]) -> None:
        """Log the errors of a full validation, one line for the live weights and one for each average."""
        width = max(map(len, results))
        for weights, errors in results.items():
            words = describe_errors(errors)
            logger.info("Batch %7d: full validation, MAE / RMSE, %-*s: %s", step, width, weights, words)
            if not math.isnan(force := errors.metric("F:RMSE")):  # the last are the averaged weights, if there are any
                self._validated = f", {weights} F {show_metric('F:RMSE', force)}"

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class IntervalTimes:
    """A stopwatch that says where the time between two displayed steps went, and what was spent waiting for data."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(_CATEGORIES, 0.0)
        self._since = self._began = time.perf_counter()
        self._waited = 0.0
        self._first_wait: float | None = None
        self._hinted = False

    def waiting_share(self) -> float:
        """Return the share of the time since the first batch was there that was spent waiting for others, 0 to 1."""
        first = self._first_wait or 0.0
        total = max(time.perf_counter() - self._began - first, 1e-9)
        return min(1.0, max(0.0, self._waited + self._spent["data"] - first) / total)

    @contextmanager
    def of(self, category: str) -> Iterator[None]:
        """Count the time of the body under ``category``: data, step, validation or checkpoint."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self._spent[category] += seconds
            if category == "data" and self._first_wait is None:
                self._first_wait, self._began = seconds, begin

    def split(self) -> str:
        """Return such as ``data 2 % | step 95 % | validation 2 % | checkpoint 1 %`` and start a new interval.

        The first time that more than a tenth was spent waiting for data, a hint is logged.
        """
        total = max(time.perf_counter() - self._since, sum(self._spent.values()), 1e-9)
        shares = {category: spent / total for category, spent in self._spent.items()}
        if shares["data"] > _SLOW_DATA and not self._hinted:
            self._hinted = True
            logger.info(
                "%.0f %% of the time was spent waiting for data: read it from a local disk, give the run one more CPU "
                "core, or use a larger batch_size (the first interval also fills the cache of neighbor lists)",
                100 * shares["data"],
            )
        self._waited += self._spent["data"]
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._since = time.perf_counter()
        return " | ".join(f"{category} {100 * share:.0f} %" for category, share in shares.items())


def _has_width() -> bool:
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return True  # no terminal: a file that is given as one


def describe_errors(errors: Errors) -> str:
    """Return MAE and RMSE of every quantity that some frame has a label of."""
    parts = []
    for quantity in "EFSV":
        mae, rmse = errors.metric(f"{quantity}:MAE"), errors.metric(f"{quantity}:RMSE")
        if mae == mae:  # not nan: some frame has the label
            number, _, unit = show_metric(quantity, mae).partition(" ")
            parts.append(f"{quantity} {number} / {show_metric(quantity, rmse).partition(' ')[0]} {unit}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time in the two largest of its units: ``4 min 7 s``."""
    parts: list[str] = []
    rest = round(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, length)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) if seconds >= 10 else f"{seconds:.1f} s"


def _log(step: int, task: str, what: str, errors: Mapping[str, float], more: str = "") -> None:
    """Log the errors of a task, in the units of lcurve.out, as DeePMD-kit does; nothing where there are none."""
    if errors:
        values = ", ".join(f"{name} = {errors[name]:8.2e}" for name in sorted(errors))
        logger.info("Batch %7d: %s: %s%s", step, f"{task}_{what}" if task else what, values, more)
