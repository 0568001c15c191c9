"""Data of any format as ``deepmd/npy`` folders or extended XYZ, and validation frames apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np

from deepmd_ema.config.labels import APARAM, ENERGY, FORCE, FPARAM, LABELS, WEIGHTS
from deepmd_ema.data.check.bonds import LONG, SHORT, nearest_bonds
from deepmd_ema.data.check.suspects import coarse_energies
from deepmd_ema.data.formats.discover import repeated, selected_elements, split_address
from deepmd_ema.data.formats.extxyz import XYZ_SUFFIXES, frame_text
from deepmd_ema.data.formats.foreign import stored_parts
from deepmd_ema.data.formats.programs import needs_conversion, recognized
from deepmd_ema.data.formats.properties import (
    Inventory,
    StoredFrame,
    kind_of,
    labels_of,
)
from deepmd_ema.data.formats.system import TYPES
from deepmd_ema.data.source import BOX, COORD, Chunk, Frame, of_atoms
from deepmd_ema.data.split import FrameTable, split_frames
from deepmd_ema.data.units import BOHR, ENERGIES, LENGTHS, quantity_factor
from deepmd_ema.errors import DataError, UserError, collect_problems
from deepmd_ema.files import atomic_write, taking_the_place_of, writing
from deepmd_ema.geometry import Array
from deepmd_ema.text import counted, first_few
from deepmd_ema.utils import even_places

_MODELS = (
    ".pt",
    ".pth",
    ".pt2",
    ".pte",
    ".pb",
    ".dp",
    ".yaml",
    ".yml",
    ".hlo",
    ".savedmodel",
    ".jax",
)
Predictor: TypeAlias = Callable[
    [StoredFrame, "Array | None", "Array | None"], Mapping[str, Array]
]
"""Returns energy (), force (N, 3) and virial (9,) of a model, by label.

