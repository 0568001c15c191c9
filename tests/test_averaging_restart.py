"""Averages over a restart: what is saved, what continues, what is reported. Names carry the demand a test is for."""

import io
import logging
from contextlib import nullcontext

import pytest
import torch
from averaging_nets import (
    PLAIN,
    POWER,
    SWA,
    WARM,
    EveryOther,
    Net,
    assert_same,
    copies,
    make_net,
    move,
    through_staging,
    train,
)

from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.errors import CheckpointError


@pytest.fixture
def net():
    return make_net()


def test_warmup_does_not_start_again_after_a_restart(net):
    bank = AverageBank(net, [WARM])
    for step in range(20):
        move(net, step)
        bank.update()
    again = AverageBank(net, [WARM])
    again.load_state_dict(bank.state_dict())
    assert again.info("ema") == bank.info("ema")
    assert again.info("ema")["effective_decay"] == pytest.approx(20 / 29)


KINDS = [
    WARM,
    EmaProfile("slow", 0.999, start_step=7, update_every=3),
    EmaProfile("late", 0.9, start_step=20),
    PowerProfile.from_sigma_rel("p1", 0.1),
    PowerProfile("p2", 3.0, update_every=4, start_step=2, dtype="float64"),
    SwaProfile("flat", start_step=5, buffers="average"),
    SwaProfile("host", device="cpu"),
    SwaProfile("even", should_update=EveryOther(0, 0)),
]


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [1, 11])
def test_a_restart_continues_every_average_bitwise(dtype, staged, at):
    with through_staging() if staged else nullcontext():
        net, other = make_net(dtype=dtype), Net(dtype=dtype)
        bank = AverageBank(net, KINDS)
        for step in range(at):
            advance(net, bank, step)
        state, weights = as_from_a_file(bank.state_dict()), copies(net)
        other.load_state_dict(weights)
        restarted = AverageBank(other, KINDS)
        restarted.load_state_dict(state)
    for step in range(at, 31):
        for module, averages in ((net, bank), (other, restarted)):
            advance(module, averages, step)
    assert_same(copies(net), copies(other))
    for name in bank.names:
        assert_same(bank.weights(name), restarted.weights(name))
        assert bank.info(name) == restarted.info(name)
        assert bank.info(name)["updates"] > 0


def advance(net, bank, step):
    move(net, step)
    net.mean.add_(0.25)
    bank.update(epoch=step / 10)


def as_from_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_is_handed_out_does_not_alias_the_average_or_the_weights(net):
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    state, weights = bank.state_dict(), bank.weights("ema")
    before = {name: value.clone() for name, value in weights.items()}
    saved = {name: value.clone() for name, value in state["profiles"]["ema"]["weights"].items()}
    move(net, 1)
    net.mean.add_(1)
    bank.update()
    assert_same(weights, before)
    assert_same(state["profiles"]["ema"]["weights"], saved)


def test_the_decay_of_the_input_wins_with_one_warning_that_names_both(net, caplog):
    state = AverageBank(net, [PLAIN]).state_dict()
    bank = AverageBank(net, [EmaProfile("ema", 0.5, warmup=False)])
    bank.load_state_dict(state)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "0.9" in warnings[0]
    assert "0.5" in warnings[0]
    assert bank.info("ema")["decay"] == 0.5


def test_an_average_switched_on_at_a_restart_starts_from_the_loaded_weights_and_says_so(net, caplog):
    caplog.set_level(logging.INFO)
    bank = AverageBank(net, [WARM])
    move(net, 0)
    bank.load_state_dict(None, step=100)
    assert "starts from the loaded weights" in caplog.text
    assert_same(bank.weights("ema"), copies(net))
    assert bank.info("ema")["updates"] == 0


def test_reseeding_after_other_weights_were_loaded_starts_from_them(net):
    bank = AverageBank(net, [PLAIN])
    bank.update()
    net.load_state_dict(Net().state_dict())
    bank.load_state_dict(None)
    assert_same(bank.weights("ema"), copies(net))
    assert bank.info("ema")["updates"] == 0


