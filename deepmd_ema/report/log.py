"""Messages of a run: handlers of terminal and log file, progress bar, times of its parts."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tqdm import tqdm

from deepmd_ema.config.labels import METRICS, QUANTITIES
from deepmd_ema.errors import reason_of
from deepmd_ema.files import LOG, refuse_to_lose, writing
from deepmd_ema.report.facts import CURVE_NAMES, displayed, labelled
from deepmd_ema.report.table import significant
from deepmd_ema.text import RED, YELLOW, colored, fitted, printable, width_of
from deepmd_ema.utils import LIVE

if TYPE_CHECKING:
    from deepmd_ema.config.outputs import Due
    from deepmd_ema.model.metrics import Errors

ValuesByTask: TypeAlias = Mapping[str, Mapping[str, float]]
"""Errors of a displayed step by task, empty in a run of one, and by column of lcurve.out."""

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = (
    60.0  # where no bar is drawn, a line is logged at least once in this time
)
_DIGITS = 3  # of an error beside the bar
_SHOWN = ("data", "step", "validation", "checkpoint")
_SHOWN_AS = {
    "row": "validation",
    "snapshot": "checkpoint",
}  # in the line of a displayed step
_SLOW_DATA = 0.1  # share of the time above which waiting for data deserves a hint
_MIN_HINT_S = 10.0  # a shorter time says little: much of it is the start
_FIRST = (
    2  # steps that prepare memory and caches, whose time says nothing about later steps
)


def set_up_logging(
    level: str | int = "INFO", log_file: str | Path | None = None, is_main: bool = True
) -> None:
    """Send the messages of this package to stderr, and to ``log_file`` if given.

    It may be called again.

    Args:
        level: name or number of the lowest level shown.
        log_file: appended to.
        is_main: processes other than rank 0 show errors only and write no file.

    Raises:
        UserError: if the file cannot be written.
    """
    root = logging.getLogger("deepmd_ema")
    for handler in [h for h in root.handlers if isinstance(h.formatter, _Formatter)]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_TerminalHandler()]
    if log_file is not None and is_main:
        refuse_to_lose(log_file, "--log-path", LOG)
        with writing(f"--log-path {log_file}"):
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            handlers.append(
                _FileHandler(log_file, encoding="utf-8", errors="backslashreplace")
            )
    for handler in handlers:
        short = (
            isinstance(handler, _TerminalHandler) and width_of(sys.stderr) is not None
        )
        handler.setFormatter(
            _Formatter(datefmt="%H:%M:%S" if short else "[%Y-%m-%d %H:%M:%S]")
        )
        root.addHandler(handler)
    root.setLevel(level if is_main else logging.ERROR)


class _TerminalHandler(logging.Handler):
    """Writes to stderr, above a progress bar if there is one; lines fit the width of a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        text = fitted(self.format(record), sys.stderr)
        if record.levelno >= logging.WARNING:
            color = RED if record.levelno >= logging.ERROR else YELLOW
            text = text.replace(
                f"{record.levelname}:",
                colored(f"{record.levelname}:", color, sys.stderr),
                1,
            )
        with suppress(OSError, ValueError):  # the terminal is gone or full
            tqdm.write(text, file=sys.stderr)


class _FileHandler(logging.FileHandler):
    """Appends to the file of ``--log-path``.

    If that fails it warns once, and the run continues without the file.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        """Leave the file alone from now on."""
        error = sys.exc_info()[1]
        logging.getLogger("deepmd_ema").removeHandler(self)
        with suppress(OSError):  # closing tries to write the rest once more
            self.close()
        reason = reason_of(error) if error is not None else "no reason given"
        text = "--log-path %s: cannot be written any more (%s): the run continues without it"
        logger.warning(text, self.baseFilename, reason)


class _Formatter(logging.Formatter):
    """Time and message; the level only when it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        text = f"{self.formatTime(record, self.datefmt)} {level}{printable(record.getMessage())}"
        return (
            f"{text}\n{self.formatException(record.exc_info)}"
            if record.exc_info
            else text
        )


