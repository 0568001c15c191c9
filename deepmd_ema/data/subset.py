"""Some frames of a source, as a source of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from deepmd_ema.data.source import Chunk, Frame, FrameSource, Place
from deepmd_ema.sorting import Array


class FrameSubset(FrameSource):
    """Some frames of a source, which keep their names and their numbers in the whole one.

    Args:
        whole: the source.
        frames: (num_frames,) numbers of the frames in it, rising.
    """

    def __init__(self, whole: FrameSource, frames: Array) -> None:
        kinds = None if whole.kinds is None else [whole.kinds[k] for k in frames.tolist()]
        super().__init__(whole.name, whole.frame_sizes[frames], whole.unread, whole.notes, kinds, whole.is_slow)
        self.whole, self.frames = whole, frames

    def files(self) -> Sequence[Path] | None:
        """Return every file of the whole source."""
        return self.whole.files()

    def frame(self, index: int) -> Frame:
        """Return one frame."""
        return self.whole.frame(int(self.frames[index]))

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Chunk]:
        """Yield all frames in order as chunks that fit in memory, with the arrays ``names``, or with all."""
        first = 0
        for chunk in self.whole.chunks(names):
            start, stop = np.searchsorted(self.frames, [chunk.first, chunk.first + chunk.num_frames])
            rows = self.frames[start:stop] - chunk.first
            if len(rows):
                arrays = {name: array[rows] for name, array in chunk.arrays.items()}
                yield Chunk(first, chunk.types[rows], arrays)
                first += len(rows)

    def where(self, index: int, array: str = "") -> Place:
        """Return the place where a frame, or one of its arrays, is stored."""
        return self.whole.where(int(self.frames[index]), array)
