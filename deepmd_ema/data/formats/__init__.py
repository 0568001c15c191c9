"""Formats of data sets: each gives a ``FrameSource``; ``discover.FORMATS`` lists them."""
