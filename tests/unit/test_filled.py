"""Batches filled up for compiled code: what a model predicts, and its derivatives, are those of the
batch.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_models import SECTIONS, TRICLINIC, VARIANTS, batch_of, toy_atoms, toy_model

from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.model.dummy_atoms import (
    at_least_two,
    fill,
    pad,
    to_eighth,
    to_half_octave,
    to_prime,
)
from deepmd_ema.model.metrics import Errors
from deepmd_ema.training.loss import EnergyLoss

ROUNDS = {
    "an eighth": lambda: to_eighth,
    "two": lambda: at_least_two,
    "half an octave": lambda: to_half_octave,
    "primes": lambda: to_prime({5, 7}),
}
# elements of the atoms of each frame, and its cell
BATCHES = {
    "one frame": [((0, 1, 2, 1, 0), TRICLINIC)],
    "several": [
        ((2, 1, 1), None),
        ((0, 0, 1, 2, 2, 1, 0), TRICLINIC),
        ((1, 1), TRICLINIC),
    ],
    "one element": [((1, 1, 1, 1), TRICLINIC)],
    "one atom alone": [((1,), None)],
}


def batch_with(model, kinds, seed=0, **conditions):
    frames = [
        (toy_atoms(seed + k, len(types))[0], types, box)
        for k, (types, box) in enumerate(kinds)
    ]
    return batch_of(model, *frames, **conditions)


def outputs_and_gradients(model, batch, take=lambda out: out):
    out = take(model(batch, create_graph=True))
    total = sum((1 + k) * value.square().sum() for k, value in enumerate(out.values()))
    grads = torch.autograd.grad(
        total, list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    return [*(value.detach() for value in out.values()), *grads]


@pytest.mark.parametrize(
    ("kind", "up"),
    [*itertools.product(SECTIONS, ROUNDS), *((kind, "primes") for kind in VARIANTS)],
)
def test_filling_changes_no_prediction_and_no_gradient(kind, up):
    _, model = toy_model(kind, {"neuron": [2, 4], "nlayers": 2}, {"neuron": [4]})
    for kinds in BATCHES.values():
        batch = batch_with(model, kinds)
        filled = fill(batch, model.layout, ROUNDS[up]())
        for found, expected in zip(
            outputs_and_gradients(model, filled.batch, filled.take),
            outputs_and_gradients(model, batch),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def labelled(batch, names, seed=5):
    """Return the batch with random labels, which its second frame does not have."""
    rng = np.random.default_rng(seed)
    has_label = torch.ones(batch.num_frames, dtype=torch.float64)
    has_label[1:2] = 0
    shapes = {name: LABELS[name].shape_of(*batch.sizes) for name in names}
    labels = {
        name: torch.from_numpy(np.abs(rng.normal(size=shape)))
        for name, shape in shapes.items()
    }
    return replace(batch, labels=labels, has_label=dict.fromkeys(names, has_label))


LOSSES = {
    "squares": {},
    "absolute": {"loss_func": "mae"},
    "norm": {"loss_func": "mae", "f_use_norm": True},
    "huber": {"use_huber": True},
    "relative": {"relative_f": 0.3},
    "intensive": {"intensive_ener_virial": True},
    "default weights": {"use_default_pf": True},
}
PREFACTORS = {
    f"{when}_pref_{symbol}": 2
    for when in ("start", "limit")
    for symbol in ("e", "f", "v", "ae", "pf")
}
PLAIN = ("energy", "force", "virial", "atom_energy", "atom_pref")


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("name", BATCHES)
def test_the_loss_of_a_padded_batch_its_gradient_and_what_is_displayed_are_those_of_the_batch(
    name, options
):
    _, model = toy_model("se_e2_a", {"neuron": [2, 4]}, {"neuron": [4]})
    loss = EnergyLoss(EnerLossConfig(**PREFACTORS, **LOSSES[options]), 1e-3, World())
    batch = labelled(batch_with(model, BATCHES[name]), PLAIN)
    found = []
    for one in (batch, *(pad(batch, model.layout, up()) for up in ROUNDS.values())):
        total, shown = loss(model(one, create_graph=True), one, 5e-4)
        found.append(
            [
                total.detach(),
                *shown.values(),
                *torch.autograd.grad(total, list(model.parameters())),
            ]
        )
    for of_padded in found[1:]:
        for value, expected in zip(of_padded, found[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BATCHES)
def test_the_errors_of_a_padded_batch_and_of_its_frames_are_those_of_the_batch(name):
    _, model = toy_model("se_e2_a")
    batch = labelled(batch_with(model, BATCHES[name]), PLAIN[:4])
    padded = pad(batch, model.layout, to_half_octave)
    assert padded.num_real == (batch.num_frames, len(batch.atom_type))
    assert padded.num_dummies[0] >= 1
    found, expected = Errors(collect=True), Errors(collect=True)
    found.add(model(padded), padded)
    expected.add(model(batch), batch)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-12, atol=1e-12)
    assert [frame.source for frame in found.frames] == [
        frame.source for frame in expected.frames
    ]
    for one, other in zip(found.frames, expected.frames):
        assert one.label.keys() == other.label.keys()
        np.testing.assert_array_equal(one.atom_type, other.atom_type)
        for key in other.prediction:
            np.testing.assert_allclose(
                one.prediction[key], other.prediction[key], rtol=1e-11, atol=1e-11
            )


def test_a_batch_with_second_derivatives_as_a_label_is_not_padded():
    _, model = toy_model("se_e2_a")
    batch = labelled(batch_with(model, BATCHES["several"]), ("energy", "hessian"))
    assert pad(batch, model.layout) is batch
    assert list(fill(batch, model.layout).batch.labels) == ["energy"]


def test_half_octaves_are_few_and_not_smaller():
    found = [to_half_octave(n) for n in range(1, 1000)]
    assert all(n <= m <= max(2, 1.5 * n) for n, m in zip(range(1, 1000), found))
    assert sorted(set(found))[:8] == [2, 3, 4, 6, 8, 12, 16, 24]
    assert len(set(found)) == 19
