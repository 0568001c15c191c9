"""Averages of any width out of snapshots: the sums are exact, the solve is sound, what is not resolved is refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kept_runs import shares_of
from torch import nn

from deepmd_ema.averaging import AverageBank, PowerProfile, SwaProfile, gamma_of
from deepmd_ema.averaging.posthoc.combination import (
    MAX_SIGMA_REL,
    MIN_SIGMA_REL,
    TOLERANCE,
    Track,
    _products,
    find_combinations,
    refuse_unresolvable,
    resolvable_range,
)
from deepmd_ema.errors import UserError

EXACT = 1e-14  # relative, of sums of some hundred terms in float64
SAME_MATH = 1e-10


def explicit(track, steps):
    """Return the weight on each step, straight from the formula; an update counts for its steps evenly."""
    power, share = track.gamma + 1, np.zeros(steps)
    for j in range(1, track.updates + 1):
        weight = (j**power - (j - 1) ** power) / track.updates**power
        last = track.start + j * track.every
        share[last - track.every : last] = weight / track.every
    return share


def every_tenth(steps, *sigma_rels, count=10, start=0, every=1):
    """Return averages kept ``count`` times up to ``steps``."""
    each = (steps - start) // every // count
    return [Track(gamma_of(s), each * n, start, every) for n in range(1, count + 1) for s in sigma_rels]


@pytest.mark.parametrize(
    "tracks",
    [
        every_tenth(60, 0.05, 0.10, MAX_SIGMA_REL),
        every_tenth(63, 0.05, 0.10, start=3, every=2),
        [*every_tenth(60, 0.05, start=30, every=3), *every_tenth(57, 0.10, start=7), Track(0.0, 9, 1, 5)],
        [Track(4.0, 1), Track(4.0, 1, 20, 7), Track(2.5, 3, 40)],
    ],
    ids=["one grid", "late start, every other step", "several grids", "first updates, disjoint"],
)
def test_products_of_profiles_are_those_of_the_weights_written_out(tracks):
    written = np.array([explicit(track, 70) for track in tracks])
    assert written.sum(1) == pytest.approx(1, abs=EXACT)
    products, found = written @ written.T, _products(tracks)
    assert found / found.max() == pytest.approx(products / products.max(), abs=EXACT)


def test_the_shares_of_a_long_run_keep_their_digits():
    """Differences of neighbouring powers would lose nine of them at step 10^7, and overflow for short averages."""
    shares = shares_of(Track(200.0, 10_000_000))
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert shares[-1] == pytest.approx(-np.expm1(201 * np.log1p(-1e-7)), rel=EXACT, abs=0)
    found = _products([Track(200.0, 3_000_000), Track(200.0, 10_000_000), Track(0.0, 10_000_000)])
    assert found[1, 1] == pytest.approx(201**2 / 401 / 1e7, rel=1e-4, abs=0)  # the integral of the paper
    assert found[2, 2] == pytest.approx(1e-7, rel=1e-12, abs=0)
    assert found[0, 1] == pytest.approx(found[1, 1] * 0.3**200, rel=1e-2, abs=0)


def test_the_running_sums_do_not_depend_on_how_the_axis_is_cut(monkeypatch):
    tracks = [*every_tenth(2000, 0.05, 0.10), *every_tenth(1000, 0.2, start=100, every=3)]
    whole = _products(tracks)
    monkeypatch.setattr("deepmd_ema.averaging.posthoc.combination.CHUNK", 17)
    assert _products(tracks) == pytest.approx(whole, rel=SAME_MATH, abs=0)


def test_the_combination_is_the_nearest_whose_coefficients_add_up_to_one():
    kept, sigma_rel = every_tenth(400, 0.05, 0.10, count=4), 0.07
    (combination,) = find_combinations(kept, [sigma_rel], 400).combinations
    basis = np.array([explicit(track, 400) for track in kept])
    target = explicit(combination.target, 400)
    # the first coefficient is what the others leave of one
    free = np.linalg.lstsq((basis[1:] - basis[0]).T, target - basis[0], rcond=None)[0]
    assert combination.coefficients == pytest.approx([1 - free.sum(), *free], abs=1e-7)
    missing = np.linalg.norm(target - combination.coefficients @ basis) / np.linalg.norm(target)
    assert combination.residual == pytest.approx(missing, rel=1e-6, abs=0)
    assert combination.amplification == pytest.approx(np.linalg.norm(combination.coefficients))


def test_an_average_that_was_kept_comes_back_as_it_is():
    kept = every_tenth(5000, 0.05, 0.10)
    for combination, place in zip(find_combinations(kept, [0.05, 0.10], 5000).combinations, (-2, -1)):
        expected = np.zeros(len(kept))
        expected[place] = 1
        assert (combination.coefficients == expected).all()
        assert combination.residual == 0


@pytest.mark.parametrize("count", [2, 10, 100])
@pytest.mark.parametrize("every", [1, 4])
def test_coefficients_add_up_to_one(count, every):
    found = find_combinations(every_tenth(4000, 0.05, 0.10, count=count, every=every), [0.02, 0.07, 0.2, 0.28], 4000)
    for combination in found.combinations:
        assert combination.coefficients.sum() == pytest.approx(1, abs=SAME_MATH)
    assert found.condition >= 1


def test_snapshots_that_are_the_same_are_no_harm():
    kept = every_tenth(4000, 0.05, 0.10)
    twice = find_combinations([*kept, *kept], [0.07], 4000)
    once = find_combinations(kept, [0.07], 4000)
    assert twice.dropped == len(kept)
    assert twice.combinations[0].residual == pytest.approx(once.combinations[0].residual, rel=1e-6)
    assert twice.combinations[0].amplification < 2


def test_swa_is_the_power_profile_of_gamma_zero():
    info = {"type": "swa", "start_step": 0, "update_every": 1, "updates": 50}
    track = Track.of(info, 50)
    assert track == Track(0.0, 50)
    assert track.sigma_rel == pytest.approx(MAX_SIGMA_REL)
    assert shares_of(track) == pytest.approx(np.full(50, 0.02), abs=EXACT)


def test_the_mean_age_is_that_of_the_shares():
    track = Track(3.2, 40, start=10, every=5)
    assert track.mean_age() == pytest.approx(shares_of(track) @ (5 * np.arange(39, -1, -1)))


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 2.0, 16.97, 200.0, 1500.0, 1e5])
def test_the_mean_age_of_a_long_run_is_found_without_walking_along_it(gamma):
    """A folder has hundreds of snapshots, and each is requested its mean age."""
    track = Track(gamma, 20_000)
    older = np.arange(1, 20_000) / 20_000
    assert track.mean_age() == pytest.approx(np.sum(older ** (gamma + 1)), rel=1e-9)
    assert Track(16.97, 10**12).mean_age() == pytest.approx(10**12 / 18.97)


def walk(steps, seed=0, drift=0.01):
    """Return (steps, 30) weights after each step: a random walk that drifts."""
    moves = torch.randn(steps, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cumsum(moves + drift, 0)


def follow(profiles, trajectory, keep_every, dtype=torch.float64):
    """Return (track, average) of each profile every ``keep_every`` steps along ``trajectory``."""
    module = nn.Linear(30, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        module.weight.zero_()
    bank, kept = AverageBank(module, profiles), []
    for step, weights in enumerate(trajectory, 1):
        with torch.no_grad():
            module.weight.copy_(weights)
        bank.update()
        if step % keep_every == 0:
            for profile in profiles:
                info = bank.info(profile.name)
                if info["updates"]:
                    kept.append((Track.of(info, step), bank.weights(profile.name)["weight"].double().ravel()))
    return kept


@pytest.mark.parametrize(
    "settings",
    [{}, {"start_step": 200}, {"update_every": 3}, {"start_step": 101, "update_every": 7}],
    ids=["plain", "late start", "every third step", "both"],
)
def test_tracks_say_what_the_bank_has_averaged(settings):
    """The explicit weights of a track, applied to the trajectory, give the average that the bank holds."""
    trajectory = walk(1000)
    profiles = [PowerProfile.from_sigma_rel("a", 0.08, **settings), SwaProfile("b", **settings)]
    kept = follow(profiles, trajectory, 250)
    assert len(kept) >= 6
    for track, average in kept:
        after = trajectory[track.start + track.every - 1 : track.end : track.every]
        assert torch.from_numpy(shares_of(track)) @ after == pytest.approx(average.numpy(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("sigma_rel", [0.03, 0.07, 0.15, 0.2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_length_that_was_also_tracked_agrees_with_the_combination(sigma_rel, every):
    steps, trajectory = 3000, walk(3000)
    kept = follow(
        [PowerProfile.from_sigma_rel(f"p{s}", s / 100, update_every=every) for s in (5, 10)], trajectory, 150,
        torch.float32,
    )  # fmt: skip
    ((_, direct),) = follow([PowerProfile.from_sigma_rel("d", sigma_rel, update_every=every)], trajectory, steps)
    found = find_combinations([track for track, _ in kept], [sigma_rel], steps)
    (combination,) = found.combinations
    made = sum(x * average for x, (_, average) in zip(combination.coefficients, kept))
    refuse_unresolvable(found, [track for track, _ in kept], steps)
    # of a walk, the worst entry of the experiment was the residual itself, relative to what averaging changes
    assert (made - direct).norm() < max(combination.residual, 1e-5) * (direct - trajectory[-1]).norm()
    assert (made - direct).norm() < 2e-3 * direct.norm()


def test_the_target_is_tracked_beside_what_was_kept():
    kept = [Track(6.0, 10, 100, 5), Track(6.0, 20, 50, 5)]
    target = find_combinations(kept, [MAX_SIGMA_REL], 152).combinations[0].target
    assert target.gamma == pytest.approx(0, abs=EXACT)
    assert (target.updates, target.start, target.every) == (20, 50, 5)


def test_every_width_in_the_resolvable_range_is_resolved():
    kept = every_tenth(20_000, 0.05, 0.10)
    low, high = resolvable_range(kept, 20_000)
    assert low < 0.05
    assert high > 0.10
    found = find_combinations(kept, np.geomspace(low, high, 15), 20_000)
    assert max(combination.residual for combination in found.combinations) <= TOLERANCE
    refuse_unresolvable(found, kept, 20_000)
    beyond = find_combinations(kept, [low / 1.2, high * 1.2], 20_000)
    assert min(combination.residual for combination in beyond.combinations) > TOLERANCE


@pytest.mark.parametrize(
    ("bits", "stretch"),
    [("110010", (0, 1)), ("100111", (3, 5)), ("011110", (1, 4)), ("101000", (0, 0)), ("000000", None)],
)
def test_the_resolvable_range_is_the_longest_run_that_is_resolved(monkeypatch, bits, stretch):
    found = SimpleNamespace(combinations=[SimpleNamespace(residual=bit == "0") for bit in bits])
    monkeypatch.setattr(f"{resolvable_range.__module__}.find_combinations", lambda *_: found)
    monkeypatch.setattr(f"{resolvable_range.__module__}._NUM_CONSIDERED", len(bits))
    widths = np.geomspace(MIN_SIGMA_REL, MAX_SIGMA_REL, len(bits)).tolist()
    assert resolvable_range([], 0) == (None if stretch is None else (widths[stretch[0]], widths[stretch[1]]))


def test_more_snapshots_resolve_a_wider_range():
    ranges = [resolvable_range(every_tenth(20_000, 0.05, 0.10, count=n), 20_000) for n in (5, 10, 20)]
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in pairwise(ranges))


def test_a_width_that_is_not_resolved_is_refused_with_the_range_and_a_remedy():
    kept = every_tenth(20_000, 0.05, 0.10)
    with pytest.raises(UserError) as caught:
        refuse_unresolvable(find_combinations(kept, [0.008, 0.05, 0.28], 20_000), kept, 20_000)
    first, second = caught.value.problems
    assert first.startswith("sigma_rel 0.008: ")
    assert "% of its profile would be missing, more than 5 %" in first
    assert second.startswith("sigma_rel 0.28: ")
    assert "20 snapshots of sigma_rel 0.05, 0.1 resolve sigma_rel 0.03" in second
    assert "snapshot_freq" in second


def test_far_from_every_snapshot_nothing_is_resolved():
    kept = [Track(gamma_of(0.05), 10), Track(gamma_of(0.05), 20)]
    found = find_combinations(kept, [0.1], 1000)
    assert resolvable_range(kept, 1000) is None
    with pytest.raises(UserError, match="resolve no sigma_rel"):
        refuse_unresolvable(found, kept, 1000)
