"""Frames that a user should look at: copies, outliers, placeholders, and net forces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from deepmd_ema.config.labels import (
    ATOM_DIPOLE,
    ATOM_POLAR,
    ENERGY,
    FORCE,
    LABELS,
    VIRIAL,
)
from deepmd_ema.data.check.bonds import (
    COVALENT_RADII,
    MIN_CONTACT,
    bonds_by_elements,
    nearest_bonds,
)
from deepmd_ema.data.check.identities import ENERGY_UNITS, FORCE_UNITS
from deepmd_ema.data.check.scan import SystemScan
from deepmd_ema.data.source import Frame, FrameSource, evenly_spaced
from deepmd_ema.errors import DataError
from deepmd_ema.findings import ERROR, WARNING, Finding, note, warning
from deepmd_ema.geometry import Array, find_pairs_once, traceless
from deepmd_ema.text import counted, first_few
from deepmd_ema.utils import even_places

_TENSORS_LOOKED_AT = 30  # frames
# robust standard deviations of a system; strained cells are many of them from cells at rest
OUTLIER_SIGMAS = 15.0
OUTLIER_ENERGY = (
    0.2  # eV/atom; a smaller residual is no outlier: near copies have no spread
)
FAR_ENERGY = 1.0  # eV/atom; a larger residual is one
# Systems are compared with each other. Cohesive energies are at most 8.9 eV/atom (tungsten), and
# atoms that repel each other have forces that lead to a minimum within about an angstrom.
_FAR_SYSTEM = 20.0  # eV/atom, difference of medians of systems
_NEAR_MINIMUM = 1.0  # angstrom
# share to the factor of a unit that is named: energies of systems of one composition are nearer
_NEAR_UNIT = 0.05
_IN_UNITS = {f" as in {unit}": number for unit, number in ENERGY_UNITS.items()}
_IN_UNITS |= {
    f" as if the others were in {unit}": 1 / number
    for unit, number in ENERGY_UNITS.items()
}
_BONDED = 1.3  # angstrom; the median length of bonds that have these constants
_MIN_ATOMS = 8  # of a system whose energies are compared with energies per atom
# Force constants of bonds, eV/angstrom^2, as molecules have them (Wilson, Decius and Cross,
# Molecular Vibrations, 1955). Those of other elements are compared between systems: in right data
# they differ by a factor of up to 3.2 in Au-Au of slabs with small and large displacements. The
# least factor of a unit is 9.6.
_CONSTANTS = {
    frozenset({"C", "H"}): 31.0,
    frozenset({"N", "H"}): 40.0,
    frozenset({"O", "H"}): 45.0,
}
_NEAR_CONSTANT = 0.25  # share to the factor of a unit
# share to the median, of most systems; differences between methods, whose bonds may have any sign,
# have less of a known constant
_SAME_CONSTANT = 0.5
_MIN_LIKE = 2 / 3  # share of the systems that must be near the median
# Force constants of systems, eV/angstrom^2, by both elements and what is expected of them, if that
# is known, and by the name of the system.
_Constants = dict[tuple[tuple[str, ...], float | None], dict[str, float]]
_MIN_BONDS = 24
_NUM_BONDED = 16  # frames of a system in which bonds are searched
_MAX_SYSTEMS = 40  # in which they are
# Least share of the squares of forces that the lengths of bonds explain: it is 0.84 to 0.92 in O-H
# and C-H, and 0 to 0.9 in metals. Of right data only bonds of one or two frames (MPtrj) have more
# with a negative constant.
_MIN_EXPLAINED = 0.64
# Bonds by which signs are judged: their frames, and the spread of their forces (eV/angstrom), which
# is 0.008 in strained crystals of Li3N, whose symmetry relates it to lengths
_MIN_SIGNED = 4
_MIN_PUSH = 0.1
# Largest cosine of virials and those of bonds, over frames and without pressures, if the sign is
# wrong. Where bonds explain the forces it is -0.83 to -0.78 in water with the wrong sign, and in
# right data 0.08 to 0.95 (0 in W and Be, whose published virials are wrong by a factor of 1,000).
_OPPOSITE = -0.25
OUTLIER_FORCE = 15.0  # eV/angstrom, of the largest component
OUTLIER_FACTOR = 30.0  # ratio to the median of the system
# distance in sums of covalent radii within which atoms repel each other, and the power with which
# the largest force may rise as the shortest distance falls below that of other frames: 3 to 5 in
# right data beyond 15 eV/angstrom
_CONTACT = 1.2
_STEEPNESS = 8
# frames of a system in which such pairs are searched, with usual and with large forces
_NUM_USUAL = 8
_MAX_SEARCHED = 64
_SEVERAL = 0.1  # a larger share of the frames of a system is another kind of frames
# eV/angstrom; net forces are also larger than this fraction of the RMS force times the square root
# of the number of atoms
NET_FORCE = 0.1
_MAX_NAMES = 3
_NUM_FITS = 40  # largest number of fits of energies per element
_FIT_TOLERANCE = (
    0.01  # eV, change of an energy per element with which the last fit is reached
)
_FITTED = 0.01  # eV/atom, size of a residual from which on it counts by its size
# frames of the same elements to judge outliers, and frames of a system to judge labels that do not
# vary
_MIN_FRAMES = 3
_MIN_SPREAD = 10  # frames, to judge energies by their spread
_COARSE = 0.1  # meV/atom; larger steps of energies in single precision are reported
_AT_ONCE = 20_000  # frames whose compositions are in memory as floating-point numbers
_MAX_ZERO = 32  # frames of a system whose symmetry is looked at
_REACH = 5.0  # angstrom, of the pair potential that looks at symmetry
# names of checks, which are keys of `dp-ema check --json`
SHARED, NEAR_COPIES = "in_training_and_validation", "near_training_frames"
SHARED_TEST, NEAR_TEST = "in_training_and_test", "test_near_training_frames"
# checks of equal frames by the check of near copies, which names equal frames as well
SHARED_OF = {NEAR_COPIES: SHARED, NEAR_TEST: SHARED_TEST}
_FAR_ENERGY = (
    "an energy far from the others of its system (after subtraction of energies "
    "per element)"
)
_LARGE_FORCE = (
    f"forces {OUTLIER_FACTOR:g} times as large as usual in its system, though its atoms are not "
    "nearer"
)
_SHARED_TEXT = (
    "{0.num_frames:,} of {0.total:,} {part} frames are also training frames (first: {0.worst}): "
    "{part} errors will look too good."
)
_NEAR_TEXT = (
    "{0.num_frames:,} of {0.total:,} {part} frames are near copies of training frames "
    "(first: {0.worst}): {part} errors will look too good. "
    "Take {part} frames from other trajectories"
)
# texts of the warnings, by check
_TEXTS = {
    "duplicates": "{copies} of another (first: {0.worst}).",
    SHARED: _SHARED_TEXT,
    SHARED_TEST: _SHARED_TEXT,
    NEAR_COPIES: f"{_NEAR_TEXT}, or let training.validation_fraction choose them.",
    NEAR_TEST: f"{_NEAR_TEXT}.",
    "energy_outliers": f"{{have}} {_FAR_ENERGY}: {{named}}. Has it converged?",
    "force_outliers": f"{{have}} {_LARGE_FORCE}: {{named}}. Has it converged?",
    "zero_forces": "{have} forces that are all zero, which the positions do not explain: "
    "{named}{more}. Remove them, or compute them again.",
    "net_forces": "the forces of {frames} of {0.total:,} do not add up to zero "
    "(worst: {0.worst}): no model can learn this part. "
    "Without an outer field it points to unconverged forces.",
}
# texts about frames that are of another kind
_KINDS = {"energy_outliers": _FAR_ENERGY, "force_outliers": _LARGE_FORCE}


class Suspects(NamedTuple):
    """Frames that a check has found.

    Attributes:
        by_system: their number in each system, of training and then of validation.
        total: frames that were looked at.
        named: the frames to look at first, with their numbers.
        mixed: systems that have frames of several kinds, among which none is named.
    """

    by_system: tuple[int, ...] = ()
    total: int = 0
    named: Sequence[str] = ()
    mixed: Sequence[str] = ()

    @property
    def num_frames(self) -> int:
        """Their number in all systems."""
        return sum(self.by_system)

    @property
    def worst(self) -> str:
        """The frame to look at first; empty without any."""
        return self.named[0] if self.named else ""


def findings_of(suspects: Mapping[str, Suspects]) -> Iterator[Finding]:
    """Yield warnings about the frames of each check, and notes on systems of several kinds."""
    for check, frames in suspects.items():
        number = frames.num_frames
        if number:
            text = _TEXTS[check].format(
                frames,
                part="test" if "test" in check else "validation",
                frames=counted(number, "frame"),
                have=counted(number, "frame has", "frames have"),
                copies=counted(
                    number, "training frame is a copy", "training frames are copies"
                ),
                named=", ".join(frames.named),
                more=f" and {number - _MAX_NAMES} more" if number > _MAX_NAMES else "",
            )
            yield warning("", text)
        if frames.mixed:
            systems = first_few(frames.mixed, _MAX_NAMES)
            what = _KINDS[check]
            yield note(
                "", f"frames with {what} are of another kind, none is named: {systems}"
            )


def name_of(sources: Sequence[FrameSource], frame: int) -> str:
    """Return the name of a frame with its number in its file or system.

    Args:
        sources: in which frames are counted.
        frame: number through all sources.
    """
    for source in sources:
        if frame < source.num_frames:
            break
        frame -= source.num_frames
    return f"{source.whole.name} frame {source.numbers[frame]}"


def find_copies(*parts: Sequence[SystemScan]) -> list[Suspects]:
    """Return training frames that are copies of others, and other frames that are in training.

    Args:
        parts: training, validation and test systems; one entry is returned for each.

    Training frames of a system that is listed again are no copies: a warning names the system.
    """
    scans = [scan for part in parts for scan in part]
    sources = [scan.system for scan in scans]
    total = [sum(scan.system.num_frames for scan in part) for part in parts]
    digests = np.concatenate(
        [np.zeros(0, np.uint64), *(scan.digests for scan in scans)]
    )
    places, inverse = np.unique(digests, return_index=True, return_inverse=True)[1:]
    first = places[inverse]  # the first frame that is equal to each
    part_of = np.repeat(np.arange(len(parts)), total)
    owner = np.repeat(
        np.arange(len(sources)), [source.num_frames for source in sources]
    )
    names = [source.whole.name for source in sources]
    # sources whose name is new
    is_new = np.isin(owner, np.unique(names, return_index=True)[1])
    kinds = []
    for k in range(len(parts)):
        is_copy = (part_of == k) & (first < total[0])
        if k == 0:
            is_copy &= is_new & (first < np.arange(len(first)))
        by_system = np.bincount(owner[is_copy], minlength=len(sources)).tolist()
        named = [
            f"{name_of(sources, frame)} is {name_of(sources, int(first[frame]))}"
            for frame in np.flatnonzero(is_copy)[:1].tolist()
        ]
        kinds.append(Suspects(tuple(by_system), total[k], named))
    return kinds


def energy_residuals(
    training: Sequence[SystemScan], rest: Sequence[SystemScan]
) -> list[Array]:
    """Return energies (F,) minus energies per element, eV/atom, of each system.

    Energies per element are fitted to the training frames. Residuals are NaN of isolated atoms and
    where energies are not known; none are returned if too few energies are known.
    """
    scans = [*training, *rest]
    # isolated atoms are left out: they are a cohesive energy above all other frames
    energies = [
        np.where(scan.isolated | ~np.isfinite(scan.energy), np.nan, scan.energy)
        for scan in scans
    ]
    weights = [np.isfinite(energy) * 1.0 for energy in energies[: len(training)]]
    num_known = int(sum(weight.sum() for weight in weights))
    if num_known < _MIN_FRAMES:
        return []
    num_types = training[0].type_counts.shape[1]
    # the bound of numpy for singular values, as if all frames were fitted at once
    smallest = np.finfo(np.float64).eps * max(num_known, num_types)
    fit = np.full(num_types, np.inf)
    for _ in range(_NUM_FITS):
        # The sum of sizes of residuals is minimized, by reweighted least squares: a frame far from
        # all others would change a sum of squares. Compositions and energies per atom are reduced
        # to the triangle of a QR decomposition, so that memory does not grow with the frames.
        reduced = np.zeros((0, num_types + 1))
        for scan, energy, weight in zip(training, energies, weights):
            for begin in range(0, len(energy), _AT_ONCE):
                part = np.arange(begin, min(begin + _AT_ONCE, len(energy)))
                part = part[weight[part] > 0]
                rows = np.concatenate(
                    [scan.type_counts[part], energy[part, None]], axis=1
                )
                rows *= (np.sqrt(weight[part]) / scan.type_counts[part].sum(axis=1))[
                    :, None
                ]
                reduced = np.asarray(
                    np.linalg.qr(np.concatenate([reduced, rows]), mode="r")
                )
        before = fit
        fit = np.linalg.lstsq(reduced[:, :-1], reduced[:, -1], rcond=smallest)[0]
        residuals = [  # eV/atom
            (energy - sum(n * e for n, e in zip(scan.type_counts.T, fit)))
            / scan.type_counts.sum(axis=1)
            for scan, energy in zip(scans, energies)
        ]
        if np.abs(fit - before).max() < _FIT_TOLERANCE:
            break
        weights = [
            np.nan_to_num(1 / np.maximum(np.abs(residual), _FITTED))
            for residual in residuals[: len(training)]
        ]
    return residuals


def shifted_systems(
    scans: Sequence[SystemScan], residuals: Sequence[Array]
) -> Iterator[Finding]:
    """Yield a warning about systems whose energies have another unit or zero than the others.

    Args:
        scans: the systems.
        residuals: of :func:`energy_residuals`.
    """
    usual = np.sort(np.concatenate([np.zeros(0), *residuals]))
    usual = usual[np.isfinite(usual)]  # NaN comes last
    texts: dict[str, str] = {}
    for scan, residual in zip(scans, residuals):
        is_known = np.isfinite(residual)
        if not is_known.any():
            continue
        # not the median: between two systems with as many frames it would be a mean of both
        shift = float(np.median(residual[is_known]) - usual[len(usual) // 2])
        energy = float(
            np.median(scan.energy[is_known] / scan.type_counts[is_known].sum(axis=1))
        )
        expected = energy - shift
        forces = scan.force_rms[np.isfinite(scan.force_rms)]
        size = np.median([*forces] or 0.0)
        num_atoms = np.median(scan.type_counts.sum(axis=1))
        # of 96 atoms 1 / (kJ/mol), too: what is more likely is named first; 0 is near to nothing
        per_atom = (num_atoms >= _MIN_ATOMS) / num_atoms
        factors = {" as if its energies were per atom": per_atom, **_IN_UNITS}
        unit = " or".join(
            text
            for text, factor in factors.items()
            if abs(shift) > FAR_ENERGY
            and abs(energy - factor * expected) < _NEAR_UNIT * abs(energy)
        )
        if unit or abs(shift) > _FAR_SYSTEM + _NEAR_MINIMUM * size:
            name = scan.system.whole.name
            texts[name] = (
                f"{name} ({energy:.6g} eV/atom{unit}, expected {expected:.6g}; RMS force "
                f"{size:.3g} eV/angstrom)"
            )
    if texts:
        yield warning(
            "",
            f"the energies of {counted(len(texts), 'system')} do not fit the energies per element "
            f"of the others: {first_few(list(texts.values()), _MAX_NAMES)}. "
            "Expected eV, and one code and method, in all systems.",
        )


def odd_forces(
    scans: Sequence[SystemScan], type_map: Sequence[str]
) -> Iterator[Finding]:
    """Yield warnings about systems whose forces or virials have another unit or sign.

    Longer bonds pull their atoms together, with a force constant that depends on the elements, and
    hardly on the temperature. Where the lengths of bonds explain the forces, these have the sign
    and the unit of the constant, and virials the sign of those of bonds, ``sum_ij r_ij f_ij^T``.

    Args:
        scans: the systems, without faults.
        type_map: the model's elements.
    """
    constants: _Constants = {}
    # systems, whose frames may be in several parts
    opposite: dict[str, dict[str, None]] = {"forces": {}, "virials": {}}
    for scan in (scans[k] for k in even_places(len(scans), _MAX_SYSTEMS)):
        name = scan.system.whole.name
        places = even_places(scan.system.num_frames, _NUM_BONDED)
        frames = [
            frame for frame in map(scan.system.frame, places) if FORCE in frame.labels
        ]
        numbers = {frame.source: k for k, frame in enumerate(frames)}
        bond_virials = np.zeros((len(frames), 3, 3))  # eV
        sign = 0.0
        is_whole = True
        groups = bonds_by_elements(nearest_bonds(frames, type_map))
        for types, bonds in groups.items():
            distance = np.array([bond.distance for bond in bonds])
            push = np.array([bond.push for bond in bonds])
            vector = np.array([bond.vector for bond in bonds])
            which = [numbers[bond.frame.source] for bond in bonds]
            strength = push / np.maximum(distance, MIN_CONTACT)
            virials = np.einsum("b,bi,bj->bij", strength, vector, vector)
            np.add.at(bond_virials, which, virials)
            if len(bonds) < _MIN_BONDS:
                continue
            (square, common), (_, size) = np.cov(distance, push)
            if common**2 > _MIN_EXPLAINED * square * size:
                constant = -common / square
                if len(set(which)) >= _MIN_SIGNED and size > _MIN_PUSH**2:
                    sign = float(np.sign(constant))
                elements = tuple(type_map[k] for k in types)
                is_bond = np.median(distance) < _BONDED
                usual = _CONSTANTS.get(frozenset(elements)) if is_bond else None
                is_whole &= abs(constant) > _SAME_CONSTANT * (usual or 0.0)
                # gradients in another unit, too; their sign can be judged in the right one
                magnitude = abs(constant) if usual else constant
                constants.setdefault((elements, usual), {})[name] = magnitude
        sign *= is_whole
        if sign < 0:
            opposite["forces"][name] = None
        both = [
            (np.reshape(frame.labels[VIRIAL], (3, 3)), sign * total)
            for frame, total in zip(frames, bond_virials)
            if VIRIAL in frame.labels
        ]
        virial, expected = np.moveaxis(traceless(np.reshape(both, (-1, 2, 3, 3))), 1, 0)
        sizes = np.linalg.norm(virial) * np.linalg.norm(expected)
        if (virial * expected).sum() < _OPPOSITE * sizes:
            opposite["virials"][name] = None
    whys = {
        "forces": "they push atoms of longer bonds apart. Expected forces, not gradients.",
        "virials": "they are opposite to the virials of the forces along bonds. Expected virial = "
        "-volume * stress.",
    }
    for what, names in opposite.items():
        if names:
            yield warning(
                "",
                f"the {what} of {first_few(list(names), _MAX_NAMES)} have the wrong sign: "
                f"{whys[what]}",
            )
    yield from _other_units(constants)


def _other_units(constants: _Constants) -> Iterator[Finding]:
    """Yield warnings about systems whose force constants are those of forces in another unit.

    Where no constant is known, the median of the systems is expected.
    """
    odd: dict[str, dict[str, str]] = {}  # evidence by unit and name
    for (elements, usual), by_name in constants.items():
        if usual is None:
            values = np.array(list(by_name.values()))
            usual = float(np.median(values))  # no system is like a negative one
            if np.mean(abs(values - usual) < _SAME_CONSTANT * usual) < _MIN_LIKE:
                continue
        for name, constant in by_name.items():
            units = [
                unit
                for unit, factor in FORCE_UNITS.items()
                if abs(constant - factor * usual) < _NEAR_CONSTANT * abs(constant)
            ]
            if units:
                odd.setdefault(" or ".join(units), {})[name] = (
                    f"bonds of {' and '.join(elements)} have a force constant of {constant:.3g} "
                    f"eV/angstrom^2, expected about {usual:.3g}"
                )
    for unit, evidence in odd.items():
        yield warning(
            "",
            f"the forces of {first_few(list(evidence), _MAX_NAMES)} look like {unit}: by them "
            f"{next(iter(evidence.values()))}. Expected eV/angstrom, and energies in eV.",
        )


def energy_outliers(
    scans: Sequence[SystemScan], residuals: Sequence[Array]
) -> Suspects:
    """Return frames far from energies per element, by the spread of their system.

    Args:
        scans: the systems.
        residuals: of :func:`energy_residuals`.
    """
    deviations = []
    bounds = []
    for scan, residual in zip(scans, residuals):
        middles, number = _middles(scan, residual)
        deviations.append(residual - middles)
        # median absolute deviation to standard deviation of a normal distribution
        spread = 1.4826 * _middles(scan, np.abs(deviations[-1]))[0]
        bound = np.minimum(
            np.maximum(OUTLIER_SIGMAS * spread, OUTLIER_ENERGY), FAR_ENERGY
        )
        bounds.append(np.where(number < _MIN_SPREAD, FAR_ENERGY, bound))
    return _outliers(scans, deviations, bounds, "eV/atom")


def force_outliers(scans: Sequence[SystemScan], type_map: Sequence[str]) -> Suspects:
    """Return frames with forces far beyond those of the system, although no atoms are nearer."""
    radii = np.array([COVALENT_RADII.get(name, 1.0) for name in type_map])
    sizes = []
    for scan in scans:
        # ratios of the largest and of the RMS force to the median of frames with the same elements
        largest = scan.max_force / np.maximum(_middles(scan, scan.max_force)[0], 1e-300)
        rms = scan.force_rms / np.maximum(_middles(scan, scan.force_rms)[0], 1e-300)
        is_large = np.maximum(largest, rms) > OUTLIER_FACTOR
        # 0 times a force is NaN where it is missing
        size = np.where(is_large, scan.max_force, 0.0 * scan.max_force)
        large = np.flatnonzero(size > OUTLIER_FORCE)
        usual = np.setdiff1d(
            np.flatnonzero(size <= OUTLIER_FORCE), list(scan.bad_frames)
        )
        if 0 < len(large) <= max(1, _SEVERAL * len(size)) and len(usual):
            # large forces of right frames come from atoms near each other, as in rattled cells
            # beside relaxed ones
            usual = usual[even_places(len(usual), _NUM_USUAL)]
            contacts = np.median(
                [_contacts(scan.system.frame(k), radii) for k in usual.tolist()], axis=0
            )
            for k in large[np.argsort(-size[large])][:_MAX_SEARCHED].tolist():
                nearer = 1.0
                if k not in scan.bad_frames:
                    nearer = (_contacts(scan.system.frame(k), radii) / contacts).min()
                size[k] *= size[k] >= OUTLIER_FORCE * nearer**-_STEEPNESS
        sizes.append(size)
    return _outliers(scans, sizes, [OUTLIER_FORCE] * len(scans), "eV/angstrom")


def _contacts(frame: Frame, radii: Array) -> Array:
    """Return the shortest distances of pairs of elements, at most ``_CONTACT``.

    Args:
        frame: of N atoms.
        radii: (T,) angstrom; distances (T, T) are in sums of them.
    """
    shortest = np.full((len(radii), len(radii)), _CONTACT)
    rcut = 2 * _CONTACT * float(radii.max())
    try:
        pairs = find_pairs_once(frame.coord, frame.box, rcut)
    except DataError:
        return shortest
    a, b = frame.atom_type[pairs.i], frame.atom_type[pairs.j]
    scaled = np.maximum(pairs.distance, MIN_CONTACT) / (radii[a] + radii[b])
    np.minimum.at(shortest, (np.minimum(a, b), np.maximum(a, b)), scaled)
    return shortest


def _outliers(
    scans: Sequence[SystemScan],
    sizes: Sequence[Array],
    bounds: Sequence[Any],
    unit: str,
) -> Suspects:
    """Return the frames of systems of at least three whose size is beyond a bound.

    Where they are many, the system is named in their place.

    Args:
        scans: the systems.
        sizes: (F,) of the frames of each; NaN where it is not known.
        bounds: (F,) of each, or a number.
        unit: of the sizes.
    """
    by_system = list[int]()
    mixed = list[str]()
    outliers = list[tuple[float, str]]()
    for scan, size, bound in zip(scans, sizes, bounds):
        far = np.flatnonzero(np.abs(size) > bound)
        # frames of another kind, such as other phases, are no outliers
        if len(far) > max(1, _SEVERAL * np.isfinite(size).sum()):
            mixed.append(f"{scan.system.name} ({len(far):,} of {len(size):,})")
            far = far[:0]
        by_system.append(len(far))
        scan.outliers.update(far.tolist())
        outliers += [(float(size[k]), name_of([scan.system], k)) for k in far.tolist()]
    total = sum(int(np.isfinite(size).sum()) for size in sizes)
    outliers.sort(key=lambda outlier: -abs(outlier[0]))
    named = [f"{name} ({size:.4g} {unit})" for size, name in outliers[:_MAX_NAMES]]
    return Suspects(tuple(by_system), total, named, mixed)


def _middles(scan: SystemScan, values: Array) -> tuple[Array, Array]:
    """Return medians of values over frames with the same elements, and the number of values.

    Both are (F,). Medians of less than three values are NaN.
    """
    kinds = np.unique(scan.type_counts > 0, axis=0, return_inverse=True)[1].ravel()
    middles = np.full(len(values), np.nan)
    number = np.zeros(len(values))
    for kind in range(kinds.max(initial=-1) + 1):
        is_kind = kinds == kind
        finite = values[is_kind & np.isfinite(values)]
        number[is_kind] = len(finite)
        if len(finite) >= _MIN_FRAMES:
            middles[is_kind] = np.median(finite)
    return middles, number


def placeholders(scan: SystemScan, labels: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about labels that are the same in all frames of a system, or coarse.

    The frames differ in something else.

    Args:
        scan: of the system.
        labels: of the loss; forces that are placeholders are an error if they are among them.
    """
    num_frames = scan.system.num_frames
    name = scan.system.name
    if text := coarse_energies(scan.energy, scan.type_counts.sum(axis=1)):
        yield warning(name, f": {text}")
    if FORCE in scan.ranges and scan.ranges[FORCE].size == 0:
        frames = [scan.system.frame(k) for k in even_places(num_frames, 8)]
        if not scan.bad_frames and not all(map(forces_vanish, frames)):
            yield Finding(
                ERROR if FORCE in labels else WARNING,
                name,
                ": all forces are zero, which the positions do not explain. "
                "Remove set.*/force.npy, or compute them again.",
            )
        return
    if num_frames < _MIN_FRAMES or len(np.unique(scan.digests)) < _MIN_FRAMES:
        return
    constant = scan.first.keys() - scan.varying
    for label in (ENERGY, VIRIAL):
        # a virial that is the same is a fault only beside energies that are not
        if label in constant and (label == ENERGY or ENERGY in scan.varying):
            value = scan.first[label].ravel()
            values = "the same" if np.ptp(value) else f"{value[0]:g}"
            yield warning(
                name,
                f": {label} is {values} in all {num_frames:,} frames, a placeholder. "
                f"Remove set.*/{LABELS[label].files[0]}.npy, or compute it again.",
            )


