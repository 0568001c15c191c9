"""The loader: the same batches from any start, errors that surface, threads that end, caches that are bounded."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import open_data
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_ema.batch import ALIGNMENT, Batch, NeighborLayout, PackedLayout
from deepmd_ema.data.collate import PairCache, pair_frame
from deepmd_ema.data.loader import Loader, atoms_at_once, prefetch, sequential_batches, shared_atoms_at_once
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import DataError

LAYOUT = NeighborLayout(4.0, (24, 24), 2)
LABELS = ("energy", "force", "virial")


@pytest.fixture
def systems(water_like, open_like, mixed_like):
    return open_data([str(water_like), str(open_like), str(mixed_like)], ["O", "H"], LABELS)


def make_sampler(systems, seed=1, **arguments):
    return Sampler([s.num_frames for s in systems], [s.natoms for s in systems], 2, seed=seed, **arguments)


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("dp-ema-loader")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert not loader_threads()


def assert_same(a, b):
    assert a.frames == b.frames
    assert a.slots == b.slots
    for name in ("atom_type", "atom_frame", "atom_order", "coord", "box", "neighbor", "vector", "reverse"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
    for name in a.labels:
        torch.testing.assert_close(a.labels[name], b.labels[name], rtol=0, atol=0)
        torch.testing.assert_close(a.has_label[name], b.has_label[name], rtol=0, atol=0)


def test_a_loader_started_at_a_position_continues_as_one_that_ran_there(systems):
    sampler = make_sampler(systems)
    with closing(Loader(systems, sampler, LAYOUT, labels=LABELS)) as running:
        batches = [next(running) for _ in range(60)]
        assert running.position == 60
    for start in (1, 17, 18, 41):
        fresh = open_data([s.name for s in systems], ["O", "H"], LABELS)
        with closing(Loader(fresh, make_sampler(fresh), LAYOUT, start=start, labels=LABELS, prefetch=1)) as resumed:
            for expected in batches[start : start + 10]:
                assert_same(next(resumed), expected)
            assert resumed.position == start + 10


def test_seek_goes_back_and_forth(systems):
    with closing(Loader(systems, make_sampler(systems), LAYOUT)) as loader:
        batches = [next(loader) for _ in range(12)]
        for position in (3, 0, 11):
            loader.seek(position)
            assert loader.position == position
            assert_same(next(loader), batches[position])


def test_batches_are_those_of_the_sampler(systems):
    sampler = make_sampler(systems)
    with closing(Loader(systems, sampler, LAYOUT)) as loader:
        for n in range(20):
            assert next(loader).frames == tuple((systems[system].name, f) for system, f in sampler.batch(n))
        assert loader.position == 20


def test_every_batch_has_the_labels_requested(systems):
    with closing(Loader(systems, make_sampler(systems), LAYOUT, labels=LABELS)) as loader:
        for _ in range(30):
            batch = next(loader)
            periodic = batch.periodic.to(torch.float64)
            torch.testing.assert_close(batch.has_label["virial"], periodic)


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


class Counting(Failing):
    """A sampler that counts the batches requested of it; from the second on each waits for ``go``."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.made, self.go = [], threading.Event()

    def batch(self, n):
        self.made.append(n)
        assert n == 0 or self.go.wait(60)
        return self.sampler.batch(n)


def test_close_waits_for_no_batch_but_the_one_that_is_made_and_may_be_repeated(systems):
    sampler = Counting(make_sampler(systems))
    loader = Loader(systems, sampler, LAYOUT, prefetch=3)
    next(loader)
    last = loader._ahead[-1]
    closer = threading.Thread(target=loader.close)
    closer.start()
    with suppress(CancelledError):
        last.result(60)
    sampler.go.set()
    closer.join()
    loader.close()
    assert sampler.made in ([0], [0, 1])  # of the four that were requested
    assert not loader_threads()
    assert loader.position == 1


def test_a_loader_that_is_forgotten_ends_its_thread(systems):
    loader = Loader(systems, make_sampler(systems), LAYOUT)
    next(loader)
    assert loader_threads()
    del loader
    gc.collect()
    assert not loader_threads()


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
    with (
        closing(Loader(systems, make_sampler(systems), LAYOUT, cache=some)) as a,
        closing(Loader(systems, make_sampler(systems), LAYOUT, cache=kept)) as b,
    ):
        for _ in range(20):
            assert_same(next(a), next(b))