Arguments are a frame, its fparam and its aparam.
"""
_MAX_FORMULA_CHARACTERS = 100  # letters of a folder's name
# readers of files that have either bohr or angstrom and do not state which
_TWO_CONVENTIONS = ("ASE as runnerdata", "dpdata as n2p2")
_MAX_LOOKED = 20  # frames of a file whose nearest atoms are searched


def is_data(path: str, output: str) -> bool:
    """Whether ``dp-ema convert`` takes ``path`` for data.

    Files are data that are named as XYZ files are, or not as models are; folders are, unless
    ``output`` is named as models are.
    """
    file = split_address(path)[0]
    if is_xyz(output) or file.suffix.lower() in XYZ_SUFFIXES:
        return True
    is_model = (Path(output) if file.is_dir() else file).suffix.lower() in _MODELS
    return not is_model and (file.exists() or recognized(file) is not None)


def is_xyz(output: str) -> bool:
    """Whether ``dp-ema convert`` writes extended XYZ."""
    return Path(output).suffix.lower() in XYZ_SUFFIXES


@dataclass(frozen=True, eq=False)
class _Labelled:
    """A frame with the arrays that are written.

    Attributes:
        file: number of its file.
        kind: kind of calculation; empty without one.
        symbols: (N,) elements.
        arrays: by name, in the shapes of ``Frame``.
    """

    file: int
    kind: str
    symbols: tuple[str, ...]
    arrays: Mapping[str, Array]


def convert_data(
    inputs: Sequence[str],
    output: str,
    validation: float = 0.0,
    mixed: bool = False,
    file_format: str | None = None,
    seed: int = 1,
    predict: Predictor | None = None,
    units: str | None = None,
    selected: Sequence[str] | None = None,
) -> list[str]:
    """Write frames as ``deepmd/npy`` folders or extended XYZ and return a report in lines.

    The lines name the frames that were read, left out and written. The frames are held in memory,
    which takes less than their text.

    Args:
        inputs: of ``stored_parts``; after ``#`` the names to read, such as
            ``train.xyz#energy=REF_energy``.
        output: folder to make, which with a validation share gets the parts ``train`` and
            ``validation``; or file named as XYZ files are, which then has the training frames, with
            the others in ``NAME_validation`` beside it.
        validation: share of the frames that are kept apart, 0 to 1, see ``split_frames``.
        mixed: whether frames of all compositions with the same number of atoms make one system.
        file_format: of ASE or dpdata, see ``stored_frames``.
        seed: of the choice of validation frames.
        predict: gives the labels that are written in place of those of the inputs; None: these are
            written.
        units: of length and energy in the inputs, such as ``bohr,hartree``; None for those that the
            reader assumes.
        selected: elements whose atoms alone have rows in tensors of atoms; None to find them by the
            numbers of rows.

    Raises:
        UserError: if the output exists, the share is none, or the units are not known.
        DataError: if files cannot be read, or have nothing to learn from.
    """
    if not 0 <= validation < 1:
        raise UserError(
            f"--validation {validation:g}: expected a share of the frames from 0 to below 1, such "
            "as 0.1."
        )
    out = Path(output)
    paths = (
        [out, out.with_stem(f"{out.stem}_validation")]
        if validation and is_xyz(output)
        else [out]
    )
    for path in paths:
        if path.exists() or path.is_symlink():
            raise UserError(
                f"{path}: exists. Nothing is written over: name a file or folder that does not "
                "exist."
            )
    if mixed and is_xyz(output):
        raise UserError(
            f"--mixed: is an option for folders, and {output} is extended XYZ, whose frames have "
            "any size."
        )
    # --units is refused before files are read, which may take minutes
    length, _, energy = (
        ("angstrom,eV" if units is None else units).lower().partition(",")
    )
    if length not in LENGTHS or energy not in ENERGIES:
        raise UserError(
            f"--units {units}: expected a length ({', '.join(LENGTHS)}) and an energy (eV, "
            "hartree, rydberg, kcal/mol, kJ/mol), such as bohr,hartree."
        )
    # systems of DeePMD-kit do not state which atoms have rows in tensors: the numbers of rows over
    # all of them show it
    if selected is None and file_format is None:
        stored = [
            path
            for path in inputs
            if split_address(path)[0].exists() and not needs_conversion(path)
        ]
        selected = selected_elements(stored)
    frames, lines = _read(inputs, file_format, predict, units, selected)
    # the message repeats the lines with the readers and with frames that are not finite
    if not frames:
        read_by = "; ".join(
            dict.fromkeys(line.strip() for line in lines if line.startswith("  by "))
        )
        bad = "".join(
            f" {line.strip()}."
            for line in lines
            if line.startswith("  warning: left out")
        )
        what = (
            f"{', '.join(inputs)}: no frame has an energy or forces (read {read_by})."
        )
        raise DataError(f"{what}{bad or ' Is the format right?'}")
    # elements in the order in which frames name them first
    type_map = tuple(
        dict.fromkeys(symbol for frame in frames for symbol in frame.symbols)
    )
    parts = [frames]
    if validation:
        table = FrameTable()
        for _, group in groupby(frames, key=attrgetter("file")):
            members = list(group)
            table.add(
                _chunks(members, type_map),
                len(type_map),
                [frame.kind for frame in members],
            )
        try:
            split = split_frames(table, validation, seed)
        except DataError as error:
            raise UserError(f"--validation {validation:g}: {error}") from error
        parts = [
            [frame for frame, is_chosen in zip(frames, split.mask) if is_chosen == kind]
            for kind in (False, True)
        ]
        lines += [
            *split.lines,
            *(f"warning: {finding}" for finding in split.findings()),
        ]
    if is_xyz(output):
        return lines + _write_files(dict(zip(paths, parts)))
    if not mixed and any(
        list(f.symbols) != sorted(f.symbols, key=type_map.index) for f in frames
    ):
        lines.append(
            f"the atoms of a frame are sorted by element: {' '.join(type_map)}"
        )
    names = ("train", "validation") if validation else ("",)
    with writing(out):  # the folder appears when it is complete
        out.parent.mkdir(parents=True, exist_ok=True)
        with taking_the_place_of(out) as half_written:
            for name, members in zip(names, parts):
                lines.append(f"wrote {out / name}: {counted(len(members), 'frame')}")
                lines += _write_part(half_written / name, members, type_map, mixed)
    return lines


def _read(
    inputs: Sequence[str],
    file_format: str | None,
    predict: Predictor | None,
    units: str | None,
    selected: Sequence[str] | None,
) -> tuple[list[_Labelled], list[str]]:
    """Return the frames with energies or forces of all files, and remarks on each file."""
    frames = list[_Labelled]()
    lines = list[str]()
    problems = list[str]()
    names = list[str]()
    num_empty = 0
    # where a model predicts the labels, only parameters and weights are those of the files
    wanted = (
        (*LABELS, FPARAM, APARAM) if predict is None else (FPARAM, APARAM, *WEIGHTS)
    )
    for address in inputs:
        with collect_problems(problems):
            # numbers are unique, as each part adds a line or more
            parts = stored_parts(address, file_format, selected)
            for number, (name, inventory, stored) in enumerate(parts, len(lines)):
                names.append(name)
                num_atoms = counted(sum(len(frame.symbols) for frame in stored), "atom")
                lines.append(
                    f"read {name}: {counted(inventory.num_frames, 'frame')}, {num_atoms}"
                )
                not_finite = list[str]()
                first = len(frames)
                factors, about_units = _factors(name, inventory, stored, units)
                for index, frame in enumerate(stored):
                    with collect_problems(
                        problems, f"{name}: frame {index} (from 0): "
                    ):
                        arrays = labels_of(frame, inventory.sources(frame), wanted)
                        arrays[COORD] = frame.coord
                        if frame.box is not None:
                            arrays[BOX] = frame.box
                        arrays = {
                            n: a * factors[n] if n in factors else a
                            for n, a in arrays.items()
                        }
                        if predict is not None:
                            # the model expects angstrom
                            converted = replace(
                                frame, coord=arrays[COORD], box=arrays.get(BOX)
                            )
                            arrays |= predict(
                                converted, arrays.get(FPARAM), arrays.get(APARAM)
                            )
                        # one calculation that diverged does not make the others useless
                        if bad := [
                            n
                            for n, array in arrays.items()
                            if not np.isfinite(array).all()
                        ]:
                            not_finite.append(f"{index} ({', '.join(bad)})")
                            continue
                        # weights of frames are labels without errors, and teach a model nothing
                        if not any(
                            LABELS[name].errors for name in arrays if name in LABELS
                        ):
                            num_empty += 1
                            continue
                        frames.append(
                            _Labelled(
                                number, kind_of(frame), tuple(frame.symbols), arrays
                            )
                        )
                about_names = inventory.lines(units or "angstrom,eV")
                lines += [f"  {line}" for line in (*about_units, *about_names)]
                part = frames[first:]
                text = coarse_energies(
                    np.array([f.arrays.get(ENERGY, np.nan) for f in part]),
                    np.array([len(f.symbols) for f in part]),
                )
                if text:
                    lines.append(f"  warning: {text}")
                if not_finite:
                    listed = (
                        f"{counted(len(not_finite), 'frame')} (from 0): "
                        f"{first_few(not_finite)}"
                    )
                    lines.append(
                        f"  warning: left out, since numbers are not finite: {listed}"
                    )
    DataError.raise_if_any(problems)
    if num_empty:
        lines.append(
            f"left out: {counted(num_empty, 'frame')} without energy and forces"
        )
    return frames, [*(f"warning: {finding}" for finding in repeated(names)), *lines]


def _factors(
    name: str, inventory: Inventory, stored: Sequence[StoredFrame], units: str | None
) -> tuple[dict[str, float], list[str]]:
    """Return the factors of arrays in other units than their reader assumes, and lines on them.

    Args:
        name: of the file.
        inventory: of the file.
        stored: its frames.
        units: of the user; None for those of the reader.

    Raises:
        DataError: if the units cannot be chosen, or must be, since nearest atoms are in no usual
            distance.
    """
    reader = inventory.reader
    read_by = f"by {inventory.reader}"
    assumed = inventory.units or ("angstrom", "eV")
    # formats that the package reads itself have fixed units, or state them
    nearest = 1.0 if reader == "dp-ema" else _nearest_atoms(stored)
    distances = f"nearest atoms are {nearest:.2f} sums of their covalent radii apart"
    fits = SHORT < nearest < LONG
    if units is not None:
        if inventory.states_units:
            raise DataError(
                f"{name}: states its units itself. Leave --units out, or remove them from the file."
            )
        if fits and inventory.units is None:
            raise DataError(
                f"{name}: is read {read_by}, which knows the units: {distances}. Leave --units out."
            )
        # the reader has converted from the units that it assumes, which the factors undo
        stated = units.lower().split(",")
        reader_units = [unit.lower() for unit in assumed]
        length = LENGTHS[stated[0]] / LENGTHS[reader_units[0]]
        energy = ENERGIES[stated[1]] / ENERGIES[reader_units[1]]
        labels = {
            name: quantity_factor(energy, length, label.unit)
            for name, label in LABELS.items()
            if label.unit
        }
        line = f"{read_by}, in {' and '.join(units.split(','))} (--units)"
        if stated != reader_units:
            line += f", not {' and '.join(assumed)}"
        return {COORD: length, BOX: length, **labels}, [line]
    read_by += (
        f", in {' and '.join(assumed)}"
        if inventory.units is not None
        else ", in the units of the program"
    )
    if fits:
        return {}, [read_by]
    distances += f", expected {SHORT} to {LONG}"
    if reader in _TWO_CONVENTIONS:
        raise DataError(
            f"{name}: is read {read_by}, and {distances} (with angstrom {nearest / BOHR:.2f}). Say "
            "which units it has: --units angstrom,eV (or angstrom,hartree), or --units "
            "bohr,hartree."
        )
    return {}, [
        read_by,
        f"warning: {distances}. If the file has other units, name them: --units LENGTH,ENERGY",
    ]


def _nearest_atoms(stored: Sequence[StoredFrame]) -> float:
    """Return the median distance of nearest atoms in sums of covalent radii; 1 without any."""
    nearest = list[float]()
    for k in even_places(len(stored), _MAX_LOOKED):
        frame = stored[k]
        atoms = Frame(frame.coord, np.arange(len(frame.symbols)), frame.box, {})
        nearest += [bond.ratio for bond in nearest_bonds([atoms], frame.symbols)]
    return float(np.median(nearest)) if nearest else 1.0


def _chunks(frames: Sequence[_Labelled], type_map: Sequence[str]) -> Iterator[Chunk]:
    """Yield frames of one size and with the same arrays that follow each other."""

    def shape(frame: _Labelled) -> tuple[int, bool, bool]:
        return len(frame.symbols), BOX in frame.arrays, FORCE in frame.arrays

    first = 0
    for _, group in groupby(frames, key=shape):
        members = list(group)
        types = _types(members, type_map)
        arrays = {
            n: np.stack([f.arrays[n] for f in members])
            for n in (COORD, BOX, FORCE)
            if n in members[0].arrays
        }
        yield Chunk(first, types, arrays)
        first += len(members)


def _types(frames: Sequence[_Labelled], type_map: Sequence[str]) -> Array:
    """Return (frames, N) types of atoms, of frames of one size."""
    return np.array([[*map(type_map.index, frame.symbols)] for frame in frames])


def _write_files(parts: Mapping[Path, Sequence[_Labelled]]) -> list[str]:
    """Write the frames of each file as extended XYZ and return a line for each.

    No file appears before all are written.
    """
    lines = list[str]()
    problems = list[str]()
    with ExitStack() as written:
        for path, frames in parts.items():
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with written.enter_context(atomic_write(path)).open(
                "w", encoding="utf-8"
            ) as file:
                for number, frame in enumerate(frames):
                    with collect_problems(
                        problems, f"{path}: frame {number} (from 0): "
                    ):
                        file.write(frame_text(frame.symbols, frame.arrays, frame.kind))
                    DataError.raise_if_any(problems)
            lines.append(
                f"wrote {path}: {counted(len(frames), 'frame')}, {_describe_labels(frames)}"
            )
    return lines


def _write_part(
    folder: Path, frames: Sequence[_Labelled], type_map: Sequence[str], mixed: bool
) -> list[str]:
    """Write frames as systems below ``folder`` and return a line for each.

    A system has frames of one composition, or of one size where it is ``mixed``.
    """
    groups: dict[tuple[str, bool], list[_Labelled]] = {}
    for frame in frames:
        formula = "".join(
            f"{name}{count}" for name, count in sorted(Counter(frame.symbols).items())
        )
        name = str(len(frame.symbols)) if mixed else formula
        groups.setdefault((name, BOX in frame.arrays), []).append(frame)
    lines = list[str]()
    used = set[str]()
    for (name, periodic), members in groups.items():
        place = re.sub(r"[^A-Za-z0-9_+-]", "_", name) + (
            "_open" if not periodic else ""
        )
        # file systems may not distinguish small and capital letters: CO and Co
        if place.lower() in used or len(place) > _MAX_FORMULA_CHARACTERS:
            place = f"system.{len(used):04d}"
        used.add(place.lower())
        system = folder / place
        system.mkdir(parents=True)
        types = _types(members, type_map)
        # plain systems have one order of types: atoms are sorted; mixed ones stay as they are, with
        # type.raw a row of 0 and types in real_atom_types.npy
        order = np.argsort(types * (not mixed), axis=1, kind="stable")  # (frames, N)
        stored = np.zeros(types.shape[1], int) if mixed else np.sort(types[0])
        (system / "type.raw").write_text(
            " ".join(map(str, stored)) + "\n", encoding="utf-8"
        )
        (system / "type_map.raw").write_text(
            "\n".join(type_map) + "\n", encoding="utf-8"
        )
        if not periodic:
            (system / "nopbc").touch()
        sets: dict[tuple[str, ...], list[int]] = {}  # one for each kind of labels
        for number, frame in enumerate(members):
            # parameters may have another number of values in each file
            shapes = (
                f"{n}{a.shape[-1:] if n in (FPARAM, APARAM) else ''}"
                for n, a in frame.arrays.items()
            )
            sets.setdefault(tuple(sorted(shapes)), []).append(number)
        for k, numbers in enumerate(sets.values()):
            part = system / f"set.{k:03d}"
            part.mkdir()
            for array in members[numbers[0]].arrays:
                rows = [
                    of_atoms(array, members[number].arrays[array], order[number])
                    for number in numbers
                ]
                shape = (len(rows),) if rows[0].ndim == 0 else (len(rows), -1)
                file = LABELS[array].files[0] if array in LABELS else array
                np.save(part / f"{file}.npy", np.stack(rows).reshape(shape))
            if mixed:
                np.save(part / f"{TYPES}.npy", types[numbers].astype(np.int32))
        cell = "periodic" if periodic else "open"
        lines.append(
            f"  {place}: {counted(len(members), 'frame')}, {cell}, {_describe_labels(members)}"
        )
    return lines


def _describe_labels(frames: Sequence[_Labelled]) -> str:
    counts = Counter(
        name for frame in frames for name in frame.arrays if name not in (COORD, BOX)
    )
    return ", ".join(
        n if c == len(frames) else f"{n} ({counted(c, 'frame')})"
        for n, c in counts.items()
    )
