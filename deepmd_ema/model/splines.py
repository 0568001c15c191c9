"""How many terms the series of the embedding nets of a model need: chosen from their error on a batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.kernels.env_mat import radial_parts
from deepmd_ema.model.kernels.spline import Spline, Watch
from deepmd_ema.model.kernels.spline_table import SplineTables, Table

logger = logging.getLogger(__name__)

# of the derivative of a net, over its largest value
LARGEST_ERROR = {torch.float64: 1e-9, torch.float32: 1e-6}
FEWEST, FIRST, MOST = 16, 32, 512  # terms
MULTIPLE = 8  # of which numbers of terms are multiples
GROWTH = 1.5  # of their number when they are not enough
SHORTEST = 0.7  # angstrom, where the shortest distance of the training data is not known
NEARER = 0.9
# of layers, for a pair and for all pairs of a batch, from which on "auto" takes tables (decision 0062)
FEWEST_NUMBERS, NUMBERS_OF_PAIRS = 40, 200_000
MARGIN_TO_SHORTEN = 8  # times smaller than the largest error must be what fewer terms are expected to give
NUMBERS_PER_SITE = 3000  # of layers, from which on "auto" takes series (decision 0055)
ROUNDS = 8  # of measuring


def splines_of(model: nn.Module) -> dict[str, Spline]:
    """Return the splines of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Spline)}


def tabulate(model: EnergyModel, always: bool = False) -> bool:
    """Let a model that is only evaluated read nets from tables, and return whether it does (decision 0062).

    Its parameters get no gradients from then on. Tables are made by the first evaluation.

    Args:
        model: on a CPU; on another device nothing is done but that.
        always: tables for nets of any size, in batches of any size, also where ``embedding_eval`` is ``direct``.
    """
    model.requires_grad_(False)
    for module in model.modules():
        spline = getattr(module, "spline", None)
        if isinstance(spline, Spline) and model.out_bias.device.type == "cpu":
            ends = _range_of(module, least_distance(model))
            if always or spline.wanted == "spline":
                spline.tables = SplineTables(*ends, spline.precision)
            elif spline.wanted == "auto" and _width(module) >= FEWEST_NUMBERS:
                spline.tables = SplineTables(*ends, spline.precision, NUMBERS_OF_PAIRS // _width(module))
    return any(spline.tables is not None for spline in splines_of(model).values())


def make_tables(model: EnergyModel, batch: Batch) -> list[Table]:
    """Make the tables of a tabulated model that a graph can read, which then serve batches of any size.

    Those for each element of the centre need atoms in the order of their types, which images lack: such nets are
    evaluated directly.

    Args:
        model: on which ``tabulate`` was called.
        batch: with all elements.
    """
    found = {spline: spline.tables for spline in splines_of(model).values() if spline.tables is not None}
    for tables in found.values():
        tables.fewest = 0
    model(batch)
    for spline, tables in found.items():
        tables.settle()
        if tables.by_centre:
            spline.tables = None
    return [table for tables in found.values() if not tables.by_centre for table in tables.made]


def seal(model: nn.Module) -> None:
    """From now on read the tables that there are for all batches, without asking whether weights have changed."""
    for spline in splines_of(model).values():
        if spline.tables is not None:
            spline.tables.sealed = True


def least_distance(model: EnergyModel) -> float:
    """Return the distance of two atoms down to which tables reach, angstrom."""
    # a bit less than in the training data, because atoms that move come nearer; H2 is the shortest molecule
    return min(NEARER * (model.min_nbor_dist or SHORTEST), 0.5 * model.layout.rcut)


def _width(module: Any) -> int:
    """Return how many numbers the layers of an embedding net of a descriptor or a block have for a pair."""
    net = module.networks[0] if isinstance(module, ByTypeDescriptor) else module.embedding
    return sum(layer.weight.shape[1] for layer in net.stack)


def _range_of(module: Any, least: float) -> tuple[float, float]:
    """Return the least and the largest first column of the normalised environment matrix of a descriptor or a block."""
    distance = torch.tensor([least], dtype=torch.float64, device=module.mean.device)
    largest = radial_parts(distance, module.rcut, module.rcut_smth, module.protection).s
    mean, spread = module.mean[..., 0].double(), module.stddev[..., 0].double()
    # 0 of pairs that are excluded; at the cutoff, and in empty slots, the raw number is 0
    ends = torch.stack([torch.zeros_like(mean), -mean / spread, (largest - mean) / spread])
    return float(ends.min()), float(ends.max())


def choose(name: str, spline: Spline, evaluate: Callable[[], Any]) -> None:
    """Choose the number of terms of the series; ``auto`` stays at each pair where a series is not less work.

    Args:
        name: of the spline, for messages.
        spline: with what was asked for.
        evaluate: evaluates a batch.
    """
    spline.use(FIRST)
    for _ in range(ROUNDS):
        watch = watched([spline], evaluate)[spline]
        unused = not watch.sites  # attention sees each pair
        if unused or (spline.wanted == "auto" and watch.numbers < NUMBERS_PER_SITE * watch.sites):
            spline.use(0)
            return
        before = spline.terms
        use(name, spline, terms_for(watch, spline), watch.error)
        if spline.terms <= before:
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


def terms_for(watch: Watch, spline: Spline) -> int:
    """Return how many terms an error asks for: more than now, or as few as the terms that are there leave out."""
    accepted, now = LARGEST_ERROR[spline.precision], spline.terms
    if not math.isfinite(watch.error):  # weights or positions are not: what evaluates them says so
        return now
    if watch.error > accepted:
        longer = _multiple(GROWTH * now)
        return MOST if now < MOST < longer else longer
    enough = sum(tail * MARGIN_TO_SHORTEN > accepted for tail in watch.tails)
    return min(now, max(FEWEST, _multiple(enough)))


def use(name: str, spline: Spline, terms: int, error: float) -> None:
    """Evaluate nets with ``terms`` from now on, or directly if these are too many.

    Args:
        name: of the spline, for messages.
        spline: of the nets.
        terms: what ``error`` asks for.
        error: with the terms of now.
    """
    before = spline.terms
    if before == terms:
        return
    if terms <= MOST:
        logger.debug("%s: %d terms, after an error of %.1e with %d", name, terms, error, before)
        spline.use(terms)
        return
    logger.warning(
        "%s: with %d terms, derivatives differ by %.1e of the largest from those of the net, which is not smooth. "
        "From now on it is evaluated at each pair, as with embedding_eval = direct.", name, before, error,
    )  # fmt: skip
    spline.use(0)


def _multiple(terms: float) -> int:
    return MULTIPLE * math.ceil(terms / MULTIPLE)
