"""Tables of embedding nets for models that are only evaluated: range, error, weights that change, pairs beyond."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_interpolation import CELL, one_batch
from toy_models import toy_atoms, toy_model

from deepmd_ema import Potential
from deepmd_ema.infer.load import LoadedModel, Provenance
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.interpolation.series import MAX_ERROR
from deepmd_ema.model.interpolation.tables import MARGIN
from deepmd_ema.model.tabulated import interpolations_of, tabulate

pytestmark = pytest.mark.timeout(120)

# of each kind of sum: per element, one for all, per element and centre, beside a net of elements, radial
WITH_TABLES = [
    "se_e2_a",
    "se_e2_r",
    "se_atten_interpolated",
    "se_atten_interpolated_one_side",
    "se_atten_interpolated_strip",
    "dpa2_interpolated",
]


def evaluated(name, nearest):
    """Return a model's outputs for a batch directly and with tables that begin at 0.9 ``nearest``, and its tables."""
    _, model = toy_model(name)
    model.eval()
    batch = one_batch(model)
    for interpolation in interpolations_of(model).values():
        interpolation.choice = "always"
    direct = model(batch)
    model.min_nbor_dist = nearest
    assert tabulate(model)
    model(batch)  # makes the tables
    tables = model(batch)
    return (
        direct,
        tables,
        [series for interpolation in interpolations_of(model).values() for series in interpolation.tables.made],
    )


@pytest.mark.parametrize("nearest", [0.7, 3.0])
@pytest.mark.parametrize("name", WITH_TABLES)
def test_energies_and_forces_from_tables_are_those_of_the_nets_also_of_pairs_that_are_nearer_than_they_reach(
    name, nearest
):
    direct, tables, made = evaluated(name, nearest)
    for key, value in direct.items():
        assert (tables[key] - value).abs().max() < 1e-11 * value.abs().max(), key
    assert made
    assert all(series.error <= MAX_ERROR[torch.float64] / MARGIN for series in made)


@pytest.mark.parametrize("nearest", [None, 2.5])
def test_a_potential_reads_tables_where_there_are_many_pairs_with_the_numbers_of_its_nets(nearest):
    found = {}
    few, many = (toy_atoms(1, natoms) for natoms in (3, 40))
    for choice in ("auto", "never"):
        changes = {"neuron": [50, 100, 200], "type_one_side": True, "interpolate": choice}
        config, model = toy_model(descriptor_changes=changes)
        model.min_nbor_dist = nearest
        potential = Potential(LoadedModel(model.eval(), config, Provenance(Path("model"), "weights")))
        interpolation: Interpolation = potential._model.descriptor.interpolation
        potential.evaluate(few[0], few[1])
        assert interpolation.tables is None or not interpolation.tables.made
        found[choice] = potential.evaluate(many[0], many[1], CELL)
        assert (interpolation.tables is not None and len(interpolation.tables.made) == 3) == (choice == "auto")
    assert np.abs(found["auto"].force - found["never"].force).max() < 1e-9 * np.abs(found["never"].force).max()
    assert np.abs(found["auto"].energy - found["never"].energy).max() < 1e-11 * np.abs(found["never"].energy).max()
