"""Neighbor lists of frames, searched once per run and kept in memory."""

from __future__ import annotations

import os
import threading

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data.collate import PairedFrame, pair_frame
from deepmd_ema.data.source import FrameSource

MOST_CACHE_BYTES = 4 << 30  # a 192-atom frame with 120 slots takes 150 kB: 28,000 of them


class PairCache:
    """Frames with their neighbors in slots, computed once and kept while they fit into ``max_bytes``.

    Nothing is evicted when it is full: frames are drawn in permutations, so that no frame is more likely to come next
    than another. All tasks of a run, their loaders and statistics share one cache. May be used by several threads.

    Args:
        max_bytes: by default a quarter of the machine's memory over the processes on it, at most 4 GiB.
        local_size: processes of the run on this machine.
    """

    def __init__(self, max_bytes: int | None = None, local_size: int = 1) -> None:
        self.max_bytes = default_cache_bytes(local_size) if max_bytes is None else max_bytes
        self.num_bytes = 0
        self._kept: dict[tuple[FrameSource, int, NeighborLayout], PairedFrame] = {}
        self._lock = threading.Lock()

    def get(self, system: FrameSource, index: int, layout: NeighborLayout) -> PairedFrame:
        """Return frame ``index`` of ``system`` with its neighbors as ``layout`` wants them."""
        key = (system, index, layout)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        made = pair_frame(system.frame(index), layout)
        with self._lock:
            if key not in self._kept and self.num_bytes + made.nbytes <= self.max_bytes:
                self._kept[key] = made
                self.num_bytes += made.nbytes
        return made

    def __len__(self) -> int:
        return len(self._kept)


def default_cache_bytes(local_size: int) -> int:
    """Return the bytes that one of ``local_size`` processes on this machine keeps by default."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no such question on this system
        return MOST_CACHE_BYTES // 4
    return min(MOST_CACHE_BYTES, memory // (4 * local_size))
