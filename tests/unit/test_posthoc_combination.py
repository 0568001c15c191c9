"""Averages of any width, and decays of the learning rate, out of snapshots: sums are exact, the
solve is sound.
"""

import numpy as np
import pytest
from averaging_nets import weights_of_steps
from kept_runs import shares_of

from deepmd_ema.averaging import PowerProfile, SwaProfile, gamma_of
from deepmd_ema.commands.posthoc.combination import (
    SHAPES,
    TOLERANCE,
    Decay,
    Track,
    find_combinations,
    place_decays,
    refuse_unresolvable,
    resolvable_range,
)
from deepmd_ema.commands.posthoc.run import DEFAULT_PARTS, parse_shapes
from deepmd_ema.errors import UserError

EXACT = 1e-14  # relative, of sums of some hundred terms in float64
NODES = (60, 70, 90, 95, 100)


def every_tenth(steps, *sigma_rels, count=10, start=0, every=1):
    """Return averages kept ``count`` times up to ``steps``."""
    each = (steps - start) // every // count
    return [
        Track(gamma_of(s), each * n, start, every)
        for n in range(1, count + 1)
        for s in sigma_rels
    ]


def test_the_shares_of_a_long_run_keep_their_digits():
    """Differences of neighbouring powers would lose nine of them at step 10^7, and overflow for
    short averages.
    """
    shares = shares_of(Track(200.0, 10_000_000))
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert shares[-1] == pytest.approx(
        -np.expm1(201 * np.log1p(-1e-7)), rel=EXACT, abs=0
    )
    assert Track(16.97, 10**12).mean_age() == pytest.approx(10**12 / 18.97)


@pytest.mark.parametrize("settings", [{}, {"start_step": 101, "update_every": 7}])
@pytest.mark.parametrize("profile", [PowerProfile.from_sigma_rel, SwaProfile])
def test_tracks_say_what_the_bank_has_averaged(profile, settings):
    weights, info = weights_of_steps(
        profile("a", *([0.08] if profile != SwaProfile else []), **settings), 310
    )
    track, expected = Track.of(info, 310), np.zeros(311)
    expected[track.start + track.every : track.end + 1 : track.every] = shares_of(track)
    assert weights.numpy() == pytest.approx(expected, abs=1e-12)
    assert track.mean_age() == pytest.approx(info["mean_age"] - 310 + track.end)


def made_and_wanted(tracks, one):
    """Return the distance of a combination from its average on a random walk, and that of the
    average from the end.
    """
    walk = np.cumsum(np.random.default_rng(1).normal(size=(tracks[-1].end, 20)), 0)
    averages = [
        shares_of(t) @ walk[t.start + t.every - 1 : t.end : t.every]
        for t in (*tracks, one.target)
    ]
    return np.linalg.norm(
        one.coefficients @ averages[:-1] - averages[-1]
    ), np.linalg.norm(averages[-1] - walk[-1])


@pytest.mark.parametrize(("start", "every"), [(0, 1), (4, 3)])
def test_a_combination_differs_from_the_average_of_its_width_by_its_residual(
    start, every
):
    tracks = every_tenth(
        start + 3000 * every, 0.05, 0.10, count=20, start=start, every=every
    )
    *made, same = find_combinations(
        [*tracks, *tracks], [0.03, 0.07, 0.2, 0.05], tracks[-1].end
    ).combinations
    for one in made:
        error, distance = made_and_wanted([*tracks, *tracks], one)
        assert error < one.residual * distance
        assert 0 < one.residual < TOLERANCE
        assert one.coefficients.sum() == pytest.approx(1, abs=1e-10)
        assert one.amplification == pytest.approx(np.linalg.norm(one.coefficients))
    assert (same.residual, same.amplification) == (0, 1)  # it was kept


def test_widths_in_the_resolvable_range_are_resolved_and_others_are_refused_with_a_remedy():
    kept = every_tenth(20_000, 0.05, 0.10)
    low, high = resolvable_range(kept, 20_000)
    assert low < 0.05 < 0.10 < high
    found = find_combinations(kept, np.geomspace(low, high, 15), 20_000)
    assert max(combination.residual for combination in found.combinations) <= TOLERANCE
    refuse_unresolvable(found, kept, 20_000)
    beyond = find_combinations(kept, [low / 1.2, high * 1.2], 20_000)
    assert min(combination.residual for combination in beyond.combinations) > TOLERANCE
    with pytest.raises(UserError) as caught:
        refuse_unresolvable(
            find_combinations(kept, [0.008, 0.05, 0.28], 20_000), kept, 20_000
        )
    first, second = caught.value.problems
    assert first.startswith("sigma_rel 0.008: ")
    assert "% of its profile would be missing, more than 5 %" in first
    assert "20 snapshots of sigma_rel 0.05, 0.1 resolve sigma_rel 0.03" in second
    assert "snapshot_freq" in second
    with pytest.raises(UserError, match="resolve no sigma_rel"):
        refuse_unresolvable(find_combinations(kept[:2], [0.1], 10**6), kept[:2], 10**6)


# ---- decays


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shares_of_a_decay_leave_what_its_learning_rate_leaves(shape):
    """Their sum over all later updates is the learning rate, as the shape says at the nodes and
    linear in between.
    """
    decay, update = Decay(shape, NODES, start=7, every=3), np.arange(1, 101)
    shares, at_nodes = (
        shares_of(decay),
        [SHAPES[shape]((node - 60) / 40) for node in NODES],
    )
    assert 1 - np.cumsum(shares) == pytest.approx(
        np.interp(update, NODES, at_nodes), abs=1e-12
    )
    assert decay.mean_age() == pytest.approx(3 * shares @ (100 - update))
    assert decay.sigma_rel == pytest.approx(
        np.sqrt(shares @ (update - shares @ update) ** 2) / 100
    )
    assert (decay.end, decay.part, decay.steps) == (307, 0.4, 120)


def test_two_profiles_resolve_the_decays_that_begin_at_a_snapshot():
    tracks = every_tenth(4000, 0.05, 0.10, count=20)
    decays, left_out = place_decays(parse_shapes(list(SHAPES)), tracks, 4000)
    assert len(decays) + sum(map(len, left_out.values())) == len(SHAPES) * len(
        DEFAULT_PARTS
    )
    for one in find_combinations(tracks, [], 4000, decays).combinations:
        error, distance = made_and_wanted(tracks, one)
        assert error < one.residual * distance
        assert one.residual <= TOLERANCE


def test_a_decay_begins_at_the_nearest_snapshot_and_needs_some_to_have_a_shape():
    requests = [("linear", 0.12), ("cosine", 0.32), ("1-sqrt", 0.5), ("linear", 0.04)]
    decays, left_out = place_decays(requests, every_tenth(1000, 0.05, 0.10), 1000)
    assert [(decay.shape, decay.nodes) for decay in decays] == [
        ("linear", (900, 1000)),
        ("1-sqrt", (500, 600, 700, 800, 900, 1000)),
    ]
    assert left_out == {
        "less than 4 intervals between snapshots": ["cosine 32 %"],
        "less than 1 interval between snapshots": ["linear 4 %"],
    }
