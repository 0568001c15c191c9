"""Batches filled up for compiled code: what a model predicts, and its derivatives, are those of the batch."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from toy_models import SECTIONS, TRICLINIC, VARIANTS, batch_of, toy_atoms, toy_model

from deepmd_ema.model.dummy_atoms import at_least_two, fill, to_half_octave, to_prime

ROUNDS = {"two": lambda: at_least_two, "half an octave": lambda: to_half_octave, "primes": lambda: to_prime({5, 7})}
# elements of the atoms of each frame, and its cell
BATCHES = {
    "one frame": [((0, 1, 2, 1, 0), TRICLINIC)],
    "several": [((2, 1, 1), None), ((0, 0, 1, 2, 2, 1, 0), TRICLINIC), ((1, 1), TRICLINIC)],
    "one element": [((1, 1, 1, 1), TRICLINIC)],
    "one atom alone": [((1,), None)],
}


def batch_with(model, kinds, seed=0, **conditions):
    frames = [(toy_atoms(seed + k, len(types))[0], types, box) for k, (types, box) in enumerate(kinds)]
    return batch_of(model, *frames, **conditions)


def outputs_and_gradients(model, batch, take=lambda out: out):
    out = take(model(batch, create_graph=True))
    total = sum((1 + k) * value.square().sum() for k, value in enumerate(out.values()))
    grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return [*(value.detach() for value in out.values()), *grads]


@pytest.mark.parametrize("up", ROUNDS)
@pytest.mark.parametrize("kind", [*SECTIONS, *VARIANTS])
def test_filling_changes_no_prediction_and_no_gradient(kind, up):
    _, model = toy_model(kind, {"neuron": [2, 4], "nlayers": 2}, {"neuron": [4]})
    for kinds in BATCHES.values():
        batch = batch_with(model, kinds)
        filled = fill(batch, model.layout, ROUNDS[up]())
        for found, expected in zip(
            outputs_and_gradients(model, filled.batch, filled.take), outputs_and_gradients(model, batch), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_frame_and_atomic_parameters_are_filled_up_too():
    _, model = toy_model("se_e2_r", fitting_changes={"neuron": [4], "numb_fparam": 2, "numb_aparam": 1})
    types = (0, 1, 2, 1)
    batch = batch_with(model, [(types, None)], fparam=np.array([0.3, 0.7]), aparam=np.arange(4.0)[:, None])
    filled = fill(batch, model.layout)
    for found, expected in zip(
        outputs_and_gradients(model, filled.batch, filled.take), outputs_and_gradients(model, batch), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BATCHES)
def test_no_size_is_0_or_1_and_the_filled_batch_is_a_batch(name):
    _, model = toy_model("se_e2_a")
    batch = batch_with(model, BATCHES[name])
    filled = fill(batch, model.layout).batch
    sizes = [*filled.type_counts, *filled.slots, filled.num_frames, filled.reverse.shape[1]]
    assert min(sizes) >= 2
    num_atoms = sum(filled.type_counts)
    assert filled.atom_type.bincount().tolist() == list(filled.type_counts)
    assert filled.atom_frame.bincount().tolist() == filled.num_atoms.tolist()
    assert sorted(filled.atom_order.tolist()) == list(range(num_atoms))
    in_order = filled.in_file_order(filled.atom_frame)
    assert (in_order.diff() >= 0).all()
    per_atom = [f.name for f in fields(batch) if getattr(batch, f.name) is batch.coord]
    assert per_atom == ["coord"]
    assert filled.coord.shape == (num_atoms, 3)
    assert filled.vector.shape == (*filled.neighbor.shape, 3) == (num_atoms, sum(filled.slots), 3)
    assert int(filled.occupied.sum()) == int(batch.occupied.sum())


def test_primes_are_all_different_and_not_those_taken():
    up = to_prime({7})
    assert [up(n) for n in (0, 2, 6, 12, 12, 100)] == [5, 11, 13, 17, 19, 101]


def test_half_octaves_are_few_and_not_smaller():
    found = [to_half_octave(n) for n in range(1, 1000)]
    assert all(n <= m <= max(2, 1.5 * n) for n, m in zip(range(1, 1000), found))
    assert sorted(set(found))[:8] == [2, 3, 4, 6, 8, 12, 16, 24]
    assert len(set(found)) == 19


@pytest.mark.parametrize("kind", ["se_e2_a", "dpa3"])
def test_filling_reads_no_number_and_makes_no_tensor_elsewhere(kind):
    """Tensors without numbers stand for those of a GPU: reading one, or one of the CPU beside them, is an error."""
    _, model = toy_model(kind)
    batch = batch_with(model, BATCHES["several"]).to(torch.device("meta"))
    filled = fill(batch, model.layout)
    tensors = [v for f in fields(filled.batch) if isinstance(v := getattr(filled.batch, f.name), torch.Tensor)]
    assert {tensor.device.type for tensor in (*tensors, filled.rows)} == {"meta"}
