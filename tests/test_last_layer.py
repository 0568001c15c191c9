"""Least squares for the output layer: columns are derivatives, and the solution is the best there is."""

from dataclasses import replace

import pytest
import torch
from toy_models import TRICLINIC, VARIANTS, batch_of, toy_atoms, toy_model

from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.dist.world import World
from deepmd_ema.labels import ENERGY, FORCE, LABELS, VIRIAL
from deepmd_ema.loss import EnergyLoss
from deepmd_ema.model.last_layer import (
    FITTED,
    _columns,
    changed_tensors,
    equations,
    loss_of,
    num_unknowns,
    solve,
)

LINEAR = 1e-9  # of the largest number: sums in another order
PREFACTORS = {ENERGY: 1.0, FORCE: 2.0, VIRIAL: 0.5}
SYMBOLS = {name: LABELS[name].symbol for name in PREFACTORS}


def frames_of(seeds, natoms=9):
    return [(*toy_atoms(seed, natoms), TRICLINIC) for seed in seeds]


def labelled(model, frames, lacking=()):
    """Return a batch whose labels are the predictions of ``model``; the frames ``lacking`` have no forces."""
    batch = batch_of(model, *frames)
    found = {name: value.detach() for name, value in model(batch).items() if name in FITTED}
    has_label = {name: torch.ones(len(frames), dtype=torch.float64) for name in found}
    has_label[FORCE][list(lacking)] = 0
    return replace(batch, labels=found, has_label=has_label)


def put(model, tensors):
    """Give the model other tensors and return what it had."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in tensors}
    model.load_state_dict(tensors, strict=False)
    return before


def random_change(model, seed=0, size=0.1):
    return size * torch.randn(num_unknowns(model), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    **{name: (name, {}, {}) for name in (*sorted(DESCRIPTORS), *VARIANTS) if "interpolated" not in name},
    "excluded_type": ("se_e2_a", {}, {"atom_exclude_types": [1]}),
    "excluded_type_in_one_network": ("se_atten", {}, {"atom_exclude_types": [1]}),
    "energies_of_atoms": ("se_e2_a", {"atom_ener": [-3.0, None, None]}, {}),
    "gated": ("dpa4c", {"type": "dpa4_ener", "neuron": [12], "precision": "float64"}, {}),
    "gated_dpa4": ("dpa4", {"type": "dpa4_ener", "neuron": [12], "precision": "float64"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_linear_in_the_output_layer_and_the_columns_are_their_slopes(case):
    descriptor, fitting, changes = CASES[case]
    _, model = toy_model(descriptor, fitting_changes=fitting, **changes)
    batch = labelled(model, frames_of((1, 2)))
    change = random_change(model)
    put(model, changed_tensors(model, change))
    moved = model(batch)
    found = equations_of_one(model, batch)
    for name in FITTED:
        difference = (moved[name].detach() - batch.labels[name]).flatten()
        assert difference.abs().max() > 1e-3  # or nothing was tested
        torch.testing.assert_close(
            found[name] @ change, difference, rtol=LINEAR, atol=LINEAR * float(difference.abs().max())
        )


def equations_of_one(model, batch):
    """Return the columns of a batch (R, P) by label, from the right sides of its equations with unit residuals."""
    with torch.no_grad():
        return _columns(model, batch, with_forces=True)


def test_labels_of_another_output_layer_are_fitted_exactly():
    _, model = toy_model()
    before = put(model, changed_tensors(model, random_change(model)))
    *batches, others = (labelled(model, frames_of(range(start, start + 4)), lacking=(1,)) for start in range(0, 16, 4))
    put(model, before)
    start = loss_of(model, [others], False, PREFACTORS)
    found = solve([equations(model, [batch], False) for batch in batches], PREFACTORS)
    assert found.kept_apart[1] < 1e-12 * found.kept_apart[0]
    put(model, changed_tensors(model, found.change))
    assert loss_of(model, [others], False, PREFACTORS) < 1e-12 * start


@pytest.mark.parametrize("intensive", [False, True])
def test_the_loss_of_the_equations_is_that_of_training(intensive):
    _, model = toy_model()
    batch = labelled(model, frames_of(range(2)) + frames_of(range(2), 6), lacking=(0, 2))
    put(model, changed_tensors(model, random_change(model)))
    by_equations = float(equations(model, [batch], intensive).weighted(PREFACTORS)[-1, -1])
    assert by_equations == pytest.approx(loss_of(model, [batch], intensive, PREFACTORS), rel=1e-12)
    pref = {
        f"{when}_pref_{symbol}": PREFACTORS[name] for name, symbol in SYMBOLS.items() for when in ("start", "limit")
    }
    loss = EnergyLoss(EnerLossConfig(**pref, intensive_ener_virial=intensive), 1e-3, World())
    assert by_equations == pytest.approx(float(loss(model(batch), batch, 1e-3)[0]), rel=1e-12)


def test_labels_that_do_not_depend_on_the_unknowns_leave_the_weights_as_they_were_trained():
    _, model = toy_model()
    parts = []
    for start in range(0, 12, 4):
        batch = labelled(model, frames_of(range(start, start + 4)))
        noise = {name: torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(start))
                 for name, value in batch.labels.items()}  # fmt: skip
        parts.append(equations(model, [replace(batch, labels={n: batch.labels[n] + noise[n] for n in noise})], False))
    found = solve(parts, PREFACTORS)
    assert found.kept_apart[1] <= found.kept_apart[0]
    assert found.ridge >= 0.1  # so few frames of noise determine nothing


def test_energies_alone_move_what_energies_depend_on():
    _, model = toy_model()
    batch = labelled(model, frames_of(range(5)))
    both, alone = (equations(model, [batch], False, with_forces=with_forces) for with_forces in (True, False))
    torch.testing.assert_close(both.sums[ENERGY], alone.sums[ENERGY], rtol=1e-12, atol=1e-12)
    assert not alone.counts[FORCE]
    assert both.counts[FORCE] == 3 * len(batch.atom_type)


def test_an_element_that_no_frame_has_keeps_its_bias():
    _, model = toy_model()
    coord, types = toy_atoms(1, 9, num_types=2)
    batches = [labelled(model, [(coord + 0.01 * k, types, TRICLINIC)]) for k in range(3)]
    shifted = [replace(b, labels={**b.labels, ENERGY: b.labels[ENERGY] + 3}) for b in batches]
    change = solve([equations(model, [batch], False) for batch in shifted], PREFACTORS).change
    assert change[-1] == 0
    assert change[-2] != 0
