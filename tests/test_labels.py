"""A label is declared once: everything that reads, joins, measures or shows labels follows its declaration."""

import math

import numpy as np
import pytest
import torch
from flat_batches import flat_batch, random_frame
from helpers import open_data, write_system

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.config.labels import LABELS, QUANTITIES, WEIGHTS, Label, Quantity
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.data.collate import collate
from deepmd_ema.distributed.world import World
from deepmd_ema.model.metrics import Errors
from deepmd_ema.training.loss import EnergyLoss

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


@pytest.mark.parametrize("name", [name for name in LABELS if name not in WEIGHTS])
def test_a_batch_without_a_label_adds_nothing_for_it(name):
    symbol, rng = LABELS[name].symbol, np.random.default_rng(1)
    batch = flat_batch([random_frame(rng, 4), random_frame(rng, 3)], names=())
    prediction = {n: torch.ones(label.shape_of(4, 3), dtype=torch.float64) for n, label in LABELS.items()}
    zeros = {f"{at}_pref_{label.symbol}": 0.0 for label in LABELS.values() if label.symbol for at in ("start", "limit")}
    loss = EnergyLoss(EnerLossConfig(**(zeros | {f"start_pref_{symbol}": 1.0})), 1e-3, World())
    total, shown = loss(prediction, batch, 1e-3)
    assert total == 0
    assert math.isnan(shown[f"rmse_{symbol}"])
