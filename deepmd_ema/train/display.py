"""Rows of the learning curve, the progress bar, and where the time of each interval went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_ema.dist.world import World

if TYPE_CHECKING:
    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.batch import Batch
    from deepmd_ema.metrics import Errors
    from deepmd_ema.report import IntervalTimes, LcurveFile, Progress
    from deepmd_ema.train.step import Outcome
    from deepmd_ema.train.task import Task


@dataclass
class Display:
    """Shows a run while it goes on.

    Attributes:
        progress: the bar, or plain lines.
        lcurve: the file of the learning curve, or None.
        times: stopwatch of the current interval.
        every: steps between two rows; step 1 has a row as well.
        average: whether a row shows the mean over its interval instead of the current batch.
        curves: name of an average to the file of its own learning curve, on the same batches; None on ranks that
            write nothing.
        bank: holds these averages.
        world: the processes over whose frames errors are summed.
        device: where validation batches are evaluated.
        board: TensorBoard writer, or None.
        board_every: steps between two points on the board.
    """

    progress: Progress
    lcurve: LcurveFile | None
    times: IntervalTimes
    every: int
    device: torch.device
    average: bool = False
    curves: Mapping[str, LcurveFile | None] = field(default_factory=dict)
    bank: AverageBank | None = None
    world: World = field(default_factory=World)
    board: Any = None
    board_every: int = 1
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _count: int = 0
    _shown_step: int = 0
    _shown_at: float = field(default_factory=time.perf_counter)

    def is_due(self, step: int) -> bool:
        """Whether ``step`` has a row."""
        return step == 1 or step % self.every == 0

    def record(self, step: int, task: Task, outcome: Outcome) -> None:
        """Take note of a step; nothing waits for the device unless a point on the board is due."""
        self.progress.advance(step)
        if self.average:
            for name, value in outcome.values.items():
                self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
            self._count += 1
        if self.board is not None and (step == 1 or step % self.board_every == 0):
            prefix = f"{task.name or 'Default'}/"
            self.board.add_scalar(f"{prefix}lr", outcome.learning_rate, step)
            for name, value in outcome.values.items():
                self.board.add_scalar(prefix + name, float(value), step)

    def show(self, step: int, task: Task, batch: Batch, outcome: Outcome) -> None:
        """Write the row of ``step`` and a line with losses, speed and the split of the interval's time.

        Args:
            step: optimizer steps so far.
            task: whose step it was.
            batch: the training batch of the step, on which averages with a curve of their own are evaluated.
            outcome: of the step.
        """
        rate = outcome.learning_rate
        train = {name: float(value) for name, value in self._train_values(outcome).items()}
        with self.times.of("validation"):
            batches = _display_batches(task)
            valid = self._mean_values(task, batches, rate)
            self._show_averages(step, task, batch, batches, rate)
        if self.lcurve is not None:
            self.lcurve.write(step, rate, train, valid)
        now = time.perf_counter()
        seconds = (now - self._shown_at) / max(1, step - self._shown_step)
        self.progress.show(step, rate, train, valid, seconds, self.times.split())
        self._shown_step, self._shown_at = step, now
        self._sums, self._count = {}, 0

    def _show_averages(self, step: int, task: Task, batch: Batch, batches: Sequence[Batch], rate: float) -> None:
        for name, file in self.curves.items():
            assert self.bank is not None
            with self.bank.swapped_in(name):
                train = self._mean_values(task, [batch], rate)
                valid = self._mean_values(task, batches, rate)
            if file is not None:
                file.write(step, rate, train, valid)
            self.progress.show_average(step, name, valid or train)

    def show_validation(self, step: int, results: Mapping[str, Errors]) -> None:
        """Set the errors of the live and the averaged weights side by side."""
        self.progress.show_validation(step, results)
        if self.board is not None:
            for weights, errors in results.items():
                for name, value in errors.summary().items():
                    self.board.add_scalar(f"validation/{weights}/{name}", value, step)

    def say(self, message: str) -> None:
        """Write one line without breaking the bar."""
        self.progress.say(message)

    def _train_values(self, outcome: Outcome) -> Mapping[str, Tensor]:
        if not self.average:
            return outcome.values
        return {name: total / self._count for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the current interval."""
        return {"sums": dict(self._sums), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue the current interval after ``step``; rows behind it are cut from the learning curve."""
        self._sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self._count = state["count"]
        self._shown_step = step
        for file in self._files():
            file.cut_after(step)
        self.progress.start_at(step)

    def close(self) -> None:
        """Close files and the bar."""
        self.progress.close()
        for file in self._files():
            file.close()
        if self.board is not None:
            self.board.close()

    def _mean_values(self, task: Task, batches: Sequence[Batch], rate: float) -> dict[str, float]:
        """Return each displayed value over ``batches``, weighted by their atoms; empty without any."""
        sums: dict[str, Tensor] = {}
        atoms = torch.zeros((), dtype=torch.float64, device=self.device)
        was_training = task.model.training
        task.model.eval()
        for batch in (b.to(self.device) for b in batches):
            prediction = task.model(batch, need_virial=task.loss.need_virial)
            _, values = task.loss(prediction, batch, rate)
            number = self.world.all_reduce_sum(torch.full_like(atoms, 0 if batch.padding else batch.atom_type.shape[0]))
            for name, value in values.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + number * value
            atoms = atoms + number
        task.model.train(was_training)
        return {name: float(total / atoms) for name, total in sums.items()}

    def _files(self) -> list[LcurveFile]:
        return [file for file in (self.lcurve, *self.curves.values()) if file is not None]


def _display_batches(task: Task) -> list[Batch]:
    """Return the next validation batches of a row, in host memory; none without validation data."""
    if task.display_frames is None:
        return []
    return [next(task.display_frames) for _ in range(task.display_batches)]
