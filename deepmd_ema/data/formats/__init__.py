"""Formats of data sets: each gives a ``FrameSource``; ``discover.FORMATS`` lists them."""

from deepmd_ema.data.formats.discover import open_systems

__all__ = ["open_systems"]
