"""Full validation: errors over the whole validation set, of the live weights and each average."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank
from deepmd_ema.averaging.bank import reshard
from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.checkpoint.series import BestFiles
from deepmd_ema.config.labels import ATOM_PREF, WEIGHTED_FORCE
from deepmd_ema.config.outputs import Outputs
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.config.schema.training import EarlyStopConfig
from deepmd_ema.data.loader import (
    num_batches,
    prefetch,
    sequential_batches,
    shared_atoms_at_once,
)
from deepmd_ema.data.source import FrameSource
from deepmd_ema.distributed.tensors import local_shard, shard_like
from deepmd_ema.distributed.world import World
from deepmd_ema.model.compiler import pad_for
from deepmd_ema.model.metrics import Errors, evaluate
from deepmd_ema.model.model_set import nested, unnested
from deepmd_ema.model.tabulated import tables_in
from deepmd_ema.report.curves import ValidationLog
from deepmd_ema.report.facts import show_metric
from deepmd_ema.text import counted
from deepmd_ema.training.modes import Products
from deepmd_ema.training.prepare import PreparedRun
from deepmd_ema.training.saver import Saver
from deepmd_ema.training.tasks import Task
from deepmd_ema.utils import LIVE

logger = logging.getLogger(__name__)


class ValidationAborted(Exception):  # noqa: N818 - a request, not a fault
    """A stop was requested in a validation; the live weights are in the models again."""


Row: TypeAlias = tuple[str, str]
"""Name of the weights, and of the task, which is empty in a run of one."""


@dataclass(frozen=True)
class Validated:
    """One row of a full validation: some weights on the data of one task.

    Attributes:
        weights: ``live``, or the name of an average.
        task: whose model and data.
        metric: error that the best weights have.
        log: the file of this row (``val.log``, ``val_ema.log``); None on ranks that write nothing.
        best: best files and their records, or None when they are not kept.
    """

    weights: str
    task: str
    metric: Metric
    log: ValidationLog | None
    best: BestFiles | None = None

    @property
    def key(self) -> Row:
        """Names of weights and task."""
        return self.weights, self.task

    @property
    def name(self) -> str:
        """Name in logs: of the weights, and of the task if it has one."""
        return f"{self.task} {self.weights}" if self.task else self.weights


class BestWeights(NamedTuple):
    """The best weights of a row: their error by its metric, in eV and angstrom, step and file."""

    row: Validated
    error: float
    step: int
    file: Path


class FullValidation:
    """Writes one row per set of weights and task at a validation, and keeps the best files.

    The live weights and every average with full validation are evaluated on the data of each task
    that has some. Every rank takes its share of the batches, and all get the errors over all of
    them.

    Args:
        prepared: models and data of the run.
        bank: averages, maybe none.
        writers: the processes that write sharded files together, or None.
        world: the processes that share the batches.
        products: context of matrix products.

    Attributes:
        models: the live models.
        tasks: tasks with validation frames, by name.
        rows: what is validated, maybe nothing; those of the same weights follow each other.
        early_stop: counts validations without a lower error; None: the run has all its steps.
        tested: tasks with test frames, by name.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        bank: AverageBank,
        writers: World | None,
        world: World,
        products: Products,
    ) -> None:
        config = prepared.config
        validating = prepared.config.validating
        outputs = Outputs(prepared.config)
        self.models = prepared.models
        self._bank = bank
        self._world = world
        self._products = products
        self.tasks = {name: task for name, task in prepared.tasks.items() if task.valid}
        self.tested = {name: task for name, task in prepared.tasks.items() if task.test}
        averages = config.fully_validated or [
            average.name for average in config.training.averaging
        ]
        self._tested_weights = dict.fromkeys(
            [LIVE, *averages]
        )  # each once, in this order

        # the error of each task that the early stop watches; every rank counts alike
        metric, early_stop = validating.validation_metric, validating.early_stop
        if early_stop is not None:
            watched = {
                name: task.config.metric(early_stop.metric or metric)
                for name, task in self.tasks.items()
            }
        self.early_stop = (
            EarlyStop(early_stop, watched) if early_stop is not None else None
        )

        # A row for each set of weights and task, those of one set together: weights are exchanged
        # once for all its tasks. Best records are on every rank, because all ranks take part in the
        # files of weights; rows of `val.log` are written by rank 0.
        self._is_first = True
        self.rows: list[Validated] = []
        for weights in config.fully_validated:
            for name, task in self.tasks.items():
                file, section = outputs.validation_log(weights, name), task.config
                best_by = section.metric(metric)
                shown = section.model.fitting_net.metrics
                if ATOM_PREF in section.labels:
                    shown = (*shown, WEIGHTED_FORCE.metric)
                log = best = None
                if world.is_main:
                    log = ValidationLog(file, prepared.length.num_steps, best_by, shown)
                if validating.save_best:
                    best = BestFiles(
                        outputs.best_prefix(weights, name),
                        outputs.best_folder,
                        validating.max_best_ckpt,
                        best_by,
                        writes=world.is_main,
                        writers=writers,
                    )
                self.rows.append(Validated(weights, name, best_by, log, best))

    def run(
        self,
        step: int,
        saver: Saver,
        stopped: Callable[[], bool],
        entered: Callable[[str], None],
    ) -> dict[str, Errors]:
        """Validate every set of weights, write rows and best files; return errors by row.

        Must be called by every rank.

        Args:
            step: optimizer steps done.
            saver: writes the best files.
            stopped: called between batches; True ends the validation.
            entered: called with the name of the weights when these are in the models.

        Raises:
            ValidationAborted: if a stop was requested; nothing of this step was written.
        """
        # Compiled numbers are compared with eager ones once more: weights are trained by now, and
        # those of the first comparison were not.
        if (compiler := self.models.compiler) is not None and self._is_first:
            compiler.due.add(False)  # the code of evaluation mode
        self._is_first = False

        # All errors first: a stop that is requested meanwhile leaves no row of this step.
        errors: dict[Validated, Errors] = {}
        for weights, rows in groupby(self.rows, key=attrgetter("weights")):
            with self._bank.swapped_in(weights):
                entered(weights)
                by_task = self.errors(stopped)
            errors.update((row, by_task[row.task]) for row in rows)

        # remarks on files of earlier steps come before the rows of this one
        saver.writer.begin(step)
        for row, row_errors in errors.items():
            if row.log is not None:
                row.log.write(step, row_errors)
            value = row_errors.metric(row.metric)
            # ranks have the same errors, and all of them copy the weights for the best file
            if row.best is not None and row.best.offer(value, step):
                saver.keep_best(
                    row.best, row.weights, step, partial(self._report_best, row, value)
                )
        if self.early_stop is not None:
            self.early_stop.add(
                step, {row.key: values for row, values in errors.items()}
            )
        return {row.name: values for row, values in errors.items()}

    def test(
        self,
        step: int,
        refitted: Mapping[str, Mapping[str, Tensor]],
        stopped: Callable[[], bool],
    ) -> dict[Row, tuple[int, Errors]]:
        """Return step and errors on the test data, by names of weights and task.

        Weights of a best file have the name ``best ema``. Must be called by every rank, when all
        files are written.

        Args:
            step: optimizer steps done.
            refitted: tensors that were fitted after the last step, by weights.
            stopped: called between batches; True ends the test.

        Raises:
            ValidationAborted: if a stop was requested.
        """
        tested: dict[Row, tuple[int, Errors]] = {}
        for weights in self._tested_weights:
            # with the tensors that the files of the end have
            with (
                self._bank.swapped_in(weights),
                self._replaced(refitted.get(weights, {})),
            ):
                errors = self.errors(stopped, self.tested)
            for task, task_errors in errors.items():
                tested[weights, task] = step, task_errors
        for best in self.best_weights():
            task = best.row.task
            if task in self.tested:
                # rank 0 has written the file, to a folder that others may not see
                file = self._world.broadcast_from_rank0(
                    partial(checkpoint.load, best.file)
                )
                with self._replaced(file["model"]):
                    errors = self.errors(stopped, {task: self.tested[task]})
                tested[f"best {best.row.weights}", task] = best.step, errors[task]
        return tested

    @contextmanager
    def _replaced(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Run the body with other tensors in the models, then put those of the models back.

        Args:
            weights: whole tensors by their names in the models.
        """
        # gathered weights of a sharded model would hide what is copied into the shards
        reshard([self.models])
        pairs = [
            (local_shard(tensor), shard_like(weights[name], tensor))
            for name, tensor in self.models.state_dict().items()
            if name in weights
        ]
        before = [shard.clone() for shard, _ in pairs]
        try:
            for shard, values in pairs:
                shard.copy_(values)
            yield
        finally:
            reshard([self.models])
            for (shard, _), values in zip(pairs, before):
                shard.copy_(values)

    def errors(
        self, stopped: Callable[[], bool], tested: Mapping[str, Task] | None = None
    ) -> dict[str, Errors]:
        """Return the errors by task of the weights that are in the models.

        Must be called by every rank.

        Args:
            stopped: called between batches; True ends the validation.
            tested: tasks whose test data count; None: the validation data of all.

        Raises:
            ValidationAborted: if a stop was requested.
        """
        errors = {}
        # as `dp-ema test` evaluates a file of these weights, so that both give the same numbers
        with tables_in(self.models.by_task.values()), self._products():
            for name, task in (self.tasks if tested is None else tested).items():
                batches = self._until(
                    stopped, task, task.valid if tested is None else task.test
                )
                rank_errors = evaluate(
                    self.models.of(name), batches, self._world.device
                )
                errors[name] = Errors(self._world.all_reduce_sum(rank_errors.sums))
        return errors

    def _report_best(self, row: Validated, value: float, path: Path) -> None:
        """Note a best file in the log of its row, when the file is on the disk."""
        if row.log is not None:
            row.log.write_best(path, row.metric, value)

    def _until(
        self, stopped: Callable[[], bool], task: Task, systems: Sequence[FrameSource]
    ) -> Iterator[Batch | PackedBatch]:
        """Yield this rank's batches of some systems, until a stop is requested."""
        world, layout = self._world, task.model.layout
        # batches as large as memory allows, but small enough that each rank has some
        max_atoms = shared_atoms_at_once(systems, world.device, world.size)
        batches = partial(sequential_batches, systems, layout, task.cache, max_atoms)
        compiler = self.models.compiler
        pad = (
            pad_for(compiler.options, layout)
            if compiler is not None and compiler.validates(task.model)
            else None
        )
        mine = prefetch(
            batches(rank=world.rank, world_size=world.size), world.device, pad
        )
        batch = None
        # All ranks make the same number of rounds, because a sharded model computes together. A
        # rank without a batch in the last round evaluates padding, which counts nothing.
        for _ in range(-(-num_batches(systems, max_atoms) // world.size)):
            if stopped():
                raise ValidationAborted
            following = next(mine, None)
            batch = (
                following
                if following is not None
                else (batch or next(batches())).as_padding()
            )
            yield batch

    def best_weights(self) -> Iterator[BestWeights]:
        """Yield the best weights so far of each row that keeps a file of them."""
        for row in self.rows:
            if row.best is not None and row.best.records:
                error, step = row.best.records[0]
                yield BestWeights(row, error, step, row.best.path(step))

    @property
    def stopped_early(self) -> str:
        """Why the errors so far end the run before its last step; empty if they do not."""
        if self.early_stop is None or not self.early_stop.is_met:
            return ""
        return self.early_stop.describe()

    def state_dict(self) -> dict[str, Any]:
        """Return the best records and the state of the early stop, of each where there are any."""
        state: dict[str, Any] = {}
        if self.rows:
            best = {
                row.key: row.best.state_dict()
                for row in self.rows
                if row.best is not None
            }
            state["best"] = _by_weights(best)
        if self.early_stop is not None:
            state["early_stop"] = self.early_stop.state_dict()
        if state:
            state["validated"] = {
                name: task.validated for name, task in self.tasks.items()
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after the validation of ``step``; cut later rows from the logs.

        Rows that ``state`` lacks, of a new task or average, start anew, as do those of tasks whose
        validation data have changed: errors of other frames are not compared.
        """
        before = state.get("validated", {})
        changed = {
            name
            for name, task in self.tasks.items()
            if task.validated and before.get(name, task.validated) != task.validated
        }
        for name in changed if self.rows else ():
            logger.warning(
                "the validation data%s have changed since the checkpoint was written: best files "
                "and early stop start without the errors before",
                f" of task {name}" if name else "",
            )
        for row in self.rows:
            if (
                row.best is not None
                and row.task not in changed
                and (records := _of_row(state.get("best", {}), row.key))
            ):
                # rank 0 checks which files are there
                row.best.records = self._world.broadcast_from_rank0(
                    partial(row.best.load_state_dict, records)
                )
            if row.log is not None:
                row.log.cut_after(step)
        if self.early_stop is not None and "early_stop" in state:
            rows = [row.key for row in self.rows if row.task not in changed]
            self.early_stop.load_state_dict(state["early_stop"], rows)
            if changed:
                self.early_stop.waited = 0


def _by_weights(values: Mapping[Row, Any]) -> dict[str, Any]:
    """Return values of rows as in files: by weights, and by task if there are several."""
    by_weights: dict[str, dict[str, Any]] = {}
    for (weights, task), value in values.items():
        by_weights.setdefault(weights, {})[task] = value
    return {weights: unnested(by_task) for weights, by_task in by_weights.items()}


def _of_row(values: Mapping[str, Any], row: Row) -> Any:
    """Return the value of a row, or None, of what :func:`_by_weights` has returned."""
    weights, task = row
    return nested(values.get(weights, {}), (task,)).get(task)


class EarlyStop:
    """Counts the full validations since the last improvement of any watched error.

    An error is an improvement if it is the first of its weights and task, or lower than at their
    last improvement by more than ``min_delta``. Errors that are not finite are none. All ranks have
    the same errors, and so decide alike.

    Args:
        config: patience, metric, ``min_delta`` and weights.
        metrics: the error that counts in each task.

    Attributes:
        waited: full validations since the last improvement.
        improvements: error and step of the last one, by weights and task.
    """

    def __init__(self, config: EarlyStopConfig, metrics: Mapping[str, Metric]) -> None:
        self._config = config
        self._metrics = metrics
        # for messages, and to see at a restart whether another error counts now
        self._metric = " and ".join(dict.fromkeys(metrics.values()))
        self.waited = 0
        self.improvements: dict[Row, tuple[float, int]] = {}

    @property
    def is_met(self) -> bool:
        """Whether the run ends; it does not as long as no error was finite."""
        return bool(self.improvements) and self.waited >= self._config.patience

    def add(self, step: int, errors: Mapping[Row, Errors]) -> None:
        """Take the errors of the full validation after ``step``."""
        self.waited += 1
        for (weights, task), row_errors in errors.items():
            if self._config.weights not in (
                None,
                weights,
            ):  # None: all of them are watched
                continue
            value = row_errors.metric(self._metrics[task])
            # compared with the last improvement, not with the last value: many small steps down
            # add up to an improvement
            before = self.improvements.get((weights, task), (math.inf, 0))[0]
            if math.isfinite(value) and value < before - self._config.min_delta:
                self.improvements[weights, task] = (value, step)
                self.waited = 0

    def describe(self) -> str:
        """Return the reason for the end, with the last improvements."""
        delta = self._config.min_delta
        by = ""
        if delta > 0:
            by = f" by more than {show_metric(next(iter(self._metrics.values())), delta)}"
        rows = [
            f"{' '.join(filter(None, reversed(row)))} {show_metric(self._metrics[row[1]], value)} "
            f"after step {step:,}"
            for row, (value, step) in self.improvements.items()
        ]
        since = (
            f"{self._metric} has not fallen{by} in the last "
            f"{counted(self.waited, 'full validation')}"
        )
        return f"{since}; last improvements: {', '.join(rows)}"

    def state_dict(self) -> dict[str, Any]:
        """Return metric, count and last improvements."""
        return {
            "metric": str(self._metric),
            "waited": self.waited,
            "improvements": _by_weights(self.improvements),
        }

    def load_state_dict(self, state: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Continue from ``state``; another metric starts anew, as do rows that it does not name."""
        if state["metric"] != self._metric:
            text = (
                "validating.early_stop: %s counts now, %s before: its full validations are "
                "counted anew"
            )
            logger.warning(text, self._metric, state["metric"])
            return
        self.waited = int(state["waited"])
        for row in rows:
            if record := _of_row(state["improvements"], row):
                self.improvements[row] = (float(record[0]), int(record[1]))
