"""The order of batches: every frame once per epoch, random access, shares of ranks, probabilities, batch rules."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from deepmd_ema.data.sampler import Sampler, batch_sizes, permutation
from deepmd_ema.errors import ConfigError, DataError

FRAMES, ATOMS = (17, 5, 8), (10, 20, 3)


def frames_of_epoch(sampler, epoch):
    length = sampler.batches_per_epoch
    return [
        (system, f)
        for n in range(epoch * length, (epoch + 1) * length)
        for system, frames in [sampler.batch(n)]
        for f in frames
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 100, [2, 1, 8], "auto", "max:30"])
def test_an_epoch_has_every_frame_exactly_once(batch_size):
    sampler = Sampler(FRAMES, ATOMS, batch_size, seed=4)
    every = sorted((i, f) for i, n in enumerate(FRAMES) for f in range(n))
    for epoch in (0, 1, 7):
        assert sorted(frames_of_epoch(sampler, epoch)) == every


def test_epochs_have_orders_of_their_own():
    sampler = Sampler((50,), (3,), 1, seed=4)
    orders = {tuple(frames_of_epoch(sampler, e)) for e in range(5)}
    assert len(orders) == 5


def test_systems_are_mixed_within_an_epoch():
    sampler = Sampler((40, 40), (3, 3), 1, seed=4)
    systems = [sampler.batch(n)[0] for n in range(80)]
    assert 20 < sum(a != b for a, b in pairwise(systems)) < 60


def test_a_batch_is_a_function_of_seed_and_number_only():
    one, other, third = (Sampler(FRAMES, ATOMS, 2, seed=s) for s in (1, 1, 2))
    numbers = [300, 5, 17, 0, 5, 299, 16, 15]
    assert [one.batch(n) for n in numbers] == [Sampler(FRAMES, ATOMS, 2, seed=1).batch(n) for n in numbers]
    assert [one.batch(n) for n in range(40)] == [other.batch(n) for n in range(40)]
    assert [one.batch(n) for n in range(40)] != [third.batch(n) for n in range(40)]


def test_the_order_never_changes_between_versions():
    """A restart with a newer numpy or a newer version of this package must go on with the same frames."""
    assert permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]
    sampler = Sampler(FRAMES, ATOMS, 4, seed=7)
    assert [sampler.batch(n) for n in (0, 1, 9)] == [(0, (14, 10, 8, 6)), (0, (11, 4, 0, 5)), (2, (1, 5, 2, 6))]


@pytest.mark.parametrize(("world", "size"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_ranks_share_the_batches_of_one_process_with_a_larger_batch(world, size):
    whole = Sampler(FRAMES, ATOMS, size * world, seed=3)
    ranks = [Sampler(FRAMES, ATOMS, size, seed=3, rank=r, world_size=world) for r in range(world)]
    assert {r.batches_per_epoch for r in ranks} == {whole.batches_per_epoch}
    for n in range(3 * whole.batches_per_epoch):
        system, together = whole.batch(n)
        shares = [r.batch(n) for r in ranks]
        assert {s for s, _ in shares} == {system}
        for rank, (_, mine) in enumerate(shares):
            assert mine == (together[rank::world] or together[rank % len(together) :][:1])
            assert 1 <= len(mine) <= size
        assert set().union(*(mine for _, mine in shares)) == set(together)


def test_probabilities_are_followed_within_two_batches_at_any_epoch():
    sampler = Sampler(FRAMES, ATOMS, 2, sys_probs=[0.01, 0.33, -1], seed=3)
    assert sampler.probabilities == pytest.approx((0.01, 0.33, 0.66))
    total, per_epoch = Counter(), []
    for epoch in range(200):
        counts = Counter(sampler.batch(n)[0] for n in range(epoch * 16, epoch * 16 + 16))
        total += counts
        per_epoch.append(counts)
        for k, p in enumerate(sampler.probabilities):
            assert abs(total[k] - (epoch + 1) * 16 * p) < 2
    for k in range(3):
        assert max(c[k] for c in per_epoch) - min(c[k] for c in per_epoch) <= 1


def test_each_system_goes_through_whole_permutations_under_any_probability():
    sampler = Sampler(FRAMES, ATOMS, 2, sys_probs=[0.1, 0.55, 0.35], seed=3)
    seen = {k: [] for k in range(3)}
    for n in range(40 * sampler.batches_per_epoch):
        system, frames = sampler.batch(n)
        seen[system] += frames
    for k, count in enumerate(FRAMES):
        rounds = [seen[k][i : i + count] for i in range(0, len(seen[k]) - count + 1, count)]
        assert len(rounds) > 3
        assert all(sorted(r) == list(range(count)) for r in rounds)


@pytest.mark.parametrize(
    ("auto_prob", "sys_probs", "expected"),
    [
        ("prob_sys_size", None, (9 / 16, 3 / 16, 4 / 16)),
        ("prob_uniform", None, (1 / 3, 1 / 3, 1 / 3)),
        ("prob_sys_size;0:1:0.3;1:3:0.7", None, (0.3, 0.7 * 3 / 7, 0.7 * 4 / 7)),
        ("prob_sys_size;0:2:3;2:3:1", None, (0.75 * 9 / 12, 0.75 * 3 / 12, 0.25)),
        ("prob_sys_size", [0.5, -1, -1], (0.5, 0.5 * 3 / 7, 0.5 * 4 / 7)),
        ("prob_uniform", [0.2, 0.2, 0.6], (0.2, 0.2, 0.6)),
    ],
)
def test_probabilities_are_those_of_the_peer(auto_prob, sys_probs, expected):
    sampler = Sampler(FRAMES, ATOMS, 2, auto_prob, sys_probs)
    assert sampler.probabilities == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        (3, (3, 3, 3)),
        ([1, 2, 3], (1, 2, 3)),
        ("auto", (4, 2, 11)),
        ("auto:20", (2, 1, 7)),
        ("max:30", (3, 1, 10)),
        ("max:5", (1, 1, 1)),
        ("filter:10", (1, 0, 3)),
    ],
)
def test_batch_rules_are_those_of_the_peer(rule, sizes):
    assert batch_sizes(rule, ATOMS)[0] == sizes


def test_a_filter_leaves_large_systems_out_and_says_so():
    sampler = Sampler(FRAMES, ATOMS, "filter:10", "prob_uniform")
    assert sampler.probabilities == pytest.approx((0.5, 0, 0.5))
    assert {sampler.batch(n)[0] for n in range(100)} == {0, 2}
    assert sampler.warnings == ['batch_size = "filter:10": left out are 1 of 3 systems, of more than 10 atoms a frame.']
    with pytest.raises(DataError, match="every system has more atoms"):
        Sampler(FRAMES, ATOMS, "filter:2")


def test_epochs_become_steps_as_the_peer_counts_them():
    assert Sampler(FRAMES, ATOMS, 2).steps_for_epochs(3) == 3 * 16
    assert Sampler(FRAMES, ATOMS, 2).steps_for_epochs(0.5) == 8
    skewed = Sampler(FRAMES, ATOMS, 2, sys_probs=[0.1, 0.3, 0.6])
    assert skewed.steps_for_epochs(2) == 2 * math.ceil(9 / 0.1)
    assert Sampler(FRAMES, ATOMS, 1, world_size=2).steps_for_epochs(1) == 9 + 3 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": "mixed:4"}, "mixed:N is not supported"),
        ({"batch_size": "mix:4"}, "mix:N is not supported"),
        ({"batch_size": "autos"}, '"autos" is unknown. Known: a number'),
        ({"batch_size": "max"}, '"max" is unknown'),
        ({"batch_size": "auto:x"}, '"auto:x" is unknown'),
        ({"batch_size": 0}, "expected numbers from 1"),
        ({"batch_size": [1, 2]}, "a list of 2 numbers, expected one per system: 3"),
        ({"auto_prob": "prob_size"}, '"prob_size" is unknown'),
        ({"auto_prob": "prob_sys_size;0:9:1"}, "does not fit 3 systems"),
        ({"auto_prob": "prob_sys_size;0:1"}, '"0:1" is not start:stop:weight'),
        ({"sys_probs": [0.5, 0.5]}, "2 numbers, expected one per system: 3"),
        ({"sys_probs": [0.9, 0.9, -1]}, "add up to 1.8, expected at most 1"),
        ({"sys_probs": [0, 0, 0]}, "all are 0"),
    ],
)
def test_a_wrong_rule_is_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Sampler(FRAMES, ATOMS, **arguments)


def test_access_far_ahead_is_as_quick_as_at_the_start():
    sampler = Sampler((1000, 500), (3, 3), 1, sys_probs=[0.123, 0.877], seed=1)
    system, frames = sampler.batch(10**12)
    assert frames[0] < (1000, 500)[system]
