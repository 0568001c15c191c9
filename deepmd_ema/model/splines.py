"""How many knots the embedding nets of a model need: chosen from their error on a batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from deepmd_ema.batch import Batch
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.kernels.spline import DEGREE, Spline, Watch

logger = logging.getLogger(__name__)

# of the derivative of a net, over its largest value
LARGEST_ERROR = {torch.float64: 1e-8, torch.float32: 1e-6}
FEWEST, FIRST, MOST = 32, 64, 1024  # intervals, powers of two
MARGIN_TO_COARSEN = 8  # times smaller than the largest error must be what fewer knots are expected to give
NUMBERS_PER_SITE = 1000  # of layers, from which on "auto" takes knots (decision 0055)
_ROUNDS = 4  # of measuring


def splines_of(model: nn.Module) -> dict[str, Spline]:
    """Return the splines of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Spline)}


def choose_for(model: EnergyModel, batch: Batch) -> bool:
    """Choose the knots of a model that is only evaluated, and return whether some of its nets are on knots."""
    splines = splines_of(model)
    for name, spline in splines.items():
        if spline.wanted != "direct" and batch.vector.device.type == "cpu":
            choose(name, spline, lambda: model(batch, create_graph=False, need_virial=False))
    return any(spline.intervals for spline in splines.values())


def choose(name: str, spline: Spline, evaluate: Callable[[], Any]) -> None:
    """Choose the number of intervals of a spline; ``auto`` stays at each pair where knots are not less work.

    Args:
        name: of the spline, for messages.
        spline: with what was asked for.
        evaluate: evaluates a batch.
    """
    spline.use(FIRST)
    for _ in range(_ROUNDS):
        watch = watched([spline], evaluate)[spline]
        unused = not watch.sites  # attention sees each pair
        if unused or (spline.wanted == "auto" and watch.numbers < NUMBERS_PER_SITE * watch.sites):
            spline.use(0)
            return
        before = spline.intervals
        use(name, spline, intervals_for(watch.error, spline), watch.error)
        if spline.intervals in (0, before):
            return


def watched(splines: Collection[Spline], evaluate: Callable[[], Any]) -> dict[Spline, Watch]:
    """Return what is seen of splines in an evaluation."""
    found = {spline: Watch() for spline in splines}
    try:
        for spline, watch in found.items():
            spline.watch = watch
        evaluate()
    finally:
        for spline in found:
            spline.watch = None
    return found


def intervals_for(error: float, spline: Spline) -> int:
    """Return how many intervals an error asks for, which goes with the seventh power of their number."""
    accepted, now = LARGEST_ERROR[spline.precision], spline.intervals
    if not math.isfinite(error):  # weights or positions are not: what evaluates them says so
        return now
    if error > accepted:
        while now <= MOST and error > accepted:
            now, error = 2 * now, error / 2**DEGREE
        return now
    while now > FEWEST and error * 2**DEGREE * MARGIN_TO_COARSEN < accepted:
        now, error = now // 2, error * 2**DEGREE
    return now


def use(name: str, spline: Spline, intervals: int, error: float) -> None:
    """Evaluate nets with ``intervals`` from now on, or directly if these are too many.

    Args:
        name: of the spline, for messages.
        spline: of the nets.
        intervals: what ``error`` asks for.
        error: with the intervals of now.
    """
    before = spline.intervals
    if before == intervals:
        return
    if intervals <= MOST:
        logger.debug("%s: %d intervals, after an error of %.1e with %d", name, intervals, error, before)
        spline.use(intervals)
        return
    logger.warning(
        "%s: with %d intervals, derivatives differ by %.1e of the largest from those of the net, which is not smooth. "
        "From now on it is evaluated at each pair, as with embedding_eval = direct.", name, before, error,
    )  # fmt: skip
    spline.use(0)
