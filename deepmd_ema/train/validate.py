"""Full validation: errors over the whole validation set, for the live weights and for each average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from deepmd_ema.metrics import Errors, evaluate
from deepmd_ema.weights import LIVE

if TYPE_CHECKING:
    import torch

    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.batch import Batch
    from deepmd_ema.checkpoint import BestFiles
    from deepmd_ema.dist.world import World
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.report import ValidationLog


class ValidationAborted(Exception):  # noqa: N818 - a request, not a fault
    """A stop was asked for inside a validation; the weights are the live ones again."""


@dataclass
class Validated:
    """One set of weights that is validated: its log and its best files.

    Attributes:
        weights: ``live``, or the name of an average.
        log: the file of this row (``val.log``, ``val_ema.log``); None on ranks that write nothing.
        best: best files and their records, or None when they are not kept.
    """

    weights: str
    log: ValidationLog | None
    best: BestFiles | None = None


@dataclass
class FullValidation:
    """Validates when it is due, writes one row per set of weights, and keeps the best files.

    Every rank takes its share of the batches, and all get the errors over all of them.

    Attributes:
        model: the live model.
        bank: averages, or None when only the live weights are validated.
        rows: what is validated.
        batches: makes a fresh pass over the whole validation set.
        metric: what ``best`` means, such as ``E:MAE``.
        start: first step at which it is due; None for never.
        every: steps between two validations.
        world: the processes that share the batches.
        num_batches: of a whole pass, over all ranks.
        padding: makes some batch, for a rank that has no share.
        stopped: asked between batches; True ends the validation.
    """

    model: EnergyModel
    bank: AverageBank | None
    rows: Sequence[Validated]
    batches: Callable[[], Iterator[Batch]]
    device: torch.device
    metric: str
    start: int | None
    every: int
    world: World
    num_batches: int
    padding: Callable[[], Batch]
    stopped: Callable[[], bool] = field(default=lambda: False)

    def is_due(self, step: int) -> bool:
        """Whether the weights after ``step`` are validated."""
        return self.start is not None and step >= self.start and (step - self.start) % self.every == 0

    def run(self, step: int, payload: Callable[[str], Mapping[str, Any]]) -> dict[str, Errors]:
        """Validate every set of weights, write its row and its best file; return the errors by name of the weights.

        Args:
            step: the optimizer steps behind the weights.
            payload: gives the content of the model file of a set of weights (``live`` or an average).

        Raises:
            ValidationAborted: if a stop was asked for; nothing of this step was written.
        """
        results = {row.weights: self._errors(row.weights) for row in self.rows}
        for row in self.rows:
            if row.log is not None:
                row.log.write(step, results[row.weights])
            if row.best is not None:
                value = results[row.weights].metric(self.metric)
                with self.world.all_ranks_ok():
                    kept = row.best.offer(value, step, partial(payload, row.weights))
                if kept and row.log is not None:
                    row.log.write_best(row.best.path(step), self.metric, value)
        return results

    def _errors(self, weights: str) -> Errors:
        swap = nullcontext() if weights == LIVE or self.bank is None else self.bank.swapped_in(weights)
        was_training = self.model.training
        with swap:
            self.model.eval()
            try:
                errors = evaluate(self.model, self._until_stopped(), self.device)
                return Errors.from_tensor(self.world.all_reduce_sum(errors.as_tensor()))
            finally:
                self.model.train(was_training)

    def _until_stopped(self) -> Iterator[Batch]:
        mine = self.batches()
        batch = None
        # all ranks go the same number of rounds, because a sharded model computes together
        for _ in range(-(-self.num_batches // self.world.size)):
            if self.stopped():
                raise ValidationAborted
            following = next(mine, None)
            batch = following if following is not None else (batch or self.padding()).as_padding()
            yield batch

    def truncate(self, step: int) -> None:
        """Cut the rows after ``step`` from every log: a restart writes them again."""
        for row in self.rows:
            if row.log is not None:
                row.log.cut_after(step)

    def close(self) -> None:
        """Close the logs."""
        for row in self.rows:
            if row.log is not None:
                row.log.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the best records of every set of weights."""
        return {row.weights: row.best.state_dict() for row in self.rows if row.best is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the best records of ``state``; what it does not name starts without records."""
        for row in self.rows:
            if row.best is not None and row.weights in state:
                checked = self.world.broadcast_from_rank0(partial(_continue, row.best, state[row.weights]))
                if not self.world.is_main:
                    row.best.load_state_dict(checked)


def _continue(best: BestFiles, state: Mapping[str, Any]) -> dict[str, Any]:
    best.load_state_dict(state)
    return best.state_dict()
