"""Batches of training, made ahead by a thread, and batches of all frames in order."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from types import TracebackType

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.data.cache import PairCache
from deepmd_ema.data.collate import collate
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.data.source import FrameSource

MOST_ATOMS = 1024  # in a batch of a validation
_POLL_S = 0.2  # how often a waiting thread looks whether it shall stop


class Loader:
    """The batches of a sampler in order, made ahead by a thread.

    Batch n depends only on the sampler and n: a loader that starts at n gives the same batches as one that has made
    all batches before n. An exception in the thread is raised by ``next``, and again by each further ``next``.

    Args:
        systems: in the order of the sampler.
        sampler: which frames make batch n.
        layout: how the model wants its neighbors.
        start: number of the first batch.
        prefetch: batches made ahead.
        pin: whether batches go to page-locked memory, for copies to a GPU beside the step.
        cache: neighbor lists shared with other loaders; a new cache by default.
        labels: names that every batch has, even if none of its frames does.

    Attributes:
        systems: as given.
        sampler: as given.
        position: number of the batch that ``next`` returns; a checkpoint needs nothing else of the loader.
        wait_s: seconds that ``next`` has waited for batches in all.
    """

    def __init__(
        self,
        systems: Sequence[FrameSource],
        sampler: Sampler,
        layout: NeighborLayout,
        start: int = 0,
        prefetch: int = 4,
        pin: bool = False,
        cache: PairCache | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        cache = cache if cache is not None else PairCache(layout)
        assert cache.layout == layout, "a cache of another layout"
        self.systems, self.sampler = systems, sampler
        self.position = start
        self.wait_s = 0.0
        self._make = partial(_make_batch, systems, sampler, cache, tuple(labels), pin)
        self._prefetch = prefetch
        self._worker: _Worker | None = None

    def make(self, n: int) -> Batch:
        """Return batch ``n``, made in this thread; ``position`` does not change."""
        return self._make(n)

    def frames_at(self, n: int) -> tuple[tuple[str, int], ...]:
        """Return where the frames of batch ``n`` come from: (system, frame number)."""
        system, frames = self.sampler.batch(n)
        return tuple((self.systems[system].name, k) for k in frames)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._worker is None:
            self._worker = _Worker(self._make, self.position, self._prefetch)
        began = time.perf_counter()
        try:
            batch = self._worker.take()
        finally:
            self.wait_s += time.perf_counter() - began
        self.position += 1
        return batch

    def seek(self, position: int) -> None:
        """Let ``next`` return batch ``position``."""
        self.close()
        self.position = position

    def close(self) -> None:
        """Stop the thread; ``next`` starts a new one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # the thread does not hold a reference to this object, which would keep both alive: it has to be stopped here
        if getattr(self, "_worker", None) is not None and not sys.is_finalizing():
            self.close()


def sequential_batches(
    systems: Sequence[FrameSource],
    layout: NeighborLayout,
    cache: PairCache | None = None,
    max_atoms: int = MOST_ATOMS,
    labels: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
    frames: Sequence[Sequence[int]] | None = None,
) -> Iterator[Batch]:
    """Yield all frames of all systems in order, as many to a batch as have at most ``max_atoms`` atoms, at least one.

    Args:
        systems: whose frames; frames of different systems may share a batch.
        layout: how the model wants its neighbors.
        cache: neighbor lists to share; without it they are computed and not kept.
        max_atoms: atoms per batch.
        labels: names that every batch has, even if none of its frames does.
        rank: which share of the batches.
        world_size: number of shares; every batch goes to one rank.
        frames: which frames of each system, and in which order; all by default.
    """
    cache = cache if cache is not None else PairCache(layout, max_bytes=0)
    assert cache.layout == layout, "a cache of another layout"
    chosen = [range(system.num_frames) for system in systems] if frames is None else frames
    for number, group in enumerate(_groups(systems, chosen, max_atoms)):
        if number % world_size == rank:
            yield collate([cache.get(system, k) for system, k in group], layout, labels=labels)


def num_batches(systems: Sequence[FrameSource], max_atoms: int = MOST_ATOMS) -> int:
    """Return how many batches :func:`sequential_batches` makes of all frames, for all ranks together."""
    return sum(1 for _ in _groups(systems, [range(system.num_frames) for system in systems], max_atoms))


def _groups(
    systems: Sequence[FrameSource], frames: Sequence[Sequence[int]], max_atoms: int
) -> Iterator[list[tuple[FrameSource, int]]]:
    group: list[tuple[FrameSource, int]] = []
    atoms = 0
    for system, chosen in zip(systems, frames, strict=True):
        sizes = system.frame_sizes
        for index in chosen:
            size = int(sizes[index])
            if group and atoms + size > max_atoms:
                yield group
                group, atoms = [], 0
            group.append((system, index))
            atoms += size
    if group:
        yield group


def _make_batch(
    systems: Sequence[FrameSource], sampler: Sampler, cache: PairCache, labels: tuple[str, ...], pin: bool, n: int
) -> Batch:
    system, frames = sampler.batch(n)
    batch = collate([cache.get(systems[system], k) for k in frames], cache.layout, labels=labels)
    if sampler.is_repeat(n):
        batch = batch.as_padding()
    return batch.pin_memory() if pin else batch


class _Worker:
    """A thread that makes batches from ``start`` on into a queue of ``size`` until it is stopped or fails."""

    def __init__(self, make: Callable[[int], Batch], start: int, size: int) -> None:
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=max(1, size))
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make, start), name="dp-ema-loader", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        """Return the next batch, or raise what stopped the thread."""
        while self._error is None:
            item = self._next_item()
            if isinstance(item, BaseException):
                self._error = item
            elif item is not None:
                return item
            elif not self._thread.is_alive() and self._queue.empty():
                self._error = RuntimeError("the thread that makes batches has ended without an error")
        raise self._error

    def stop(self) -> None:
        """Stop the thread after the batch it is making."""
        self._stop.set()
        while self._thread.is_alive():
            self._next_item(0.0)  # makes room: the thread may be waiting to put
            self._thread.join(timeout=0.01)

    def _next_item(self, timeout_s: float = _POLL_S) -> Batch | BaseException | None:
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
        except queue.Empty:
            return None

    def _run(self, make: Callable[[int], Batch], start: int) -> None:
        item: Batch | BaseException | None = None
        for n in count(start):
            if self._stop.is_set() or isinstance(item, BaseException):
                return
            item = _try(make, n)
            while not self._stop.is_set() and not self._offer(item):
                pass

    def _offer(self, item: Batch | BaseException) -> bool:
        try:
            self._queue.put(item, timeout=_POLL_S)
        except queue.Full:
            return False
        return True


def _try(make: Callable[[int], Batch], n: int) -> Batch | BaseException:
    try:
        return make(n)
    except BaseException as error:  # whatever it is, it is raised again by ``next``
        return error
