"""Profiles: their formulas, what each step counts, their settings.

Names carry the demand that a test is for.
"""

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

SAME_MATH = 1e-13


def bank_of(profile):
    return AverageBank(make_net(), [profile])


# widths


def test_a_width_and_its_exponent_are_each_others_inverse():
    for gamma in (0.0, 0.3, 1.0, 6.94, 16.97, 500.0):
        assert gamma_of(sigma_rel_of(gamma)) == pytest.approx(
            gamma, rel=1e-10, abs=1e-12
        )
    # the numbers of the paper (section 3.1)
    assert gamma_of(0.05) == pytest.approx(16.97, abs=5e-3)
    assert gamma_of(0.10) == pytest.approx(6.94, abs=5e-3)
    assert sigma_rel_of(0) == pytest.approx(1 / math.sqrt(12), rel=1e-15)
    # the polynomial of its algorithm 2
    for sigma in (0.01, 0.1, 0.25):
        roots = np.roots([1, 7, 16 - sigma**-2, 12 - sigma**-2])
        assert gamma_of(sigma) == pytest.approx(roots.real.max(), rel=1e-9)


# what each step counts

# a profile without its pace -> the decay after t steps since its start
FORMULAS = {
    "ema": (EmaProfile("e", 0.9, warmup=False), lambda t: 0.9),
    "half-life": (
        EmaProfile.from_half_life("e", 7, warmup=False),
        lambda t: 0.5 ** (1 / 7),
    ),
    "warm-up": (EmaProfile("e", 0.6), lambda t: min(0.6, (1 + t) / (10 + t))),
    "power": (PowerProfile("e", 2.5), lambda t: (t / (t + 1)) ** 3.5),
    "power of the paper": (
        PowerProfile.from_sigma_rel("e", 0.1),
        lambda t: (t / (t + 1)) ** (gamma_of(0.1) + 1),
    ),
    "equal": (SwaProfile("e"), lambda t: t / (t + 1)),
}


@pytest.mark.parametrize(("start", "every"), [(0, 1), (6, 1), (4, 3)])
@pytest.mark.parametrize("name", FORMULAS)
def test_an_average_has_the_weights_and_the_mean_age_of_its_formula(name, start, every):
    """An update takes in the decays of all its steps; before its start the average is the live
    weights.
    """
    profile, decay_of_step = FORMULAS[name]
    profile, num_steps = (
        replace(profile, start_step=start, update_every=every),
        start + 37,
    )
    weights, info = weights_of_steps(profile, num_steps)
    expected = torch.zeros(num_steps + 1, dtype=torch.float64)
    expected[start] = 1
    for step in range(start + every, num_steps + 1, every):
        decay = math.prod(
            decay_of_step(t) for t in range(step - start - every, step - start)
        )
        expected *= decay
        expected[step] += 1 - decay
    assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-15)
    assert float(weights.sum()) == pytest.approx(1, rel=SAME_MATH)
    assert info["mean_age"] == pytest.approx(
        float(weights @ (num_steps - torch.arange(num_steps + 1.0).double()))
    )
    assert info["updates"] == 37 // every
    before, _ = weights_of_steps(profile, max(start - 1, 0))
    assert before[-1] == 1


@pytest.mark.parametrize(
    "profile",
    [EmaProfile("e", 0.9, warmup=False), PowerProfile("e", 3.0), SwaProfile("e")],
)
def test_D6_skipped_steps_count_nothing_and_the_others_sum_to_one(profile):
    skipped = (1, 4, 5, 11)
    weights, info = weights_of_steps(profile, 20, skipped)
    plain, _ = weights_of_steps(profile, 16)
    assert bool((weights[list(skipped)] == 0).all())
    good = [step for step in range(21) if step not in skipped]
    assert torch.equal(weights[good], plain)
    assert float(weights.sum()) == pytest.approx(1, rel=SAME_MATH)
    assert info["mean_age"] == pytest.approx(
        float((weights * (20 - torch.arange(21))).sum()), rel=SAME_MATH
    )


def test_a_start_in_epochs_after_any_run_is_never():
    assert (
        EmaProfile("e", half_life=1, half_life_unit="epochs")
        .in_steps({"epochs": 2})
        .decay
        == 0.5**0.5
    )
    late = SwaProfile("s", start_epoch=1e300).in_steps({"epochs": 20.0})
    assert late.start_epoch is None
    assert not late.is_due(10**17)


# settings


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (lambda: EmaProfile("e", 1.0), "decay = 1.0: expected a number >= 0 and < 1"),
        (
            lambda: SwaProfile("e", update_every=0),
            "update_every = 0: expected a whole number > 0",
        ),
        (
            lambda: SwaProfile("e", should_update=lambda step, epoch: True),
            "should_update: cannot be pickled",
        ),
        (
            lambda: bank_of(EvenSteps("e", update_every=2)),
            "update_every = 2: type swa says itself which steps count",
        ),
        (
            lambda: bank_of(EmaProfile("e", 0.9, half_life=3)),
            "half_life = 3: decay = 0.9 is given too. Remove one",
        ),
        (lambda: SwaProfile("a/b"), "average 'a/b': name = \"a/b\": expected a name"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_average(make, phrase):
    with pytest.raises(ConfigError) as reported:
        make()
    assert phrase in str(reported.value)
    assert len(reported.value.problems) == 1
    assert reported.value.problems[0].startswith("average '")


# when it is updated


def test_a_hook_decides_which_steps_after_the_start_count():
    profile = SwaProfile(
        "even", start_step=3, should_update=EveryOther(0, from_epoch=0.5)
    )
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
