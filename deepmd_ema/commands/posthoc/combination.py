"""Profiles of averages, and the average of any width as a combination of snapshots.

EDM2 (Karras et al., arXiv:2312.02696, section 3.2 and appendix C) stores averages of power profiles
at many steps of a run and finds, after it, the combination of them whose profile is nearest to that
of an average which was not tracked. A *profile* says how much of the weights after each step is in
an average. With p = gamma + 1, an average that has seen n updates holds of those at update j the
share

    (j^p - (j - 1)^p) / n^p

exactly, so all products of profiles here are exact sums and not the integrals of the paper. Unlike
there, coefficients add up to one, so that a weight which never moves keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.schema.averaging import gamma_of, sigma_rel_of
from deepmd_ema.errors import UserError, counted

Array = NDArray[np.float64]

# S snapshots, L targets, C classes: averages of one gamma that were updated at the same steps

TOLERANCE = 0.05  # largest residual, see doc/decisions.md
MIN_SIGMA_REL, MAX_SIGMA_REL = (
    0.005,
    12**-0.5,
)  # sigma_rel that are considered; the longest is that of equal weights
_NUM_CONSIDERED = 49
_NOISE = 64 * np.finfo(np.float64).eps  # of an entry of the normalized Gram matrix, per average
MIN_INTERVALS = (
    4  # between snapshots, in a decay that is not linear: with fewer it equals a linear one
)
CHUNK = (
    1 << 14
)  # places of the axis at a time: with 50 classes the work fits into a processor's cache

SHAPES: dict[
    str, Callable[[float], float]
] = {  # learning rate over its first value, after a part 0 to 1 of the decay
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
        """Return the track of an average from ``AverageBank.info`` after ``step`` steps; of type
        power or swa.
        """
        every, updates = int(info["update_every"]), int(info["updates"])
        last = (
            step - (step - int(info["start_step"])) % every
        )  # it may be saved between two updates
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
        """Exponent of the decrease of a share with further updates: ``n ** -power`` after n
        updates.
        """
        return self.gamma + 1

    def shares_at(self, update: Array, updates: float) -> Array:
        """Return the share of the weights at each ``update`` in the average after ``updates``; all
        add up to one.

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
            return self.every * (
                n / (p + 1) - 1 / 2 + p / (12 * n) - p * (p - 1) * (p - 2) / (720 * n**3)
            )
        return self.every * float(np.sum((np.arange(1, n, dtype=np.float64) / n) ** p))

    def describe(self) -> str:
        """Return its type and length as text."""
        return f"sigma_rel {self.sigma_rel:.4g}"


