"""The record of a run, beside its files: programs, machine, times, warnings, and how it ended."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np

from deepmd_ema.config.outputs import RECORD
from deepmd_ema.errors import Interrupted, WriteError
from deepmd_ema.files import atomic_write
from deepmd_ema.report.table import Column, Table, duration
from deepmd_ema.text import counted
from deepmd_ema.utils import __version__

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = (
    10.0  # between two writes of the record in a step; each costs milliseconds
)
MAX_WARNINGS = 20  # the last ones are kept
_IN_STEP = (
    "forward",
    "backward",
    "optimizer",
)  # parts of a step, which are subtracted from it
_PARTS = {
    "start": "start: data, statistics",
    "data": "waiting for data",
    "forward": "step: forward pass",
    "backward": "step: backward pass",
    "optimizer": "step: clipping, optimizer",
    "step": "step",
    "row": "rows of the learning curve",
    "validation": "full validations",
    "test": "test data",
    "checkpoint": "checkpoints",
    "snapshot": "snapshots of averages",
}


@dataclass
class Part:
    """A run from one start to its end: a restart begins another one.

    Attributes:
        command: the words of the command line.
        programs: versions by name.
        machine: host, processor and operating system.
        device: on which it ran.
        ranks: number of processes.
        began: local time of the start, as ISO 8601.
        updated: local time of the last entry.
        ended: how it ended, such as ``ended``, ``ended early: ...`` or ``interrupted by SIGTERM``;
            empty while it runs, or if it was killed.
        first_step: steps done before it.
        step: steps done.
        num_steps: of the whole run.
        elapsed: seconds of this part of the run, with data and validation.
        left: seconds until the end, at its last entry; None while it is not known.
        seconds: by part: start, data, step, forward, backward, optimizer (in step), row,
            validation, checkpoint.
        averages: settings, updates and mean age of each average, at the last checkpoint.
        warnings: time and text of the last warnings.
        test: errors on the test data after the last step, by weights, after the task if there are
            several, and by column as in validation logs, with the step of the weights.
    """

    command: str = ""
    programs: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    device: str = ""
    ranks: int = 1
    began: str = ""
    updated: str = ""
    ended: str = ""
    first_step: int = 0
    step: int = 0
    num_steps: int = 0
    elapsed: float = 0.0
    left: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    averages: dict[str, dict[str, Any]] = field(default_factory=dict)
    warnings: list[list[str]] = field(default_factory=list)
    test: dict[str, dict[str, float]] = field(default_factory=dict)


class RunRecord:
    """Writes the record of a run, at most every ten seconds.

    If it cannot be written, the run continues without it.

    Args:
        path: the file; None writes nothing.
        warnings: of the run so far, which may grow.
        device: on which the run computes, such as ``cpu (2 threads)``.
        ranks: number of processes.
        began: ``time.monotonic()`` at the start.
        continues: whether the run continues the one that the file is of.

    Attributes:
        early_end: why the run ends before its last step although nothing has interrupted it; empty
            if it does not.
    """

    def __init__(
        self,
        path: Path | None = None,
        warnings: deque[list[str]] | None = None,
        device: str = "",
        ranks: int = 1,
        began: float | None = None,
        continues: bool = False,
    ) -> None:
        import torch  # not by the commands that read records: it takes seconds

        self._path = path
        # not `warnings or ...`: an empty deque is filled later
        self._warnings = warnings if warnings is not None else deque[list[str]]()
        self._began = time.monotonic() if began is None else began
        self._written = 0.0
        self.early_end = ""
        self._earlier = (
            read_record(path.parent) if path is not None and continues else []
        )
        program = Path(sys.argv[0])
        # a rank is started as python -m deepmd_ema
        name = "dp-ema" if program.parent.name == "deepmd_ema" else program.name
        processor = (
            platform.machine()
        )  # the architecture, where Linux does not name the model
        with suppress(OSError, IndexError):
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
            processor = text.split("model name", 1)[1].partition("\n")[0].strip(" \t:")
        system = f"{platform.system()} {platform.release()}"
        # from the monotonic clock, whose zero is arbitrary, to the time of day
        began_at = datetime.fromtimestamp(time.time() - time.monotonic() + self._began)
        versions = {
            "dp-ema": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        self.part = Part(
            command=shlex.join([name, *sys.argv[1:]]),
            programs={**versions, "Python": platform.python_version()},
            machine=f"{socket.gethostname()}, {processor}, {system}",
            device=device,
            ranks=ranks,
            began=began_at.astimezone().isoformat(" ", "seconds"),
        )

    def write(self, **changes: Any) -> None:
        """Set attributes of the part and write the file.

        The first call ends the start of the run: data and models are ready.
        """
        now = time.monotonic()
        vars(self.part).update(changes)
        self.part.seconds.setdefault("start", now - self._began)
        if self._path is None:
            return
        self.part.updated = datetime.now().astimezone().isoformat(" ", "seconds")
        self.part.elapsed = now - self._began
        self.part.warnings = [list(entry) for entry in self._warnings]
        self._written = now
        parts = [asdict(part) for part in (*self._earlier, self.part)]
        text = json.dumps(parts, indent=1, default=str)
        try:
            with atomic_write(self._path) as file:
                file.write_text(
                    text + "\n", encoding="utf-8", errors="backslashreplace"
                )
        except WriteError as error:  # a disk that is full is reported once
            self._path = None
            logger.warning("%s The run continues without it.", error)

    def note(
        self,
        step: int,
        seconds: Mapping[str, float],
        left: float | None,
        averages: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Note that ``step`` is done.

        The file is written at once if averages are given, else some seconds later.

        Args:
            step: optimizer steps so far.
            seconds: of each part of the steps.
            left: seconds until the end.
            averages: settings and counters of each average.
        """
        self.part.step = step
        self.part.left = left
        self.part.seconds |= seconds
        if averages is not None:
            self.write(averages={name: dict(facts) for name, facts in averages.items()})
        elif time.monotonic() - self._written > MIN_INTERVAL_S:
            self.write()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Note at the end of the body how it ended."""
        how = ""
        try:
            yield
            if self.early_end:
                how = f"ended early: {self.early_end}"
            elif self.part.step >= self.part.num_steps:
                how = "ended"
            else:
                how = "interrupted before its last step"
        except BaseException as error:
            how = f"failed: {' '.join(str(error).split()) or type(error).__name__}"
            if isinstance(error, Interrupted):
                how = f"interrupted by {Signals(error.signal_number).name}"
            elif isinstance(error, KeyboardInterrupt):
                how = "interrupted by Ctrl-C"
            raise
        finally:
            self.write(ended=how, left=None)


def read_record(folder: str | Path) -> list[Part]:
    """Return the parts of the run in a folder; nothing without a record that can be read."""
    # attributes of later versions are left out, and those that are new have their defaults
    with suppress(OSError, ValueError, TypeError, AttributeError):
        names = {f.name for f in fields(Part)}
        parts = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
        return [
            Part(**{name: value for name, value in part.items() if name in names})
            for part in parts
        ]
    return []


def table_of_times(parts: Sequence[Part]) -> Table:
    """Return the times of the parts of a run and their shares; without records it has no rows."""
    spent = {
        name: sum(part.seconds.get(name, 0.0) for part in parts) for name in _PARTS
    }
    elapsed = sum(part.elapsed for part in parts)
    # the time of a step includes that of its parts, where these are measured
    in_step = sum(spent[name] for name in _IN_STEP)
    # no share is negative, even if the parts add up to more than the elapsed time
    total = max(elapsed, sum(spent.values()) - in_step)
    spent["step"] -= in_step
    names = {**_PARTS, "step": "step: averages, the rest"} if in_step else _PARTS
    times = {text: spent[name] for name, text in names.items() if spent[name] > 0}
    times["end and everything else"] = total - sum(times.values())
    rows = [
        (text, duration(seconds), f"{100 * seconds / total:.1f} %")
        for text, seconds in times.items()
        if total
    ]
    title = duration(elapsed)
    if len(parts) > 1:
        title += f" in {counted(len(parts), 'part')}"
    return Table(
        title, (Column("part"), Column("time", "", "s"), Column("share", "", "s")), rows
    )


@contextmanager
def keeping_warnings() -> Iterator[deque[list[str]]]:
    """Yield the last warnings that are logged in the body, with their times."""
    handler = _Keeper(logging.WARNING)
    root = logging.getLogger("deepmd_ema")
    handler.last = deque(maxlen=MAX_WARNINGS)
    root.addHandler(handler)
    try:
        yield handler.last
    finally:
        root.removeHandler(handler)


class _Keeper(logging.Handler):
    last: deque[list[str]]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message, and show it if no other handler does."""
        time_of_message = datetime.now().astimezone().isoformat(" ", "seconds")
        self.last.append([time_of_message, record.getMessage()])
        # logging shows warnings if there is no handler at all, and this one is a handler
        handlers = (
            *logging.getLogger("deepmd_ema").handlers,
            *logging.getLogger().handlers,
        )
        if logging.lastResort is not None and all(
            handler is self for handler in handlers
        ):
            logging.lastResort.handle(record)
