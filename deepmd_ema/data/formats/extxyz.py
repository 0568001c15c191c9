"""Extended XYZ: frames of any sizes and compositions one after the other.

A file is read once when it is opened, and then frame by frame, at the first byte of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.labels import (
    ATOM_ENERGY,
    ENERGY_WEIGHT,
    FORCE,
    FORCE_WEIGHT,
    VIRIAL,
    VIRIAL_WEIGHT,
)
from deepmd_ema.data.formats.properties import (
    KIND_NAMES,
    STRESS,
    Inventory,
    StoredFrame,
    in_angstrom,
    kind_of,
    make_frame,
    numbers,
    parse_choice,
)
from deepmd_ema.data.formats.stores import is_there, readable
from deepmd_ema.data.source import BOX, COORD, Frame, FrameSource, ReadSpec, rows_per
from deepmd_ema.errors import DataError, collect_problems
from deepmd_ema.geometry import Array
from deepmd_ema.text import show_text

XYZ_SUFFIXES = (".xyz", ".extxyz")
_MAX_PROBLEMS = 5  # problems of one file that are reported
# names of ASE and MACE; other labels are written under the names of config.labels
_WRITTEN_NAMES = {
    COORD: "pos",
    FORCE: "forces",
    ATOM_ENERGY: "energies",
    ENERGY_WEIGHT: "config_energy_weight",
    FORCE_WEIGHT: "config_forces_weight",
    VIRIAL_WEIGHT: "config_virials_weight",
}
# prefix of the names of labels in a file that has predictions under the usual names
REFERENCE = "REF_"
_SPECIAL = ("lattice", "properties", "pbc")  # names that may have capital letters
_PLAIN = "species:S:1:pos:R:3"  # columns where a file does not say
# parts of a comment line: words, and names with a value that may be quoted or in brackets
_WORD = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'[^']*'|[^\s=]+)""")
_EQUALS = re.compile(r"\s*=\s*")
# a text in quotes, a list in braces, a list or a list of lists in brackets, or a word
_VALUE = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\{[^}]*\}|\[(?:[^\[\]]|\[[^\]]*\])*\]|[^\s"'{\[]\S*"""
)
_BOOLEANS = {
    w: w[0] in "Tt1"
    for w in ("T", "True", "true", "TRUE", "1", "F", "False", "false", "FALSE", "0")
}


@dataclass(eq=False, kw_only=True)
class ExtxyzFile(FrameSource):
    """The frames of one file, of which only the places of the first bytes are in memory.

    Its name has the names that the user has chosen, after ``#``.

    Attributes:
        path: of the file.
        spec: what is read.
        starts: (num_frames + 1,) first byte of each frame, and the end of the last.
        inventory: the names in the file.
    """

    path: Path
    spec: ReadSpec = field(repr=False)
    starts: Array = field(repr=False)
    inventory: Inventory = field(repr=False)

    def files(self) -> list[Path]:
        """Return the file."""
        return [self.path]

    def frame(self, index: int) -> Frame:
        """Return one frame."""
        if not 0 <= index < self.num_frames:
            raise IndexError(f"{self.name}: frame {index} of {self.num_frames}")
        start, stop = self.starts[index : index + 2].tolist()
        with self.path.open("rb") as file:
            file.seek(start)
            block = file.read(stop - start)
        try:
            stored = read_block(block)
            if len(stored.symbols) != self.frame_sizes[index]:
                raise DataError("has another number of atoms")
            return make_frame(
                stored, self.inventory.sources(stored), self.spec, (self.name, index)
            )
        # each frame was read without an error when the file was opened
        except DataError as error:
            raise DataError(
                f"{self.name}: frame {index} has changed while the file was in use: {error}"
            ) from None


def is_extxyz(path: Path) -> bool:
    """Whether ``path`` is a file named as XYZ files are."""
    return path.suffix.lower() in XYZ_SUFFIXES and path.exists() and not path.is_dir()


