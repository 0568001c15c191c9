"""Reports a run: rows of the learning curve, the progress bar, the time of each interval."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config.labels import METRICS
from deepmd_ema.config.outputs import Outputs
from deepmd_ema.distributed.world import World
from deepmd_ema.model.metrics import Errors, evaluated
from deepmd_ema.model.model_set import nested, unnested
from deepmd_ema.report.curves import LcurveFile
from deepmd_ema.report.facts import (
    displayed,
    error_table,
    labelled,
    mae_rmse,
    metrics_of,
)
from deepmd_ema.report.log import Progress, RunTimes
from deepmd_ema.report.loggers import Loggers, named
from deepmd_ema.report.table import Column, render
from deepmd_ema.text import counted
from deepmd_ema.training.loss import LossOverBatches, constant_prediction, root_of
from deepmd_ema.training.modes import Products
from deepmd_ema.training.prepare import PreparedRun
from deepmd_ema.training.tasks import Task, TaskMixture
from deepmd_ema.utils import LIVE

logger = logging.getLogger(__name__)

COMPARED_ROWS = 20  # rows whose training errors are compared with those of a constant
SHORT_RUN = 1000  # steps; a run of fewer may need more of them to learn anything


class Reporter:
    """Shows the progress of a run: a row holds the values of all tasks.

    Args:
        prepared: config and length of the run.
        tasks: whose errors are shown.
        bank: averages; some have learning curves of their own.
        run_id: of the trajectory of weights, which loggers continue at a restart.
        world: the processes over whose frames errors are summed.
        times: stopwatch of the run.
        products: context of matrix products of validation frames.

    Attributes:
        times: stopwatch of the run.
        curves: ``live`` and names of averages to the files of their learning curves, on the same
            batches; None on ranks that write nothing.
        validated: errors of the last full validation, by row.
        validated_step: its step.
        before: errors by task of the weights that the run started with, if they are of a file.
        tested: step and errors on the test data, by weights, after the task if there are several.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        tasks: TaskMixture,
        bank: AverageBank,
        run_id: str,
        world: World,
        times: RunTimes,
        products: Products,
    ) -> None:
        config, length = prepared.config, prepared.length
        training, outputs = config.training, Outputs(config)

        # parts of the run, and the bar on rank 0 (None: only where there is a terminal)
        self._tasks = tasks
        self._bank = bank
        self._world = world
        self.times = times
        self._products = products
        self._progress = Progress(
            length.num_steps, times, None if world.is_main else False
        )
        # a row shows the mean over its interval, or the last batch of each task
        self._shows_means = training.disp_avg

        # Learning curves of the live weights and of some averages. Every rank has their names,
        # because all of them compute the rows; rank 0 alone has the files.
        # Columns are sorted by name, as those of DeePMD-kit.
        columns = [
            (
                task.name,
                name,
                ("trn",) if task.display_loader is None else ("val", "trn"),
            )
            for task in tasks
            for name in sorted(task.loss.display_names)
        ]
        averages = [average.name for average in training.averaging if average.lcurve]
        shown = [LIVE, *averages] if training.disp_training else []
        self.curves = {
            w: LcurveFile(outputs.lcurve(w), columns) if world.is_main else None
            for w in shown
        }
        has_loggers = training.tensorboard or training.loggers
        self._loggers = (
            Loggers(config, run_id) if world.is_main and has_loggers else None
        )
        # by task: values of its last step, and their mean over its steps in the current interval
        self._last: dict[str, Mapping[str, Tensor]] = {}
        self._means = {task.name: _Mean() for task in tasks}
        # by task, for the last rows in the second half of the run: an error of the training
        # batches, and that of a constant
        self._compared = {
            task.name: deque[tuple[float, float]](maxlen=COMPARED_ROWS)
            for task in tasks
        }
        self._num_steps = length.num_steps
        self._warned = set[str]()
        self.validated_step = 0
        self.validated: Mapping[str, Errors] = {}
        self.before: Mapping[str, Errors] = {}
        self.tested: dict[str, tuple[int, Errors]] = {}

    def start(self, step: int) -> None:
        """Start the loggers of a run that has done ``step`` steps."""
        if self._loggers is not None:
            self._loggers.start(step)

    def record(
        self, step: int, task: Task, rate: float, values: Mapping[str, Tensor]
    ) -> None:
        """Record a step.

        Nothing waits for the device, unless a logger takes training errors more often than shown.
        """
        self._progress.advance(step)
        self._last[task.name] = values
        if self._shows_means:
            self._means[task.name].add(values)
        if (
            self._loggers is not None
            and (due := self._loggers.takes_training_errors(step)) is not None
        ):
            errors = {task.name: {name: float(value) for name, value in values.items()}}
            self._loggers.log(step, {"lr": rate, **named("train", LIVE, errors)}, due)

    def show(
        self,
        step: int,
        task: Task,
        batches: Sequence[Batch | PackedBatch],
        rate: float,
        values: Mapping[str, Tensor],
    ) -> None:
        """Write the row of ``step``, and a line with losses, speed and times of the interval.

        Must be called by every rank.

        Args:
            step: optimizer steps so far.
            task: whose step it was.
            batches: of the step, on whose frames averages with a curve of their own are evaluated.
            rate: learning rate of the step.
            values: of the step, for the learning curve.
        """
        # training errors of the live weights, from the steps themselves; here the host waits for
        # the device
        if self._shows_means:
            train = {name: mean.values() for name, mean in self._means.items()}
        else:  # nothing of a task that has had no step
            train = {
                t.name: {
                    name: float(v) for name, v in self._last.get(t.name, {}).items()
                }
                for t in self._tasks
            }

        # validation errors, and both errors of averages, on the same batches
        with self.times.of("row"), self._products():
            display = {t.name: t.next_display_batches() for t in self._tasks}
            valid = self._mean_values(display, rate)
            rows = {LIVE: (train, valid)}
            for name in (name for name in self.curves if name != LIVE):
                with self._bank.swapped_in(name):
                    train_of_average = self._values_of_step(task, batches, rate)
                    rows[name] = train_of_average, self._mean_values(display, rate)
            # in the second half of the run, whose errors should be below those of a constant
            judged = _judged(task)
            if 2 * step > self._num_steps and judged:
                constant = self._values_of_step(task, batches, rate, is_constant=True)
                pair = float(values[judged]), constant[task.name][judged]
                self._compared[task.name].append(pair)

        # files, loggers, and the line of the log
        shown = {"train": train, "valid": valid}
        for name, (train_row, valid_row) in rows.items():
            if (file := self.curves.get(name)) is not None:
                file.write(step, rate, train_row, valid_row)
            errors = named("train", name, train_row)
            logged = named("batch", name, valid_row)
            if name != LIVE:
                logged |= errors
                shown[name] = valid_row if any(valid_row.values()) else train_row
            if self._loggers is not None:
                if (
                    name == LIVE
                ):  # not to loggers that take training errors at their own pace
                    self._loggers.log(
                        step, {"lr": rate, **errors}, lambda logger: logger.freq is None
                    )
                self._loggers.log(step, logged)
        self._progress.show(step, rate, shown)
        self._means = {name: _Mean() for name in self._means}

    def warn_if_nothing_is_learned(
        self, step: int, remedy: str, at_least: int = 1
    ) -> None:
        """Warn once of each task whose training errors are those of a constant.

        Args:
            step: optimizer steps so far.
            remedy: of the optimizer, for the message.
            at_least: number of rows that must show it.
        """
        longer = "train longer, or " if step < SHORT_RUN else ""
        for task in self._tasks:
            # nan: the batches of a row did not have the label
            rows = [
                pair
                for pair in self._compared[task.name]
                if not any(map(math.isnan, pair))
            ]
            if task.name in self._warned or len(rows) < max(1, at_least):
                continue
            # errors are root mean squares: their squares are averaged over the rows
            error, constant = (
                math.sqrt(sum(value**2 for value in values) / len(rows))
                for values in zip(*rows)
            )
            if error >= constant > 0:
                self._warned.add(task.name)
                logger.warning(
                    "%sstep %d: %s of the training batches of the last %s is %.4g, no better than "
                    "%.4g with energies of the elements alone and no forces: nothing is learned. "
                    "Try to %s.",
                    (f"task {task.name}: " if task.name else ""),
                    step,
                    _judged(task),
                    counted(len(rows), "row"),
                    error,
                    constant,
                    f"{longer}{remedy.removeprefix('or ')}",
                )

    def show_before(self, errors: Mapping[str, Errors]) -> None:
        """Log the errors by task of the weights that the run starts with."""
        self.before = errors
        title = (
            "errors before the first step, of the loaded weights on all validation frames, MAE / "
            "RMSE"
        )
        heads = Column("task"), Column("frames", "", ",.0f")
        quantities = labelled(*errors.values())
        columns = {
            q: Column(METRICS[q].title, METRICS[q].display_unit, "s")
            for q in quantities
        }
        for line in render(error_table(title, heads, columns, errors, mae_rmse), "  "):
            logger.info("%s", line)

    def show_validation(
        self, step: int, results: Mapping[str, Errors], best: Collection[str]
    ) -> None:
        """Show the errors of the live and the averaged weights side by side.

        Args:
            step: optimizer steps so far.
            results: errors by row, names of task and weights.
            best: rows that have the lowest errors so far.
        """
        self.validated_step = step
        self.validated = results
        self._progress.show_validation(step, results, best)
        if self._loggers is not None:
            for row, errors in results.items():
                # names of weights have no spaces, those of tasks may; without the space between
                task, weights = row.rpartition(" ")[::2]
                self._loggers.log(
                    step, named("val", weights, {task: _without_counts(errors)})
                )

    def show_test(
        self, tested: Mapping[tuple[str, str], tuple[int, Errors]]
    ) -> dict[str, dict[str, float]]:
        """Keep the errors on the test data, and return them in the units of tables.

        Args:
            tested: step and errors (eV, angstrom) by names of weights and task.

        Returns:
            A row for each of them, by its name, with its step and a column for each error.
        """
        self.tested = {}
        rows = {}
        for (weights, task), (step, errors) in tested.items():
            name = f"{task} {weights}".lstrip()
            self.tested[name] = step, errors
            values = {
                m.column: displayed(errors, m) for m in metrics_of(labelled(errors))
            }
            rows[name] = {"step": float(step), **values}
            if self._loggers is not None:
                # names of best weights have a space (`best ema`), which keys of loggers may not
                logged = named(
                    "test", weights.replace(" ", "_"), {task: _without_counts(errors)}
                )
                self._loggers.log(step, logged)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the current interval, and the last values of several tasks.

        The next step draws one of the tasks only, and a row shows all of them.
        """
        # as in files: without the level of tasks if there is one
        state: dict[str, Any] = {
            "sums": unnested(
                {name: dict(mean.sums) for name, mean in self._means.items()}
            ),
            "counts": unnested(
                {name: dict(mean.counts) for name, mean in self._means.items()}
            ),
        }
        if self.before:
            state["before"] = unnested(
                {name: errors.sums for name, errors in self.before.items()}
            )
        return state if len(self._means) == 1 else {**state, "last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue the current interval after ``step``; cut later rows from the learning curve."""
        device, tasks = self._world.device, tuple(self._means)
        counts = nested(state.get("counts", state.get("count")), tasks)
        for name, sums in nested(state["sums"], tasks).items():
            task_counts = counts[name]
            # older checkpoints have one number of steps for all errors
            if not isinstance(task_counts, Mapping):
                task_counts = {
                    key: torch.full_like(value, task_counts)
                    for key, value in sums.items()
                }
            self._means[name] = _Mean(
                *(
                    {k: v.to(device) for k, v in part.items()}
                    for part in (sums, task_counts)
                )
            )
        before = nested(state["before"], tasks) if "before" in state else {}
        self.before = {name: Errors(sums) for name, sums in before.items()}
        for name, values in state.get("last", {}).items():
            self._last[name] = {key: value.to(device) for key, value in values.items()}
        # rows after the checkpoint are written again by the restarted run
        for file in self.curves.values():
            if file is not None:
                file.cut_after(step)
        self._progress.start_at(step)

    def close(self, status: str) -> None:
        """Close the bar, and the loggers of a run that ends with a ``status``."""
        self._progress.close()
        if self._loggers is not None:
            self._loggers.finish(status)

    def _values_of_step(
        self,
        task: Task,
        batches: Sequence[Batch | PackedBatch],
        rate: float,
        is_constant: bool = False,
    ) -> dict[str, dict[str, float]]:
        """Return each displayed value by task over all frames of a step.

        A step is of one task; those of the other tasks are empty. The values are those of the
        model, or of the energies of its elements alone (``is_constant``).
        """
        whole = LossOverBatches(task.loss, batches, rate)
        with evaluated(task.models):
            for batch in (b.to(self._world.device) for b in batches):
                if is_constant:
                    bias = task.models.of(task.name).out_bias.view(-1)  # (T,) eV
                    prediction = constant_prediction(batch, bias)
                else:
                    prediction = task.models(task.name, batch, **task.loss.needs(batch))
                whole.add(prediction, batch)
        values = {name: float(value) for name, value in whole.displayed().items()}
        return {t.name: values if t is task else {} for t in self._tasks}

    def _mean_values(
        self, batches: Mapping[str, Sequence[Batch | PackedBatch]], rate: float
    ) -> dict[str, dict[str, float]]:
        """Return the mean of each displayed value over batches of each task; empty without any.

        Batches count by their atoms.
        """
        means: dict[str, dict[str, float]] = {}
        for task in self._tasks:
            mean = _Mean()
            with evaluated(task.models):
                for batch in (b.to(self._world.device) for b in batches[task.name]):
                    prediction = task.models(task.name, batch, **task.loss.needs(batch))
                    _, values = task.loss(prediction, batch, rate)
                    # A rank without frames has a batch of padding: it takes part in collectives.
                    # Dummy atoms of a padded batch do not count.
                    num_atoms = 0 if batch.padding else batch.num_real[1]
                    atoms = torch.tensor(
                        num_atoms, dtype=torch.float64, device=self._world.device
                    )
                    mean.add(values, self._world.all_reduce_sum(atoms))
            means[task.name] = mean.values()
        return means


