"""One pass over all numbers of a system: what is broken, and what the frames are like."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from deepmd_ema.data.folder import StoredArray
from deepmd_ema.data.npy import FrameSet, System
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL

Array: TypeAlias = np.ndarray

_NUMBERS_AT_ONCE = 4_000_000  # of one array, so that a data set need not fit in memory
_FLAT_CELL = 1e-6  # volume over product of the lengths
_SMALL_STEP = 0.25  # angstrom, most that an atom may move between two frames for their work to be counted


@dataclass
class Range:
    """Least and largest of a quantity, its mean square, and where the largest magnitude is."""

    low: float = math.inf
    high: float = -math.inf
    sum_squares: float = 0.0
    count: int = 0
    largest_frame: int = -1

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.sqrt(self.sum_squares / self.count) if self.count else math.nan

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high)) if self.count else 0.0

    def add(self, values: Array, first_frame: int) -> None:
        """Take in ``values`` (frames, numbers), of frames from ``first_frame`` on; NaN are passed over."""
        finite = np.isfinite(values)
        if not finite.any():
            return
        known = np.where(finite, values, 0.0)
        before = self.largest
        self.low = min(self.low, float(values[finite].min()))
        self.high = max(self.high, float(values[finite].max()))
        self.sum_squares += float((known**2).sum())
        self.count += int(finite.sum())
        if self.largest > before or self.largest_frame < 0:
            self.largest_frame = first_frame + int(np.abs(known).max(axis=1).argmax())

    def merge(self, other: Range) -> None:
        """Take in another range, whose frame number is then lost."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.sum_squares += other.sum_squares
        self.count += other.count


@dataclass
class SystemScan:
    """What one pass over a system found.  F frames, T types.

    Attributes:
        system: which.
        problems: broken numbers, with file and frame.
        bad_frames: frames whose geometry cannot be used.
        type_counts: (F, T) atoms of each type.
        energy: (F,) eV, NaN where missing.
        net_force: (F,) length of the sum of the forces, eV/angstrom, NaN where missing.
        force_rms: (F,) eV/angstrom, NaN where missing.
        ranges: of energy per atom, force and virial per atom, by label.
        label_frames: number of frames that have each label.
        digests: one per frame, equal for equal types, positions and cells.
        work: pairs of frames close to each other: energy difference and work of the forces between them, eV.
    """

    system: System
    problems: list[str]
    bad_frames: set[int]
    type_counts: Array
    energy: Array
    net_force: Array
    force_rms: Array
    ranges: dict[str, Range] = field(default_factory=dict)
    label_frames: dict[str, int] = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    work: list[tuple[float, float]] = field(default_factory=list)


def scan_system(system: System, num_types: int) -> SystemScan:
    """Return what a pass over all numbers of ``system`` finds."""
    frames = system.num_frames
    scan = SystemScan(
        system=system,
        problems=[],
        bad_frames=set(),
        type_counts=np.zeros((frames, num_types), np.int64),
        energy=np.full(frames, np.nan),
        net_force=np.full(frames, np.nan),
        force_rms=np.full(frames, np.nan),
    )
    with np.errstate(all="ignore"):  # broken numbers are told by name, not by warnings of their arithmetic
        for part in system.sets:
            _scan_set(scan, part)
    return scan


