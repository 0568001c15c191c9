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
from deepmd_ema.errors import UserError
from deepmd_ema.text import counted

Array = NDArray[np.float64]

# Sizes in shapes of arrays: S snapshots, L targets, C classes, which are averages of one gamma that
# were updated at the same steps.

# Largest residual. At 3 to 5 % the reconstructed weights were off by 0.4 to 3.2 % of the distance
# between average and live weights (median), at 5 to 7 % by up to 12 % (doc/decisions.md).
TOLERANCE = 0.05
# sigma_rel that are considered; the longest is that of equal weights
MIN_SIGMA_REL = 0.005
MAX_SIGMA_REL = 12**-0.5
_NUM_CONSIDERED = 49  # widths on a logarithmic scale: neighbors differ by 9 %
# rounding error of an entry of the normalized Gram matrix, per average; eigenvalues below it are
# noise
_NOISE = 64 * np.finfo(np.float64).eps
# fewest intervals between snapshots in a decay that is not linear: with fewer it equals a
# linear one
MIN_INTERVALS = 4
# places of the axis at a time: with 50 classes the work fits into a processor's cache
CHUNK = 1 << 14

# learning rate over its first value, after a part 0 to 1 of the decay
SHAPES: dict[str, Callable[[float], float]] = {
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
        """Return the track of a power or swa average, from ``AverageBank.info`` after ``step``."""
        every, updates = int(info["update_every"]), int(info["updates"])
        # Counted back from the last update, as the start in the settings is not that of an average
        # that was added at a restart. The average may be saved between two updates.
        last = step - (step - int(info["start_step"])) % every
        return cls(
            float(info.get("gamma", 0.0)), updates, last - updates * every, every
        )

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
        """Exponent with which a share falls with further updates: ``n ** -power`` after n."""
        return self.gamma + 1

    def shares_at(self, update: Array, updates: float) -> Array:
        """Return the share of the weights at each ``update`` in the average after ``updates``.

        All add up to one. It is ``(j^p - (j - 1)^p) / n^p`` for j = ``update``, n = ``updates`` and
        p = gamma + 1.
        """
        log_ratio = np.log(update / updates)
        with np.errstate(
            divide="ignore"
        ):  # no update comes before the first one: log(0) is -inf
            step_back = np.log1p(-1 / update)
        # (j / n)^p * (1 - (1 - 1 / j)^p): the difference of neighboring powers itself would cancel
        return np.exp(self.power * log_ratio) * -np.expm1(self.power * step_back)

    def mean_age(self) -> float:
        """Return the mean number of steps between the weights in it and its last update."""
        # the sum over the updates m before the last one of all shares up to m: (m / n)^p
        n, p = self.updates, self.power
        # The sum of a run of 10^7 steps takes time and memory: Euler-Maclaurin with three terms of
        # correction, exact to rounding here. With a steep power the next terms would count.
        if n > CHUNK and n > 10 * p:
            return self.every * (
                n / (p + 1)
                - 1 / 2
                + p / (12 * n)
                - p * (p - 1) * (p - 2) / (720 * n**3)
            )
        return self.every * float(np.sum((np.arange(1, n, dtype=np.float64) / n) ** p))

    def describe(self) -> str:
        """Return its type and length as text."""
        return f"sigma_rel {self.sigma_rel:.4g}"


@dataclass(frozen=True)
class Decay:
    """The average that replaces a decay of the learning rate at the end of a run at constant rate.

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

    # shares do not change with the update at which a sum over them ends; those of a track are
    # scaled by its number of updates
    power = 0.0

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
        # between two nodes the shares are equal: mean and variance of consecutive whole numbers
        mass, ends = self._masses(), np.array(self.nodes, dtype=np.float64)
        middle = (ends[1:] + ends[:-1] + 1) / 2
        inside = (np.diff(ends) ** 2 - 1) / 12
        variance = mass @ (inside + (middle - mass @ middle) ** 2)
        return float(np.sqrt(variance)) / self.updates

    def shares_at(self, update: Array, updates: float) -> Array:
        """Return the share of the weights at each ``update``; ``updates`` has no influence.

        All add up to one.
        """
        # before the first node and after the last one there is no share
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
        # a_j = eta_j - eta_(j+1) adds up to the difference of the rates at both nodes
        first, last = self.nodes[0], self.nodes[-1]
        factors = [
            SHAPES[self.shape]((node - first) / (last - first)) for node in self.nodes
        ]
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
    """Return the decays with nodes at snapshots, and by reason those with too few snapshots.

    Args:
        requests: shapes and parts; a decay begins at the snapshot that is nearest to where its part
            does.
        tracks: of the snapshots, none of them later than ``step``.
        step: the end of the decays.
    """
    # in updates of the finest grid; a snapshot between two of its updates is at the one before
    start, every = _grid(tracks)
    last = (step - start) // every
    marks = sorted(
        {
            0,
            last,
            *(min(last, max(0, (track.end - start) // every)) for track in tracks),
        }
    )
    # two parts may begin at one snapshot: they are one decay, and the dict keeps the order
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
    tracks: Sequence[Track],
    sigma_rels: Sequence[float],
    step: int,
    decays: Sequence[Decay] = (),
) -> Combinations:
    """Return the combinations of ``tracks`` nearest to averages of ``sigma_rels`` after ``step``.

    Least squares between profiles under the constraint that coefficients add up to one.

    Args:
        tracks: of the snapshots, none of them later than ``step``.
        sigma_rels: widths.
        step: the last step that is averaged over.
        decays: further averages to approximate, which end at ``step``.
    """
    # The targets are averages that could have been tracked beside the snapshots: from the earliest
    # of them on, as often as the one that is updated most often.
    first, every = _grid(tracks)
    targets: list[Track | Decay] = [
        Track(gamma_of(w), (step - first) // every, first, every) for w in sigma_rels
    ]
    targets += decays
    gram = _products([*tracks, *targets])  # (S + L, S + L)
    num = len(tracks)
    # profiles of unit length, because the norm falls with the width of an average, and rounding is
    # compared with one number for all
    length = np.sqrt(np.diag(gram))
    unit = gram / np.outer(length, length)
    matrix, right = unit[:num, :num], unit[:num, num:] * length[num:]
    # The unknowns are z = x * length. The sum of x is one: that leaves z = start + free @ y, with
    # any start that fulfils it and the columns of free, (S, S - 1), orthogonal to 1 / length.
    free = np.linalg.qr((1 / length[:num])[:, None], mode="complete")[0][:, 1:]
    values, vectors = np.linalg.eigh(free.T @ matrix @ free)
    # profiles of neighboring snapshots are nearly parallel: directions whose eigenvalue is rounding
    # would get coefficients of any size
    good = values > _NOISE * num * values.max(initial=0.0)
    directions = free @ vectors[:, good] / np.sqrt(values[good])
    combinations = []
    for k, target in enumerate(targets):
        b, square = right[:, k], gram[num + k, num + k]
        # The start is the nearest snapshot alone, with coefficient 1, so that a target which is a
        # snapshot gives exactly that, and dropped directions do not matter then.
        nearest = int(np.argmin(length[:num] ** 2 - 2 * length[:num] * b))
        start = np.zeros(num)
        start[nearest] = length[nearest]
        z = start + directions @ (directions.T @ (b - matrix @ start))
        missing = square - 2 * z @ b + z @ matrix @ z
        x = z / length[:num]
        residual = float(
            np.sqrt(max(missing, 0.0) / square)
        )  # rounding may make it negative
        combinations.append(Combination(target, x, residual, float(np.linalg.norm(x))))
    condition = float(values[good].max() / values[good].min()) if good.any() else 1.0
    return Combinations(combinations, condition, int((~good).sum()))


def resolvable_range(tracks: Sequence[Track], step: int) -> tuple[float, float] | None:
    """Return the ends of the range of sigma_rel that ``tracks`` resolve after ``step``, or None."""
    considered = np.geomspace(MIN_SIGMA_REL, MAX_SIGMA_REL, _NUM_CONSIDERED).tolist()
    pairs = zip(considered, find_combinations(tracks, considered, step).combinations)
    # A range without a gap: the width of a snapshot is resolved even if its neighbors are not.
    stretches = [
        list(run)
        for good, run in groupby(pairs, lambda pair: pair[1].residual <= TOLERANCE)
        if good
    ]
    longest = max(stretches, key=len, default=None)  # the first of several
    return None if longest is None else (longest[0][0], longest[-1][0])


def refuse_unresolvable(
    combinations: Combinations, tracks: Sequence[Track], step: int
) -> None:
    """Check that snapshots of ``tracks`` resolve every width of ``combinations`` after ``step``.

    Raises:
        UserError: naming each that they do not, the range that they do, and how to widen it.
    """
    bad = [
        combination
        for combination in combinations.combinations
        if isinstance(combination.target, Track) and combination.residual > TOLERANCE
    ]
    if not bad:
        return
    ends = resolvable_range(tracks, step)
    stored = sorted({round(track.sigma_rel, 4) for track in tracks})
    about = (
        f"{len(tracks)} snapshots of sigma_rel {', '.join(f'{w:g}' for w in stored)}"
    )
    resolved = (
        "no sigma_rel" if ends is None else f"sigma_rel {ends[0]:.3g} to {ends[1]:.3g}"
    )
    advice = (
        f"{about} resolve {resolved}. For more, keep snapshots of two profiles, one on either "
        "side of the widths in question (type power, sigma_rel 0.05 and 0.10), and more often (a "
        "smaller snapshot_freq)."
    )
    problems = [
        f"{combination.target.describe()}: {combination.describe_missing()}."
        for combination in bad
    ]
    problems[-1] += f" {advice}"  # once, after all widths
    raise UserError(problems)


def percent(part: float) -> str:
    """Return a part of one in percent."""
    return f"{100 * part:.3g} %"


def _grid(tracks: Sequence[Track]) -> tuple[int, int]:
    """Return the start of the earliest of ``tracks``, and the fewest steps between two updates."""
    return min(track.start for track in tracks), min(track.every for track in tracks)


def _products(tracks: Sequence[Track | Decay]) -> Array:
    """Return the exact products of all profiles, (T, T) for T tracks, up to a common factor.

    Averages of one gamma and one grid of updates share a profile up to where it ends and its scale:
    so one walk along the axis gives all products as running sums, in memory that does not grow with
    the run. An average that is updated every k steps counts as spread evenly over those, when
    others are updated at other steps.
    """
    # place m of the axis is step origin + m * stride, m = 1, 2, ...: one per update when all are
    # updated at the same steps, else one per step
    grids = {(track.start, track.every) for track in tracks}
    origin, stride = (
        grids.pop() if len(grids) == 1 else (min(track.start for track in tracks), 1)
    )
    # tracks whose shares differ by a factor, and by where they end, are one class
    alike = [
        replace(track, updates=1) if isinstance(track, Track) else track
        for track in tracks
    ]
    classes = list(dict.fromkeys(alike))
    kind = np.array([classes.index(profile) for profile in alike])  # (T,) class of each
    power = np.array([profile.power for profile in classes])
    ends = np.array([(track.end - origin) // stride for track in tracks])
    stops = np.unique(ends)

    # number of the first update of a profile at a place or after it; below 1 before the first one.
    # Two minus signs round up: the places since the update before it belong to an update.
    def update(profile: Track | Decay, place: Any) -> Any:
        return -((profile.start - origin - place * stride) // profile.every)

    # products of the classes up to each stop, (stops, C, C), each scaled as if it ended there, and
    # the number of updates of each class there, (stops, C)
    sums = np.empty((len(stops), len(classes), len(classes)))
    number = np.empty((len(stops), len(classes)))
    # both at the place that the walk has reached: (C, C) and (C,)
    now = np.zeros((len(classes), len(classes)))
    latest = np.ones(len(classes))
    low = 0
    for k, stop in enumerate(stops.tolist()):
        while low < stop:
            high, before = min(low + CHUNK, stop), latest
            latest = np.array(
                [max(1, update(profile, high)) for profile in classes], dtype=np.float64
            )
            places = np.arange(low + 1, high + 1)
            part = np.zeros(
                (len(classes), high - low)
            )  # shares of the classes at these places
            for c, profile in enumerate(classes):
                each = update(profile, places).astype(np.float64)
                begun = each >= 1
                # an update that spans several places is spread evenly over them
                part[c, begun] = profile.shares_at(each[begun], latest[c]) / (
                    profile.every / stride
                )
            # further updates make the shares of all earlier weights smaller by one factor
            shrink = (before / latest) ** power
            now, low = now * np.outer(shrink, shrink) + part @ part.T, high
        sums[k], number[k] = now, [max(1, update(profile, stop)) for profile in classes]
    which = np.searchsorted(stops, ends)  # (T,) stop at which each ends
    updates = np.array([t.updates for t in tracks], dtype=np.float64)
    gram = np.empty((len(tracks), len(tracks)))
    for i in range(len(tracks)):
        # Both reach up to the end of the shorter one, i; the longer one is scaled by its own number
        # of updates. Pairs in the other order are the transpose.
        scale = (number[which[i]][kind] / updates) ** power[kind]
        gram[i] = np.where(
            which >= which[i], sums[which[i], kind[i], kind] * scale, 0.0
        )
    return np.where(which[:, None] <= which[None, :], gram, gram.T)