def _judged(task: Task) -> str:
    """Return the displayed error by which a task learns or not; empty if it has none.

    It is that of forces, else of energies.
    """
    # forces are many numbers per frame, so their errors scatter less than those of energies
    return next(
        (
            name
            for name in reversed(task.loss.display_names)
            if name.endswith(("_f", "_pf", "_e"))
        ),
        "",
    )


def _without_counts(errors: Errors) -> dict[str, float]:
    """Return the errors of a summary, without the numbers of frames and atoms in it."""
    return {
        name: value
        for name, value in errors.summary().items()
        if not name.startswith("num_")
    }


@dataclass
class _Mean:
    """Mean of displayed values over batches.

    A batch without a label does not count for the error of that label.

    Attributes:
        sums: by name, the sum of the values times their weights.
        counts: by name, the sum of the weights of batches that have the label.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], weight: Tensor | float = 1.0) -> None:
        """Add the values of a batch; nothing waits for the device."""
        numbers = torch.stack(list(values.values()))
        # A value is nan where no frame has the label, and then the loss is a number. Where the
        # model itself gives nan, the loss is nan, too, and the mean shall show it.
        lacking = numbers.isnan() & ~root_of(values).isnan()
        counts = (weight * (~lacking).to(numbers.dtype)).unbind()
        for name, value, count in zip(
            values, (weight * numbers.masked_fill(lacking, 0.0)).unbind(), counts
        ):
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = (
                self.counts[name] + count if name in self.counts else count
            )

    def values(self) -> dict[str, float]:
        """Return the mean of each value, nan where no batch has the label; empty without any."""
        return {
            name: float(total / self.counts[name]) for name, total in self.sums.items()
        }
