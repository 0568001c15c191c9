"""Chooses how the embedding nets are evaluated while training, and adapts the length of their series."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepmd_ema.batch import Batch
from deepmd_ema.dist.world import World
from deepmd_ema.model.kernels.series import FIRST_TERMS, MAX_TERMS, MULTIPLE
from deepmd_ema.model.kernels.spline import Spline
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.splines import splines_of
from deepmd_ema.tensors import prefix_of

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 20  # steps
GROWTH_OF_GRAPHS = 1.5  # at least, of the number of terms
NUMBERS_PER_SITE = 3000  # of layers, from which on "auto" takes series (decision 0055)


@dataclass
class SplineControl:
    """The series of the models of a run.

    Each evaluation extends a series that is too short for it, so that errors are bounded whatever is chosen here. The
    length with which evaluations begin follows what those since the last check needed: only their time depends on it.
    It is the same on all ranks, and after a restart that of the run without a break.

    Attributes:
        models: of the run.
        world: the processes of the run.
        interval: steps between two checks.
    """

    models: ModelSet
    world: World
    interval: int = CHECK_INTERVAL

    def __post_init__(self) -> None:
        self._by_task = {task: splines_of(model) for task, model in self.models.by_task.items()}
        named: dict[Spline, str] = {}  # one that tasks share has the name of the first
        for task, splines in self._by_task.items():
            for name, spline in splines.items():
                named.setdefault(spline, prefix_of(task) + name)
        self._splines = {name: spline for spline, name in named.items()}

    def begin(self, batches: Mapping[str, Batch], saved: Mapping[str, Any] | None) -> None:
        """Choose which nets are series, and their number of terms.

        Must be called by every rank.

        Args:
            batches: one of each task, the same on all ranks, on the device of the models, which are not yet sharded.
            saved: what :meth:`state_dict` returned in the run that is continued.
        """
        chosen = [s for s in self._splines.values() if s.wanted != "direct" and self.world.device.type == "cpu"]
        for spline in self._splines.values():
            if spline.wanted == "spline" and spline not in chosen:
                logger.warning(
                    "embedding_eval = spline: networks are interpolated on CPUs only. On %s they are evaluated at each "
                    "pair, as with embedding_eval = direct.", self.world.device.type,
                )  # fmt: skip
        for spline in chosen:
            spline.use(FIRST_TERMS)
        for task, batch in batches.items():
            self._evaluate(task, batch)
        # rank 0 decides: another kind of processor may round differently
        begun = self.world.broadcast_from_rank0(lambda: {name: _first_terms(s) for name, s in self._splines.items()})
        known, wanted = (saved.get("terms", {}), saved.get("wanted", {})) if saved else ({}, {})
        for name, spline in self._splines.items():
            spline.needed = 0
            if name in known and wanted.get(name) == spline.wanted and spline in chosen:
                spline.use(known[name])  # not if a restart has changed the option
                spline.needed = saved.get("needed", {}).get(name, 0) if saved else 0
            else:
                self._use(name, spline, begun[name] if spline in chosen else 0)

    def describe(self) -> str:
        """Return how the embedding nets are evaluated; empty if there is no choice."""
        used = {name: spline.terms for name, spline in self._splines.items() if spline.terms}
        if not used:
            return "at each pair" if self._splines else ""
        several = len(self._splines) > 1
        return "; ".join(f"{f'{name}: ' if several else ''}{n} terms of a series" for name, n in used.items())

    def before_step(self, step: int) -> None:
        """Adapt the number of terms every `interval` steps. Must be called by every rank."""
        used = {name: spline for name, spline in self._splines.items() if spline.terms}
        if step % self.interval or not used:
            return
        # a graph records nothing, so that only batches that it could not evaluate count; each number of terms needs a
        # graph of its own, which takes a minute
        compiled = self.models.compiler is not None and self.models.compiler.in_training
        needed = self.world.all_reduce_max_each([spline.needed for spline in used.values()])
        for (name, spline), terms in zip(used.items(), needed, strict=True):
            spline.needed = 0
            if compiled and terms > spline.terms:
                longer = MULTIPLE * math.ceil(GROWTH_OF_GRAPHS * spline.terms / MULTIPLE)
                self._use(name, spline, terms if terms > MAX_TERMS else min(max(terms, longer), MAX_TERMS))
            elif terms and not compiled:
                self._use(name, spline, terms)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to go on with the same series. Must be called by every rank."""
        needed = self.world.all_reduce_max_each([spline.needed for spline in self._splines.values()])
        return {
            "terms": {name: spline.terms for name, spline in self._splines.items()},
            "wanted": {name: spline.wanted for name, spline in self._splines.items()},
            "needed": dict(zip(self._splines, needed, strict=True)),
        }

    def _use(self, name: str, spline: Spline, terms: int) -> None:
        if terms > MAX_TERMS:
            logger.warning(
                "%s: more than %d terms would be needed for derivatives within %.0e of the largest: the network is not "
                "smooth. From now on it is evaluated at each pair, as with embedding_eval = direct.",
                name, MAX_TERMS, spline.max_error,
            )  # fmt: skip
        elif terms != spline.terms:
            logger.debug("%s: %d terms, %d before", name, terms, spline.terms)
        spline.use(terms if terms <= MAX_TERMS else 0)

    def _evaluate(self, task: str, batch: Batch) -> None:
        """Evaluate a batch eagerly, and record what its series need."""
        with _recorded(self._by_task[task].values()):
            self.models(task, batch, create_graph=False, need_virial=False)


@contextmanager
def _recorded(splines: Collection[Spline]) -> Iterator[None]:
    for spline in splines:
        spline.recording = True
    try:
        yield
    finally:
        for spline in splines:
            spline.recording = False


def _first_terms(spline: Spline) -> int:
    """Return the terms that the first batches need, 0 where ``auto`` finds a series not to be less work."""
    unused = not spline.evaluated_sites  # attention sees each pair
    if unused or (spline.wanted == "auto" and spline.direct_numbers < NUMBERS_PER_SITE * spline.evaluated_sites):
        return 0
    return spline.needed
