"""Embedding nets as series: error, number of terms, restarts, and what makes a run leave them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from helpers import assert_same
from parallel_runs import train
from test_parallel import config_of
from test_train import load, start  # noqa: F401  (a fixture)
from toy_models import batch_of, toy_atoms, toy_model

from deepmd_ema.dist.world import World
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.kernels.spline import Spline, Watch
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.splines import FIRST, LARGEST_ERROR, MOST
from deepmd_ema.train import splines as control
from deepmd_ema.train.splines import SplineControl

pytestmark = pytest.mark.timeout(120)

CELL = np.diag([7.0, 7.5, 8.0])
SPLINE = {"model__descriptor__embedding_eval": "spline"}


def net_of(activation="tanh", dtype=torch.float64, steep=1.0):
    net = Network([1, 4, 8], activation, timestep=True, dtype=dtype, seed=1)
    with torch.no_grad():
        net.stack[0].weight *= steep
    return net


def in_series(net, terms, left, s):
    spline = Spline("spline", torch.float64)
    spline.use(terms)
    return spline(left, s, net)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums_and_gradients(value, grads, net):
    """Return sums, both gradients of a function of them, and the gradient of a function of all of that by weights."""
    total = sum(part.square().sum() for part in (value, *grads))
    return [value, *grads, *torch.autograd.grad(total, list(net.parameters()))]


def differences(terms, net):
    left, s, grad = drawn(5, 40, 4), 3 * drawn(5, 40, seed=1), drawn(5, 4, 8, seed=2)
    found = in_series(net, terms, left, s)
    value, slope = net.value_and_derivative(s[..., None])
    summed = torch.einsum("akc,akm->acm", left, value)
    of_left = torch.einsum("acm,akm->akc", grad, value)
    of_s = torch.einsum("acm,akc,akm->ak", grad, left, slope)
    on_pairs = sums_and_gradients(summed, (of_left, of_s), net)
    pairs = zip(sums_and_gradients(found.value, found.vjp(grad), net), on_pairs, strict=True)
    return [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs]


def test_sums_their_gradients_and_those_by_the_weights_are_those_of_the_net():
    assert max(differences(64, net_of())) < 1e-11


def test_the_error_falls_geometrically_with_the_number_of_terms():
    errors = np.array([differences(n, net_of(steep=2)) for n in (32, 64, 128)])
    for quantity in (0, 2):  # the sums, and derivatives
        assert errors[1, quantity] < 0.1 * errors[0, quantity]
        assert errors[2, quantity] < 0.1 * errors[1, quantity]


def test_the_gradient_by_rows_is_that_by_both_where_s_is_their_first_column():
    left, grad = drawn(5, 40, 4), drawn(5, 4, 8, seed=2)
    net = net_of()
    found = in_series(net, 40, left, left[..., 0])
    of_left, of_s = found.vjp(grad)
    expected = torch.cat([of_left[..., :1] + of_s[..., None], of_left[..., 1:]], -1)
    rows = found.rows_vjp(grad)
    weight = net.stack[0].weight
    gradients = [torch.autograd.grad(one.square().sum(), weight, retain_graph=True) for one in (rows, expected)]
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_a_list_without_pairs_has_sums_of_zero_and_gradients_of_zero():
    for shape in ((3, 0), (0, 4)):
        net = net_of()
        found = in_series(net, 32, drawn(*shape, 4), drawn(*shape))
        grads = sums_and_gradients(found.value, found.vjp(torch.ones_like(found.value)), net)
        assert found.value.shape == (shape[0], 4, 8)
        assert all(not part.detach().abs().sum() for part in grads)


def test_pairs_that_are_all_alike_are_no_trouble():
    s = torch.full((2, 5), 0.7, dtype=torch.float64)
    found = in_series(net_of(), 32, torch.ones(2, 5, 1, dtype=torch.float64), s)
    torch.testing.assert_close(found.value[:, 0], 5 * net_of()(s[:, :1]), rtol=1e-12, atol=1e-12)


def test_nets_in_float32_lose_no_more_than_their_rounding():
    """Beside the same weights in float64: the coefficients are computed in float64."""
    left, s = drawn(5, 40, 4), 3 * drawn(5, 40, seed=1)
    narrow = net_of(dtype=torch.float32)
    wide = net_of()
    wide.load_state_dict({name: value.double() for name, value in narrow.state_dict().items()})
    exact = torch.einsum("akc,akm->acm", left, wide(s[..., None]))
    direct = torch.einsum("akc,akm->acm", left.float(), narrow(s[..., None].float()))
    found = in_series(narrow, 64, left.float(), s.float()).value
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 3 * (direct - exact).abs().max()


def one_batch(model, natoms=40, seed=1):
    coord, types = toy_atoms(seed, natoms)
    return batch_of(model, (coord, types, CELL))


def controlled(descriptor="se_e2_a", activation="tanh", wanted="auto", natoms=40, **changes):
    """Return the spline of a model after a run has begun with it, its control and a batch."""
    changes |= {"embedding_eval": wanted, "activation_function": activation}
    _, model = toy_model(descriptor, changes)
    steering = SplineControl(ModelSet({"": model}), World())
    batch = one_batch(model, natoms)
    steering.begin({"": batch}, None)
    return model.descriptor.spline, steering, batch


def test_auto_takes_knots_where_there_are_many_pairs_and_the_nets_are_wide():
    wide = {"neuron": [50, 100, 200], "type_one_side": True}
    assert controlled(**wide)[0].terms >= FIRST // 2
    assert controlled(**wide, natoms=3)[0].terms == 0
    assert controlled(neuron=[2, 4])[0].terms == 0
    assert controlled(**wide, wanted="direct")[0].terms == 0
    assert controlled(neuron=[2, 4], natoms=3, wanted="spline")[0].terms > 0


def test_knots_are_added_when_the_net_gets_steeper_and_taken_away_when_it_is_smooth_again():
    spline, steering, batch = controlled(wanted="spline")
    model: EnergyModel = steering.models.by_task[""]
    first = spline.terms
    weight = model.descriptor.networks[0].stack[0].weight
    seen = []
    for factor in (6.0, 1 / 6.0):
        with torch.no_grad():
            weight *= factor
        for step in range(2):  # the error that is expected of other knots is measured at the next check
            steering.check("", batch, step)
        spline.watch = Watch()
        model(batch)
        assert spline.watch.error < LARGEST_ERROR[torch.float64]
        spline.watch = None
        seen.append(spline.terms)
    # knots go when an eighth of the largest error is expected without them, so not all that came need to go
    assert first <= seen[1] < seen[0]


def test_a_net_with_a_kink_is_evaluated_directly_with_a_warning(caplog):
    spline, steering, _ = controlled(activation="relu", wanted="spline")
    assert spline.terms == 0
    assert "not smooth" in caplog.text
    assert steering.in_words() == "at each pair"
    assert not steering.is_due("", 1000)


def test_a_step_that_is_not_finite_leaves_the_knots_as_they_are():
    spline, steering, batch = controlled(wanted="spline")
    before = spline.terms
    with torch.no_grad():
        steering.models.by_task[""].descriptor.networks[0].stack[0].weight.fill_(float("nan"))
    steering.check("", batch, 1)
    assert spline.terms == before <= MOST


def test_a_run_on_knots_is_that_of_the_nets_and_a_restart_of_it_is_bitwise(start, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(control, "CHECK_EVERY", 7)
    caplog.set_level(logging.INFO)
    direct = start("direct", 20, {"model__descriptor__embedding_eval": "direct"})
    assert "embedding nets  at each pair" in caplog.text
    whole = start("whole", 20, SPLINE)
    assert "terms of a series" in caplog.text
    weights = [load(folder / "model.ckpt-20.pt") for folder in (direct, whole)]
    for name, value in weights[0]["model"].items():
        torch.testing.assert_close(weights[1]["model"][name], value, rtol=1e-6, atol=1e-8)
    assert any(weights[1]["splines"]["terms"].values())
    assert weights[1]["splines"]["checked"] == {"": 14}

    parts = start("parts", 20, SPLINE)
    for name in ("model.ckpt-20.pt", "model_ema.ckpt-20.pt"):
        (parts / name).unlink()
    start("parts", 20, SPLINE, restart="model.ckpt-10.pt")
    assert_same(weights[1], load(parts / "model.ckpt-20.pt"))
    assert_same(load(whole / "model_ema.ckpt-20.pt"), load(parts / "model_ema.ckpt-20.pt"))


def test_a_restart_takes_the_knots_of_its_checkpoint_whatever_it_would_choose(start, monkeypatch):  # noqa: F811
    folder = start("run", 10, SPLINE)
    saved = load(folder / "model.ckpt-10.pt")["splines"]["terms"]
    monkeypatch.setattr("deepmd_ema.model.splines.FIRST", 512)
    monkeypatch.setattr("deepmd_ema.model.splines.LARGEST_ERROR", {torch.float64: 1e-30})
    start("run", 12, SPLINE, restart="model.ckpt.pt")
    assert load(folder / "model.ckpt-12.pt")["splines"]["terms"] == saved


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_agree_on_the_knots_where_each_has_frames_of_its_own(tmp_path, stage, water_like, water_like_valid):
    config = config_of([water_like], water_like_valid, stage, 2, SPLINE, num_steps=101)
    train(tmp_path, 2, config)
    saved = load(tmp_path / "model.ckpt-101.pt")["splines"]
    assert saved["checked"] == {"": 100}
    assert all(n > 0 for n in saved["terms"].values())


def test_numbers_that_are_not_finite_are_seen_in_the_sums():
    s = 3 * drawn(2, 5, seed=1)
    s[0, 0] = float("nan")
    found = in_series(net_of(), 32, drawn(2, 5, 4), s)
    assert not torch.isfinite(found.value[0]).any()


def test_a_restart_with_another_evaluation_chooses_anew(start):  # noqa: F811
    folder = start("run", 10)  # auto: there are few pairs
    assert not any(load(folder / "model.ckpt-10.pt")["splines"]["terms"].values())
    start("run", 12, SPLINE, restart="model.ckpt.pt", allow_config_change=True)
    assert all(load(folder / "model.ckpt-12.pt")["splines"]["terms"].values())
