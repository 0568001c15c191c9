"""A label is declared once: everything that reads, joins, measures or shows labels follows its declaration."""

import math

import numpy as np
import pytest
import torch
from helpers import open_data, write_system

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.config.labels import LABELS, QUANTITIES, Label, Quantity
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.data.collate import collate
from deepmd_ema.model.metrics import Errors

DIPOLE = Label(
    "dipole", "d", "e*angstrom", ("dipole", "dipoles"), (3,), errors=(Quantity("d", "Dipole", "e*angstrom"),)
)
CHARGE = Label("charge", "q", "e", ("charge",), per_atom=True, errors=(Quantity("q", "Charge", "e", milli=False),))


@pytest.fixture
def further_labels(monkeypatch):
    for label in (DIPOLE, CHARGE):
        monkeypatch.setitem(LABELS, label.name, label)
        for quantity in label.errors:
            monkeypatch.setitem(QUANTITIES, quantity.name, quantity)


@pytest.mark.usefixtures("further_labels")
def test_a_further_label_is_read_joined_and_measured_after_its_declaration_alone(tmp_path):
    path, rng = write_system(tmp_path / "w", frames=3, natoms=5), np.random.default_rng(0)
    dipole, charge = rng.normal(size=(3, 3)), rng.normal(size=(3, 5))
    np.save(path / "set.000" / "dipoles.npy", dipole)
    np.save(path / "set.000" / "charge.npy", charge)
    [system] = open_data([str(path)], ["O", "H"], ("dipole", "charge"))
    batch = collate([system.frame(k) for k in range(3)], NeighborLayout(4.0, (20, 20), 2))
    np.testing.assert_array_equal(batch.labels["dipole"], dipole)
    np.testing.assert_array_equal(batch.in_file_order(batch.labels["charge"]), charge.ravel())
    errors = Errors(collect=True)
    errors.add({"dipole": torch.zeros(3, 3), "charge": torch.zeros(15)}, batch)
    found = errors.summary()
    assert found["mae_d"] == pytest.approx(np.abs(dipole).mean())
    assert found["rmse_q"] == pytest.approx(math.sqrt((charge**2).mean()))
    assert errors.frames[1].errors.summary()["mae_q"] == pytest.approx(np.abs(charge[1]).mean())


def test_every_prefactor_of_the_loss_is_named_by_a_label():
    prefixes = {name.removeprefix("start_pref_") for name in vars(EnerLossConfig()) if name.startswith("start_pref_")}
    assert prefixes == {label.symbol for label in LABELS.values()} - {""}