def rows_at_once(natoms: int) -> int:
    """Return how many frames to read at a time."""
    return max(1, _NUMBERS_AT_ONCE // (3 * natoms))


@dataclass
class _Broken:
    """Rows of one array that have something wrong, told as one message."""

    array: StoredArray
    what: Callable[[Array], str]
    rows: list[int] = field(default_factory=list)
    first: str = ""

    def add(self, rows: Array, offset: int, values: Array) -> None:
        if len(rows) and not self.rows:
            self.first = self.what(values[rows[0]])
        self.rows += [int(r) + offset for r in rows]

    def message(self) -> str:
        more = f" and {len(self.rows) - 1} more frames" if len(self.rows) > 1 else ""
        return f"{self.array.name}: frame {self.rows[0]}{more} (of {self.array.shape[0]}, from 0): {self.first}"


def _scan_set(scan: SystemScan, part: FrameSet) -> None:
    system = scan.system
    broken = {
        name: _Broken(array, lambda row: _describe_nonfinite(row, system.natoms)) for name, array in part.arrays.items()
    }
    flat = _Broken(part.arrays["box"], _describe_flat) if system.periodic else None
    for label in part.arrays:
        if label in system.labels:
            scan.label_frames[label] = scan.label_frames.get(label, 0) + part.num_frames
    for start, stop in _chunks(part, system.natoms):
        types = system.types(part, start, stop)
        values = {name: array.read(start, stop).astype(np.float64) for name, array in part.arrays.items()}
        bad = np.zeros(stop - start, bool)
        for name, value in values.items():
            rows = ~np.isfinite(_real_only(value, types, system.natoms)).all(axis=1)
            broken[name].add(np.flatnonzero(rows), start, value)
            if name in ("coord", "box"):
                bad |= rows
        if flat is not None:
            no_volume = _has_no_volume(values["box"])
            flat.add(np.flatnonzero(no_volume), start, values["box"])
            bad |= no_volume
        first = part.first + start
        scan.bad_frames |= {first + int(k) for k in np.flatnonzero(bad)}
        _describe(scan, types, values, first)
    scan.problems += [b.message() for b in [*broken.values(), *([flat] if flat else [])] if b.rows]


def _describe(scan: SystemScan, types: Array, values: dict[str, Array], first: int) -> None:
    frames, natoms = types.shape
    here = slice(first, first + frames)
    real = types >= 0
    num_atoms = real.sum(axis=1)
    scan.type_counts[here] = np.stack([(types == t).sum(axis=1) for t in range(scan.type_counts.shape[1])], axis=1)
    for label in (ENERGY, VIRIAL):
        if label in values:
            scan.ranges.setdefault(label, Range()).add(values[label] / num_atoms[:, None], first)
    if ENERGY in values:
        scan.energy[here] = values[ENERGY][:, 0]
    force = None
    if FORCE in values:
        force = np.where(real[:, :, None], values[FORCE].reshape(frames, natoms, 3), 0.0)
        scan.ranges.setdefault(FORCE, Range()).add(force.reshape(frames, -1), first)
        scan.net_force[here] = np.linalg.norm(force.sum(axis=1), axis=1)
        scan.force_rms[here] = np.sqrt((force**2).sum(axis=(1, 2)) / (3 * num_atoms))
    scan.digests += _digests(types, values)
    if force is not None and ENERGY in values:
        scan.work += _work(types, values, force)


def _work(types: Array, values: dict[str, Array], force: Array) -> list[tuple[float, float]]:
    """Return energy differences and works of the forces between frames that follow each other closely."""
    frames, natoms = types.shape
    coord = values["coord"].reshape(frames, natoms, 3)
    step = np.where((types[1:] >= 0)[:, :, None], np.diff(coord, axis=0), 0.0)
    near = (types[1:] == types[:-1]).all(axis=1)
    if "box" in values:
        box = values["box"].reshape(frames, 3, 3)
        near &= (np.abs(np.diff(box, axis=0)) < 1e-6).all(axis=(1, 2)) & (np.abs(np.linalg.det(box[1:])) > 0)
        step[near] -= np.round(step[near] @ np.linalg.inv(box[1:][near])) @ box[1:][near]
    size = np.linalg.norm(step, axis=2).max(axis=1, initial=0.0)
    near &= (size > 0) & (size < _SMALL_STEP)
    work = -0.5 * ((force[1:] + force[:-1]) * step).sum(axis=(1, 2))
    rise = np.diff(values[ENERGY][:, 0])
    use = near & np.isfinite(work) & np.isfinite(rise)
    return list(zip(rise[use].tolist(), work[use].tolist()))


def _digests(types: Array, values: dict[str, Array]) -> list[bytes]:
    # in float32: the same frame may stand in one file in double and in another in single precision
    parts = [types.astype(np.int32), values["coord"].astype(np.float32) + np.float32(0)]
    if "box" in values:
        parts.append(values["box"].astype(np.float32) + np.float32(0))
    return [
        hashlib.blake2b(b"".join(p[k].tobytes() for p in parts), digest_size=16).digest() for k in range(len(types))
    ]


def _chunks(part: FrameSet, natoms: int) -> Iterator[tuple[int, int]]:
    step = rows_at_once(natoms)
    for start in range(0, part.num_frames, step):
        yield start, min(start + step, part.num_frames)


def _real_only(value: Array, types: Array, natoms: int) -> Array:
    if value.shape[1] % natoms or (types >= 0).all():
        return value
    return np.where((types >= 0)[:, :, None], value.reshape(len(value), natoms, -1), 0.0).reshape(value.shape)


def _has_no_volume(box: Array) -> Array:
    cells = box.reshape(-1, 3, 3)
    lengths = np.linalg.norm(cells, axis=2).prod(axis=1)
    return np.abs(np.linalg.det(cells)) <= _FLAT_CELL * lengths


def _describe_nonfinite(row: Array, natoms: int) -> str:
    place = int(np.flatnonzero(~np.isfinite(row))[0])
    atom = f" at atom {place // (len(row) // natoms)}" if len(row) % natoms == 0 and len(row) > 9 else ""
    return f"{row[place]}{atom}. Expected finite numbers; remove the frame or compute it again."


def _describe_flat(row: Array) -> str:
    cell = " ".join(f"{v:g}" for v in row)
    return f"the cell has no volume ({cell}). For open boundaries add an empty file nopbc to the system."
