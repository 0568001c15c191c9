"""Averages of the weights, tracked beside training on whatever part of each tensor this process holds.

``s <- d * s + (1 - d) * w`` (s: average, w: weight) is elementwise, so a process averages what it holds and talks to
nobody. It is computed as ``s.lerp_(w, 1 - d)``, which leaves a weight that does not move bit-identical.
"""

from deepmd_ema.averaging.bank import AverageBank, note_unused
from deepmd_ema.averaging.profile import AverageProfile

__all__ = ["AverageBank", "AverageProfile", "note_unused"]
