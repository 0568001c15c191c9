"""The interpolations of a model, and tables of models that are only evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from deepmd_ema.model.interpolation.interpolation import ALWAYS, AUTO, Interpolation
from deepmd_ema.model.interpolation.series import Series
from deepmd_ema.model.interpolation.tables import Tables

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.model.energy import EnergyModel

# angstrom, where the shortest distance of the training data is not known; H2 has 0.74
MIN_DISTANCE = 0.7
NEARER = 0.9  # atoms that move come a bit nearer than in the training data
# numbers that layers have for a pair, and for all pairs of a batch, from which on "auto" uses
# tables (doc/decisions.md)
MIN_WIDTH = 40
MIN_NUMBERS = 200_000
# a table with so many terms for each number that layers have for a pair takes as long as the net
MAX_LENGTH = 1.2


def interpolations_of(model: nn.Module) -> dict[str, Interpolation]:
    """Return the interpolations of a model by the names of the modules whose nets they evaluate."""
    return {
        name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if isinstance(module, Interpolation)
    }


def tabulate(model: EnergyModel, always: bool = False) -> bool:
    """Let a model that is only evaluated use tables of its nets, and return whether it does.

    Its parameters get no gradients from then on. Tables are made by the first evaluation
    (doc/decisions.md).

    Args:
        model: on a CPU; on another device nothing is done but that.
        always: tables for nets of any size, in batches of any size, also where ``interpolate`` is
            ``never``.
    """
    model.requires_grad_(False)
    return _add_tables(model, always)


@contextmanager
def tables_in(models: Iterable[EnergyModel]) -> Iterator[None]:
    """Evaluate models that are trained as :func:`tabulate` evaluates them, within the body.

    Weights must not change in it. Every rank may call this; with gradients nets are evaluated
    directly.
    """
    evaluated = list(models)
    try:
        for model in evaluated:
            _add_tables(model, always=False)
        yield
    finally:
        for model in evaluated:
            model.has_tables = False
            for interpolation in interpolations_of(model).values():
                interpolation.tables = None


def make_tables(model: EnergyModel, batch: Batch) -> list[Series]:
    """Make the tables of a tabulated model that a graph can read, for batches of any size.

    Those for each element of the centre need atoms in the order of their types, which images lack:
    such nets are evaluated directly.

    Args:
        model: on which ``tabulate`` was called.
        batch: with all elements.
    """
    pairs = [(part, part.tables) for part in interpolations_of(model).values()]
    tabulated = [(part, tables) for part, tables in pairs if tables is not None]
    for _, tables in tabulated:
        tables.min_pairs = 0
        # a graph merges the operations of a net, so that a table must be shorter to be faster
        tables.longest = tables.longest / 2
    model(batch)
    for interpolation, tables in tabulated:
        if tables.by_centre:
            interpolation.tables = None
    return [
        series
        for _, tables in tabulated
        if not tables.by_centre
        for series in tables.made
    ]


def seal(model: nn.Module) -> None:
    """Use the tables that a model has for all batches, even if its weights have changed."""
    for interpolation in interpolations_of(model).values():
        if interpolation.tables is not None:
            interpolation.tables.sealed = True


def min_table_distance(model: EnergyModel) -> float:
    """Return the distance of two atoms down to which tables reach, angstrom."""
    return min(NEARER * (model.min_nbor_dist or MIN_DISTANCE), 0.5 * model.layout.rcut)


def _add_tables(model: EnergyModel, always: bool) -> bool:
    """Give nets of a model on a CPU tables, and return whether some have them."""
    if model.out_bias.device.type == "cpu":
        for owner, interpolation in interpolations_of(model).items():
            width = interpolation.width
            requested = always or interpolation.choice == ALWAYS
            # fewest pairs of a batch and most terms with which a table is used
            min_pairs = 0 if requested else MIN_NUMBERS // max(width, 1)
            longest = float("inf") if requested else MAX_LENGTH * width
            if requested or (interpolation.choice == AUTO and width >= MIN_WIDTH):
                module: Any = model.get_submodule(owner)
                low, high = module.radial_range(min_table_distance(model))
                interpolation.tables = Tables(
                    low, high, interpolation.precision, min_pairs, longest
                )
    model.has_tables = any(
        part.tables is not None for part in interpolations_of(model).values()
    )
    return model.has_tables
