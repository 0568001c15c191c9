"""Chooses which embedding nets are interpolated while training, and adapts the length of their
series.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from deepmd_ema.batch import Batch
from deepmd_ema.config.schema.common import interpolate_choice
from deepmd_ema.distributed.tensors import prefix_of
from deepmd_ema.distributed.world import World
from deepmd_ema.model.interpolation.interpolation import ALWAYS, AUTO, NEVER, Interpolation
from deepmd_ema.model.interpolation.series import FIRST_TERMS, MAX_TERMS, MULTIPLE
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.tabulated import interpolations_of

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 20  # steps
MIN_GROWTH_OF_GRAPHS = 1.5  # of the number of terms
MIN_NUMBERS_PER_SITE = 3000  # of layers, from which on "auto" uses series (doc/decisions.md)


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
        named: dict[Interpolation, str] = {}  # one that tasks share has the name of the first
        for task, model in models.by_task.items():
            for name, interpolation in interpolations_of(model).items():
                named.setdefault(interpolation, prefix_of(task) + name)
        self._named = {name: interpolation for interpolation, name in named.items()}
        on_cpu = self.world.device.type == "cpu"
        chosen = {name: one for name, one in self._named.items() if one.choice != NEVER and on_cpu}
        if not on_cpu and any(one.choice == ALWAYS for one in self._named.values()):
            logger.warning(
                "interpolate = always: networks are interpolated on CPUs only. On %s they are "
                "evaluated for each pair of atoms, as with interpolate = never.",
                self.world.device.type,
            )
        for one in chosen.values():
            one.use(FIRST_TERMS)
            one.recording = True
        for task, batch in batches.items():
            self.models(task, batch, create_graph=False, need_virial=False)
        # rank 0 decides: another kind of processor may round differently
        begun = self.world.broadcast_from_rank0(
            lambda: {name: _first_terms(one) for name, one in chosen.items()}
        )
        # files of 0.1.0 have other names, and some have less
        state = {
            part: dict(saved.get(part, {})) for part in ("terms", "needed", "wanted", "choice")
        }
        state["choice"] = {k: interpolate_choice(v) for k, v in state["wanted"].items()} | state[
            "choice"
        ]
        known = {
            part: {k.removesuffix(".spline"): v for k, v in of.items()}
            for part, of in state.items()
        }
        for name, one in chosen.items():
            one.recording, one.needed = False, 0
            # not if a restart has changed the option
            if name in known["terms"] and known["choice"].get(name) == one.choice:
                one.use(known["terms"][name])
                one.needed = known["needed"].get(name, 0)
            else:
                self._use(name, one, begun[name])

    def describe(self) -> str:
        """Return a description of the evaluation of embedding nets; empty if there is no choice."""
        used = {name: one.terms for name, one in self._named.items() if one.terms}
        if not used:
            return "evaluated for each pair of atoms" if self._named else ""
        several = len(self._named) > 1
        return "; ".join(
            f"{f'{name}: ' if several else ''}{n} terms of a Chebyshev series"
            for name, n in used.items()
        )

    def before_step(self, step: int) -> None:
        """Adapt the number of terms every `interval` steps. Must be called by every rank."""
        used = {name: one for name, one in self._named.items() if one.terms}
        if step % self.interval or not used:
            return
        # a graph records nothing, so that only batches that it could not evaluate count; each
        # number of terms needs a graph of its own, which takes a minute
        compiled = self.models.compiler is not None and self.models.compiler.in_training
        needed = self.world.all_reduce_max([one.needed for one in used.values()])
        for (name, one), terms in zip(used.items(), needed, strict=True):
            one.needed = 0
            if compiled and terms > one.terms:
                longer = MULTIPLE * math.ceil(MIN_GROWTH_OF_GRAPHS * one.terms / MULTIPLE)
                self._use(
                    name, one, terms if terms > MAX_TERMS else min(max(terms, longer), MAX_TERMS)
                )
            elif terms and not compiled:
                self._use(name, one, terms)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a restart continues with the same series.

        Must be called by every rank.
        """
        needed = self.world.all_reduce_max([one.needed for one in self._named.values()])
        return {
            "choice": {name: one.choice for name, one in self._named.items()},
            "terms": {name: one.terms for name, one in self._named.items()},
            "needed": dict(zip(self._named, needed, strict=True)),
        }

    def _use(self, name: str, one: Interpolation, terms: int) -> None:
        if terms > MAX_TERMS:
            logger.warning(
                "%s: more than %d terms would be needed for derivatives within %.0e of the "
                "largest: the network is not smooth. From now on it is evaluated for each pair of "
                "atoms, as with interpolate = never.",
                name,
                MAX_TERMS,
                one.max_error,
            )
        elif terms != one.terms:
            logger.debug("%s: %d terms, %d before", name, terms, one.terms)
        one.use(terms if terms <= MAX_TERMS else 0)


def _first_terms(one: Interpolation) -> int:
    """Return the terms that the first batches need, 0 where ``auto`` finds a series not to be less
    work.
    """
    unused = not one.evaluated_sites  # attention sees each pair
    if unused or (
        one.choice == AUTO and one.direct_numbers < MIN_NUMBERS_PER_SITE * one.evaluated_sites
    ):
        return 0
    return one.needed
