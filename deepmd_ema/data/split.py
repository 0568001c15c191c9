"""Validation frames split off from training frames.

Every kind of calculation is in both parts, and near copies are in one.

Frames are known by some twenty numbers each that do not depend on the order of atoms, translation
and rotation. The cost is one pass over the positions, about F log F comparisons for F frames, and
some hundred bytes for each frame.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise, product
from typing import NamedTuple

import numpy as np

from deepmd_ema.config.labels import FORCE
from deepmd_ema.data.check.suspects import NEAR_COPIES, NEAR_TEST, Suspects, name_of
from deepmd_ema.data.formats.properties import KIND_NAMES, describe_singles
from deepmd_ema.data.sampler import permutation
from deepmd_ema.data.source import BOX, COORD, Chunk, FrameSource
from deepmd_ema.errors import DataError
from deepmd_ema.findings import Finding, warning
from deepmd_ema.geometry import Array
from deepmd_ema.text import counted, first_few
from deepmd_ema.utils import seed_for

_COPY = 1e-4  # angstrom; frames nearer than this are copies of each other
# share of the distance of two frames drawn at random: nearer frames are near copies, wherever they
# are
_NEAR = 0.05
_NEXT = 0.5  # the same for frames that follow each other, of which far fewer are so near by chance
_PAIRS = 256  # pairs of frames drawn at random to find that distance
# each frame is compared with the next _WINDOW frames in the order of each of _COLUMNS numbers, the
# numbers that vary most, in place of F**2 comparisons
_WINDOW = 4
_COLUMNS = 3
_MIN_CUT = 10  # a trajectory of fewer different frames is not cut in two
_MAX_RMS_RATIO = 2.0  # ratio of the force RMS of the two parts
_MAX_KINDS = 16  # kinds that one line names
# half of the vectors of whole numbers from -1 to 1, as a wave vector and its negative have
# structure factors of the same size
_WAVES = np.array([h for h in product((-1, 0, 1), repeat=3) if h > (0, 0, 0)])
# combinations of cell vectors whose six lengths determine the cell but for its orientation
_EDGES = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])
_NUMBERS = len(_WAVES) + len(_EDGES)


class Stratum(NamedTuple):
    """Frames that are split on their own: of a named kind, or of a file and a composition.

    Attributes:
        kind: kind of calculation; empty where the data name none.
        place: number of the file or system; empty for all.
        composition: of the frames; empty for all.
    """

    kind: str
    place: str = ""
    composition: str = ""


@dataclass
class FrameTable:
    """Properties of frames that a split needs, in their order.

    Attributes:
        kinds: name of the kind of calculation of each frame; empty where the data name none.
        places: number of the file or system of each frame.
        compositions: atoms of each type of each frame, as bytes, and whether it is periodic.
        points: (frames, 19) float32 arrays, angstrom, of ``describe_frames``.
        forces: (frames, 2) arrays: sum of squares of force components, and their number.
    """

    kinds: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    compositions: list[tuple[bytes, bool]] = field(default_factory=list)
    points: list[Array] = field(default_factory=list)
    forces: list[Array] = field(default_factory=list)

    def add(
        self,
        chunks: Iterable[Chunk],
        num_types: int,
        kinds: Sequence[str] | None = None,
    ) -> None:
        """Add the frames of a file or system, with arrays ``coord``, ``box`` and ``force``."""
        for chunk in chunks:
            exists, periodic = chunk.types >= 0, BOX in chunk.arrays
            self.points.append(describe_frames(chunk, num_types))
            self.forces.append(np.zeros((len(exists), 2)))
            if FORCE in chunk.arrays:
                squares = np.where(
                    exists, (chunk.arrays[FORCE] ** 2).sum(axis=2), 0.0
                ).sum(axis=1)
                self.forces[-1] = np.stack([squares, 3.0 * exists.sum(axis=1)], axis=1)
            for types in chunk.types:
                counts = np.bincount(types[types >= 0], minlength=num_types)
                self.compositions.append((counts.astype(np.int32).tobytes(), periodic))
        new = len(self.compositions) - len(self.kinds)
        self.kinds += [""] * new if kinds is None else kinds
        self.places += [self.places[-1] + 1 if self.places else 0] * new


class Split(NamedTuple):
    """A choice of frames for validation, in JSON values.

    Attributes:
        num_frames: frames in all.
        chosen: numbers of those for validation.
        lines: what went where, for the user.
        force_rms: of training and of validation frames, eV/angstrom; empty if unknown.
    """

    num_frames: int
    chosen: list[int]
    lines: list[str]
    force_rms: list[float]

    def findings(self) -> Iterator[Finding]:
        """Yield a warning if the forces of the two parts differ in size."""
        if not self.force_rms:
            return
        training, validation = self.force_rms
        if not max(self.force_rms) < _MAX_RMS_RATIO * min(self.force_rms):
            yield warning(
                "",
                f"force RMS is {training:.3g} eV/angstrom in training and {validation:.3g} "
                "in validation: their errors are of different kinds of frames. Try another seed "
                "or a larger fraction, or name the kinds of frames "
                f"({KIND_NAMES[0]} in extended XYZ).",
            )

    @property
    def mask(self) -> Array:
        """(num_frames,) whether each frame is for validation."""
        return np.isin(np.arange(self.num_frames), self.chosen)

    @property
    def digest(self) -> str:
        """Hash of the chosen frames."""
        content = str(self.num_frames).encode() + np.packbits(self.mask).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


def split_frames(table: FrameTable, fraction: float, seed: int) -> Split:
    """Return a choice of about ``fraction`` of the frames for validation.

    The choice is a function of the arguments alone.
    Each kind of calculation is split on its own; where the data name none, or name single frames,
    each composition in each file or system.
    Near copies come to one part; a trajectory that is nearly all of its kind is cut once, and its
    end is for validation. A kind with one structure is for training, and so are single structures
    of a composition, unless there are many, and frames with an element that no other frame has.

    Raises:
        DataError: if one of the parts is empty.
    """
    singles = describe_singles(table.kinds)
    strata: list[Stratum] = [
        Stratum(kind)
        if kind and not singles
        else Stratum("", f"{place:08d}", f"{composition.hex()} {periodic}")
        for kind, place, (composition, periodic) in zip(
            table.kinds, table.places, table.compositions
        )
    ]
    # Copies: for each frame the first that it is a copy of, among all frames of a composition.
    # Clusters: sets of near copies within a stratum, in the order of the frames.
    points = np.concatenate([np.zeros((0, _NUMBERS), np.float32), *table.points])
    pairs = [np.zeros((2, 0), np.int64)]
    pairs += [
        _near_pairs(points, members, _COPY)
        for members in _groups(table.compositions).values()
    ]
    copies = _joined(len(points), np.concatenate(pairs, axis=1))
    for members in _groups(list(zip(strata, table.compositions))).values():
        scale = _scale(points, members)
        pairs.append(_near_pairs(points, members, _NEAR * scale))
        numbers = np.array(members)
        places = np.array([table.places[k] for k in members])
        distance = np.linalg.norm(np.diff(points[members], axis=0), axis=1)
        following = np.stack([numbers[:-1], numbers[1:]])
        # the next frame of the stratum, if it is of the same file or system
        pairs.append(
            following[:, (distance < _NEXT * scale) & (places[1:] == places[:-1])]
        )
    clusters = list(
        _groups(_joined(len(points), np.concatenate(pairs, axis=1)).tolist()).values()
    )
    # A stratum of one cluster can be split only by cutting it. Such strata of one composition are
    # joined over all files. Short clusters whose composition no other cluster has are joined by
    # kind; where they are too few to give a validation frame, they are for training.
    num_of_composition = Counter(table.compositions[cluster[0]] for cluster in clusters)
    num_of_stratum = Counter(strata[cluster[0]] for cluster in clusters)
    divided: dict[Stratum, list[list[int]]] = {}
    for cluster in clusters:
        stratum = strata[cluster[0]]
        lone = (
            num_of_composition[table.compositions[cluster[0]]] == 1
            and len(_groups(copies[cluster].tolist())) < _MIN_CUT
        )
        if lone:
            stratum = Stratum(stratum.kind, "", "lone")
        elif num_of_stratum[stratum] == 1:
            stratum = stratum._replace(place="")
        divided.setdefault(stratum, []).append(cluster)
    chosen = np.zeros(len(strata), bool)
    seen = 0
    for stratum, sets in sorted(divided.items()):
        if stratum.composition == "lone" and len(sets) * fraction < 1:
            continue
        # The next stratum makes up for the rounding of this one, within one frame, so that the
        # fraction is right over all strata.
        number = sum(map(len, sets))
        seen += number
        least, most = math.floor(fraction * number), math.ceil(fraction * number)
        wanted = min(max(round(fraction * seen) - int(chosen.sum()), least), most)
        order = permutation(
            len(sets), seed_for(f"validation of {'/'.join(stratum)}", seed)
        )
        chosen[_taken([sets[k] for k in order], copies, wanted, fraction)] = True
    # frames that have an element which no training frame has are for training
    present = np.array(
        [np.frombuffer(counts, np.int32) > 0 for counts, _ in table.compositions]
    )
    trained = present[~chosen].any(axis=0)
    for cluster in clusters:
        if chosen[cluster].any() and (present[cluster[0]] & ~trained).any():
            chosen[cluster] = False
            trained |= present[cluster[0]]
    if not 0 < chosen.sum() < len(chosen):
        raise DataError(
            f"{counted(len(chosen), 'frame')} of {counted(len(clusters), 'different structure')} "
            f"leave none for one of the parts with a fraction of {fraction:g}. Use more frames or "
            "another fraction, or give validation data."
        )
    head = (
        f"validation: {chosen.sum():,} of {counted(len(chosen), 'frame')} (fraction {fraction:g}, "
        f"seed {seed})"
    )
    return Split(
        len(chosen),
        np.flatnonzero(chosen).tolist(),
        *_describe_parts(head, table, chosen),
    )


def find_near_copies(
    parts: Sequence[Sequence[FrameSource]], num_types: int
) -> dict[str, Suspects]:
    """Return frames of validation and of test data that are near copies of training frames.

    Copies are among them. They are listed by the names of these checks. Frames are compared that
    follow each other closely in the order of a number, so some may be missed.

    Args:
        parts: sources of training, validation and test data.
        num_types: number of elements.
    """
    sources = [source for part in parts for source in part]
    table = FrameTable()
    for source in sources:
        table.add(source.chunks((COORD, BOX)), num_types)
    points = np.concatenate([np.zeros((0, _NUMBERS), np.float32), *table.points])
    starts = np.cumsum(
        [0, *(sum(source.num_frames for source in part) for part in parts)]
    ).tolist()
    ends = np.cumsum([0, *(source.num_frames for source in sources)])
    checks = dict[str, Suspects]()
    copy_of: dict[int, int] = {}
    for members in _groups(table.compositions).values():
        bound = max(_COPY, _NEAR * _scale(points, members))
        low, high = np.sort(_near_pairs(points, members, bound), axis=0)
        # training frames have the lowest numbers: pairs of one of them and another part's
        across = (low < starts[1]) & (high >= starts[1])
        copy_of |= dict(zip(high[across].tolist(), low[across].tolist()))
    for check, (start, stop) in zip((NEAR_COPIES, NEAR_TEST), pairwise(starts[1:])):
        near = sorted(frame for frame in copy_of if start <= frame < stop)
        named = [
            f"{name_of(sources, frame)} is near {name_of(sources, copy_of[frame])}"
            for frame in near[:1]
        ]
        by_system = tuple(np.histogram(near, ends)[0].tolist()) if sources else ()
        checks[check] = Suspects(by_system, stop - start, named)
    return checks


def describe_frames(chunk: Chunk, num_types: int) -> Array:
    """Return (C, 19) float32 numbers, angstrom, whose differences are small for near copies.

    Of periodic frames the sizes of 13 structure factors, each times the distance of its planes, and
    lengths of the cell; of open ones the moments of the distances from four reference points
    (ultrafast shape recognition).
    """
    exists = chunk.types >= 0
    # atoms of different types have different weights, so that exchanged atoms make another frame;
    # the weight of a type is the same in every chunk, so that copies are found across files
    weight = exists * (1.0 + chunk.types / num_types)
    coord = np.where(exists[..., None], chunk.arrays[COORD], 0.0)
    out = np.zeros((len(coord), _NUMBERS), np.float32)
    if BOX not in chunk.arrays:
        rows = np.arange(len(coord))
        total = weight.sum(axis=1, keepdims=True)
        total = np.where(total > 0, total, 1.0)
        # the first reference point is the center; (C, 3)
        point = (weight[..., None] * coord).sum(axis=1) / total
        for reference in range(4):
            distance = np.linalg.norm(coord - point[:, None], axis=2)
            mean = (weight * distance).sum(axis=1) / total[:, 0]
            away = distance - mean[:, None]
            variance, third = (
                (weight * away**k).sum(axis=1) / total[:, 0] for k in (2, 3)
            )
            out[:, 3 * reference : 3 * reference + 3] = np.stack(
                [mean, np.sqrt(variance), np.cbrt(third)], axis=1
            )
            # the next points: the atom nearest to the center, the one farthest from the center, and
            # the one farthest from the latter
            if reference == 0:
                nearest = np.where(weight > 0, distance, np.inf).argmin(axis=1)
            if reference != 1:
                farthest = np.where(weight > 0, distance, -np.inf).argmax(axis=1)
            point = coord[rows, nearest if reference == 0 else farthest]
        return out
    box = chunk.arrays[BOX].reshape(-1, 3, 3)
    # a frame with a cell without volume is refused later; here its inverse must not fail
    box = np.where(np.abs(np.linalg.det(box))[:, None, None] > 0, box, np.eye(3))
    inverse = np.linalg.inv(box)
    phases = np.exp(2j * np.pi * (coord @ inverse))
    phases = np.stack(
        [phases.conj(), np.ones_like(phases), phases]
    )  # (-1 0 1, C, M, 3)
    root = np.sqrt(np.maximum(1, exists.sum(axis=1)))
    for column, wave in enumerate(_WAVES):
        waves = np.prod(
            [phases[h + 1, :, :, axis] for axis, h in enumerate(wave)], axis=0
        )
        # A displacement u of an atom changes its phase by 2 pi u / spacing, so that the product
        # below is a length. The root makes it as large for frames of any number of atoms.
        spacing = 1 / np.linalg.norm(inverse @ wave, axis=1)
        out[:, column] = (
            np.abs((weight * waves).sum(axis=1)) / root * spacing / (2 * np.pi)
        )
    out[:, len(_WAVES) :] = np.linalg.norm(_EDGES @ box, axis=2) / math.sqrt(12)
    return out


def _joined(number: int, pairs: Array) -> Array:
    """Return for each of ``number`` frames the first of those to which pairs (2, P) join it."""
    # labels of connected components: each round takes the smaller label along all pairs, and then
    # the label of the label, so that long chains take few rounds
    first = np.arange(number)
    while True:
        a, b = first[pairs]
        joined = first.copy()
        for end in (a, b):
            np.minimum.at(joined, end, np.minimum(a, b))
        joined = joined[joined]
        if (joined == first).all():
            return first
        first = joined


def _groups(keys: Sequence[object]) -> dict[object, list[int]]:
    groups: dict[object, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return groups


def _scale(points: Array, members: Sequence[int]) -> float:
    """Return the median distance of two frames drawn at random, angstrom."""
    if len(members) < 2:
        return 0.0
    order = [permutation(len(members), 0, k) for k in range(2)]
    a, b = (np.resize(np.array(members)[o], _PAIRS) for o in order)
    distance = np.linalg.norm(points[a] - points[b], axis=1)[a != b]
    return float(np.median(distance)) if len(distance) else 0.0


def _near_pairs(points: Array, members: Sequence[int], bound: float) -> Array:
    """Return pairs of frames (2, P) nearer than ``bound``.

    Frames are compared that follow each other in the order of a number.
    """
    frames = np.array(members)
    pairs = [np.zeros((2, 0), np.int64)]
    columns = np.argsort(-points[frames].var(axis=0), kind="stable")[:_COLUMNS]
    for column in columns:
        order = frames[np.argsort(points[frames, column], kind="stable")]
        for step in range(1, min(_WINDOW, len(frames) - 1) + 1):
            a = order[:-step]
            b = order[step:]
            is_near = np.linalg.norm(points[a] - points[b], axis=1) < bound
            pairs.append(np.stack([a, b])[:, is_near])
    return np.concatenate(pairs, axis=1)


def _taken(
    clusters: Sequence[list[int]], copies: Array, wanted: int, fraction: float
) -> list[int]:
    """Return about ``wanted`` frames of one stratum: whole clusters, and the ends of large ones."""
    taken = list[int]()
    whole = list[list[int]]()
    for cluster in clusters:
        if len(cluster) <= wanted and len(clusters) > 1:
            whole.append(cluster)
            continue
        # a trajectory that is longer than wanted gives its end, as frames far apart in time are
        # least alike; copies of one frame stay together
        units = list(_groups(copies[cluster].tolist()).values())
        end = list[int]()
        for unit in reversed(units if len(units) >= _MIN_CUT else []):
            if len(end) + len(unit) > round(fraction * len(cluster)):
                break
            end += [cluster[k] for k in unit]
        taken += end
    rest = len(whole) - (len(whole) == len(clusters))  # one cluster stays in training
    for cluster in whole[:rest]:
        if len(taken) + len(cluster) <= wanted:
            taken += cluster
    return taken


def _describe_parts(
    head: str, table: FrameTable, chosen: Array
) -> tuple[list[str], list[float]]:
    """Return lines about the two parts, ``head`` first, and their force RMS in eV/angstrom."""
    lines = [head]
    force_rms = list[float]()
    names = [kind or "without a name" for kind in table.kinds]
    named = Counter(names)
    singles = describe_singles(table.kinds)
    if set(table.kinds) != {""} and not singles:
        taken = Counter(compress(names, chosen))
        split = [
            f"{kind} {taken[kind]} of {n:,}" for kind, n in named.items() if taken[kind]
        ]
        whole = [
            f"{kind} ({counted(n, 'frame')})"
            for kind, n in named.items()
            if not taken[kind]
        ]
        lines.append(f"  by {' or '.join(KIND_NAMES)}: {first_few(split, _MAX_KINDS)}")
        if whole:
            lines.append(f"  in training alone: {first_few(whole, _MAX_KINDS)}")
    else:
        if singles:
            lines.append(f"  {singles}")
        lines.append(
            "  at random in each composition of each file or system, near copies in one part"
        )
    squares = np.concatenate(table.forces)
    sums = np.stack([squares[~chosen].sum(axis=0), squares[chosen].sum(axis=0)])
    # the check of the data names forces that are not finite
    if sums[:, 1].all() and np.isfinite(sums).all():
        force_rms = np.sqrt(sums[:, 0] / sums[:, 1]).tolist()
        training, validation = force_rms
        lines.append(
            f"  force RMS (eV/angstrom): {training:.3g} in training, {validation:.3g} in validation"
        )
    return lines, force_rms
