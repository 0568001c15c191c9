"""The order of batches: every frame once per epoch, random access, shares of ranks, probabilities,
batch rules.
"""

import math
from collections import Counter

import numpy as np
import pytest

from deepmd_ema.data.sampler import Sampler, batch_sizes, permutation
from deepmd_ema.errors import ConfigError, DataError

FRAMES, ATOMS = (17, 5, 8), (10, 20, 3)


def frames_of_epoch(sampler, epoch):
    length = sampler.batches_per_epoch
    return [
        frame
        for n in range(epoch * length, (epoch + 1) * length)
        for frame in sampler.batch(n)
    ]


def system_of(batch):
    """Return the only system of a batch."""
    (system,) = {system for system, _ in batch}
    return system


@pytest.mark.parametrize(
    "batch_size", [3, [2, 1, 8], "auto", "max:30", "mixed:4", "mix:32", "mix:2"]
)
def test_an_epoch_has_every_frame_exactly_once(batch_size):
    sampler = Sampler(FRAMES, ATOMS, batch_size, seed=4)
    every = sorted((i, f) for i, n in enumerate(FRAMES) for f in range(n))
    for epoch in (0, 1, 7):
        assert sorted(frames_of_epoch(sampler, epoch)) == every


@pytest.mark.parametrize(
    "auto_prob", ["prob_sys_size", "prob_sys_size;0:2:0.9;2:3:0.1"]
)
@pytest.mark.parametrize("rule", [2, "mixed:2", "mix:25"])
def test_a_batch_is_a_function_of_seed_and_number_only(rule, auto_prob):
    one, other, third = (
        Sampler(FRAMES, ATOMS, rule, auto_prob, seed=s) for s in (1, 1, 2)
    )
    numbers = [300, 5, 17, 0, 5, 299, 16, 15]
    fresh = [Sampler(FRAMES, ATOMS, rule, auto_prob, seed=1).batch(n) for n in numbers]
    assert [one.batch(n) for n in numbers] == fresh
    assert [one.batch(n) for n in range(40)] == [other.batch(n) for n in range(40)]
    assert [one.batch(n) for n in range(40)] != [third.batch(n) for n in range(40)]


def test_the_order_never_changes_between_versions():
    """A restart with a newer numpy or a newer version of this package must continue with the same
    frames.
    """
    assert permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]
    sampler = Sampler(FRAMES, ATOMS, 4, seed=7)
    expected = {0: (0, (14, 10, 8, 6)), 1: (0, (11, 4, 0, 5)), 9: (2, (1, 5, 2, 6))}
    for n, (system, frames) in expected.items():
        assert sampler.batch(n) == [(system, f) for f in frames]


@pytest.mark.parametrize("form", [int, "mixed:{}".format])
@pytest.mark.parametrize(("world", "size"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_ranks_share_the_batches_of_one_process_with_a_larger_batch(world, size, form):
    whole = Sampler(FRAMES, ATOMS, form(size * world), seed=3)
    ranks = [
        Sampler(FRAMES, ATOMS, form(size), seed=3, rank=r, world_size=world)
        for r in range(world)
    ]
    assert {r.batches_per_epoch for r in ranks} == {whole.batches_per_epoch}
    for n in range(3 * whole.batches_per_epoch):
        together = whole.batch(n)
        shares = [r.batch(n) for r in ranks]
        for rank, mine in enumerate(shares):
            assert mine == (
                together[rank::world] or together[rank % len(together) :][:1]
            )
            assert 1 <= len(mine) <= size
        assert set().union(*shares) == set(together)


def test_probabilities_are_followed_within_two_batches_at_any_epoch():
    sampler = Sampler(FRAMES, ATOMS, 2, sys_probs=[0.01, 0.33, -1], seed=3)
    assert sampler.probabilities == pytest.approx((0.01, 0.33, 0.66))
    total, per_epoch = Counter(), []
    for epoch in range(200):
        counts = Counter(
            system_of(sampler.batch(n)) for n in range(epoch * 16, epoch * 16 + 16)
        )
        total += counts
        per_epoch.append(counts)
        for k, p in enumerate(sampler.probabilities):
            assert abs(total[k] - (epoch + 1) * 16 * p) < 2
    for k in range(3):
        assert max(c[k] for c in per_epoch) - min(c[k] for c in per_epoch) <= 1


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
        ("auto", (4, 2, 11)),
        ("auto:20", (2, 1, 7)),
        ("max:30", (3, 1, 10)),
        ("filter:10", (1, 0, 3)),
    ],
)
def test_batch_rules_are_those_of_the_peer(rule, sizes):
    assert batch_sizes(rule, ATOMS)[0] == sizes


@pytest.mark.parametrize(
    ("rule", "size", "frames"),
    [
        ("auto:16", 2, 10),
        ("max:24", 2, 10),
        ("max:23", 1, 10),
        ("filter:9", 1, 7),
    ],
)
def test_batch_rules_count_the_atoms_of_each_frame(rule, size, frames):
    sizes = np.array([5, 12, 8, 12, 3, 9, 8, 5, 12, 7])  # 8.1 in the mean
    assert batch_sizes(rule, [sizes])[0] == (size,)
    plan = Sampler([10, 4], [sizes, 1], rule)
    assert len(plan.frames[0]) == frames
    assert all(sizes[k] <= 9 for k in plan.frames[0]) or frames == 10