def coarse_energies(energy: Array, num_atoms: Array) -> str:
    """Return a text on the steps of energies in single precision; empty if they are small.

    Args:
        energy: (F,) eV, NaN where it is not known.
        num_atoms: (F,) atoms of each frame.
    """
    is_known = np.isfinite(energy)
    single = energy[is_known].astype(np.float32)
    steps = 1e3 * np.spacing(np.abs(single)) / num_atoms[is_known]  # meV/atom
    step = steps.max(initial=0.0)
    # numbers in double precision that single precision holds exactly were in it before
    if step < _COARSE or (single != energy[is_known]).any():
        return ""
    return (
        f"energies of {single[steps.argmax()]:,.0f} eV are in single precision (float32), in which "
        f"they have steps of {step:.2g} meV/atom. Write them in float64 from the calculations, or "
        "subtract energies of the elements before they become float32."
    )


def elements_without_tensors(
    scans: Sequence[SystemScan],
    labels: Sequence[str],
    type_map: Sequence[str],
    excluded: Set[int],
) -> Iterator[Finding]:
    """Yield warnings about elements of which all atoms have a tensor of exactly 0.

    Atoms without a tensor are written as 0 by programs that need a row for each atom.

    Args:
        scans: of training systems.
        labels: of the loss.
        type_map: the model's elements.
        excluded: types whose atoms have no tensor in the model.
    """
    for label in (ATOM_DIPOLE, ATOM_POLAR):
        systems = [
            scan.system
            for scan in scans
            if label in labels and scan.label_frames.get(label)
        ]
        sources = evenly_spaced(systems, _TENSORS_LOOKED_AT)
        frames = [
            frame
            for source in sources
            for frame in map(source.frame, range(source.num_frames))
            if label in frame.labels
        ]
        present = {k for frame in frames for k in frame.atom_type.tolist()}
        with_tensor = {
            k
            for frame in frames
            for k in frame.atom_type[frame.labels[label].any(1)].tolist()
        }
        absent = [type_map[k] for k in sorted(present - with_tensor - excluded)]
        if with_tensor and absent:
            text = (
                f": is 0 for all atoms of {', '.join(absent)}. If these have none, set"
            )
            yield warning(
                label, f"{text} model.fitting_net.sel_type = {sorted(with_tensor)}."
            )