def test_molecules_are_kept_only_where_reading_them_takes_long(systems):
    cache, molecules = PairCache(), systems[1]
    assert cache.get(molecules, 0, LAYOUT) is not cache.get(molecules, 0, LAYOUT)
    assert (len(cache), cache.num_bytes) == (0, 0)
    vars(molecules)["is_slow"] = True  # as of a compressed array
    for layout in (LAYOUT, NeighborLayout(3.0, (12, 12), 2)):
        assert cache.get(molecules, 0, layout) is cache.get(molecules, 0, layout)
    assert len(cache) == 1
    assert 1000 < cache.num_bytes < 4000


@pytest.mark.parametrize("max_atoms", [1, 40, 10_000])
def test_sequential_batches_have_all_frames_in_order_and_few_atoms(systems, max_atoms):
    batches = list(sequential_batches(systems, LAYOUT, max_atoms=max_atoms, labels=LABELS))
    frames = [f for b in batches for f in b.frames]
    assert frames == [(s.name, k) for s in systems for k in range(s.num_frames)]
    assert all(len(b.atom_type) <= max_atoms or b.num_frames == 1 for b in batches)
    assert len(batches) == {1: 35, 40: 5 + 1 + 1 + 4, 10_000: 1}[max_atoms]
    energies = np.concatenate([b.labels["energy"].numpy() for b in batches])
    expected = [s.frame(k).labels["energy"] for s in systems for k in range(s.num_frames)]
    np.testing.assert_array_equal(energies, expected)


