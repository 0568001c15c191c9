"""The best files of a run by a validation metric, with the rank in their names."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepmd_ema.checkpoint.files import save
from deepmd_ema.checkpoint.names import best_name, best_pattern, files_by_step
from deepmd_ema.files import sweep

logger = logging.getLogger(__name__)


class BestFiles:
    """Keeps the ``keep`` best files as ``<prefix>.ckpt-<step>.t-<rank>.pt``; lower values are better.

    A file that is no longer among the best keeps a rank beyond ``keep`` until :meth:`prune` is called, after a training
    checkpoint with the new records was written: a restart finds the files of its records. :meth:`prune` also removes
    best files of an earlier run, once this run has one of its own. Rotation of checkpoints never touches best files.

    Args:
        prefix: ``best``, or ``best_<name>`` for an average.
        folder: of the files.
        keep: how many are kept.
        metric: what the values are, such as ``E:MAE``; records of another metric are not continued.
        writes: whether this process writes the files; others keep the records and make the payload, no more.
    """

    def __init__(self, prefix: str, folder: str | Path, keep: int, metric: str, writes: bool = True) -> None:
        self.writes = writes
        self.prefix, self.folder, self.keep, self.metric = prefix, Path(folder), keep, metric
        self.records: list[tuple[float, int]] = []  # (value, step), best first

    def offer(self, value: float, step: int, payload: Callable[[], Mapping[str, Any]]) -> bool:
        """Write the file of ``step`` if it is among the best, and return whether it is.

        Of equal values the earlier one ranks higher; a value that is not finite is never kept.
        """
        records = [r for r in self.records if r[1] != step]
        rank = sum(v <= value for v, _ in records)
        if not math.isfinite(value) or rank >= self.keep:
            return False
        records.insert(rank, (value, step))
        content = payload()
        if self.writes:
            save(self._file(step, rank + 1), content)
        self.records = records[: self.keep]
        if self.writes:
            self._arrange(records)
        return True

    def path(self, step: int) -> Path:
        """Return the file of ``step``, which must be among the best."""
        return self._file(step, 1 + [s for _, s in self.records].index(step))

    def prune(self) -> None:
        """Remove every other file of this prefix, once there is a record: call it after a checkpoint was written."""
        if not self.records or not self.writes:
            return
        sweep(self.folder, best_pattern(self.prefix))
        mine = {self.path(step).name for _, step in self.records}
        for files in self._on_disk().values():
            for file in files:
                if file.name not in mine:
                    file.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the metric and the records, best first."""
        return {"metric": str(self.metric), "records": [list(record) for record in self.records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the records of ``state`` whose files still exist, and correct the ranks in their names.

        A process that does not write takes the records as they are: those that the writing one has checked.
        """
        if state["metric"] != self.metric:
            logger.warning(
                "best files are chosen by %s now, by %s before: starts without records", self.metric, state["metric"]
            )
            return
        records = [(float(value), int(step)) for value, step in state["records"]]
        if not self.writes:
            self.records = records
            return
        there = self._on_disk()
        for value, step in records:
            if step not in there:
                text = "%s of step %d (%s %.5g) is gone and no longer counts as best"
                logger.warning(text, self.prefix, step, self.metric, value)
        records = [r for r in records if r[1] in there]
        self.records = records[: self.keep]
        self._arrange(records)

    def _arrange(self, records: list[tuple[float, int]]) -> None:
        """Give the files of ``records`` their ranks; names differ by step, so no move can hit another file."""
        there = self._on_disk()
        for rank, (_, step) in enumerate(records, 1):
            wanted = self._file(step, rank)
            files = there.get(step, [])
            if wanted not in files and files:
                os.replace(files[0], wanted)
            for file in files:
                if wanted in files and file != wanted:
                    file.unlink(missing_ok=True)

    def _file(self, step: int, rank: int) -> Path:
        return self.folder / best_name(self.prefix, step, rank)

    def _on_disk(self) -> dict[int, list[Path]]:
        return files_by_step(self.folder, best_pattern(self.prefix))
