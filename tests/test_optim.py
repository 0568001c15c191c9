"""Optimizers: same numbers as plain Adam, steps skipped on the device, state by name, clipping."""

import copy

import pytest
import torch
from torch import nn

from deepmd_ema.config.schema.optim import AdamConfig, AdamWConfig
from deepmd_ema.errors import CheckpointError
from deepmd_ema.optim.build import (
    build_optimizer,
    clip_gradients,
    guarded_step,
    load_optimizer_state,
    optimizer_state,
)

SAME_MATH = 1e-12
CPU = torch.device("cpu")
CONFIGS = [
    AdamConfig(),
    AdamConfig(weight_decay=0.1, adam_beta1=0.8),
    AdamWConfig(weight_decay=0.05),
    AdamWConfig(adam_beta2=0.99),
]


def make_model(frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 2)).double()
    if frozen:
        model[0].bias.requires_grad_(False)
    return model


def fill_gradients(model, seed, bad=False):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            if bad:
                p.grad.view(-1)[0] = torch.nan


def step(optimizer, found_inf=0.0, lr=1e-2):
    for group in optimizer.param_groups:
        group["lr"] = lr
    guarded_step(optimizer, torch.tensor(found_inf, dtype=torch.float64))


def everything(model, optimizer):
    """Return copies of all weights and all state."""
    state = optimizer_state(optimizer, model.named_parameters())
    return [p.detach().clone() for p in model.parameters()] + [t for s in state["state"].values() for t in s.values()]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_steps_equal_those_of_torch_without_fusing(config):
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer = build_optimizer(config, model.named_parameters())
    plain = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[config.type](
        reference.parameters(),
        lr=1e-2,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=1e-8,
        weight_decay=config.weight_decay,
        foreach=False,
    )
    for k in range(5):
        fill_gradients(model, k)
        fill_gradients(reference, k)
        step(optimizer)
        plain.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=SAME_MATH, atol=SAME_MATH)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_step_called_off_changes_no_bit(config, steps_before):
    model = make_model()
    optimizer = build_optimizer(config, model.named_parameters())
    for k in range(steps_before):
        fill_gradients(model, k)
        step(optimizer)
    before = everything(model, optimizer)
    fill_gradients(model, 9, bad=True)
    step(optimizer, found_inf=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer)))


def test_a_guarded_step_is_a_plain_step_when_nothing_is_wrong_also_after_one_called_off():
    model, other = make_model(), make_model()
    guarded, plain = (build_optimizer(AdamWConfig(), m.named_parameters()) for m in (model, other))
    for k in range(4):
        fill_gradients(model, 9, bad=True)
        step(guarded, found_inf=1.0)
        for m in (model, other):
            fill_gradients(m, k)
        step(guarded)
        plain.param_groups[0]["lr"] = 1e-2
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(everything(model, guarded), everything(other, plain)))


def test_frozen_parameters_are_left_out():
    model = make_model(frozen=True)
    before = model[0].bias.detach().clone()
    optimizer = build_optimizer(AdamWConfig(weight_decay=0.5), model.named_parameters())
    fill_gradients(model, 0)
    step(optimizer)
    assert torch.equal(model[0].bias, before)
    assert "0.bias" not in optimizer_state(optimizer, model.named_parameters())["state"]
    assert len(optimizer.param_groups[0]["params"]) == 3


def test_state_by_name_continues_to_the_last_bit(tmp_path):
    model = make_model()
    optimizer = build_optimizer(AdamConfig(), model.named_parameters())
    for k in range(3):
        fill_gradients(model, k)
        step(optimizer)
    torch.save(optimizer_state(optimizer, model.named_parameters()), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    restored = build_optimizer(AdamConfig(), other.named_parameters())
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    load_optimizer_state(restored, other.named_parameters(), state)
    for k in range(3, 6):
        for m, o in ((model, optimizer), (other, restored)):
            fill_gradients(m, k)
            step(o)
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), everything(other, restored)))
    assert restored.state[other[0].bias]["step"].item() == 6


def test_saved_state_does_not_follow_later_steps():
    model = make_model()
    optimizer = build_optimizer(AdamConfig(), model.named_parameters())
    state = optimizer_state(optimizer, model.named_parameters())
    fill_gradients(model, 0)
    step(optimizer)
    assert state["state"]["0.weight"]["step"].item() == 0
    assert not state["state"]["0.weight"]["exp_avg"].any()


def test_state_of_other_parameters_is_refused_by_name_and_changes_nothing():
    model = make_model()
    optimizer = build_optimizer(AdamConfig(), model.named_parameters())
    state = optimizer_state(optimizer, model.named_parameters())
    moments = state["state"]
    moments["2.new"] = moments.pop("2.weight")
    moments["0.bias"]["exp_avg"] = torch.ones(5)
    moments["0.weight"]["exp_avg"] += 1
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(optimizer, model.named_parameters(), state)
    text = str(caught.value)
    assert "missing: 2.weight.step ()" in text
    assert "renamed: 2.weight.exp_avg is called 2.new.exp_avg there" in text
    assert "of another shape: 0.bias.exp_avg is (5,) there, (37,) here" in text
    assert not optimizer.state[model[0].weight]["exp_avg"].any()


def test_state_of_another_optimizer_is_refused():
    model = make_model()
    state = optimizer_state(build_optimizer(AdamConfig(), model.named_parameters()), model.named_parameters())
    other = build_optimizer(AdamWConfig(), model.named_parameters())
    with pytest.raises(CheckpointError, match=r"it is of Adam, optimizer\.type is AdamW"):
        load_optimizer_state(other, model.named_parameters(), state)


def test_clipping_scales_all_gradients_to_the_norm():
    model = make_model()
    fill_gradients(model, 0)
    reference = copy.deepcopy(model)
    for p, q in zip(model.parameters(), reference.parameters()):
        q.grad = p.grad.clone()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.testing.assert_close(clip_gradients(model.parameters(), 0.5), expected)
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=SAME_MATH, atol=0)


def test_small_gradients_and_no_limit_leave_gradients_untouched():
    model = make_model(frozen=True)
    fill_gradients(model, 0)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for limit in (None, 1e6):
        norm = clip_gradients(model.parameters(), limit)
        assert norm.item() == pytest.approx(torch.cat([g.view(-1) for g in before]).norm().item())
        assert all(torch.equal(a, p.grad) for a, p in zip(before, [p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_norm_is_finite_only_if_every_gradient_is(value):
    model = make_model()
    fill_gradients(model, 0)
    model[2].weight.grad[1, 3] = value
    assert not clip_gradients(model.parameters(), 1.0).isfinite()


def test_gradients_of_two_precisions_have_one_norm():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0], dtype=torch.float64)
    assert clip_gradients([first, second], 1.0).item() == 5
    assert (first.grad[0].item(), second.grad[1].item()) == pytest.approx((0.6, 0.8))


def test_no_gradients_have_norm_zero():
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0).item() == 0
