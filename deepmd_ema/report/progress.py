"""Progress of a run: a bar on a terminal, or plain lines."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tqdm import tqdm

from deepmd_ema.labels import METRICS
from deepmd_ema.report.tables import ValuesByTask, labelled, mae_rmse, significant
from deepmd_ema.report.times import RunTimes
from deepmd_ema.weight_names import LIVE

if TYPE_CHECKING:
    from deepmd_ema.metrics import Errors

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 60.0  # where no bar is drawn, a line comes at least so often
_DIGITS = 3  # of an error beside the bar


class Progress:
    """A bar on a terminal with steps, force error and time left; log lines everywhere.

    Args:
        num_steps: steps of the whole run.
        times: stopwatch of the run.
        interactive: whether to draw a bar; None: if stderr is a terminal.
        frames_per_step: mean number of frames in a step of all ranks together; None leaves frames per second out.
    """

    def __init__(
        self,
        num_steps: int,
        times: RunTimes,
        interactive: bool | None = None,
        frames_per_step: float | None = None,
    ) -> None:
        self._num_steps, self._times, self._frames = num_steps, times, frames_per_step
        self._interactive = sys.stderr.isatty() if interactive is None else interactive
        self._bar: tqdm | None = None
        self._error, self._is_validated = "", False
        self._step = self._shown = 0
        self._line_at = time.perf_counter()

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
                    bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
                    # a terminal that does not know its width (a recording, some containers) reports 0
                    **({"dynamic_ncols": True} if _has_width() else {"ncols": 80, "nrows": 24}),
                    file=sys.stderr,
                )
            self._bar.set_postfix_str(self._facts(step), refresh=False)
            self._bar.update(step - self._step)
        elif time.perf_counter() - self._line_at > LINE_INTERVAL_S and step < self._num_steps:
            self._line_at = time.perf_counter()
            logger.info("Batch %7d: %d steps in all, %s", step, self._num_steps, self._facts(step))
        self._step = step

    def _facts(self, step: int) -> str:
        """Return the force error, the time left and that of a step; the last are left out where there is no room."""
        left, seconds = self._times.left(step, self._num_steps), self._times.step_seconds()
        facts = [self._error] * bool(self._error)
        if left is not None and seconds is not None:
            facts += [f"{tqdm.format_interval(left)} left", f"{seconds:.2g} s/step"]
        while self._bar is not None and self._bar.ncols and len(facts) > 1:
            if len(f"100%|#| {step}/{self._num_steps}, {', '.join(facts)}") <= self._bar.ncols:
                break
            facts.pop()
        return ", ".join(facts)

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
        left = self._times.left(step, self._num_steps)  # nothing is known after the first steps
        eta = ""
        if left is not None:
            end = (datetime.now() + timedelta(seconds=left)).strftime("%Y-%m-%d %H:%M")
            eta = f", eta = {timedelta(seconds=int(left))} at {end}"
        rate = 1 / seconds_per_step if seconds_per_step > 0 else 0.0
        logger.info(
            "Batch %7d: total wall time = %.2f s (%.1f steps/s%s%s)%s",
            step,
            seconds_per_step * (step - self._shown),
            rate,
            f", {rate * self._frames:.4g} frames/s" if self._frames is not None else "",
            f"; {split}" if split else "",
            eta,
        )
        self._shown, self._line_at = step, time.perf_counter()
        if not self._is_validated:
            self._error = _batch_errors(training, validation)

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
        if shown := _validated_errors(results):
            self._error, self._is_validated = shown, True

    def close(self) -> None:
        """Leave the bar as it is now and end its line."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._facts(self._step), refresh=False)  # with the last validation
            self._bar.close()
            self._bar = None


def _has_width() -> bool:
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return True  # no terminal: a file that is given as one


def describe_errors(errors: Errors, before: Errors | None = None) -> str:
    """Return MAE and RMSE of every quantity that some frame has a label of, with those ``before`` in front."""
    parts = []
    for quantity in labelled(errors):
        first = f"{mae_rmse(before, quantity)} -> " if before is not None else ""
        parts.append(f"{quantity} {first}{mae_rmse(errors, quantity)} {METRICS[quantity].display_unit}")
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


def _validated_errors(results: Mapping[str, Errors]) -> str:
    """Return the force errors of each task by the first average, or by the live weights if there is none."""
    rows = [(*name.rpartition(" ")[::2], errors.metric("F:RMSE")) for name, errors in results.items()]
    names = list(dict.fromkeys(weights for _, weights, _ in rows))
    chosen = next((name for name in names if name != LIVE), LIVE)
    return _force_errors(chosen, {task: force for task, weights, force in rows if weights == chosen})


def _batch_errors(training: ValuesByTask, validation: ValuesByTask) -> str:
    """Return the force errors of the batches of a displayed step, those of validation frames if there are any."""
    name, values = ("val batch", validation) if any(validation.values()) else ("trn batch", training)
    return _force_errors(name, {task: of.get("rmse_f", math.nan) for task, of in values.items()})


def _force_errors(name: str, errors: Mapping[str, float]) -> str:
    """Return force errors by task, given in eV/angstrom, as ``ema F 44.4 meV/Å``; nothing where there are none."""
    factor, unit = METRICS["F"].display_factor, METRICS["F"].display_unit
    known = {task: significant(factor * force, _DIGITS) for task, force in errors.items() if not math.isnan(force)}
    shown = [f"{task} {force}".strip() for task, force in known.items()]
    return f"{name} F {', '.join(shown)} {unit}" if shown else ""


def _log(step: int, task: str, what: str, errors: Mapping[str, float], more: str = "") -> None:
    """Log the errors of a task, in the units of lcurve.out, as DeePMD-kit does; nothing where there are none."""
    if errors:
        values = ", ".join(f"{name} = {errors[name]:8.2e}" for name in sorted(errors))
        logger.info("Batch %7d: %s: %s%s", step, f"{task}_{what}" if task else what, values, more)
