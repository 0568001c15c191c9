"""Some frames of a source, as a source of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepmd_ema.data.source import Chunk, Frame, FrameSource, Place
from deepmd_ema.sorting import Array


@dataclass(frozen=True, eq=False)
class FrameSubset:
    """Some frames of a source: a :class:`FrameSource` that names frames by their numbers in the whole one.

    Attributes:
        whole: the source.
        frames: (num_frames,) numbers of the frames in it, rising.
    """

    whole: FrameSource
    frames: Array = field(repr=False)

    @property
    def name(self) -> str:
        """That of the whole source."""
        return self.whole.name

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.frames)

    @property
    def frame_sizes(self) -> Array:
        """(num_frames,) atoms of each frame as stored."""
        return self.whole.frame_sizes[self.frames]

    @property
    def is_slow(self) -> bool:
        """Whether reading a frame takes long."""
        return self.whole.is_slow

    @property
    def unread(self) -> Sequence[str]:
        """Parameters that are stored, and that the model does not take."""
        return self.whole.unread

    @property
    def notes(self) -> Sequence[str]:
        """Remarks on how the frames are read."""
        return self.whole.notes

    @property
    def kinds(self) -> Sequence[str] | None:
        """Kind of calculation of each frame."""
        return None if self.whole.kinds is None else [self.whole.kinds[k] for k in self.frames.tolist()]

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