def test_ranks_share_sequential_batches(systems):
    whole = [b.frames for b in sequential_batches(systems, LAYOUT, max_atoms=30)]
    shares = [
        [b.frames for b in sequential_batches(systems, LAYOUT, max_atoms=30, rank=r, world_size=3)] for r in range(3)
    ]
    assert [shares[n % 3][n // 3] for n in range(len(whole))] == whole


def assert_same_everywhere(a, b):
    """Every field of two batches is the same, tensors to the last bit."""
    for f in fields(a):
        one, other = getattr(a, f.name), getattr(b, f.name)
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), f.name
        else:
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, f.name


@pytest.fixture
def batches(systems):
    """Batches of several layouts, with all labels."""
    return list(sequential_batches(systems, LAYOUT, max_atoms=30, labels=LABELS))


def test_a_packed_batch_is_the_batch_in_one_aligned_buffer(batches):
    for batch in (*batches, batches[0].as_padding()):
        packed = batch.pack()
        made = packed.to(torch.device("cpu"))
        assert_same_everywhere(made, batch)
        assert {t.untyped_storage().data_ptr() for t in (made.vector, made.periodic, *made.labels.values())} == {
            packed.data.data_ptr()
        }
        assert all(place.start * place.dtype.itemsize % ALIGNMENT == 0 for place in packed.layout.tensors)
        assert all(tensor.is_contiguous() for tensor in (made.vector, made.coord, made.labels["force"]))
        assert_same_everywhere(packed.as_padding().to(torch.device("cpu")), batch.as_padding())


def test_conditions_are_packed_too(batches):
    batch = replace(
        batches[0], conditions={"aparam": torch.rand(len(batches[0].atom_type), 2), "fparam": torch.rand(2)}
    )
    assert_same_everywhere(batch.pack().to(torch.device("cpu")), batch)


def test_batches_of_one_layout_follow_each_other_in_one_buffer(batches):
    by_layout = {}
    for batch in batches:
        by_layout.setdefault(batch.pack().layout, []).append(batch)
    assert 1 < len(by_layout) < len(batches)
    for layout, group in by_layout.items():
        larger = torch.zeros(layout.num_bytes + ALIGNMENT, dtype=torch.uint8)
        kept = larger[ALIGNMENT:]  # a buffer may be a part of another
        view = layout.view(kept)
        for batch in group:
            kept.copy_(batch.pack().data)
            assert_same_everywhere(view, replace(batch, frames=()))


def test_a_layout_is_another_where_a_number_of_the_host_is(batches):
    batch = batches[0]
    first, *others = (
        PackedLayout.of(one)
        for one in (batch, replace(batch, slots=(sum(batch.slots), 0)), replace(batch, sizes=(*batch.sizes, 1)))
    )
    assert hash(first) == hash(PackedLayout.of(batches[0]))
    assert first not in others
    assert PackedLayout.of(replace(batch, labels=dict(reversed(batch.labels.items())))) == first


def test_a_loader_pads_its_batches_and_shows_single_ones_as_they_are(systems):
    with closing(Loader(systems, make_sampler(systems), LAYOUT, pad=lambda batch: replace(batch, sizes=()))) as loader:
        for n in range(4):
            assert next(loader).sizes == ()
            assert loader.batch(n).sizes


def test_batches_for_a_cpu_are_made_when_they_are_wanted_and_for_a_gpu_one_ahead(batches, monkeypatch):
    monkeypatch.setattr(Batch, "pack", lambda self, pin: self if pin else None)
    made = []
    for device, ahead in (("cpu", 0), ("cuda", 1)):
        made.clear()
        source = (made.append(batch) or batch for batch in batches)
        found = prefetch(source, torch.device(device), pad=lambda batch: replace(batch, sizes=()))
        for n in range(2):
            assert_same(next(found), batches[n])
        until = time.monotonic() + 30
        while len(made) < 2 + ahead and time.monotonic() < until:
            time.sleep(0.001)
        assert len(made) == 2 + ahead
        assert len(loader_threads()) == ahead
        assert [b.frames for b in found] == [b.frames for b in batches[2:]]
        found = prefetch(iter(batches), torch.device(device))
        next(found)
        found.close()
        assert not loader_threads()


def test_an_error_in_batches_made_ahead_surfaces_where_the_batch_would_be(batches, monkeypatch):
    monkeypatch.setattr(Batch, "pack", lambda self, pin: self)

    def failing():
        yield batches[0]
        raise DataError("water/set.000/force.npy: has become shorter")

    found = prefetch(failing(), torch.device("cuda"))
    assert next(found) is batches[0]
    with pytest.raises(DataError, match="has become shorter"):
        next(found)


def test_a_gpu_evaluates_more_atoms_at_once():
    assert [atoms_at_once(torch.device(name)) for name in ("cpu", "cuda", "meta")] == [1024, 16384, 1024]


@pytest.mark.parametrize(
    ("atoms", "ranks", "most"),
    [(50_000, 1, 16384), (50_000, 4, 12_500), (50_000, 3, 16384), (1500, 1, 1500), (1500, 8, 1024)],
)
def test_several_gpus_share_the_frames_of_a_validation(atoms, ranks, most):
    systems = [SimpleNamespace(frame_sizes=np.full(10, atoms // 20)) for _ in range(2)]
    assert shared_atoms_at_once(systems, torch.device("cuda"), ranks) == most
    assert shared_atoms_at_once(systems, torch.device("cpu"), ranks) == 1024


@pytest.mark.gpu
def test_a_batch_comes_to_a_gpu_from_page_locked_memory_by_one_copy(systems):
    class Copies(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names = (*self.names, function._schema.name)
            return function(*args, **(kwargs or {}))

    device = torch.device("cuda", 0)
    with closing(Loader(systems, make_sampler(systems), LAYOUT, labels=LABELS, pin=True)) as loader:
        for n in range(8):
            packed = next(loader)
            assert packed.data.is_pinned()
            with Copies() as seen:
                moved = packed.to(device)
            assert sum("copy" in name for name in seen.names) == 1
            assert moved.vector.device == device
            assert_same_everywhere(moved._map(lambda t: t.cpu()), loader.batch(n))


@pytest.mark.gpu
def test_batches_of_an_evaluation_come_to_a_gpu_in_order(systems):
    device = torch.device("cuda", 0)
    expected = list(sequential_batches(systems, LAYOUT, max_atoms=30, labels=LABELS))
    found = list(prefetch(sequential_batches(systems, LAYOUT, max_atoms=30, labels=LABELS), device))
    assert all(packed.data.is_pinned() for packed in found)
    for packed, batch in zip(found, expected, strict=True):
        assert_same_everywhere(packed.to(device)._map(lambda t: t.cpu()), batch)


def test_processes_of_one_machine_share_the_memory_for_neighbors(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 10)  # pages, and bytes of a page: 1 MiB
    assert PairCache().max_bytes == 1 << 18
    assert PairCache(local_size=4).max_bytes == 1 << 16
    assert PairCache(max_bytes=7, local_size=4).max_bytes == 7


def test_layouts_share_one_cache_and_its_bound(systems):
    other = NeighborLayout(3.0, (12, 12), 2)
    cache = PairCache(max_bytes=0)
    cache.max_bytes = 2 * cache.get(systems[0], 0, LAYOUT).nbytes
    for layout in (LAYOUT, other):
        for k in range(5):
            found = cache.get(systems[0], k, layout)
            np.testing.assert_array_equal(found.neighbor, pair_frame(systems[0].frame(k), layout).neighbor)
    assert cache.num_bytes <= cache.max_bytes
    cache.max_bytes = 1 << 30
    assert cache.get(systems[0], 4, other) is cache.get(systems[0], 4, other)
    assert cache.get(systems[0], 4, other) is not cache.get(systems[0], 4, LAYOUT)