def test_epochs_become_steps_as_the_peer_counts_them():
    assert Sampler(FRAMES, ATOMS, 2).batches_for_epochs(3) == 3 * 16
    assert Sampler(FRAMES, ATOMS, 2).batches_for_epochs(0.5) == 8
    skewed = Sampler(FRAMES, ATOMS, 2, sys_probs=[0.1, 0.3, 0.6])
    assert skewed.batches_for_epochs(2) == 2 * math.ceil(9 / 0.1)
    assert Sampler(FRAMES, ATOMS, 1, world_size=2).batches_for_epochs(1) == 9 + 3 + 4


def test_epochs_do_not_count_a_system_that_is_never_drawn():
    sampler = Sampler(FRAMES, ATOMS, 2, sys_probs=[0, 0.5, 0.5])
    assert sampler.batches_for_epochs(1) == 4 / 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": [1, 2]}, "a list of 2 numbers, expected one per system: 3"),
        ({"auto_prob": "prob_sys_size;0:9:1"}, "does not fit 3 systems"),
        ({"sys_probs": [0.5, 0.5]}, "2 numbers, expected one per system: 3"),
        ({"sys_probs": [0, 0, 0]}, "all are 0"),
    ],
)
def test_a_wrong_rule_is_reported(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Sampler(FRAMES, ATOMS, **arguments)
    with pytest.raises(DataError, match="every system has more atoms"):
        Sampler(FRAMES, ATOMS, "filter:2")
    left_out = (
        'batch_size = "filter:10": left out are 1 of 3 systems, of more than 10 atoms a '
        "frame."
    )
    [finding] = Sampler(FRAMES, ATOMS, "filter:10").findings
    assert str(finding) == left_out


def test_frames_larger_than_a_rule_allows_are_counted_in_a_warning():
    sizes = np.array([5, 12, 8, 12, 3])
    plan = Sampler([5, 4], [sizes, 1], "filter:10")
    assert plan.num_frames == (3, 4)
    [finding] = plan.findings
    assert (
        str(finding)
        == 'batch_size = "filter:10": left out: 2 frames of more than 10 atoms.'
    )


# ---- batches of several systems


def atoms_of(batch, natoms=ATOMS):
    sizes = [
        natoms[system] if isinstance(natoms[system], int) else natoms[system][frame]
        for system, frame in batch
    ]
    return [int(size) for size in sizes]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_no_rank_has_more_atoms_than_mix_allows_unless_one_frame_has(world):
    natoms = (10, 20, 3, np.arange(60) % 45 + 1)
    frames = (*FRAMES, 60)
    ranks = [
        Sampler(frames, natoms, "mix:40", seed=3, rank=r, world_size=world)
        for r in range(world)
    ]
    batches = [r.batch(n) for n in range(5 * ranks[0].batches_per_epoch) for r in ranks]
    for atoms in (atoms_of(batch, natoms) for batch in batches):
        assert sum(atoms) <= 40 or len(atoms) == 1
    assert {r.max_atoms for r in ranks} == {45}
    assert np.mean([sum(atoms_of(batch, natoms)) for batch in batches]) > 0.7 * 40


@pytest.mark.parametrize("rule", ["mixed:3", "mix:25"])
@pytest.mark.parametrize(
    ("auto_prob", "sys_probs", "expected"),
    [
        ("prob_uniform", None, (1 / 3, 1 / 3, 1 / 3)),
        ("prob_sys_size", [0.01, 0.33, -1], (0.01, 0.33, 0.66)),
    ],
)
def test_probabilities_of_mixed_batches_are_those_of_frames(
    rule, auto_prob, sys_probs, expected
):
    sampler = Sampler(FRAMES, ATOMS, rule, auto_prob, sys_probs, seed=3)
    assert sampler.probabilities == pytest.approx(expected)
    total, seen = Counter(), Counter()
    for epoch in range(100):
        drawn = frames_of_epoch(sampler, epoch)
        assert len(drawn) == 30
        seen.update(drawn)
        total.update(system for system, _ in drawn)
        for k, p in enumerate(sampler.probabilities):
            assert abs(total[k] - (epoch + 1) * 30 * p) < 2
            counts = [seen[k, frame] for frame in range(FRAMES[k])]
            assert (
                max(counts) - min(counts) <= 1
            )  # a system's frames come in permutations


def test_more_ranks_than_frames_repeat_some():
    ranks = [
        Sampler((2, 1), (4, 5), "mix:100", seed=1, rank=r, world_size=5)
        for r in range(5)
    ]
    assert [r.is_repeat(0) for r in ranks] == [False, False, False, True, True]
    assert sorted(frame for r in ranks[:3] for frame in r.batch(0)) == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert all(r.batches_per_epoch == 1 and len(r.batch(0)) == 1 for r in ranks)
