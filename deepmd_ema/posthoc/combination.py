"""The average of any width as a combination of snapshots of averages.

EDM2 (Karras et al., arXiv:2312.02696, section 3.2 and appendix C) stores averages of power profiles at many steps of a
run and finds, after it, the combination of them whose profile is nearest to that of an average which was not tracked.
A *profile* says how much of the weights after each step is in an average. With p = gamma + 1, an average that has seen
n updates holds of those at update j the share

    (j^p - (j - 1)^p) / n^p

exactly, so all products of profiles here are exact sums and not the integrals of the paper. Unlike there, coefficients
add up to one, so that a weight which never moves keeps its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.schema.averaging import gamma_of
from deepmd_ema.errors import UserError
from deepmd_ema.posthoc.profiles import CHUNK, Array, Decay, Track, first_grid

# S snapshots, L targets, C classes: averages of one gamma that were updated at the same steps

TOLERANCE = 0.05  # largest residual, see doc/decisions/0005-averages-found-after-training.md
MIN_SIGMA_REL, MAX_SIGMA_REL = 0.005, 12**-0.5  # sigma_rel that are considered; the longest is that of equal weights
_NUM_CONSIDERED = 49
_NOISE = 64 * np.finfo(np.float64).eps  # of an entry of the normalized Gram matrix, per average


@dataclass(frozen=True)
class Combination:
    """A linear combination of snapshots that approximates an average which was not tracked.

    Attributes:
        target: the average that it approximates.
        coefficients: (S,) one per snapshot; their sum is one.
        residual: norm of the difference of the profiles, relative to the norm of the target's profile.
        amplification: norm of the coefficients, by which the rounding error of one snapshot is multiplied.
    """

    target: Track | Decay
    coefficients: Array
    residual: float
    amplification: float


@dataclass(frozen=True)
class Combinations:
    """Combinations for several widths and decays.

    Attributes:
        combinations: in the order of the widths, then of the decays.
        condition: condition number of the Gram matrix of normalized profiles.
        dropped: eigenvectors left out because their eigenvalues are below rounding.
    """

    combinations: Sequence[Combination]
    condition: float
    dropped: int


def target_track(tracks: Sequence[Track], sigma_rel: float, step: int) -> Track:
    """Return the average of width ``sigma_rel`` after ``step`` that would have been tracked beside ``tracks``.

    It starts with the earliest of them and is updated as often as the one that is updated most often.
    """
    start, every = first_grid(tracks)
    return Track(gamma_of(sigma_rel), (step - start) // every, start, every)


def find_combinations(
    tracks: Sequence[Track], sigma_rels: Sequence[float], step: int, decays: Sequence[Decay] = ()
) -> Combinations:
    """Return the combinations of ``tracks`` nearest to averages of the widths ``sigma_rels`` after ``step``.

    Args:
        tracks: of the snapshots, none of them later than ``step``.
        sigma_rels: widths.
        step: the last step that is averaged over.
        decays: further averages to approximate, which end at ``step``.
    """
    targets: list[Track | Decay] = [target_track(tracks, sigma_rel, step) for sigma_rel in sigma_rels]
    targets += decays
    gram = _products([*tracks, *targets])
    num = len(tracks)
    length = np.sqrt(np.diag(gram))
    unit = gram / np.outer(length, length)
    matrix, right = unit[:num, :num], unit[:num, num:] * length[num:]
    # unknown z = x * length; sum of x = 1 leaves z = z0 + free @ y, with the columns of free orthogonal to 1 / length
    free = np.linalg.qr((1 / length[:num])[:, None], mode="complete")[0][:, 1:]
    values, vectors = np.linalg.eigh(free.T @ matrix @ free)
    good = values > _NOISE * num * values.max(initial=0.0)
    directions = free @ vectors[:, good] / np.sqrt(values[good])
    combinations = []
    for k, target in enumerate(targets):
        b, square = right[:, k], gram[num + k, num + k]
        nearest = int(np.argmin(length[:num] ** 2 - 2 * length[:num] * b))
        start = np.zeros(num)
        start[nearest] = length[nearest]  # so that a width of which there is a snapshot gives exactly that
        z = start + directions @ (directions.T @ (b - matrix @ start))
        missing = square - 2 * z @ b + z @ matrix @ z
        x = z / length[:num]
        combinations.append(
            Combination(target, x, float(np.sqrt(max(missing, 0.0) / square)), float(np.linalg.norm(x)))
        )
    condition = float(values[good].max() / values[good].min()) if good.any() else 1.0
    return Combinations(combinations, condition, int((~good).sum()))


def resolvable_range(tracks: Sequence[Track], step: int) -> tuple[float, float] | None:
    """Return the smallest and largest sigma_rel that snapshots of ``tracks`` resolve after ``step``, or None."""
    considered = np.geomspace(MIN_SIGMA_REL, MAX_SIGMA_REL, _NUM_CONSIDERED).tolist()
    found = zip(considered, find_combinations(tracks, considered, step).combinations)
    stretches = [list(run) for good, run in groupby(found, lambda pair: pair[1].residual <= TOLERANCE) if good]
    longest = max(stretches, key=len, default=None)  # the first of several
    return None if longest is None else (longest[0][0], longest[-1][0])


def refuse_unresolvable(found: Combinations, tracks: Sequence[Track], step: int) -> None:
    """Check that snapshots of ``tracks`` resolve every width of ``found`` after ``step``.

    Raises:
        UserError: naming each that they do not, the range that they do, and how to widen it.
    """
    widths = [combination for combination in found.combinations if isinstance(combination.target, Track)]
    bad = [combination for combination in widths if combination.residual > TOLERANCE]
    if not bad:
        return
    ends = resolvable_range(tracks, step)
    stored = sorted({round(track.sigma_rel, 4) for track in tracks})
    about = f"{len(tracks)} snapshots of sigma_rel {', '.join(f'{w:g}' for w in stored)}"
    resolved = "no sigma_rel" if ends is None else f"sigma_rel {ends[0]:.3g} to {ends[1]:.3g}"
    advice = (
        f"{about} resolve {resolved}. For more, keep snapshots of two profiles, one on either side of the widths in "
        "question (type power, sigma_rel 0.05 and 0.10), and more often (a smaller snapshot_freq)."
    )
    *others, last = [describe_missing(one) for one in bad]
    raise UserError([*others, f"{last} {advice}"])


def describe_missing(one: Combination) -> str:
    """Return why a combination is not used."""
    missing = f"{100 * one.residual:.2g} % of its profile would be missing"
    return f"{one.target.describe()}: {missing}, more than {100 * TOLERANCE:g} %."


@dataclass(frozen=True)
class _Axis:
    """Steps of the updates of all averages: place m is step ``origin + m * stride``, m = 1, 2, ..."""

    origin: int
    stride: int

    @classmethod
    def of(cls, tracks: Sequence[Track | Decay]) -> _Axis:
        """Return one place per update when all are updated at the same steps, else one per step."""
        grids = {(track.start, track.every) for track in tracks}
        return cls(*grids.pop()) if len(grids) == 1 else cls(min(start for start, _ in grids), 1)

    def place(self, track: Track | Decay) -> int:
        """Return the place of the last update."""
        return (track.end - self.origin) // self.stride

    def update(self, grid: tuple[int, int], place: Any) -> Any:
        """Return the number of the update that ``place`` (a number or array) belongs to; below 1 before the first."""
        start, every = grid
        return -((start - self.origin - place * self.stride) // every)


def _products(tracks: Sequence[Track | Decay]) -> Array:
    """Return the exact products of all profiles with each other, (T, T) for T tracks, up to a factor common to all.

    Averages of one gamma and one grid of updates share a profile up to where it ends and its scale: so one walk along
    the axis gives all products as running sums, in memory that does not grow with the run. An average that is updated
    every k steps counts as spread evenly over those, when others are updated at other steps.
    """
    axis = _Axis.of(tracks)
    place = {profile: c for c, profile in enumerate(dict.fromkeys(t.endless for t in tracks))}
    classes, kind = list(place), np.array([place[t.endless] for t in tracks])
    power = np.array([profile.power for profile in classes])
    grids = [(profile.start, profile.every) for profile in classes]
    ends = np.array([axis.place(t) for t in tracks])
    stops = np.unique(ends)
    sums = _running_sums(axis, classes, power, stops)
    number = np.array([[max(1, axis.update(grid, int(stop))) for grid in grids] for stop in stops], dtype=np.float64)
    which, updates = np.searchsorted(stops, ends), np.array([t.updates for t in tracks], dtype=np.float64)
    gram = np.empty((len(tracks), len(tracks)))
    for i in range(len(tracks)):
        # both reach up to where the shorter one ends; the longer one is scaled by its own number of updates
        scale = (number[which[i]][kind] / updates) ** power[kind]
        gram[i] = np.where(which >= which[i], sums[which[i], kind[i], kind] * scale, 0.0)
    return np.where(which[:, None] <= which[None, :], gram, gram.T)


def _running_sums(axis: _Axis, classes: Sequence[Track | Decay], power: Array, stops: NDArray[np.int64]) -> Array:
    """Return (stops, C, C): products of the classes up to each stop, each scaled as if it ended there."""
    grids = [(profile.start, profile.every) for profile in classes]
    sums, now = np.empty((len(stops), len(power), len(power))), np.zeros((len(power), len(power)))
    before = np.ones(len(power))  # number of the last update so far, which the sums are scaled by
    low = 0
    for k, stop in enumerate(stops.tolist()):
        while low < stop:
            high = min(low + CHUNK, stop)
            latest = np.array([max(1, axis.update(grid, high)) for grid in grids], dtype=np.float64)
            shrink = (before / latest) ** power
            part = _profiles(axis, classes, np.arange(low + 1, high + 1), latest)
            now = now * np.outer(shrink, shrink) + part @ part.T
            before, low = latest, high
        sums[k] = now
    return sums


def _profiles(axis: _Axis, classes: Sequence[Track | Decay], places: NDArray[np.int64], latest: Array) -> Array:
    """Return the shares of each class at ``places``, scaled as if it ended with update ``latest``, (C, places)."""
    out = np.zeros((len(classes), len(places)))
    for c, profile in enumerate(classes):
        update = axis.update((profile.start, profile.every), places).astype(np.float64)
        begun = update >= 1
        spread = profile.every / axis.stride
        out[c, begun] = profile.shares_at(update[begun], latest[c]) / spread
    return out