class RunTimes:
    """A stopwatch that says where the time of a run went, and how much is left.

    Args:
        due: when a part is due that is not in every step, by its name.
        expected: until one of these was measured, how many steps take as long.

    Attributes:
        seconds: of each part so far.
    """

    def __init__(
        self,
        due: Mapping[str, Due] | None = None,
        expected: Mapping[str, float] | None = None,
    ) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_SHOWN, 0.0)
        self._counts: dict[str, int] = defaultdict(int)
        self._due = due or {}
        self._expected = expected or {}
        self._since = self._began = time.perf_counter()
        self._before = dict(self.seconds)  # seconds at the begin of the interval
        self._first_wait: float | None = None
        self._hinted = False
        # time and seconds of due parts, after the first steps
        self._measured_from: tuple[float, float] | None = None

    def waiting_share(self) -> float:
        """Return the share of time spent waiting for batches after the first one, 0 to 1."""
        total = max(time.perf_counter() - self._began, 1e-9)
        return min(
            1.0, max(0.0, self.seconds["data"] - (self._first_wait or 0.0)) / total
        )

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the time of the body under ``part``, such as data, step, row or checkpoint."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[part] = self.seconds.get(part, 0.0) + end - begin
            self._counts[part] += 1
            if part == "data" and self._first_wait is None:
                self._first_wait = end - begin
                self._began = end
            if part == "step" and self._counts[part] == _FIRST:
                self._measured_from = (
                    end,
                    sum(self.seconds.get(part, 0.0) for part in self._due),
                )

    def step_seconds(self) -> float | None:
        """Return the mean seconds of a step without due parts; None in the first steps."""
        steps = self._counts["step"] - _FIRST
        if self._measured_from is None or steps < 1:
            return None
        since, before = self._measured_from
        due = sum(self.seconds.get(part, 0.0) for part in self._due)
        return max(0.0, time.perf_counter() - since - (due - before)) / steps

    def left(self, step: int, num_steps: int) -> float | None:
        """Return the seconds from ``step`` to the end; None in the first steps.

        They include all that is still due. A part that was not due yet is counted with its expected
        time.
        """
        step_s = self.step_seconds()
        if step_s is None:
            return None
        left = step_s * (num_steps - step)
        for part, due in self._due.items():
            count = self._counts[part]
            mean = (
                self.seconds.get(part, 0.0) / count
                if count
                else self._expected.get(part, 0.0) * step_s
            )
            left += mean * due.count(step)
        return left

    def split(self) -> str:
        """Return the shares of the time of an interval, and start a new one.

        The text is such as ``data 2 % | step 95 % | validation 2 % | checkpoint 1 %``. The first
        time that more than a tenth was spent waiting for data, a hint is logged.
        """
        spent = dict.fromkeys(_SHOWN, 0.0)
        for part, seconds in self.seconds.items():
            spent[_SHOWN_AS.get(part, part)] += seconds - self._before.get(part, 0.0)
        total = max(time.perf_counter() - self._since, sum(spent.values()), 1e-9)
        is_slow = total > _MIN_HINT_S and spent["data"] > _SLOW_DATA * total
        if is_slow and not self._hinted:
            self._hinted = True
            logger.info(
                "%.0f %% of the time was spent waiting for data: read it from a local disk, give "
                "the run one more CPU core, or use a larger batch_size (the first interval also "
                "fills the cache of neighbor lists)",
                100 * spent["data"] / total,
            )
        self._before = dict(self.seconds)
        self._since = time.perf_counter()
        return " | ".join(
            f"{part} {100 * seconds / total:.0f} %" for part, seconds in spent.items()
        )


