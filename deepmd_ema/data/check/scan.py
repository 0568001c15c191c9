"""One pass over all numbers of a source: faults, and what the checks compare between frames."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepmd_ema.config.labels import (
    APARAM,
    ATOM_PREF,
    ENERGY,
    FORCE,
    FPARAM,
    LABELS,
    WEIGHTS,
)
from deepmd_ema.data.source import BOX, COORD, Chunk, FrameSource, Place, rows_per
from deepmd_ema.findings import Finding, error
from deepmd_ema.geometry import Array, frame_faults

# angstrom, and share of a cell vector; lengths in files have 4 or more decimals
SAME_CELL = 1e-4
_MAX_NUMBER = 1e30  # size of any number; its square is still a number


class SystemScan:
    """Results of one pass over a source.  F frames, T types.

    Args:
        system: the source.
        num_types: T.

    Attributes:
        system: the source.
        faults: by file and kind.
        bad_frames: frames whose geometry cannot be used.
        outliers: frames far from the others in energy or forces, which the checks of units leave
            out.
        type_counts: (F, T) atoms of each type.
        energy: (F,) eV, NaN where missing.
        isolated: (F,) whether a frame is one atom without neighbors within the cutoff.
        net_force: (F,) length of the sum of the forces, eV/angstrom, NaN where missing.
        force_rms: (F,) eV/angstrom, NaN where missing.
        element_forces: (T, 3) of the forces on each element: number of finite components, sum of
            their squares, and the largest, eV/angstrom.
        ranges: of the labels that metrics show, extensive ones per atom.
        label_frames: number of frames that have each label.
        conditions: smallest and largest value, and numbers per row, of frame and atomic
            parameters.
        open_frames: number of frames without a cell.
        digests: (F,) 64-bit numbers, equal for equal types, positions and cells.
        max_force: (F,) the largest component, eV/angstrom, NaN where missing.
        first: of each label, and of the cell, the numbers of the first frame.
        varying: those that differ between frames.
    """

    def __init__(self, system: FrameSource, num_types: int) -> None:
        num_frames = system.num_frames
        self.system = system
        self.faults: dict[tuple[str, str], Fault] = {}
        self.bad_frames: set[int] = set()
        self.outliers: set[int] = set()
        # 41 bytes for each frame and, for small frames, one per type, so that millions of frames
        # fit into memory
        small = np.min_scalar_type(-int(system.frame_sizes.max(initial=0)) - 1)
        self.type_counts = np.zeros((num_frames, num_types), small)
        self.energy = np.full(num_frames, np.nan)
        self.net_force = np.full(num_frames, np.nan)
        self.force_rms = np.full(num_frames, np.nan)
        self.isolated = np.zeros(num_frames, bool)
        self.element_forces = np.zeros((num_types, 3))
        self.ranges: dict[str, Range] = {}
        self.label_frames: dict[str, int] = {}
        self.conditions: dict[str, tuple[float, float, int]] = {}
        self.open_frames = 0
        self.digests = np.zeros(num_frames, np.uint64)
        self.max_force = np.full(num_frames, np.nan)
        self.first: dict[str, Array] = {}
        self.varying: set[str] = set()

    def findings(self) -> Iterator[Finding]:
        """Yield an error for each fault."""
        for fault in self.faults.values():
            place = fault.place
            more = (
                f" and {fault.num_frames - 1} more frames"
                if fault.num_frames > 1
                else ""
            )
            text = f": frame {place.frame}{more} (of {place.num_frames}, from 0): {fault.text}"
            yield error(place.file, text)


@dataclass
class Fault:
    """A fault of one kind in frames of a file.

    Attributes:
        place: the first frame.
        text: what is wrong there, and what is expected.
        num_frames: frames that have it.
    """

    place: Place
    text: str
    num_frames: int = 0


@dataclass
class Range:
    """Values of a label in many frames.

    Attributes:
        low: smallest finite one; infinite without any.
        high: largest finite one; minus infinity without any.
        squares: sum of the squares of the finite ones.
        count: their number.
        worst: the first frame with the value of the largest size.
    """

    low: float = math.inf
    high: float = -math.inf
    squares: float = 0.0
    count: int = 0
    worst: int = 0

    @classmethod
    def of(cls, parts: Sequence[Range]) -> Range:
        """Return the values of several ranges together."""
        low = min((part.low for part in parts), default=math.inf)
        high = max((part.high for part in parts), default=-math.inf)
        squares = sum(part.squares for part in parts)
        return cls(low, high, squares, sum(part.count for part in parts))

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite values; NaN without any."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    @property
    def size(self) -> float:
        """The largest size of a value."""
        return max(-self.low, self.high)

    def add(self, values: Array, first: int) -> None:
        """Add the values of consecutive frames.

        Args:
            values: (F, numbers).
            first: number of the first of these frames.
        """
        finite = np.isfinite(values)
        sizes = np.where(finite, np.abs(values), -math.inf).max(axis=1)
        if sizes.max() > max(-self.low, self.high):
            self.worst = first + int(sizes.argmax())
        present = values[finite]
        self.low = min(self.low, present.min(initial=math.inf))
        self.high = max(self.high, present.max(initial=-math.inf))
        self.squares += float((present**2).sum())
        self.count += present.size


def scan_system(system: FrameSource, num_types: int, rcut: float) -> SystemScan:
    """Read all numbers of ``system`` once and return what the checks need of them.

    Args:
        system: the source.
        num_types: number of elements of the model.
        rcut: cutoff radius of the model, angstrom: whether neighbors of a frame can be searched
            depends on it.
    """
    scan = SystemScan(system, num_types)
    # numbers that are not finite are reported as faults, and not by warnings of numpy
    with np.errstate(all="ignore"):
        for chunk in system.chunks():
            for row, array, kind, text in _faults_of(chunk, rcut):
                place = system.where(chunk.first + row, array)
                # one fault for all frames of a file that have it, with the first of them
                fault = scan.faults.setdefault((place.file, kind), Fault(place, text))
                fault.num_frames += 1
                if array in (COORD, BOX):
                    scan.bad_frames.add(chunk.first + row)
            _describe(scan, chunk, rcut)
    return scan


def _faults_of(chunk: Chunk, rcut: float) -> Iterator[tuple[int, str, str, str]]:
    """Yield row, array, kind and text of wrong numbers, positions and cells."""
    exists = (chunk.types >= 0)[:, :, None]  # (C, M, 1)
    reported = set[int]()  # rows with positions or cells that are not finite
    for name, array in chunk.arrays.items():
        # "not <=" also finds NaN
        bad = ~(np.abs(array) <= _MAX_NUMBER)
        per = rows_per(name)
        if name in WEIGHTS:
            bad |= array < 0
        if not bad.any():
            continue
        # rows of atoms that do not exist hold anything
        if per == "pair":
            coordinates = exists.repeat(3, axis=1)
            bad &= coordinates & coordinates.transpose(0, 2, 1)
        elif per == "atom":
            bad &= exists
        for k in np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)).tolist():
            first = tuple(np.argwhere(bad[k])[0])
            value = f"{array[k][first]:g}"
            if per == "atom":
                value += f" at atom {first[0]}"
            elif per == "pair":  # three coordinates of each atom
                value += f" at atom {first[0] // 3}"
            numbers = "finite numbers from 0" if name in WEIGHTS else "finite numbers"
            expected = f"Expected {numbers}; remove the frame or compute it again."
            yield k, name, "finite", f"{value}. {expected}"
            if name in (COORD, BOX):
                reported.add(k)
    # the geometry of a frame without numbers has no further faults
    box = chunk.arrays[BOX].reshape(-1, 3, 3) if BOX in chunk.arrays else None
    coord = np.where(exists, chunk.arrays[COORD], 0.0)
    for k, fault in frame_faults(coord, box, exists.sum(axis=(1, 2)), rcut).items():
        if k not in reported:
            yield (
                k,
                COORD if "position" in fault or box is None else BOX,
                "geometry",
                fault,
            )


def _describe(scan: SystemScan, chunk: Chunk, rcut: float) -> None:
    """Add counts, ranges, forces and digests of the frames of ``chunk``, whose faults are known."""
    types = chunk.types
    arrays = chunk.arrays
    first = chunk.first
    rows = slice(first, first + len(types))  # frames of the chunk
    exists = types >= 0  # (C, M)
    num_atoms = exists.sum(axis=1)
    if not exists.all():  # rows of atoms that do not exist hold anything
        arrays = {
            n: np.where(exists[:, :, None], a, 0.0) if rows_per(n) == "atom" else a
            for n, a in arrays.items()
        }
    scan.type_counts[rows] = np.stack(
        [(types == t).sum(axis=1) for t in range(scan.type_counts.shape[1])], axis=1
    )
    scan.open_frames += len(types) * (BOX not in arrays)
    scan.digests[rows] = _digests(chunk)
    scan.isolated[rows] = is_isolated(num_atoms, arrays.get(BOX), rcut)
    for name in (FPARAM, APARAM):
        if name in arrays:
            low, high = scan.conditions.get(name, (math.inf, -math.inf, 0))[:2]
            values = arrays[name]
            low = min(low, values.min())
            high = max(high, values.max())
            scan.conditions[name] = (low, high, values.shape[-1])
    if BOX in arrays:
        cell = scan.first.setdefault(BOX, arrays[BOX][0])
        if not np.allclose(arrays[BOX], cell, rtol=SAME_CELL, atol=SAME_CELL):
            scan.varying.add(BOX)
    for name in (name for name in arrays if name in LABELS):
        label = LABELS[name]
        scan.label_frames[name] = scan.label_frames.get(name, 0) + len(types)
        reference = scan.first.setdefault(name, arrays[name][0])
        if (
            arrays[name].shape[1:] != reference.shape
            or (arrays[name] != reference).any()
        ):
            scan.varying.add(name)
        if any(quantity.metric for quantity in label.errors):
            values = arrays[name]
            if label.per_atom:
                values = np.where(exists[:, :, None], values, np.nan)
            values = values.reshape(len(types), -1)  # (C, numbers)
            values = values / (num_atoms[:, None] if label.extensive else 1)
            scan.ranges.setdefault(name, Range()).add(values, first)
    if ENERGY in arrays:
        scan.energy[rows] = arrays[ENERGY][:, 0]
    if FORCE in arrays:
        force = arrays[FORCE]  # (C, M, 3)
        finite = np.isfinite(force[exists])
        sizes = np.where(finite, np.abs(force[exists]), 0.0)
        for column, values in enumerate((finite.sum(axis=1), (sizes**2).sum(axis=1))):
            scan.element_forces[:, column] += np.bincount(
                types[exists], values, len(scan.element_forces)
            )
        np.maximum.at(
            scan.element_forces[:, 2], types[exists], sizes.max(axis=1, initial=0.0)
        )
        scan.net_force[rows] = np.linalg.norm(force.sum(axis=1), axis=1)
        scan.force_rms[rows] = np.sqrt((force**2).sum(axis=(1, 2)) / (3 * num_atoms))
        scan.max_force[rows] = np.abs(force).max(axis=(1, 2))
        if ATOM_PREF in arrays:  # forces of weight 0 may be unknown
            unknown = first + np.flatnonzero(
                ((arrays[ATOM_PREF] == 0) & exists[:, :, None]).any(axis=(1, 2))
            )
            for values in (scan.net_force, scan.force_rms, scan.max_force):
                values[unknown] = np.nan


def is_isolated(num_atoms: Array, box: Array | None, rcut: float) -> Array:
    """Return (F,) which frames are one atom farther than ``rcut`` from its images."""
    single: Array = num_atoms == 1
    if box is not None and single.any():
        cell = box[single].reshape(-1, 3, 3)
        # distance of the nearest opposite faces, which no image is nearer than
        faces = np.linalg.norm(
            np.cross(cell[:, [1, 2, 0]], cell[:, [2, 0, 1]]), axis=2
        ).max(axis=1)
        single[single] = np.abs(np.linalg.det(cell)) > rcut * faces
    return single


def _digests(chunk: Chunk) -> Array:
    """Return 64-bit numbers (C,) that are equal for equal types, positions and cells."""
    # in float32: one system may have a frame in double precision and another one in single
    # precision; -0 + 0 is 0
    types = chunk.types.astype(np.int32)
    coord = chunk.arrays[COORD].astype(np.float32) + np.float32(0)
    boxes = (
        [chunk.arrays[BOX].astype(np.float32) + np.float32(0)]
        if BOX in chunk.arrays
        else []
    )
    exists = types >= 0
    if exists.all():
        arrays = (
            np.ascontiguousarray(array).reshape(len(types), -1)
            for array in (types, coord, *boxes)
        )
        contents: Iterable[Any] = iter(
            np.concatenate([array.view(np.uint8) for array in arrays], axis=1)
        )
    else:
        # only atoms that exist: how far frames are padded depends on where they are stored
        rows = zip(exists, types, coord, *boxes)
        contents = (
            b"".join((t[e].tobytes(), c[e].tobytes(), *(b.tobytes() for b in box)))
            for e, t, c, *box in rows
        )
    digests = b"".join(
        hashlib.blake2b(content, digest_size=8).digest() for content in contents
    )
    return np.frombuffer(digests, np.uint64)