@dataclass(frozen=True)
class Decay:
    """The average that replaces a decay of the learning rate over the last part of a run at a
    constant rate.

    With updates g of the weights, a run at the rate r has the weights ``w_j = w_0 + sum over i <= j
    of r g_i``, and a decay by the factors eta_i leads, as far as it leaves the g_i as they are, to
    ``w_0 + sum of eta_i r g_i``. That is ``sum of a_j w_j`` with the shares ``a_j = eta_j -
    eta_(j+1)``: a linear decay is the mean over the part, and merging checkpoints replaces a decay
    (WSM, arXiv:2507.17634).

    The factors follow the shape at ``nodes`` and are linear in between, so that shares are constant
    between two nodes.

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

    def shares_at(self, update: Array, updates: float) -> Array:
        """Return the share of the weights at each ``update``, whatever ``updates`` is; all add up
        to one.
        """
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


@dataclass(frozen=True)
class Combination:
    """A linear combination of snapshots that approximates an average which was not tracked.

    Attributes:
        target: the average that it approximates.
        coefficients: (S,) one per snapshot; their sum is one.
        residual: norm of the difference of the profiles, relative to the norm of the target's
            profile.
        amplification: norm of the coefficients, by which the rounding error of one snapshot is
            multiplied.
    """

    target: Track | Decay
    coefficients: Array
    residual: float
    amplification: float

    def describe_missing(self) -> str:
        """Return why it is not used."""
        return (
            f"{100 * self.residual:.2g} % of its profile would be missing, more than "
            f"{100 * TOLERANCE:g} %"
        )


@dataclass(frozen=True)
class Combinations:
    """Combinations for several widths and decays.

    Attributes:
        combinations: in the order of the widths, then of the decays.
        condition: condition number of the Gram matrix of normalized profiles.
        dropped: eigenvectors left out because their eigenvalues are below rounding.
        resolvable: smallest and largest sigma_rel that the snapshots resolve, or None; where it was
            looked for.
        left_out: decays that the snapshots do not resolve, by reason.
    """

    combinations: Sequence[Combination]
    condition: float
    dropped: int
    resolvable: tuple[float, float] | None = None
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


def place_decays(
    requests: Sequence[tuple[str, float]], tracks: Sequence[Track], step: int
) -> tuple[list[Decay], dict[str, list[str]]]:
    """Return the decays with their nodes at snapshots, and by reason the ones that there are too
    few snapshots for.

    Args:
        requests: shapes and parts; a decay begins at the snapshot that is nearest to where its part
            does.
        tracks: of the snapshots, none of them later than ``step``.
        step: the end of the decays.
    """
    start, every = _grid(tracks)
    last = (step - start) // every
    marks = sorted(
        {0, last, *(min(last, max(0, (track.end - start) // every)) for track in tracks)}
    )
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


def find_combinations(
    tracks: Sequence[Track], sigma_rels: Sequence[float], step: int, decays: Sequence[Decay] = ()
) -> Combinations:
    """Return the combinations of ``tracks`` nearest to averages of the widths ``sigma_rels`` after
    ``step``.

    Args:
        tracks: of the snapshots, none of them later than ``step``.
        sigma_rels: widths.
        step: the last step that is averaged over.
        decays: further averages to approximate, which end at ``step``.
    """
    # tracked beside the snapshots: from the earliest of them on, as often as the one that is
    # updated most often
    first, every = _grid(tracks)
    targets: list[Track | Decay] = [
        Track(gamma_of(w), (step - first) // every, first, every) for w in sigma_rels
    ]
    targets += decays
    gram = _products([*tracks, *targets])
    num = len(tracks)
    length = np.sqrt(np.diag(gram))
    unit = gram / np.outer(length, length)
    matrix, right = unit[:num, :num], unit[:num, num:] * length[num:]
    # unknown z = x * length; sum of x = 1 leaves z = z0 + free @ y, with the columns of free
    # orthogonal to 1 / length
    free = np.linalg.qr((1 / length[:num])[:, None], mode="complete")[0][:, 1:]
    values, vectors = np.linalg.eigh(free.T @ matrix @ free)
    good = values > _NOISE * num * values.max(initial=0.0)
    directions = free @ vectors[:, good] / np.sqrt(values[good])
    combinations = []
    for k, target in enumerate(targets):
        b, square = right[:, k], gram[num + k, num + k]
        nearest = int(np.argmin(length[:num] ** 2 - 2 * length[:num] * b))
        start = np.zeros(num)
        start[nearest] = length[
            nearest
        ]  # so that a width of which there is a snapshot gives exactly that
        z = start + directions @ (directions.T @ (b - matrix @ start))
        missing = square - 2 * z @ b + z @ matrix @ z
        x = z / length[:num]
        combinations.append(
            Combination(
                target, x, float(np.sqrt(max(missing, 0.0) / square)), float(np.linalg.norm(x))
            )
        )
    condition = float(values[good].max() / values[good].min()) if good.any() else 1.0
    return Combinations(combinations, condition, int((~good).sum()))


def resolvable_range(tracks: Sequence[Track], step: int) -> tuple[float, float] | None:
    """Return the smallest and largest sigma_rel that snapshots of ``tracks`` resolve after
    ``step``, or None.
    """
    considered = np.geomspace(MIN_SIGMA_REL, MAX_SIGMA_REL, _NUM_CONSIDERED).tolist()
    found = zip(considered, find_combinations(tracks, considered, step).combinations)
    stretches = [
        list(run)
        for good, run in groupby(found, lambda pair: pair[1].residual <= TOLERANCE)
        if good
    ]
    longest = max(stretches, key=len, default=None)  # the first of several
    return None if longest is None else (longest[0][0], longest[-1][0])


def refuse_unresolvable(found: Combinations, tracks: Sequence[Track], step: int) -> None:
    """Check that snapshots of ``tracks`` resolve every width of ``found`` after ``step``.

    Raises:
        UserError: naming each that they do not, the range that they do, and how to widen it.
    """
    bad = [
        one
        for one in found.combinations
        if isinstance(one.target, Track) and one.residual > TOLERANCE
    ]
    if not bad:
        return
    ends = resolvable_range(tracks, step)
    stored = sorted({round(track.sigma_rel, 4) for track in tracks})
    about = f"{len(tracks)} snapshots of sigma_rel {', '.join(f'{w:g}' for w in stored)}"
    resolved = "no sigma_rel" if ends is None else f"sigma_rel {ends[0]:.3g} to {ends[1]:.3g}"
    advice = (
        f"{about} resolve {resolved}. For more, keep snapshots of two profiles, one on either "
        "side of the widths in question (type power, sigma_rel 0.05 and 0.10), and more often (a "
        "smaller snapshot_freq)."
    )
    *others, last = [f"{one.target.describe()}: {one.describe_missing()}." for one in bad]
    raise UserError([*others, f"{last} {advice}"])


def percent(part: float) -> str:
    """Return a part of one in percent."""
    return f"{100 * part:.3g} %"


def _grid(tracks: Sequence[Track]) -> tuple[int, int]:
    """Return the start of the earliest of ``tracks``, and the fewest steps between two updates of
    any.
    """
    return min(track.start for track in tracks), min(track.every for track in tracks)


def _products(tracks: Sequence[Track | Decay]) -> Array:
    """Return the exact products of all profiles with each other, (T, T) for T tracks, up to a
    factor common to all.

    Averages of one gamma and one grid of updates share a profile up to where it ends and its scale:
    so one walk along the axis gives all products as running sums, in memory that does not grow with
    the run. An average that is updated every k steps counts as spread evenly over those, when
    others are updated at other steps.
    """
    # place m of the axis is step origin + m * stride, m = 1, 2, ...: one per update when all are
    # updated at the same steps, else one per step
    grids = {(track.start, track.every) for track in tracks}
    origin, stride = grids.pop() if len(grids) == 1 else (min(track.start for track in tracks), 1)
    # tracks whose shares differ by a factor, and by where they end, are one class
    alike = [replace(track, updates=1) if isinstance(track, Track) else track for track in tracks]
    classes = list(dict.fromkeys(alike))
    kind = np.array([classes.index(one) for one in alike])
    power = np.array([profile.power for profile in classes])
    ends = np.array([(track.end - origin) // stride for track in tracks])
    stops = np.unique(ends)

    def update(
        profile: Track | Decay, place: Any
    ) -> Any:  # its number at a place; below 1 before the first
        return -((profile.start - origin - place * stride) // profile.every)

    # products of the classes up to each stop, each scaled as if it ended there
    sums, now = (
        np.empty((len(stops), len(classes), len(classes))),
        np.zeros((len(classes), len(classes))),
    )
    number, latest = np.empty((len(stops), len(classes))), np.ones(len(classes))
    low = 0
    for k, stop in enumerate(stops.tolist()):
        while low < stop:
            high, before = min(low + CHUNK, stop), latest
            latest = np.array(
                [max(1, update(profile, high)) for profile in classes], dtype=np.float64
            )
            part, places = np.zeros((len(classes), high - low)), np.arange(low + 1, high + 1)
            for c, profile in enumerate(classes):
                each = update(profile, places).astype(np.float64)
                begun = each >= 1
                part[c, begun] = profile.shares_at(each[begun], latest[c]) / (
                    profile.every / stride
                )
            shrink = (before / latest) ** power
            now, low = now * np.outer(shrink, shrink) + part @ part.T, high
        sums[k], number[k] = now, [max(1, update(profile, stop)) for profile in classes]
    which, updates = (
        np.searchsorted(stops, ends),
        np.array([t.updates for t in tracks], dtype=np.float64),
    )
    gram = np.empty((len(tracks), len(tracks)))
    for i in range(len(tracks)):
        # both reach up to where the shorter one ends; the longer one is scaled by its own number of
        # updates
        scale = (number[which[i]][kind] / updates) ** power[kind]
        gram[i] = np.where(which >= which[i], sums[which[i], kind[i], kind] * scale, 0.0)
    return np.where(which[:, None] <= which[None, :], gram, gram.T)