class Progress:
    """A bar on a terminal with steps, force error and time left; log lines everywhere.

    Args:
        num_steps: steps of the whole run.
        times: stopwatch of the run.
        interactive: whether to draw a bar; None: if stderr is a terminal.
    """

    def __init__(
        self, num_steps: int, times: RunTimes, interactive: bool | None = None
    ) -> None:
        self._num_steps = num_steps
        self._times = times
        self._width = len(str(num_steps))
        self._interactive = sys.stderr.isatty() if interactive is None else interactive
        self._bar: tqdm | None = None
        self._error = ""
        self._is_validated = False
        self._step = self._shown = 0
        self._line_at = self._shown_at = time.perf_counter()

    def start_at(self, step: int) -> None:
        """Count from ``step``, at a restart."""
        self._step = self._shown = step

    def advance(self, step: int) -> None:
        """Note that ``step`` is done."""
        if self._interactive:
            if self._bar is None:
                self._bar = self._new_bar()
            self._bar.set_postfix_str(self._facts(step), refresh=False)
            self._bar.update(step - self._step)
        elif (
            time.perf_counter() - self._line_at > LINE_INTERVAL_S
            and step < self._num_steps
        ):
            self._line_at = time.perf_counter()
            logger.info(
                "%*d  of %d steps, %s",
                self._width,
                step,
                self._num_steps,
                self._facts(step),
            )
        self._step = step

    def _new_bar(self) -> tqdm:
        width = 1  # where it cannot be read, tqdm finds it
        with suppress(OSError, ValueError, AttributeError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        return tqdm(
            total=self._num_steps,
            initial=self._step,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            # a terminal that does not know its width (a recording, some containers) reports 0
            **({"dynamic_ncols": True} if width else {"ncols": 80, "nrows": 24}),
            file=sys.stderr,
        )

    def _facts(self, step: int) -> str:
        """Return the force error, the time left and that of a step, as far as there is room."""
        left = self._times.left(step, self._num_steps)
        seconds = self._times.step_seconds()
        facts = [self._error] if self._error else []
        if left is not None and seconds is not None:
            facts += [f"{tqdm.format_interval(left)} left", f"{seconds:.2g} s/step"]
        while self._bar is not None and self._bar.ncols and len(facts) > 1:
            if (
                len(f"100%|#| {step}/{self._num_steps}, {', '.join(facts)}")
                <= self._bar.ncols
            ):
                break
            facts.pop()
        return ", ".join(facts)

    def show(self, step: int, lr: float, errors: Mapping[str, ValuesByTask]) -> None:
        """Log the errors of a displayed step, a line for each task.

        Where no bar is drawn, the first line has speed and time left.

        Args:
            step: optimizer steps so far.
            lr: learning rate of the step.
            errors: of batches: ``train``, ``valid``, then averages by name.
        """
        now = time.perf_counter()
        ends = [f"lr {lr:.1e}"]
        if not self._interactive:
            ends.append(
                f"{(step - self._shown) / max(now - self._shown_at, 1e-9):.3g} steps/s"
            )
            left = self._times.left(step, self._num_steps)
            if left is not None:
                ends.append(f"{tqdm.format_interval(left)} left")
        for task in errors["train"]:
            cells = [f"{step:{self._width}d}"]
            if task:
                cells.append(task)
            has_errors = False
            for name, by_task in errors.items():
                if text := describe_values(by_task.get(task, {})):
                    cells.append(f"{name} {text}")
                    has_errors = True
            if has_errors:
                logger.info("%s", "  ".join([*cells, *ends]))
                ends = ends[:1]  # the rest is in the first line alone
        logger.debug(
            "%*d  %.2f s: %s",
            self._width,
            step,
            now - self._shown_at,
            self._times.split(),
        )
        self._shown = step
        self._shown_at = now
        self._line_at = now
        # until the first full validation, the bar has errors of batches, of validation data if any
        if not self._is_validated:
            name = "valid" if any(errors["valid"].values()) else "train"
            forces = {
                task: row.get("rmse_f", math.nan) for task, row in errors[name].items()
            }
            self._error = _force_errors(name, forces)

    def show_validation(
        self, step: int, results: Mapping[str, Errors], best: Collection[str] = ()
    ) -> None:
        """Log the RMSE of a full validation, a line for each task.

        Args:
            step: optimizer steps so far.
            results: errors by weights, after the task if there are several: ``ice ema``.
            best: names of the results that are the best so far, which get a star.
        """
        names_by_task: dict[str, list[str]] = defaultdict(list)
        for name in results:
            names_by_task[name.rpartition(" ")[0]].append(name)
        for task, names in names_by_task.items():
            cells = [f"{step:{self._width}d}"]
            if task:
                cells.append(task)
            cells.append("full")
            for name in names:
                errors = results[name]
                values = [
                    f"{q} {significant(displayed(errors, f'{q}:RMSE'), _DIGITS)}"
                    for q in labelled(errors)
                    if q != "S"  # virials are shown
                ]
                star = "*" if name in best else ""
                cells.append(f"{name.rpartition(' ')[2]}{star} {' '.join(values)}")
            logger.info("%s", "  ".join(cells))
        # the bar has force errors of each task by the first average, or by the live weights if
        # there is none
        weights = [name.rpartition(" ")[2] for name in results]
        chosen = next((name for name in weights if name != LIVE), LIVE)
        forces = {
            name.rpartition(" ")[0]: errors.metric("F:RMSE")
            for name, errors in results.items()
            if name.rpartition(" ")[2] == chosen
        }
        if shown := _force_errors(chosen, forces):
            self._error = shown
            self._is_validated = True

    def close(self) -> None:
        """Leave the bar as it is now and end its line."""
        if self._bar is not None:
            # the error is that of the last validation, which may come after the last step
            self._bar.set_postfix_str(self._facts(self._step), refresh=False)
            self._bar.close()
            self._bar = None


def _force_errors(name: str, errors: Mapping[str, float]) -> str:
    """Return force errors in eV/angstrom by task as ``ema F 44.4 meV/Å``; empty without any."""
    metric = METRICS["F"]
    shown = []
    for task, force in errors.items():
        if not math.isnan(force):  # the data have no forces
            text = significant(metric.display_factor * force, _DIGITS)
            shown.append(f"{task} {text}".strip())
    return f"{name} F {', '.join(shown)} {metric.display_unit}" if shown else ""


def describe_values(errors: Mapping[str, float]) -> str:
    """Return errors by column of lcurve.out in units of tables: ``E 3.24 F 146``; not the loss."""
    parts = []
    letters = {name: letter for letter, name in CURVE_NAMES.items()}
    for name, value in errors.items():
        # rmse_e: e; a column without an underscore is its own symbol, unless it is the loss
        symbol = name.partition("_")[2] or ("" if name in ("rmse", "loss") else name)
        letter = letters.get(symbol, symbol.upper())
        # quantities without a letter are in the units of tables, too
        if quantity := METRICS.get(letter) or QUANTITIES.get(symbol):
            shown = letter if letter in METRICS else symbol
            parts.append(
                f"{shown} {significant(quantity.display_factor * value, _DIGITS)}"
            )
        elif symbol:
            parts.append(f"{symbol} {value:.3g}")
    return " ".join(parts)
