"""Chooses the knots on which embedding nets are evaluated, and checks while training that they are enough."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepmd_ema.batch import Batch
from deepmd_ema.dist.world import World
from deepmd_ema.model.kernels.spline import DEGREE, Spline, Watch
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.tensors import prefix_of

logger = logging.getLogger(__name__)

OPTION = "embedding_eval"
LARGEST_ERROR = {torch.float64: 1e-8, torch.float32: 1e-6}  # of the derivative of a net, over its largest value
FEWEST, FIRST, MOST = 32, 64, 1024  # intervals, powers of two
CHECK_EVERY = 100  # steps of a task
MARGIN_TO_COARSEN = 8  # times smaller than the largest error must be what fewer knots are expected to give
NUMBERS_PER_SITE = 1000  # of layers, from which on "auto" takes knots (decision 0055)
_ROUNDS = 4  # of measuring before the first step


@dataclass
class SplineControl:
    """The splines of the models of a run.

    The number of knots follows from the weights and the frames alone, so that all ranks, and a restart, have the same.

    Attributes:
        models: of the run.
        world: the processes of the run.
        checked: step of the run at which each task was checked last.
    """

    models: ModelSet
    world: World
    checked: dict[str, int] = field(default_factory=dict)

    def begin(self, batches: Mapping[str, Batch], saved: Mapping[str, Any] | None) -> None:
        """Choose the knots.

        Args:
            batches: one of each task, the same on all ranks, on the device of the models, which are not yet sharded.
            saved: what :meth:`state_dict` returned in the run that is continued.
        """
        known = dict(saved["intervals"]) if saved else {}
        self.checked = dict(saved["checked"]) if saved else {}
        done: set[Spline] = set()
        for task, batch in batches.items():
            for name, spline in self._of(task).items():
                if spline not in done and spline.wanted != "direct":
                    done.add(spline)
                    if name in known:
                        spline.use(known[name])
                    elif spline.wanted == "spline" or batch.vector.device.type == "cpu":
                        self._choose(task, name, spline, batch)

    def in_words(self) -> str:
        """Return how the embedding nets are evaluated; empty if there is no choice."""
        splines = {name: s for task in self.models.by_task for name, s in self._of(task).items()}
        used = {name: s.intervals for name, s in splines.items() if s.intervals}
        if not used:
            return "at each pair" if splines else ""
        several = len(splines) > 1
        return "; ".join(f"{f'{name}: ' if several else ''}{n} intervals of a spline" for name, n in used.items())

    def is_due(self, task: str, step: int) -> bool:
        """Whether the splines of a task are checked before ``step``."""
        return any(s.intervals for s in self._of(task).values()) and step >= self.checked.get(task, 0) + CHECK_EVERY

    def check(self, task: str, batch: Batch, step: int) -> None:
        """Measure the error with the weights of now, and change the number of knots where it asks for it.

        Every rank calls this, with its own batch.
        """
        self.checked[task] = step
        for name, (spline, watch) in self._watched(task, batch).items():
            _use(name, spline, self.world.all_reduce_max(_intervals_for(watch.error, spline)), watch.error)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to go on with the same knots."""
        named = {name: spline.intervals for task in self.models.by_task for name, spline in self._of(task).items()}
        return {"intervals": named, "checked": dict(self.checked)}

    def _choose(self, task: str, name: str, spline: Spline, batch: Batch) -> None:
        spline.use(FIRST)
        for _ in range(_ROUNDS):
            found = self._watched(task, batch)
            watch = found[name][1]
            if spline.wanted == "auto" and watch.numbers < NUMBERS_PER_SITE * watch.sites:
                spline.use(0)
                return
            wanted = _intervals_for(watch.error, spline)
            if wanted == spline.intervals:
                return
            _use(name, spline, wanted, watch.error)
            if not spline.intervals:
                return

    def _watched(self, task: str, batch: Batch) -> dict[str, tuple[Spline, Watch]]:
        """Evaluate a batch without gradients, and return what was seen of each spline in use."""
        used = {name: spline for name, spline in self._of(task).items() if spline.intervals}
        for spline in used.values():
            spline.watch = Watch()
        try:
            self.models(task, batch, create_graph=False, need_virial=False)
            return {name: (spline, spline.watch) for name, spline in used.items() if spline.watch is not None}
        finally:
            for spline in used.values():
                spline.watch = None

    def _of(self, task: str) -> dict[str, Spline]:
        modules = self.models.by_task[task].named_modules()
        return {f"{prefix_of(task)}{name}": module for name, module in modules if isinstance(module, Spline)}


def _intervals_for(error: float, spline: Spline) -> int:
    """Return how many intervals ``error`` asks for, which goes with the seventh power of their number."""
    largest, now = LARGEST_ERROR[spline.precision], spline.intervals
    if not math.isfinite(error):  # the step that follows says which
        return now
    if error > largest:
        while now <= MOST and error > largest:
            now, error = 2 * now, error / 2**DEGREE
        return now
    while now > FEWEST and error * 2**DEGREE * MARGIN_TO_COARSEN < largest:
        now, error = now // 2, error * 2**DEGREE
    return now


def _use(name: str, spline: Spline, intervals: int, error: float) -> None:
    before = spline.intervals
    if before == intervals:
        return
    if intervals <= MOST:
        logger.debug("%s: %d intervals, after an error of %.1e with %d", name, intervals, error, before)
        spline.use(intervals)
        return
    logger.warning(
        "%s: with %d intervals, derivatives differ by %.1e of the largest from those of the net, which is not smooth. "
        "From now on it is evaluated at each pair, as with %s = direct.", name, before, error, OPTION,
    )  # fmt: skip
    spline.use(0)