@pytest.mark.parametrize(
    ("spoil", "phrase"),
    [
        (lambda w: w.pop("first.bias"), "missing: first.bias"),
        (lambda w: w.update(strange=torch.zeros(2)), "not of this model: strange"),
        (lambda w: w.update(first_weight=w.pop("first.weight")), "renamed: first.weight is called first_weight"),
        (lambda w: w.update({"first.weight": torch.zeros(4, 3)}), r"another shape: first.weight is \(4, 3\) there"),
    ],
)
def test_keys_that_do_not_fit_fail_with_their_names(net, spoil, phrase):
    bank = AverageBank(net, [PLAIN])
    state = bank.state_dict()
    spoil(state["profiles"]["ema"]["weights"])
    with pytest.raises(CheckpointError, match=phrase):
        bank.load_state_dict(state)


def test_a_float32_average_of_a_bfloat16_model_is_float32_after_loading():
    net, profile = Net(dtype=torch.bfloat16), EmaProfile("ema", 0.999, warmup=False, dtype="float32")
    bank = AverageBank(net, [profile])
    for step in range(5):
        move(net, step)
        bank.update()
    state = bank.state_dict()
    again = AverageBank(net, [profile])
    again.load_state_dict(state)
    for bank_ in (bank, again):
        weight = bank_.state_dict()["profiles"]["ema"]["weights"]["first.weight"]
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
    assert_same(state["profiles"]["ema"]["weights"], again.state_dict()["profiles"]["ema"]["weights"])


def test_every_setting_that_changed_is_warned_of_and_counts_from_now_on(net, caplog):
    bank = AverageBank(net, [PowerProfile("p", 3.0), EmaProfile("e", 0.9)])
    train(net, bank, range(5))
    state = bank.state_dict()
    again = AverageBank(net, [PowerProfile("p", 6.0, update_every=2), SwaProfile("e")])
    again.load_state_dict(state)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "average p: update_every was 1 in the checkpoint and is 2 from now on",
        "average p: gamma was 3.0 in the checkpoint and is 6.0 from now on",
        "average e: was of type ema in the checkpoint and is swa from now on",
    ]
    assert again.info("p")["updates"] == 5
    assert_same(again.weights("p"), bank.weights("p"))


@pytest.mark.parametrize("profile", [POWER, SWA])
def test_a_growing_average_that_is_switched_on_at_a_restart_counts_from_there(net, profile):
    bank = AverageBank(net, [profile])
    bank.load_state_dict(None, step=1000)
    train(net, bank, range(1))
    assert_same(bank.weights("ema"), copies(net))
    first = net.first.weight.detach().clone()
    train(net, bank, range(1, 2))
    d = profile.decay_at(1)
    expected = d * first + (1 - d) * net.first.weight.detach()
    assert torch.allclose(bank.weights("ema")["first.weight"], expected, rtol=1e-13)
    assert bank.info("ema")["mean_age"] == pytest.approx(d)


def test_the_state_of_a_bank_of_0_1_0_is_continued(net):
    """That version had one type only, and saved the mean age."""
    bank, reference = AverageBank(net, [WARM]), AverageBank(net, [WARM])
    for step in range(9):
        move(net, step)
        bank.update()
        reference.update()
    state = bank.state_dict()
    saved = state["profiles"]["ema"]
    kept = ("decay", "warmup", "start_step", "update_every", "updates", "mean_age", "weights")
    state["profiles"]["ema"] = {key: saved[key] for key in kept}
    again = AverageBank(net, [WARM])
    again.load_state_dict(state)
    move(net, 9)
    again.update()
    reference.update()
    assert_same(again.weights("ema"), reference.weights("ema"))
    assert again.info("ema")["updates"] == 10
    assert again.info("ema")["mean_age"] == pytest.approx(reference.info("ema")["mean_age"], rel=1e-12)


def test_an_average_of_0_1_0_that_is_a_power_profile_now_is_reported(net, caplog):
    state = AverageBank(net, [PLAIN]).state_dict()
    del state["profiles"]["ema"]["type"]
    AverageBank(net, [POWER]).load_state_dict(state)
    assert "average ema: was of type ema in the checkpoint and is power from now on" in caplog.text


def test_the_mean_age_continues_to_the_last_bit(net):
    """An average that remembers its start: the mean step is small beside the number of steps."""
    slow = EmaProfile("ema", 0.999, warmup=False)
    bank = AverageBank(net, [slow])
    for _ in range(40):
        bank.update()
        state = bank.state_dict()
        again = AverageBank(net, [slow])
        again.load_state_dict(state)
        assert again.state_dict()["profiles"]["ema"]["mean_step"] == state["profiles"]["ema"]["mean_step"]
        assert again.info("ema") == bank.info("ema")