def zero_forces(scans: Sequence[SystemScan]) -> Suspects:
    """Return frames whose forces are all zero, in systems with other forces, without a symmetry."""
    by_system = list[int]()
    named = list[str]()
    for scan in scans:
        zero = (scan.force_rms == 0) & ~scan.isolated & (scan.force_rms > 0).any()
        suspect = [
            k
            for k in np.flatnonzero(zero)[:_MAX_ZERO].tolist()
            if k not in scan.bad_frames and not forces_vanish(scan.system.frame(k))
        ]
        by_system.append(len(suspect))
        named += [name_of([scan.system], k) for k in suspect]
    total = sum(int(np.isfinite(scan.force_rms).sum()) for scan in scans)
    return Suspects(tuple(by_system), total, named[:_MAX_NAMES])


def forces_vanish(frame: Frame) -> bool:
    """Return whether symmetry makes the forces of a frame zero."""
    # Forces that vanish by symmetry vanish in any potential. This one has no other reason for it:
    # it distinguishes types by an arbitrary number, and is smooth at the cutoff.
    try:
        pairs = find_pairs_once(frame.coord, frame.box, _REACH)
    except DataError:
        return True
    types = frame.atom_type
    strength = 1 + 0.37 * (types[pairs.i] + types[pairs.j])
    distance = pairs.distance
    weight = np.exp(-distance) * (1 - (distance / _REACH) ** 2) ** 2 * strength
    force = np.zeros_like(frame.coord)
    pull = pairs.vector * (weight / np.maximum(distance, 1e-12))[:, None]
    np.add.at(force, pairs.i, pull)
    np.subtract.at(force, pairs.j, pull)
    return bool(np.abs(force).max(initial=0.0) < 1e-4)


def net_forces(scans: Sequence[SystemScan]) -> Suspects:
    """Return frames whose forces do not add up to zero.

    Errors of N forces that have nothing to do with each other add up to sqrt(N) times one of them,
    so the sum is judged by that.
    """
    by_system = list[int]()
    num_known = 0
    worst = 0.0
    named = list[str]()
    for scan in scans:
        net = np.nan_to_num(scan.net_force)
        rms = np.nan_to_num(scan.force_rms)
        each = net / np.sqrt(np.maximum(scan.type_counts.sum(axis=1), 1))
        off = (net > NET_FORCE) & (each > NET_FORCE * rms)
        by_system.append(int(off.sum()))
        num_known += int(np.isfinite(scan.net_force).sum())
        if off.any() and each[off].max() > worst:
            frame = int(np.where(off, each, 0).argmax())
            worst = float(each[frame])
            name = name_of([scan.system], frame)
            named = [
                f"{net[frame]:.3g} eV/angstrom in {name}, RMS force {rms[frame]:.3g}"
            ]
    return Suspects(tuple(by_system), num_known, named)
