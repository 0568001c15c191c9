"""Profiles: their formulas, what each step counts, their settings. Names carry the demand that a test is for."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from averaging_nets import EveryOther, make_net, move, weights_of_steps

from deepmd_ema.averaging import (
    AverageBank,
    EmaProfile,
    PowerProfile,
    SwaProfile,
    gamma_of,
    sigma_rel_of,
)
from deepmd_ema.errors import ConfigError

EACH = [
    EmaProfile("ema", 0.9, warmup=False),
    EmaProfile("ema", 0.99, update_every=3),
    EmaProfile.from_half_life("ema", 7, warmup=False, update_every=2),
    PowerProfile("ema", 6.94),
    PowerProfile("ema", 2.5, update_every=3),
    SwaProfile("ema"),
    SwaProfile("ema", update_every=4),
]
SAME_MATH = 1e-13


def bank_of(profile):
    return AverageBank(make_net(), [profile])


def by_name(profile):
    return "-".join(f"{v}" for k, v in profile.settings().items() if k in ("type", "decay", "gamma", "update_every"))


# widths


def test_a_width_and_its_exponent_are_each_others_inverse():
    for gamma in (0.0, 0.3, 1.0, 6.94, 16.97, 500.0):
        assert gamma_of(sigma_rel_of(gamma)) == pytest.approx(gamma, rel=1e-10, abs=1e-12)
    # the numbers of the paper (section 3.1)
    assert gamma_of(0.05) == pytest.approx(16.97, abs=5e-3)
    assert gamma_of(0.10) == pytest.approx(6.94, abs=5e-3)
    assert sigma_rel_of(0) == pytest.approx(1 / math.sqrt(12), rel=1e-15)
    # the polynomial of its algorithm 2
    for sigma in (0.01, 0.1, 0.25):
        roots = np.roots([1, 7, 16 - sigma**-2, 12 - sigma**-2])
        assert gamma_of(sigma) == pytest.approx(roots.real.max(), rel=1e-9)


@pytest.mark.parametrize("sigma", [0, -0.1, 0.29, math.nan, "0.1", True])
def test_a_width_that_no_exponent_has_is_an_error(sigma):
    with pytest.raises(ConfigError, match=r"average 'p': sigma_rel = .*: expected a number > 0 and <= 0.288675"):
        PowerProfile.from_sigma_rel("p", sigma)


@pytest.mark.parametrize(("sigma", "every"), [(0.05, 1), (0.10, 1), (0.10, 5), (0.20, 1), (0.28, 3)])
def test_the_weights_of_a_power_profile_spread_as_wide_as_it_says(sigma, every):
    """The spread is measured on the weights that a real bank gives to each step."""
    weights, _ = weights_of_steps(PowerProfile.from_sigma_rel("p", sigma, update_every=every), 600)
    weights, steps = weights.numpy(), np.arange(601)
    mean = np.sum(weights * steps)
    measured = np.sqrt(np.sum(weights * (steps - mean) ** 2)) / 600
    assert measured == pytest.approx(sigma, abs=5e-4)
    if sigma == 0.10:
        assert measured == pytest.approx(0.0995, abs=6e-4)


# what each step counts


@pytest.mark.parametrize("profile", EACH, ids=by_name)
def test_the_weights_of_each_profile_sum_to_one_and_have_its_mean_age(profile):
    weights, info = weights_of_steps(profile, 36)
    assert float(weights.sum()) == pytest.approx(1, rel=SAME_MATH)
    assert bool((weights >= 0).all())
    ages = 36 - torch.arange(37)
    assert info["mean_age"] == pytest.approx(float((weights * ages).sum()), rel=SAME_MATH)
    assert info["updates"] == 36 // profile.update_every


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("gamma", [0, 0.7, 6.94])
def test_a_power_profile_has_the_weights_of_the_paper(gamma, every, start):
    """Step tau counts (tau^(g+1) - (tau-k)^(g+1)) / t^(g+1), steps counted from the start."""
    weights, _ = weights_of_steps(PowerProfile("p", gamma, update_every=every, start_step=start), start + 24)
    expected = torch.zeros(start + 25, dtype=torch.float64)
    for tau in range(every, 25, every):
        expected[start + tau] = (tau ** (gamma + 1) - (tau - every) ** (gamma + 1)) / 24 ** (gamma + 1)
    assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-15)


def test_equal_weights_are_equal():
    weights, info = weights_of_steps(SwaProfile("flat", start_step=5, update_every=2), 15)
    expected = torch.zeros(16, dtype=torch.float64)
    expected[[7, 9, 11, 13, 15]] = 0.2
    assert torch.allclose(weights, expected, rtol=SAME_MATH)
    assert info["mean_age"] == pytest.approx(4)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize(("start", "every"), [(0, 1), (6, 1), (4, 3)])
def test_an_exponential_average_has_the_weights_of_its_recursion(warmup, start, every):
    decay, num_steps = 0.9, start + 12
    weights, _ = weights_of_steps(EmaProfile("e", decay, warmup, start_step=start, update_every=every), num_steps)
    expected = torch.zeros(num_steps + 1, dtype=torch.float64)
    expected[start] = 1
    for step in range(start + every, num_steps + 1, every):
        done = range(step - start - every, step - start)
        d = math.prod(min(decay, (1 + t) / (10 + t)) if warmup else decay for t in done)
        expected = d * expected
        expected[step] += 1 - d
    assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-15)


def weights_explicit(decays):
    """Return the weight of each step (steps + 1), from the decay of every step, one step after the other."""
    weights = np.zeros(len(decays) + 1)
    weights[0] = 1
    for step, d in enumerate(decays, start=1):
        weights[:step] *= d
        weights[step] = 1 - d
    return weights


@pytest.mark.parametrize("every", [1, 2, 10, 100])
@pytest.mark.parametrize("num_steps", [200, 3000])
@pytest.mark.parametrize(
    ("profile", "decay_of_step"),
    [
        *((EmaProfile("e", d), lambda t, d=d: min(d, (1 + t) / (10 + t))) for d in (0.9, 0.999, 0.99999)),
        (EmaProfile("e", 0.999, warmup=False), lambda t: 0.999),
        (PowerProfile("p", 6.94), lambda t: (t / (t + 1)) ** 7.94),
        (SwaProfile("s"), lambda t: t / (t + 1)),
    ],
    ids=["ema-0.9", "ema-0.999", "ema-0.99999", "ema-no-warmup", "power", "swa"],
)
def test_updates_every_k_steps_do_not_change_the_mean_age_by_more_than_k_half(profile, decay_of_step, num_steps, every):
    explicit = weights_explicit([decay_of_step(t) for t in range(num_steps)])
    expected = float(explicit @ (num_steps - np.arange(num_steps + 1)))
    weights, info = weights_of_steps(replace(profile, update_every=every), num_steps)
    assert abs(info["mean_age"] - expected) <= every / 2
    # the weights of k steps together are those of the update after them
    blocks = explicit[1:].reshape(-1, every).sum(axis=1)
    assert np.allclose(weights[every::every].numpy(), blocks, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("profile", [*EACH[:1], PowerProfile("ema", 3.0), SwaProfile("ema")], ids=by_name)
def test_D6_skipped_steps_count_nothing_and_the_others_sum_to_one(profile):
    skipped = (1, 4, 5, 11)
    weights, info = weights_of_steps(profile, 20, skipped)
    plain, _ = weights_of_steps(profile, 16)
    assert bool((weights[list(skipped)] == 0).all())
    good = [step for step in range(21) if step not in skipped]
    assert torch.equal(weights[good], plain)
    assert float(weights.sum()) == pytest.approx(1, rel=SAME_MATH)
    assert info["mean_age"] == pytest.approx(float((weights * (20 - torch.arange(21))).sum()), rel=SAME_MATH)


def test_a_half_life_is_what_its_name_says():
    weights, _ = weights_of_steps(EmaProfile.from_half_life("e", 8, warmup=False), 40)
    assert float(weights[24]) == pytest.approx(0.5 * float(weights[32]))
    assert EmaProfile.from_half_life("e", 1).decay == 0.5
    assert EmaProfile("e", half_life=1, half_life_unit="epochs").in_steps({"epochs": 2}).decay == 0.5**0.5
    with pytest.raises(ConfigError, match="average 'e': half_life = 0: expected a number > 0"):
        EmaProfile.from_half_life("e", 0)


@pytest.mark.parametrize("profile", EACH, ids=by_name)
def test_the_host_and_the_device_compute_the_same_decay(profile):
    updates = torch.arange(3000, dtype=torch.float64)
    device = profile.decay_of_update(updates) + 0 * updates
    host = torch.tensor([profile.decay_of_update(n) for n in range(3000)], dtype=torch.float64)
    assert torch.allclose(device, host, rtol=1e-15, atol=0)
    # without warm-up, and without gamma, no function is involved that two libraries round differently
    if profile.type == "swa":
        assert torch.equal(device, host)


def test_a_start_in_epochs_after_any_run_is_never():
    late = SwaProfile("s", start_epoch=1e300).in_steps({"epochs": 20.0})
    assert late.start_epoch is None
    assert not late.is_due(10**17)


# settings


def test_settings_are_plain_values_that_rebuild_the_profile():
    kinds = {"ema": EmaProfile, "power": PowerProfile, "swa": SwaProfile}
    for profile in EACH:
        settings = profile.settings()
        kind = kinds[settings.pop("type")]
        assert kind(name="ema", **settings) == profile
        assert pickle.loads(pickle.dumps(profile)) == profile
    assert EmaProfile("e", should_update=EveryOther(0, 1)).settings()["should_update"] == "EveryOther"


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (lambda: EmaProfile("e", 1.0), "decay = 1.0: expected a number >= 0 and < 1"),
        (lambda: EmaProfile("e", -0.1), "decay = -0.1: expected a number >= 0 and < 1"),
        (lambda: EmaProfile("e", math.nan), "decay = NaN: expected a number"),
        (lambda: EmaProfile("e", "0.9"), 'decay = "0.9": expected a number'),
        (lambda: EmaProfile("e", warmup=3), "warmup = 3: expected true or false"),
        (lambda: PowerProfile("e", -1.0), "gamma = -1.0: expected a number >= 0"),
        (lambda: SwaProfile("e", update_every=0), "update_every = 0: expected a whole number > 0"),
        (lambda: SwaProfile("e", start_step=-1), "start_step = -1: expected a whole number >= 0"),
        (lambda: SwaProfile("e", start_step=1.5), "start_step = 1.5: expected a whole number"),
        (lambda: SwaProfile("e", device="cuda"), 'device = "cuda": unknown. Known: live, cpu'),
        (
            lambda: SwaProfile("e", dtype="bfloat16"),
            'dtype = "bfloat16": unknown. Did you mean float64? Known',
        ),
        (lambda: SwaProfile("e", layout="whole"), 'layout = "whole": unknown. Known: local_shard, full_tensor'),
        (lambda: SwaProfile("e", buffers="none"), 'buffers = "none": unknown. Known: copy, average'),
        (lambda: SwaProfile("e", should_update=5), "should_update = 5: expected a function"),
        (lambda: SwaProfile("e", should_update=lambda step, epoch: True), "should_update: cannot be pickled"),
        (
            lambda: bank_of(SwaProfile("e", should_update=EveryOther(0, 0), update_every=2)),
            "update_every = 2: should_update says itself which steps count. Remove it.",
        ),
        (lambda: bank_of(EmaProfile("e", 0.9, half_life=3)), "half_life = 3: decay = 0.9 is given too. Remove one"),
        (lambda: bank_of(PowerProfile("e")), "gamma or sigma_rel is required."),
        (lambda: SwaProfile("live"), "average 'live': name = \"live\": expected a name of at most 40 letters"),
        (lambda: SwaProfile("a/b"), "average 'a/b': name = \"a/b\": expected a name"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_average(make, phrase):
    with pytest.raises(ConfigError) as reported:
        make()
    assert phrase in str(reported.value)
    assert len(reported.value.problems) == 1
    assert reported.value.problems[0].startswith("average '")


def test_all_wrong_settings_of_a_profile_are_reported_at_once():
    with pytest.raises(ConfigError) as reported:
        EmaProfile("e", 2.0, start_step=-1, update_every=0, dtype="int8")
    assert len(reported.value.problems) == 4


# when it is updated


def test_an_average_starts_at_its_step_from_the_live_weights_and_skips_between():
    net = make_net()
    bank = AverageBank(net, [EmaProfile("ema", 0.9, warmup=False, start_step=4, update_every=2)])
    history = {}
    for step in range(1, 9):
        move(net, step)
        bank.update()
        history[step] = net.first.weight.detach().clone()
        if step == 5:
            assert torch.equal(bank.weights("ema")["first.weight"], history[4])
    expected = 0.81 * (0.81 * history[4] + 0.19 * history[6]) + 0.19 * history[8]
    assert torch.allclose(bank.weights("ema")["first.weight"], expected, rtol=1e-13)
    assert bank.info("ema")["updates"] == 2


def test_between_its_start_and_its_first_update_an_average_grows_older_by_every_step():
    net = make_net()
    bank = AverageBank(net, [SwaProfile("flat", start_step=2, update_every=5)])
    ages = []
    for _ in range(8):
        bank.update()
        ages.append(bank.info("flat")["mean_age"])
    assert ages == [0, 0, 1, 2, 3, 4, 0, 1]


def test_a_hook_decides_which_steps_after_the_start_count():
    profile = SwaProfile("even", start_step=3, should_update=EveryOther(0, from_epoch=0.5))
    assert [step for step in range(12) if profile.is_due(step, epoch=step / 10)] == [3, 6, 8, 10]
    net = make_net()
    bank, history = AverageBank(net, [profile]), {}
    for step in range(1, 12):
        move(net, step)
        bank.update(epoch=step / 10)
        history[step] = net.first.weight.detach().clone()
        if step == 4:
            assert torch.equal(bank.weights("even")["first.weight"], history[3])
    expected = (history[6] + history[8] + history[10]) / 3
    assert torch.allclose(bank.weights("even")["first.weight"], expected, rtol=1e-13)
    assert bank.info("even")["mean_age"] == pytest.approx(3)


class EvenSteps(SwaProfile):
    """Says itself which steps count."""

    def should_update(self, step, epoch):
        """Count even steps."""
        return step % 2 == 0


def test_a_method_should_update_of_a_subclass_decides_which_steps_count():
    profile = EvenSteps("even")
    assert [step for step in range(1, 6) if profile.is_due(step)] == [2, 4]
    assert pickle.loads(pickle.dumps(profile)).is_due(3) is False
    assert profile.settings()["should_update"] == "EvenSteps.should_update"
    assert not EvenSteps("odd", should_update=EveryOther(1, 0)).is_due(2, epoch=1)
    with pytest.raises(ConfigError, match="update_every = 2: type swa says itself which steps count"):
        bank_of(EvenSteps("even", update_every=2))
