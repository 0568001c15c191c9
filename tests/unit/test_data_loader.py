"""The loader: the same batches from any start, errors that surface, threads that end, caches that
are bounded.
"""

from contextlib import closing
from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers import open_data

from deepmd_ema.batch import ALIGNMENT, NeighborLayout
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import Loader, sequential_batches
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import DataError

LAYOUT = NeighborLayout(4.0, (24, 24), 2)
LABELS = ("energy", "force", "virial")


@pytest.fixture
def systems(water_like, open_like, mixed_like):
    return open_data(
        [str(water_like), str(open_like), str(mixed_like)], ["O", "H"], LABELS
    )


def make_sampler(systems, seed=1, **arguments):
    return Sampler(
        [s.num_frames for s in systems],
        [s.natoms for s in systems],
        2,
        seed=seed,
        **arguments,
    )


def assert_same(a, b):
    """Every field of two batches is the same, tensors to the last bit."""
    for f in fields(a):
        one, other = getattr(a, f.name), getattr(b, f.name)
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), f.name
        else:
            assert (
                torch.equal(one, other)
                if isinstance(one, torch.Tensor)
                else one == other
            ), f.name


def test_a_loader_started_at_a_position_continues_as_one_that_ran_there(systems):
    sampler = make_sampler(systems)
    with closing(Loader(systems, sampler, LAYOUT, labels=LABELS)) as running:
        batches = [next(running) for _ in range(60)]
        assert running.position == 60
    for start in (1, 17, 18, 41):
        fresh = open_data([s.name for s in systems], ["O", "H"], LABELS)
        with closing(
            Loader(
                fresh,
                make_sampler(fresh),
                LAYOUT,
                start=start,
                labels=LABELS,
                prefetch=1,
            )
        ) as resumed:
            for expected in batches[start : start + 10]:
                assert_same(next(resumed), expected)
            assert resumed.position == start + 10


class Failing:
    """A sampler that fails at batch 3."""

    def __init__(self, sampler):
        self.sampler = sampler

    def batch(self, n):
        if n == 3:
            raise DataError("water/set.000/force.npy: has become shorter")
        return self.sampler.batch(n)

    def is_repeat(self, n):
        return self.sampler.is_repeat(n)


def test_an_exception_of_the_thread_surfaces_in_order_and_again(systems):
    with closing(Loader(systems, Failing(make_sampler(systems)), LAYOUT)) as loader:
        assert len([next(loader) for _ in range(3)]) == 3
        for _ in range(2):
            with pytest.raises(DataError, match="has become shorter"):
                next(loader)
        assert loader.position == 3


def test_the_cache_holds_no_more_than_its_bound_and_changes_nothing(systems):
    kept, none = PairCache(), PairCache(max_bytes=0)
    one = kept.get(systems[0], 0, LAYOUT)
    assert kept.get(systems[0], 0, LAYOUT) is one
    assert kept.get(systems[2], 0, LAYOUT) is not one
    assert len(kept) == 2
    assert none.get(systems[0], 0, LAYOUT) is not none.get(systems[0], 0, LAYOUT)
    assert (len(none), none.num_bytes) == (0, 0)
    some = PairCache(max_bytes=3 * one.nbytes)
    for k in range(10):
        some.get(systems[0], k, LAYOUT)
    assert 2 <= len(some) <= 3
    assert some.num_bytes <= some.max_bytes
    a, b = (
        Loader(systems, make_sampler(systems), LAYOUT, cache=cache)
        for cache in (some, kept)
    )
    for _ in range(20):  # not closed: loaders that are forgotten end their threads
        assert_same(next(a), next(b))


@pytest.mark.parametrize("max_atoms", [1, 40, 10_000])
def test_sequential_batches_have_all_frames_in_order_and_few_atoms(systems, max_atoms):
    batches = list(
        sequential_batches(systems, LAYOUT, max_atoms=max_atoms, labels=LABELS)
    )
    frames = [f for b in batches for f in b.frames]
    assert frames == [(s.name, k) for s in systems for k in range(s.num_frames)]
    assert all(len(b.atom_type) <= max_atoms or b.num_frames == 1 for b in batches)
    assert len(batches) == {1: 35, 40: 5 + 1 + 1 + 4, 10_000: 1}[max_atoms]
    energies = np.concatenate([b.labels["energy"].numpy() for b in batches])
    expected = [
        s.frame(k).labels["energy"] for s in systems for k in range(s.num_frames)
    ]
    np.testing.assert_array_equal(energies, expected)


def test_ranks_share_sequential_batches(systems):
    whole = [b.frames for b in sequential_batches(systems, LAYOUT, max_atoms=30)]
    shares = [
        [
            b.frames
            for b in sequential_batches(
                systems, LAYOUT, max_atoms=30, rank=r, world_size=3
            )
        ]
        for r in range(3)
    ]
    assert [shares[n % 3][n // 3] for n in range(len(whole))] == whole


def test_a_packed_batch_is_the_batch_in_one_aligned_buffer(systems):
    batches = list(sequential_batches(systems, LAYOUT, max_atoms=30, labels=LABELS))
    for batch in (*batches, batches[0].as_padding()):
        packed = batch.pack()
        made = packed.to(torch.device("cpu"))
        assert_same(made, batch)
        assert {
            t.untyped_storage().data_ptr()
            for t in (made.vector, made.periodic, *made.labels.values())
        } == {packed.data.data_ptr()}
        assert all(
            place.start * place.dtype.itemsize % ALIGNMENT == 0
            for place in packed.layout.tensors
        )
        assert all(
            tensor.is_contiguous()
            for tensor in (made.vector, made.coord, made.labels["force"])
        )
        assert_same(packed.as_padding().to(torch.device("cpu")), batch.as_padding())