def open_extxyz(path: Path, choice: str, spec: ReadSpec) -> ExtxyzFile:
    """Return the frames of a file, after reading all of it once.

    Args:
        path: of the file.
        choice: names chosen by the user, for ``parse_choice``.
        spec: what to read.

    Raises:
        DataError: with the first problems of the file, each with its frame.
    """
    chosen = parse_choice(choice, spec.labels)
    name = str(path)
    if chosen:
        name += "#" + ",".join(f"{what}={key}" for what, key in chosen.items())
    # a list, not a set: messages are in the same order on all ranks
    inventory = Inventory(chosen, wanted=[*spec.labels, *spec.conditions])
    starts = list[int]()
    sizes = list[int]()
    kinds = list[str]()
    problems = list[str]()
    for start, block in blocks(path):
        with collect_problems(problems, f"{name}: frame {len(starts)} (from 0): "):
            stored = read_block(block)
            inventory.add(stored)
            make_frame(stored, inventory.sources(stored), spec, (name, len(starts)))
            sizes.append(len(stored.symbols))
            kinds.append(kind_of(stored))
        if len(problems) >= _MAX_PROBLEMS:
            raise DataError(
                [*problems, f"{name}: the frames after this one were not read."]
            )
        starts.append(start)
    # mistakes in names are judged over all frames, which must have been read
    if not problems:
        problems += [f"{name}: {text}" for text in inventory.problems(str(path))]
    if not starts:
        problems.append(f"{name}: no frames: the file is empty. Leave it out.")
    DataError.raise_if_any(problems)
    ends = np.array([*starts, path.stat().st_size], np.int64)
    unread = [
        name
        for name in spec.ignored
        if name in inventory.read or name in inventory.unused
    ]
    return ExtxyzFile(
        name,
        np.array(sizes, np.int64),
        unread,
        inventory.lines(),
        kinds,
        units={what: next(iter(units)) for what, units in inventory.stated.items()},
        path=path,
        spec=spec,
        starts=ends,
        inventory=inventory,
    )


def extxyz_frames(path: Path) -> Iterator[StoredFrame]:
    """Yield the frames of a file with all that is stored.

    Raises:
        DataError: as ``blocks`` and ``read_block``.
    """
    return map(read_block, (block for _, block in blocks(path)))


def blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield first byte and text of each frame of a file.

    Raises:
        DataError: if the file cannot be read, or a frame does not begin with its number of atoms or
            is cut off.
    """
    is_there(path)  # an error for a pipe, from which reading would wait
    start = 0
    number = 0
    line_number = 1
    with readable(path), path.open("rb") as file:
        while line := file.readline():
            if not line.strip():  # between frames, or at the end
                start += len(line)
                line_number += 1
                continue
            if not re.fullmatch(rb"\s*\d{1,9}\s*", line) or not int(line):
                is_text = (
                    b"\0" not in line and line.decode(errors="ignore").encode() == line
                )
                shown = show_text(line.decode().strip()) if is_text else "is not text"
                raise DataError(
                    f"{path}: line {line_number}: {shown}, expected the number of atoms of frame "
                    f"{number}."
                )
            # the comment line and a line for each atom
            rest = list(islice(file, int(line) + 1))
            if len(rest) <= int(line):
                raise DataError(
                    f"{path}: is cut off: frame {number} (from line {line_number}) has "
                    f"{max(len(rest) - 1, 0)} of {int(line)} atoms. Copy it again, or remove the "
                    "frame."
                )
            block = line + b"".join(rest)
            yield start, block
            start += len(block)
            number += 1
            line_number += len(rest) + 1


def frame_text(
    symbols: Sequence[str], arrays: Mapping[str, Array], kind: str = ""
) -> str:
    """Return a frame of N atoms in extended XYZ.

    ``read_block`` returns the same numbers, bit for bit.

    Args:
        symbols: (N,) names of elements.
        arrays: float64 arrays by name: ``coord`` (N, 3) and, where the frame has them, ``box`` (3,
            3), labels, ``fparam`` and ``aparam``, in the shapes of
            :class:`~deepmd_ema.data.source.Frame`; ``stress`` (9,), in eV/angstrom^3, positive
            under tension; and any of them with ``REFERENCE`` before its name.
        kind: kind of calculation; empty without one.

    Raises:
        DataError: if a name cannot be written in one word or line.
    """
    if bad := [symbol for symbol in symbols if symbol.split() != [symbol]]:
        element = f"element {show_text(bad[0])}"
        raise DataError(
            f"{element}: cannot be written in extended XYZ. Expected a name without spaces."
        )
    if "\n" in kind or "\r" in kind:
        raise DataError(
            f"{KIND_NAMES[0]} {show_text(kind)}: cannot be written in extended XYZ. Expected one "
            "line."
        )
    head = []
    properties = ["species:S:1"]
    columns = [np.array(symbols, object)[:, None]]
    if (box := arrays.get(BOX)) is not None:
        head.append(f'Lattice="{_numbers(box)}"')
    for name, array in arrays.items():
        label = name.removeprefix(REFERENCE)
        plain = label.partition("[")[0]  # some labels are named NAME[WIDTH]
        written = name.removesuffix(label) + _WRITTEN_NAMES.get(plain, plain)
        if rows_per(label) == "atom":
            columns.append(array.reshape(len(symbols), -1).astype(object))
            properties.append(f"{written}:R:{columns[-1].shape[1]}")
        elif name != BOX:
            # column by column, as it is read
            value = array.reshape(3, 3).T if name in (VIRIAL, STRESS) else array
            head.append(f"{written}={_quoted(_numbers(value))}")
    if kind:
        head.append(f"{KIND_NAMES[0]}={_quoted(kind)}")
    head += [
        "Properties=" + ":".join(properties),
        f'pbc="{" ".join("FT"[box is not None] * 3)}"',
    ]
    rows = np.concatenate(columns, axis=1).tolist()
    return "\n".join(
        [
            str(len(symbols)),
            " ".join(head),
            *(" ".join(map(str, row)) for row in rows),
            "",
        ]
    )


def read_block(block: bytes) -> StoredFrame:
    """Return the frame in the text ``block``.

    Raises:
        DataError: if it is not extended XYZ; the message does not name file and frame.
    """
    try:
        lines = (
            block.decode().splitlines()
            if b"\r" in block
            else block.decode().split("\n")
        )
    except UnicodeDecodeError:
        raise DataError("is not UTF-8 text, or it is damaged.") from None
    natoms = int(lines[0])
    values = _read_values(lines[1])
    special = {
        name.lower(): values.pop(name)
        for name in list(values)
        if name.lower() in _SPECIAL
    }
    # these two are stored column by column, as ASE reads and writes them
    for name in ("virial", "stress"):
        if (
            name in values
            and len(nine := re.split(r"[\s,]+", values[name].strip())) == 9
        ):
            values[name] = " ".join(nine[k] for k in (0, 3, 6, 1, 4, 7, 2, 5, 8))
    properties = special.get("properties", _PLAIN)
    lattice = special.get("lattice")
    pbc = special.get("pbc")
    # first and last column of each array, and the number of all
    fields = properties.split(":")
    columns = dict[str, tuple[int, int]]()
    width = 0
    for name, kind, number in zip(fields[::3], fields[1::3], fields[2::3]):
        if kind not in ("S", "R", "I", "L") or not re.fullmatch(
            r"[1-9]\d{0,3}", number
        ):
            columns = {}
            break
        columns[name] = (width, width + int(number))
        width += int(number)
    width_of = {name: last - start for name, (start, last) in columns.items()}
    if (
        len(fields) != 3 * len(columns)  # a name that repeats has one entry
        or width_of.get("pos") != 3
        or 1 not in (width_of.get("species"), width_of.get("Z"))
    ):
        raise DataError(
            f"Properties={show_text(properties)}: expected name:kind:columns, each name "
            f"once, such as {_PLAIN}."
        )
    # the cell of a frame, None of an open one
    flags = list(filter(None, re.split(r"[\s,\[\]]+", pbc or "")))
    if any(flag not in _BOOLEANS for flag in flags):
        raise DataError(
            f"pbc = {show_text(pbc or '')}: expected T or F for each direction."
        )
    periodic = {_BOOLEANS[flag] for flag in flags} or {lattice is not None}
    if len(periodic) > 1:
        raise DataError(
            f'pbc = "{pbc}": periodic in some directions only, which models do not know. Write '
            'pbc="T T T", with a '
            "vacuum larger than the cutoff along the open directions."
        )
    box = None
    if periodic == {True}:
        if lattice is None:
            raise DataError(
                f'pbc = "{pbc}" without Lattice. Expected nine numbers, or pbc="F F F".'
            )
        box = numbers("Lattice", lattice)
        if box.size != 9:
            raise DataError(f"Lattice: has {box.size} numbers, expected 9.")
        box = box.reshape(3, 3)
    rows = [row.split() for row in lines[2 : natoms + 2]]
    # each row, not the total: what one has too many another may lack
    if len(rows) < natoms or any(len(row) != width for row in rows):
        bad = next((k for k, row in enumerate(rows) if len(row) != width), 0)
        source = "Properties" if len(columns) > 2 else "without Properties"
        raise DataError(
            f"atom {bad} (from 0): {show_text(lines[2 + bad].strip())} has {len(rows[bad])} "
            f"columns, expected {width} ({source}: {', '.join(columns)})."
        )
    table = np.array(rows, object).reshape(natoms, width)
    per_atom = {name: table[:, first:last] for name, (first, last) in columns.items()}
    try:
        coord = per_atom.pop("pos").astype(np.float64)
    except ValueError as error:
        raise DataError(f"positions: {error}.") from None
    elements = {
        name: per_atom.pop(name)[:, 0].tolist()
        for name in ("species", "Z")
        if name in per_atom
    }
    names = elements.get("species")
    if names is None:
        # a file without names of elements has their atomic numbers
        symbol_of = {str(number): symbol for number, symbol in enumerate(SYMBOLS, 1)}
        if unknown := [n for n in elements["Z"] if n not in symbol_of]:
            raise DataError(
                f"Z: {show_text(unknown[0])} is no atomic number. Expected 1 to {len(SYMBOLS)}."
            )
        names = [symbol_of[number] for number in elements["Z"]]
    return in_angstrom(StoredFrame(names, coord, box, values, per_atom))


def _read_values(line: str) -> dict[str, str]:
    """Return the names and values of a comment line.

    Reading stops at the first value without an end, so that no text is searched twice.
    """
    values = dict[str, str]()
    place = 0
    while word := _WORD.match(line, place):
        place = word.end()
        if equals := _EQUALS.match(
            line, place
        ):  # a word alone holds nothing that is read
            value = _VALUE.match(line, equals.end())
            if value is None:
                break
            name, text = _unquoted(word[1]), _unquoted(value[0])
            if values.setdefault(name, text) != text:
                raise DataError(
                    f"{name}: is there twice, as {show_text(values[name])} and {show_text(text)}. "
                    "Keep one of them."
                )
            place = value.end()
    if line[place:].strip():
        raise DataError(
            f"line 2 of the frame: a quote or bracket does not end: {show_text(line.strip())}."
        )
    return values


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] + text[-1] in ('""', "''", "{}"):
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


def _numbers(array: Array) -> str:
    """Return float64 numbers in the shortest form that is read back as the same numbers."""
    return " ".join(map(str, array.ravel().tolist()))


def _quoted(text: str) -> str:
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'
