"""Choice of the embedding nets that are interpolated in training, and length of their series."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from deepmd_ema.batch import Batch
from deepmd_ema.config.schema.common import interpolate_choice
from deepmd_ema.distributed.tensors import prefix_of
from deepmd_ema.distributed.world import World
from deepmd_ema.model.interpolation.interpolation import (
    ALWAYS,
    AUTO,
    NEVER,
    Interpolation,
)
from deepmd_ema.model.interpolation.series import FIRST_TERMS, MAX_TERMS, MULTIPLE
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.tabulated import interpolations_of

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 20  # steps
MIN_GROWTH_OF_GRAPHS = (
    1.5  # factor of the number of terms with which a new graph is made
)
# numbers that the layers would have for all pairs, over the number of sites of a series, from which
# on "auto" uses the series: the choice by counts of doc/decisions.md
MIN_NUMBERS_PER_SITE = 3000


class InterpolationControl:
    """The series of the models of a run.

    Each evaluation extends a series that is too short for it, so that errors are small whatever is
    chosen here. The length with which evaluations begin follows what those since the last check
    needed: only their time depends on it. It is the same on all ranks, and after a restart that of
    the run without a break.

    Must be made by every rank. It chooses which nets are interpolated, and their number of terms.

    Args:
        models: of the run, not yet sharded.
        world: the processes of the run.
        batches: one of each task, the same on all ranks, on the device of the models.
        saved: what :meth:`state_dict` returned in the run that is continued; empty in a new one.
        interval: steps between two checks.
    """

    def __init__(
        self,
        models: ModelSet,
        world: World,
        batches: Mapping[str, Batch],
        saved: Mapping[str, Any],
        interval: int = CHECK_INTERVAL,
    ) -> None:
        self.models = models
        self.world = world
        self.interval = interval
        # an interpolation that tasks share has the name that it has in the first of them
        named: dict[Interpolation, str] = {}
        for task, model in models.by_task.items():
            for name, interpolation in interpolations_of(model).items():
                named.setdefault(interpolation, prefix_of(task) + name)
        self._named = {name: interpolation for interpolation, name in named.items()}
        # on CPUs only: reading the estimate of an error would make the host wait for a GPU
        on_cpu = self.world.device.type == "cpu"
        chosen = {
            name: interpolation
            for name, interpolation in self._named.items()
            if interpolation.choice != NEVER and on_cpu
        }
        if not on_cpu and any(net.choice == ALWAYS for net in self._named.values()):
            logger.warning(
                "interpolate = always: networks are interpolated on CPUs only. On %s they are "
                "evaluated for each pair of atoms, as with interpolate = never.",
                self.world.device.type,
            )

        # One evaluation of a batch of each task counts the numbers that layers would have, and the
        # terms that are needed. Counts, not times, decide: two runs of one input are the same.
        for interpolation in chosen.values():
            interpolation.use(FIRST_TERMS)
            interpolation.recording = True
        for task, batch in batches.items():
            self.models(task, batch, create_graph=False, need_virial=False)
        # rank 0 decides: another kind of processor may round differently
        first_terms = self.world.broadcast_from_rank0(
            lambda: {
                name: _first_terms(interpolation)
                for name, interpolation in chosen.items()
            }
        )

        # The state of a checkpoint. Files of 0.1.0 have "wanted" in place of "choice", with other
        # values, and names that end with ".spline"; some files lack parts.
        state = {
            part: dict(saved.get(part, {}))
            for part in ("terms", "needed", "wanted", "choice")
        }
        state["choice"] = {
            k: interpolate_choice(v) for k, v in state["wanted"].items()
        } | state["choice"]
        state = {
            part: {k.removesuffix(".spline"): v for k, v in values.items()}
            for part, values in state.items()
        }
        for name, interpolation in chosen.items():
            interpolation.recording = False
            interpolation.needed = 0
            # not if a restart has changed the option
            if (
                name in state["terms"]
                and state["choice"].get(name) == interpolation.choice
            ):
                # `needed`, too: it holds evaluations since the last check, which the next one reads
                interpolation.use(state["terms"][name])
                interpolation.needed = state["needed"].get(name, 0)
            else:
                self._use(name, interpolation, first_terms[name])

    def describe(self) -> str:
        """Return a description of the evaluation of embedding nets; empty if there is no choice."""
        used = {name: net.terms for name, net in self._named.items() if net.terms}
        if not used:
            return "evaluated for each pair of atoms" if self._named else ""
        several = len(self._named) > 1
        return "; ".join(
            f"{f'{name}: ' if several else ''}{n} terms of a Chebyshev series"
            for name, n in used.items()
        )

    def before_step(self, step: int) -> None:
        """Adapt the number of terms every `interval` steps. Must be called by every rank."""
        used = {name: net for name, net in self._named.items() if net.terms}
        if step % self.interval or not used:
            return
        # A graph records nothing, so that only batches that it could not evaluate count. Each
        # number of terms needs a graph of its own, which takes a minute: a compiled series never
        # becomes shorter, and grows by half at least.
        compiled = self.models.compiler is not None and self.models.compiler.in_training
        needed = self.world.all_reduce_max([net.needed for net in used.values()])
        for (name, interpolation), terms in zip(used.items(), needed, strict=True):
            interpolation.needed = 0
            if compiled and terms > interpolation.terms:
                least = MULTIPLE * math.ceil(
                    MIN_GROWTH_OF_GRAPHS * interpolation.terms / MULTIPLE
                )
                # more than MAX_TERMS are not cut: _use then gives the series up
                longer = (
                    terms if terms > MAX_TERMS else min(max(terms, least), MAX_TERMS)
                )
                self._use(name, interpolation, longer)
            elif terms and not compiled:
                self._use(name, interpolation, terms)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a restart continues with the same series.

        Must be called by every rank.
        """
        # the largest over the ranks, which is all that the next check reads of them
        needed = self.world.all_reduce_max([net.needed for net in self._named.values()])
        return {
            "choice": {name: net.choice for name, net in self._named.items()},
            "terms": {name: net.terms for name, net in self._named.items()},
            "needed": dict(zip(self._named, needed, strict=True)),
        }

    def _use(self, name: str, interpolation: Interpolation, terms: int) -> None:
        """Begin evaluations with ``terms`` terms; with none from now on, if these are too many."""
        if terms > MAX_TERMS:
            logger.warning(
                "%s: more than %d terms would be needed for derivatives within %.0e of the "
                "largest: the network is not smooth. From now on it is evaluated for each pair of "
                "atoms, as with interpolate = never.",
                name,
                MAX_TERMS,
                interpolation.max_error,
            )
        elif terms != interpolation.terms:
            logger.debug("%s: %d terms, %d before", name, terms, interpolation.terms)
        interpolation.use(terms if terms <= MAX_TERMS else 0)


def _first_terms(interpolation: Interpolation) -> int:
    """Return the terms that the first batches need, 0 where a series is not used.

    With ``auto`` that is where it is not less work.
    """
    sites = interpolation.evaluated_sites
    if not sites:  # a net whose output attention needs for each pair
        return 0
    numbers = interpolation.direct_numbers
    if interpolation.choice == AUTO and numbers < MIN_NUMBERS_PER_SITE * sites:
        return 0
    return interpolation.needed
