"""Which embedding nets of a model are interpolated, and the tables of models that are only evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.kernels.spline import Spline
from deepmd_ema.model.kernels.spline_table import SplineTables, Table
from deepmd_ema.model.ops.environment import radial_parts

SHORTEST = 0.7  # angstrom, where the shortest distance of the training data is not known
NEARER = 0.9
# of layers, for a pair and for all pairs of a batch, from which on "auto" takes tables (decision 0062)
FEWEST_NUMBERS, NUMBERS_OF_PAIRS = 40, 200_000


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
    return _add_tables(model, always)


@contextmanager
def tables_in(models: Iterable[EnergyModel]) -> Iterator[None]:
    """Evaluate models that are trained as :func:`tabulate` evaluates them, within the body.

    Weights must not change in it. Every rank may call this; with gradients nets are evaluated directly.
    """
    found = list(models)
    try:
        for model in found:
            _add_tables(model, always=False)
        yield
    finally:
        for model in found:
            model.has_tables = False
            for spline in splines_of(model).values():
                spline.tables = None


def _add_tables(model: EnergyModel, always: bool) -> bool:
    """Let nets of a model on a CPU read tables, and return whether some do."""
    for module in model.modules():
        spline = getattr(module, "spline", None)
        if isinstance(spline, Spline) and model.out_bias.device.type == "cpu":
            ends = _range_of(module, least_distance(model))
            if always or spline.wanted == "spline":
                spline.tables = SplineTables(*ends, spline.precision)
            elif spline.wanted == "auto" and _width(module) >= FEWEST_NUMBERS:
                spline.tables = SplineTables(*ends, spline.precision, NUMBERS_OF_PAIRS // _width(module))
    model.has_tables = any(spline.tables is not None for spline in splines_of(model).values())
    return model.has_tables


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
