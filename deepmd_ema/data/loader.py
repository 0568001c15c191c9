"""Batches of training, made ahead by threads, and batches of all frames in order."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, pairwise

import numpy as np
import torch

from deepmd_ema.batch import Batch, NeighborLayout, PackedBatch
from deepmd_ema.data.collate import PairCache, collate
from deepmd_ema.data.sampler import Sampler, batch_edges
from deepmd_ema.data.source import FrameSource

# atoms in a batch whose frames are only evaluated: a GPU needs so many for its kernels to take
# longer than their launches
ATOMS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
MAX_ATOMS = ATOMS_AT_ONCE["cpu"]
PREFETCH = 4  # batches of training made ahead

Pad = Callable[[Batch], Batch]
"""Fills a batch up, so that batches have few sizes."""


class Loader:
    """The batches of a sampler in order, made ahead by a thread, for a GPU by several.

    Batch n depends only on the sampler and n: a loader that starts at n gives the same batches as
    one that has made all batches before n. An exception in a thread is raised by ``next``, and
    again by each further ``next``.

    Args:
        systems: in the order of the sampler.
        sampler: which frames make batch n.
        layout: how the model wants its neighbors.
        start: number of the first batch.
        prefetch: batches made ahead.
        pin: whether batches are packed into page-locked memory, for one copy to a GPU that runs
            beside the step.
        pad: fills batches up, in the thread too; None: they are as they are.
        cache: neighbor lists shared with other loaders; a new cache by default.
        labels: names that every batch has, even if none of its frames does.

    Attributes:
        systems: as given.
        sampler: as given.
        cache: neighbor lists.
        batch: returns batch ``n`` as it was collated, whatever comes next.
        pad: as given; may be set before the first batch.
        position: number of the batch that ``next`` returns; a checkpoint needs nothing else of the
            loader.
    """

    def __init__(
        self,
        systems: Sequence[FrameSource],
        sampler: Sampler,
        layout: NeighborLayout,
        start: int = 0,
        prefetch: int = PREFETCH,
        pin: bool = False,
        cache: PairCache | None = None,
        labels: Sequence[str] = (),
        pad: Pad | None = None,
    ) -> None:
        self.systems = systems
        self.sampler = sampler
        self.position = start
        self.cache = pairs = PairCache() if cache is None else cache

        # Closures that do not refer to self: a thread that held the loader would keep it from being
        # collected, so that __del__ would never stop the thread.
        def batch(n: int) -> Batch:
            frames = collate(
                [
                    pairs.get(systems[system], k, layout)
                    for system, k in sampler.batch(n)
                ],
                layout,
                labels,
            )
            return frames.as_padding() if sampler.is_repeat(n) else frames

        self.batch = batch
        self.pad = pad
        self._prepare: Callable[[int, Pad | None], Batch | PackedBatch] = (
            lambda n, pad: _prepared(batch(n), pin, pad)
        )
        self._prefetch = prefetch
        # on a CPU more threads would take the cores of the steps
        self._num_threads = max(1, prefetch) if pin else 1
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch | PackedBatch]] = deque()

    def frames_at(self, n: int) -> tuple[tuple[str, int], ...]:
        """Return the origin of the frames of batch ``n``: (system, frame number)."""
        return tuple(
            self.systems[system].frame(k).source for system, k in self.sampler.batch(n)
        )

    def __iter__(self) -> Iterator[Batch | PackedBatch]:
        return self

    def __next__(self) -> Batch | PackedBatch:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                self._num_threads, thread_name_prefix="dp-ema-loader"
            )
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(
                self._thread.submit(
                    self._prepare, self.position + len(self._ahead), self.pad
                )
            )
        batch = self._ahead[
            0
        ].result()  # a batch with an error stays, and is raised again
        self._ahead.popleft()
        self.position += 1
        return batch

    def seek(self, position: int) -> None:
        """Let ``next`` return batch ``position``."""
        self.close()
        self.position = position

    def close(self) -> None:
        """Stop the thread; ``next`` starts a new one."""
        if self._thread is not None:
            self._thread.shutdown(
                cancel_futures=True
            )  # waits for the batch that it is making
            self._thread = None
            self._ahead.clear()

    def __del__(self) -> None:
        if hasattr(self, "_ahead") and not sys.is_finalizing():
            self.close()


def sequential_batches(
    systems: Sequence[FrameSource],
    layout: NeighborLayout,
    cache: PairCache | None = None,
    max_atoms: int = MAX_ATOMS,
    labels: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
    frames: Sequence[Sequence[int]] | None = None,
) -> Iterator[Batch]:
    """Yield batches of all frames of all systems in order.

    A batch has as many frames as have at most ``max_atoms`` atoms, and at least one.

    Args:
        systems: whose frames; frames of different systems may share a batch.
        layout: how the model wants its neighbors.
        cache: neighbor lists to share; without it they are computed and not stored.
        max_atoms: atoms per batch.
        labels: names that every batch has, even if none of its frames does.
        rank: which share of the batches.
        world_size: number of shares; every batch goes to one rank.
        frames: which frames of each system, and in which order; all by default.
    """
    # frames that are read once need no cache
    cache = cache if cache is not None else PairCache(max_bytes=0)
    chosen = (
        [range(system.num_frames) for system in systems] if frames is None else frames
    )
    remaining = (
        (system, int(k))
        for system, indices in zip(systems, chosen, strict=True)
        for k in indices
    )
    sizes = [
        system.frame_sizes[np.asarray(indices, int)]
        for system, indices in zip(systems, chosen)
    ]
    edges = batch_edges(np.concatenate([np.zeros(0, int), *sizes]), max_atoms)
    # each rank takes the frames of all batches from the iterator, but reads those of its share only
    for number, (first, last) in enumerate(pairwise(edges)):
        group = list(islice(remaining, last - first))
        if number % world_size == rank:
            yield collate(
                [cache.get(system, k, layout) for system, k in group],
                layout,
                labels=labels,
            )


def num_batches(systems: Sequence[FrameSource], max_atoms: int = MAX_ATOMS) -> int:
    """Return the number of batches of :func:`sequential_batches`, of all ranks together."""
    sizes = np.concatenate(
        [np.zeros(0, int), *(system.frame_sizes for system in systems)]
    )
    return len(batch_edges(sizes, max_atoms)) - 1


def prefetch(
    batches: Iterator[Batch], device: torch.device, pad: Pad | None = None
) -> Iterator[Batch | PackedBatch]:
    """Yield ``batches``; for a GPU in page-locked memory.

    For a GPU each batch is made by a thread while the one before is evaluated.

    Args:
        batches: called for in a thread if the device is a GPU.
        device: that they are evaluated on.
        pad: fills batches up; None: they are as they are.
    """
    pin = device.type == "cuda"
    prepared = (_prepared(batch, pin, pad) for batch in batches)
    if not pin:
        yield from prepared
        return
    with ThreadPoolExecutor(1, thread_name_prefix="dp-ema-loader") as thread:
        following = thread.submit(next, prepared, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, prepared, None)
            yield batch


def atoms_at_once(device: torch.device) -> int:
    """Return the most atoms in a batch whose frames are evaluated on ``device``."""
    return ATOMS_AT_ONCE.get(device.type, MAX_ATOMS)


def shared_atoms_at_once(
    systems: Sequence[FrameSource], device: torch.device, world_size: int
) -> int:
    """Return the most atoms in a batch: few enough that each of several ranks has batches."""
    share = -(-sum(int(system.frame_sizes.sum()) for system in systems) // world_size)
    return min(atoms_at_once(device), max(MAX_ATOMS, share))


def _prepared(batch: Batch, pin: bool, pad: Pad | None) -> Batch | PackedBatch:
    filled = batch if pad is None else pad(batch)
    return filled.pack(pin=True) if pin else filled
