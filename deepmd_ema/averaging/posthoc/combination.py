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

from deepmd_ema.averaging.posthoc.profiles import CHUNK, Array, Decay, Track, first_grid
from deepmd_ema.config.schema.averaging import gamma_of
from deepmd_ema.errors import UserError

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

    @property
    def is_resolved(self) -> bool:
        """Whether the snapshots resolve the target."""
        return self.residual <= TOLERANCE

    def describe_missing(self) -> str:
        """Return why it is not used."""
        missing = f"{100 * self.residual:.2g} % of its profile would be missing"
        return f"{self.target.describe()}: {missing}, more than {100 * TOLERANCE:g} %"


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
    bad = [one for one in found.combinations if isinstance(one.target, Track) and not one.is_resolved]
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
    *others, last = [f"{one.describe_missing()}." for one in bad]
    raise UserError([*others, f"{last} {advice}"])


def _products(tracks: Sequence[Track | Decay]) -> Array:
    """Return the exact products of all profiles with each other, (T, T) for T tracks, up to a factor common to all.

    Averages of one gamma and one grid of updates share a profile up to where it ends and its scale: so one walk along
    the axis gives all products as running sums, in memory that does not grow with the run. An average that is updated
    every k steps counts as spread evenly over those, when others are updated at other steps.
    """
    # place m of the axis is step origin + m * stride, m = 1, 2, ...: one per update when all are updated at the same
    # steps, else one per step
    grids = {(track.start, track.every) for track in tracks}
    origin, stride = grids.pop() if len(grids) == 1 else (min(track.start for track in tracks), 1)
    classes = list(dict.fromkeys(track.endless for track in tracks))
    kind = np.array([classes.index(track.endless) for track in tracks])
    power = np.array([profile.power for profile in classes])
    ends = np.array([(track.end - origin) // stride for track in tracks])
    stops = np.unique(ends)

    def update(profile: Track | Decay, place: Any) -> Any:  # its number at a place; below 1 before the first
        return -((profile.start - origin - place * stride) // profile.every)

    # products of the classes up to each stop, each scaled as if it ended there
    sums, now = np.empty((len(stops), len(classes), len(classes))), np.zeros((len(classes), len(classes)))
    number, latest = np.empty((len(stops), len(classes))), np.ones(len(classes))
    low = 0
    for k, stop in enumerate(stops.tolist()):
        while low < stop:
            high, before = min(low + CHUNK, stop), latest
            latest = np.array([max(1, update(profile, high)) for profile in classes], dtype=np.float64)
            part, places = np.zeros((len(classes), high - low)), np.arange(low + 1, high + 1)
            for c, profile in enumerate(classes):
                each = update(profile, places).astype(np.float64)
                begun = each >= 1
                part[c, begun] = profile.shares_at(each[begun], latest[c]) / (profile.every / stride)
            shrink = (before / latest) ** power
            now, low = now * np.outer(shrink, shrink) + part @ part.T, high
        sums[k], number[k] = now, [max(1, update(profile, stop)) for profile in classes]
    which, updates = np.searchsorted(stops, ends), np.array([t.updates for t in tracks], dtype=np.float64)
    gram = np.empty((len(tracks), len(tracks)))
    for i in range(len(tracks)):
        # both reach up to where the shorter one ends; the longer one is scaled by its own number of updates
        scale = (number[which[i]][kind] / updates) ** power[kind]
        gram[i] = np.where(which >= which[i], sums[which[i], kind[i], kind] * scale, 0.0)
    return np.where(which[:, None] <= which[None, :], gram, gram.T)
