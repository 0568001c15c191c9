"""Profiles: the share of the weights after each step in an average, tracked in the run or made after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.schema.averaging import sigma_rel_of
from deepmd_ema.errors import counted

Array = NDArray[np.float64]

MIN_INTERVALS = 4  # between snapshots, in a decay that is not linear: with fewer it equals a linear one
CHUNK = 1 << 14  # places of the axis at a time: with 50 classes the work fits into a processor's cache

SHAPES: dict[str, Callable[[float], float]] = {  # learning rate over its first value, after a part 0 to 1 of the decay
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}


@dataclass(frozen=True)
class Track:
    """An average of a power profile after its last update.

    Attributes:
        gamma: exponent of the profile; 0 is equal weights.
        updates: how many it has seen, at least 1.
        start: step at which it began; its first update was at ``start + every``.
        every: steps between two updates.
    """

    gamma: float
    updates: int
    start: int = 0
    every: int = 1

    @classmethod
    def of(cls, info: Mapping[str, Any], step: int) -> Track:
        """Return the track of an average from ``AverageBank.info`` after ``step`` steps; of type power or swa."""
        every, updates = int(info["update_every"]), int(info["updates"])
        last = step - (step - int(info["start_step"])) % every  # it may be saved between two updates
        return cls(float(info.get("gamma", 0.0)), updates, last - updates * every, every)

    @property
    def end(self) -> int:
        """Step of the last update."""
        return self.start + self.updates * self.every

    @property
    def sigma_rel(self) -> float:
        """Width of the profile as a part of its length."""
        return sigma_rel_of(self.gamma)

    @property
    def power(self) -> float:
        """Exponent of the decrease of a share with further updates: ``n ** -power`` after n updates."""
        return self.gamma + 1

    @property
    def endless(self) -> Track:
        """The same for all tracks whose shares differ by a factor, and by where they end."""
        return replace(self, updates=1)

    def shares_at(self, update: Array, updates: float) -> Array:
        """Return the share of the weights at each ``update`` in the average after ``updates``; all add up to one.

        It is ``(j^p - (j - 1)^p) / n^p`` for j = ``update``, n = ``updates`` and p = gamma + 1.
        """
        log_ratio = np.log(update / updates)
        with np.errstate(divide="ignore"):  # the first update has no one before it: log(0)
            step_back = np.log1p(-1 / update)
        # a difference of neighboring powers would cancel
        return np.exp(self.power * log_ratio) * -np.expm1(self.power * step_back)

    def mean_age(self) -> float:
        """Return the mean number of steps between the weights in it and its last update."""
        # the sum over updates of the part that is older than each: (m / n)^p
        n, p = self.updates, self.power
        if n > CHUNK and n > 10 * p:  # Euler-Maclaurin, exact to rounding here
            return self.every * (n / (p + 1) - 1 / 2 + p / (12 * n) - p * (p - 1) * (p - 2) / (720 * n**3))
        return self.every * float(np.sum((np.arange(1, n, dtype=np.float64) / n) ** p))

    def describe(self) -> str:
        """Return its type and length as text."""
        return f"sigma_rel {self.sigma_rel:.4g}"


@dataclass(frozen=True)
class Decay:
    """The average that replaces a decay of the learning rate over the last part of a run at a constant rate.

    With updates g of the weights, a run at the rate r has the weights ``w_j = w_0 + sum over i <= j of r g_i``, and a
    decay by the factors eta_i leads, as far as it leaves the g_i as they are, to ``w_0 + sum of eta_i r g_i``. That is
    ``sum of a_j w_j`` with the shares ``a_j = eta_j - eta_(j+1)``: a linear decay is the mean over the part, and
    merging checkpoints replaces a decay (WSM, arXiv:2507.17634).

    The factors follow the shape at ``nodes`` and are linear in between, so that shares are constant between two nodes.

    Attributes:
        shape: one of ``SHAPES``.
        nodes: updates, rising; the decay begins after the first and is complete after the last.
        start: step at which the averages began.
        every: steps between two updates.
    """

    shape: str
    nodes: tuple[int, ...]
    start: int = 0
    every: int = 1

    power = 0.0  # shares do not change with where a sum over them ends

    @property
    def updates(self) -> int:
        """Number of updates up to the end of the decay."""
        return self.nodes[-1]

    @property
    def end(self) -> int:
        """Step of the last update."""
        return self.start + self.updates * self.every

    @property
    def part(self) -> float:
        """Length of the decay as a part of all updates."""
        return (self.nodes[-1] - self.nodes[0]) / self.updates

    @property
    def steps(self) -> int:
        """Length of the decay in steps."""
        return (self.nodes[-1] - self.nodes[0]) * self.every

    @property
    def sigma_rel(self) -> float:
        """Standard deviation of the updates in it, as a part of all updates."""
        mass, ends = self._masses(), np.array(self.nodes, dtype=np.float64)
        middle, inside = (ends[1:] + ends[:-1] + 1) / 2, (np.diff(ends) ** 2 - 1) / 12
        variance = mass @ (inside + (middle - mass @ middle) ** 2)
        return float(np.sqrt(variance)) / self.updates

    @property
    def endless(self) -> Decay:
        """Itself: no other has its shares."""
        return self

    def shares_at(self, update: Array, updates: float) -> Array:
        """Return the share of the weights at each ``update``, whatever ``updates`` is; all add up to one."""
        each = np.concatenate([[0.0], self._masses() / np.diff(self.nodes), [0.0]])
        return each[np.searchsorted(self.nodes, update)]

    def mean_age(self) -> float:
        """Return the mean number of steps between the weights in it and its last update."""
        middle = np.array([(low + high + 1) / 2 for low, high in pairwise(self.nodes)])
        return self.every * float(self._masses() @ (self.updates - middle))

    def describe(self) -> str:
        """Return its type and length as text."""
        return f"{self.shape} {percent(self.part)}"

    def _masses(self) -> Array:
        """Return the sum of the shares between each two nodes."""
        first, last = self.nodes[0], self.nodes[-1]
        factors = [SHAPES[self.shape]((node - first) / (last - first)) for node in self.nodes]
        return -np.diff(factors)


def percent(part: float) -> str:
    """Return a part of one in percent."""
    return f"{100 * part:.3g} %"


def first_grid(tracks: Sequence[Track]) -> tuple[int, int]:
    """Return the start of the earliest of ``tracks``, and the fewest steps between two updates of any."""
    return min(track.start for track in tracks), min(track.every for track in tracks)


def place_decays(
    requests: Sequence[tuple[str, float]], tracks: Sequence[Track], step: int
) -> tuple[list[Decay], dict[str, list[str]]]:
    """Return the decays with their nodes at snapshots, and by reason the ones that there are too few snapshots for.

    Args:
        requests: shapes and parts; a decay begins at the snapshot that is nearest to where its part does.
        tracks: of the snapshots, none of them later than ``step``.
        step: the end of the decays.
    """
    start, every = first_grid(tracks)
    last = (step - start) // every
    marks = sorted({0, last, *(min(last, max(0, (track.end - start) // every)) for track in tracks)})
    decays: dict[Decay, None] = {}
    refused: dict[str, list[str]] = {}
    for shape, part in requests:
        begin = min(marks, key=lambda mark: abs(mark - (1 - part) * last))
        nodes = tuple(mark for mark in marks if mark >= begin)
        fewest = 1 if shape == "linear" else MIN_INTERVALS
        if len(nodes) > fewest:
            decays[Decay(shape, nodes, start, every)] = None
        else:
            reason = f"less than {counted(fewest, 'interval')} between snapshots"
            refused.setdefault(reason, []).append(f"{shape} {percent(part)}")
    return list(decays), refused
