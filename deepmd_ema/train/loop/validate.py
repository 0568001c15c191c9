"""Full validation: errors over the whole validation set, for the live weights and for each average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch
from deepmd_ema.checkpoint.series import BestFiles
from deepmd_ema.checkpoint.store import Store
from deepmd_ema.config.outputs import Outputs
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.data.loader import num_batches, sequential_batches
from deepmd_ema.dist.world import World
from deepmd_ema.metrics import Errors, evaluate
from deepmd_ema.model.model_set import ModelSet, nested, unnested
from deepmd_ema.model.tabulated import tables_in
from deepmd_ema.report.tables import ValidationLog
from deepmd_ema.train.loop.saver import Saver
from deepmd_ema.train.start.prepare import PreparedRun, PreparedTask
from deepmd_ema.weight_names import LIVE


class ValidationAborted(Exception):  # noqa: N818 - a request, not a fault
    """A stop was requested inside a validation; the live weights are back in the models."""


@dataclass(frozen=True)
class Validated:
    """One row of a full validation: some weights on the data of one task.

    Attributes:
        weights: ``live``, or the name of an average.
        task: whose model and data.
        log: the file of this row (``val.log``, ``val_ema.log``); None on ranks that write nothing.
        best: best files and their records, or None when they are not kept.
    """

    weights: str
    task: str
    log: ValidationLog | None
    best: BestFiles | None = None

    @property
    def name(self) -> str:
        """Name in logs: of the weights, and of the task if it has one."""
        return f"{self.task} {self.weights}" if self.task else self.weights


def build_rows(prepared: PreparedRun, num_steps: int, store: Store, world: World) -> list[Validated]:
    """Return the rows of a full validation: the live weights and every average with full validation, by task."""
    config, validating, outputs = prepared.config, prepared.config.validating, Outputs(prepared.config)
    metric, rows = validating.validation_metric, []
    for weights in config.fully_validated:
        for task in (name for name, task in prepared.tasks.items() if task.valid):
            log = ValidationLog(outputs.validation_log(weights, task), num_steps, metric) if world.is_main else None
            prefix, folder, keep = outputs.best_prefix(weights, task), outputs.best_folder, validating.max_best_ckpt
            best = BestFiles(prefix, folder, keep, metric, writes=world.is_main, store=store)
            rows.append(Validated(weights, task, log, best if validating.save_best else None))
    return rows


@dataclass(frozen=True)
class FullValidation:
    """Validates when it is due, writes one row per set of weights and task, and keeps the best files.

    Every rank takes its share of the batches, and all get the errors over all of them.

    Attributes:
        models: the live models.
        bank: averages, or None when only the live weights are validated.
        rows: what is validated, maybe nothing; those of the same weights follow each other.
        tasks: validation frames by task.
        saver: writes the best files.
        metric: what ``best`` means, such as ``E:MAE``.
        start: first step at which it is due; None for never.
        every: steps between two validations.
        last: step of the run that is validated whatever ``start`` and ``every`` are.
        world: the processes that share the batches.
    """

    models: ModelSet
    bank: AverageBank | None
    rows: Sequence[Validated]
    tasks: Mapping[str, PreparedTask]
    saver: Saver
    metric: Metric
    start: int | None
    every: int
    last: int
    world: World

    @classmethod
    def build(
        cls, prepared: PreparedRun, bank: AverageBank | None, rows: Sequence[Validated], saver: Saver, num_steps: int,
        world: World,
    ) -> FullValidation:  # fmt: skip
        """Return the full validation of ``rows``, whose best files ``saver`` writes."""
        validating = prepared.config.validating
        tasks = {name: task for name, task in prepared.tasks.items() if task.valid}
        # below 1 a fraction of the run, never at 1, a step above it; the last step is validated in any case but never
        start = validating.full_val_start
        first = None if start == 1 else int(start * num_steps) if start < 1 else int(start)
        metric, every = validating.validation_metric, validating.validation_freq
        return cls(prepared.models, bank, rows, tasks, saver, metric, first, every, num_steps, world)

    def is_due(self, step: int) -> bool:
        """Whether the weights after ``step`` are validated."""
        if not self.rows or self.start is None:
            return False
        return step == self.last or (step >= self.start and (step - self.start) % self.every == 0)

    def run(
        self, step: int, stopped: Callable[[], bool] = lambda: False, entered: Callable[[str], None] = lambda _: None
    ) -> dict[str, Errors]:
        """Validate every set of weights, write its rows, and have its best files written; return errors by row.

        Args:
            step: optimizer steps done.
            stopped: called between batches; True ends the validation.
            entered: called with the name of the weights when these are in the models.

        Raises:
            ValidationAborted: if a stop was requested; nothing of this step was written.
        """
        errors: dict[Validated, Errors] = {}
        for weights, rows in groupby(self.rows, key=attrgetter("weights")):
            swap = nullcontext() if weights == LIVE or self.bank is None else self.bank.swapped_in(weights)
            # as `dp-ema test` evaluates a file of these weights, so that both give the same numbers
            with swap, tables_in(self.models.by_task.values()):
                entered(weights)
                for row in rows:
                    batches = self._until(stopped, self.tasks[row.task])
                    own = evaluate(self.models.of(row.task), batches, self.world.device)
                    errors[row] = Errors(self.world.all_reduce_sum(own.sums))
        self.saver.writer.begin(step)  # remarks on files of earlier steps come before the rows of this one
        for row, found in errors.items():
            if row.log is not None:
                row.log.write(step, found)
            value = found.metric(self.metric)
            if row.best is not None and row.best.offer(value, step):
                self.saver.keep_best(row.best, row.weights, step, partial(self._report_best, row, value))
        return {row.name: found for row, found in errors.items()}

    def _report_best(self, row: Validated, value: float, path: Path) -> None:
        if row.log is not None:
            row.log.write_best(path, self.metric, value)

    def _until(self, stopped: Callable[[], bool], task: PreparedTask) -> Iterator[Batch]:
        batches = partial(sequential_batches, task.valid, task.model.layout, task.cache)
        mine = batches(rank=self.world.rank, world_size=self.world.size)
        batch = None
        # all ranks go the same number of rounds, because a sharded model computes together
        for _ in range(-(-num_batches(task.valid) // self.world.size)):
            if stopped():
                raise ValidationAborted
            following = next(mine, None)
            batch = following if following is not None else (batch or next(batches())).as_padding()
            yield batch

    def truncate(self, step: int) -> None:
        """Cut the rows after ``step`` from every log: a restart writes them again."""
        for row in self.rows:
            if row.log is not None:
                row.log.cut_after(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the best records by set of weights, and by task if there are several."""
        records: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row.best is not None:
                records.setdefault(row.weights, {})[row.task] = row.best.state_dict()
        return {weights: unnested(of_task) for weights, of_task in records.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the best records of ``state``; what it does not name starts without records."""
        for row in self.rows:
            records = nested(state.get(row.weights, {}), (row.task,)).get(row.task)
            if row.best is not None and records:
                checked = self.world.broadcast_from_rank0(partial(_continue, row.best, records))
                if not self.world.is_main:
                    row.best.load_state_dict(checked)


def _continue(best: BestFiles, state: Mapping[str, Any]) -> dict[str, Any]:
    best.load_state_dict(state)
    return best.state_dict()
