"""Times of the parts of a run, and how much of it is left."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deepmd_ema.config.due import Due

logger = logging.getLogger(__name__)

_SHOWN = ("data", "step", "validation", "checkpoint")
_SHOWN_AS = {"row": "validation", "snapshot": "checkpoint"}  # in the line of a displayed step
_SLOW_DATA = 0.1  # share of the time above which waiting for data deserves a hint
_FIRST = 2  # steps that prepare memory and caches: their time says nothing of the others


class RunTimes:
    """A stopwatch that says where the time of a run went, and how much is left.

    Args:
        due: when a part is due that is not in every step, by its name.
        expected: until one of these was measured, how many steps take as long.

    Attributes:
        seconds: of each part so far.
    """

    def __init__(self, due: Mapping[str, Due] | None = None, expected: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_SHOWN, 0.0)
        self._counts: dict[str, int] = defaultdict(int)
        self._due, self._expected = due or {}, expected or {}
        self._since = self._began = time.perf_counter()
        self._before = dict(self.seconds)  # the interval
        self._first_wait: float | None = None
        self._hinted = False
        self._measured_from: tuple[float, float] | None = None  # time and seconds of due parts, after the first steps

    def waiting_share(self) -> float:
        """Return the share of the time since the first batch was there that was spent waiting for others, 0 to 1."""
        first = self._first_wait or 0.0
        total = max(time.perf_counter() - self._began - first, 1e-9)
        return min(1.0, max(0.0, self.seconds["data"] - first) / total)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the time of the body under ``part``: data, step, row, validation, snapshot or checkpoint."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[part] = self.seconds.get(part, 0.0) + end - begin
            self._counts[part] += 1
            if part == "data" and self._first_wait is None:
                self._first_wait, self._began = end - begin, begin
            if part == "step" and self._counts[part] == _FIRST:
                self._measured_from = end, self._seconds_due()

    def step_seconds(self) -> float | None:
        """Return the mean seconds of a step with all that is not due at its own pace; None in the first steps."""
        steps = self._counts["step"] - _FIRST
        if self._measured_from is None or steps < 1:
            return None
        since, before = self._measured_from
        return max(0.0, time.perf_counter() - since - (self._seconds_due() - before)) / steps

    def left(self, step: int, num_steps: int) -> float | None:
        """Return the seconds from ``step`` to the end, with all that is still due; None in the first steps.

        A part that was not due yet is counted with its expected time.
        """
        each = self.step_seconds()
        if each is None:
            return None
        left = each * (num_steps - step)
        for part, due in self._due.items():
            count = self._counts[part]
            mean = self.seconds.get(part, 0.0) / count if count else self._expected.get(part, 0.0) * each
            left += mean * due.count(step)
        return left

    def split(self) -> str:
        """Return such as ``data 2 % | step 95 % | validation 2 % | checkpoint 1 %`` and start a new interval.

        The first time that more than a tenth was spent waiting for data, a hint is logged.
        """
        spent = dict.fromkeys(_SHOWN, 0.0)
        for part, seconds in self.seconds.items():
            spent[_SHOWN_AS.get(part, part)] += seconds - self._before.get(part, 0.0)
        total = max(time.perf_counter() - self._since, sum(spent.values()), 1e-9)
        shares = {part: seconds / total for part, seconds in spent.items()}
        if shares["data"] > _SLOW_DATA and not self._hinted:
            self._hinted = True
            logger.info(
                "%.0f %% of the time was spent waiting for data: read it from a local disk, give the run one more CPU "
                "core, or use a larger batch_size (the first interval also fills the cache of neighbor lists)",
                100 * shares["data"],
            )
        self._before, self._since = dict(self.seconds), time.perf_counter()
        return " | ".join(f"{part} {100 * share:.0f} %" for part, share in shares.items())

    def _seconds_due(self) -> float:
        return sum(self.seconds.get(part, 0.0) for part in self._due)


class Laps:
    """Times of the parts of a step, on a device that the host waits for; else nothing is measured."""

    def __init__(self, measures: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._measures, self._since = measures, 0.0

    def lap(self, part: str = "") -> None:
        """Count the time since the last call under ``part``; without a name it only begins."""
        if self._measures:
            now = time.perf_counter()
            if part:
                self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
            self._since = now
