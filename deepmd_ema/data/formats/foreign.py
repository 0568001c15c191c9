"""Files of any format, read whole and frame by frame as they are stored.

Files of other programs are read by ASE or dpdata.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.labels import (
    ATOM_DIPOLE,
    ATOM_POLAR,
    FORCE,
    GPA,
    NAMES_OF_DPDATA,
)
from deepmd_ema.data.formats.convergence import (
    has_turned_dipole,
    mapped,
    mismatch,
    notes_of_output,
    pressures_of_siesta,
    unconverged_steps_of_vasp,
)
from deepmd_ema.data.formats.discover import find_stores, format_of, split_address
from deepmd_ema.data.formats.programs import (
    Output,
    argument_of,
    is_of_dpdata,
    recognized,
)
from deepmd_ema.data.formats.properties import (
    Inventory,
    StoredFrame,
    in_angstrom,
    parse_choice,
)
from deepmd_ema.data.formats.system import backups_of, system_frames
from deepmd_ema.errors import DataError

if TYPE_CHECKING:
    from ase import Atoms

_MAX_PROBLEMS = 5
_MAX_REASON_CHARACTERS = 1000  # letters of a message of another program
# bytes at the end of a file, in which an output of VASP says that it is complete
_TAIL_BYTES = 100_000
# Units that readers of ASE and dpdata assume, by the names of formats that have one unit of length
# and one of energy. Other formats are outputs of programs whose units their readers know.
_UNITS_OF = {
    ("angstrom", "eV"): (
        "traj bundletrajectory db json mysql postgresql extxyz xyz cfg gpumd lammps-dump-text "
        "lammps-dump-binary netcdftrajectory vasp-out vasp-xml aims-output castep-castep gpaw-out "
        "gpw vasp/outcar outcar vasp/xml xml vasp/string ase/traj fhi_aims/md fhi_aims/output "
        "fhi_aims/scf siesta/output siesta/aimd_output pwmat/movement movement pwmat/mlmd mlmd"
    ),
    ("bohr", "hartree"): "runnerdata n2p2 abinit-out castep-md castep-geom qe/cp/traj",
    ("bohr", "rydberg"): "espresso-out qe/pw/scf",
}
_UNITS = {name: units for units, names in _UNITS_OF.items() for name in names.split()}
_NESTED = ("key_value_pairs", "data")  # names in `info` of ASE
_KIND = re.compile(
    r"([A-Z][a-z]?)[\d_].*"
)  # kinds of atoms of one element: Fe1, O_surface
# arrays of atoms among the results of a calculator of ASE
_PER_ATOM = ("forces", "energies", "stresses", "charges", "magmoms")
# labels that a frame of ASE may have beside the results of its calculator
_TWICE = {"energy", "free_energy", "stress", "dipole"}
_ROUNDED_STRESS = 5e-6  # eV/angstrom^3; SIESTA prints six decimals
_TURNED_DIPOLE = (
    "dipoles of Gaussian's standard orientation are left out: positions are those of the input. "
    "Compute with NoSymm"
)
_OPEN_IN_PART = (
    "is periodic in some directions only, which models do not know. Set pbc to True in all "
    "directions, with a vacuum larger than the cutoff along the open ones."
)


def stored_parts(
    address: str, file_format: str | None, selected: Sequence[str] | None = None
) -> Iterator[tuple[str, Inventory, list[StoredFrame]]]:
    """Yield name, content and all frames of an input, of each system where it has several.

    Args:
        address: what ``train`` reads, or a file that ASE or dpdata reads; after ``#`` the names to
            read in a file.
        file_format: of ASE (``vasp-out``, ``vasp-xml``, ``db``, ...) or, with a ``/`` in it and
            ``n2p2``, of dpdata (``cp2k/output``, ...); found from the name and the content when not
            given; dpdata reads what ASE cannot.
        selected: elements whose atoms alone have rows in tensors of atoms; None if all have.

    Raises:
        DataError: if the file cannot be read, or some frames cannot be used.
    """
    path, choice = split_address(address)
    output = recognized(path)
    stored_as = format_of(path)
    has_systems = path.is_dir() if stored_as is None else stored_as.frames is None
    if file_format is None and output is None and has_systems:
        for store in find_stores(address):
            if store is None:
                continue
            inventory = Inventory()
            inventory.other.update(dict.fromkeys(backups_of(store), 0))
            stored = _all_frames(store.name, system_frames(store, selected), inventory)
            if selected and {ATOM_DIPOLE, ATOM_POLAR} & inventory.read.keys():
                inventory.other[
                    f"tensors are those of {' '.join(selected)} (--sel-type), and 0 of other atoms"
                ] = 0
            yield store.name, inventory, stored
        return
    inventory = Inventory(parse_choice(choice))
    name = file_format or ("" if output is None or output.name_of_ase else output.name)
    place = argument_of(path, name)
    if (
        path.is_file() and not path.stat().st_size
    ):  # ASE would make a new data base of it
        raise DataError(f"{path}: is empty.")
    try:
        stored = _all_frames(
            str(path), _frames(path, name, output, inventory), inventory
        )
    except DataError as error:
        # electrons that did not converge are often the reason for which a reader finds no frames
        said = notes_of_output(place, inventory)
        notes = [f"{path}: {text}" for text, _ in said if text.startswith("electrons")]
        raise DataError([*error.problems, *notes]) from None
    if inventory.reader != "dp-ema":
        if FORCE in inventory.read and (text := mismatch(place, inventory.reader)):
            raise DataError(f"{path}: {text}")
        other = (
            "another --format"
            if output is None or name == output.name
            else f"--format {output.name}"
        )
        # not |=: it drops entries of 0, which are remarks on the whole file
        inventory.other.update(dict(notes_of_output(place, inventory, other)))
        if output is not None and output.name.startswith("vasp/"):
            _note_what_vasp_left_out(path, output.name == "vasp/xml", inventory)
    yield address, inventory, stored


def _all_frames(
    name: str, frames: Iterator[StoredFrame], inventory: Inventory
) -> list[StoredFrame]:
    """Return all frames and count them in ``inventory``; DataError with the first problems."""
    stored = []
    problems = list[str]()
    number = 0
    while len(problems) < _MAX_PROBLEMS:
        try:
            frame = next(frames, None)
            if frame is None:
                break
            inventory.add(frame)
            stored.append(frame)
        except DataError as error:
            problems += [
                text if name in text else f"{name}: frame {number}: {text}"
                for text in error.problems
            ]
        number += 1
    if not problems:
        problems += [f"{name}: {text}" for text in inventory.problems(name)]
    DataError.raise_if_any(problems)
    return stored


def _frames(
    path: Path, name: str, output: Output | None, inventory: Inventory
) -> Iterator[StoredFrame]:
    """Return the frames of a file; what a user should know of them goes to ``inventory``.

    Args:
        path: of the file.
        name: of the format, if the user has given it or ASE does not read it; else empty.
        output: what the file is, where something shows it.
        inventory: of the file.
    """
    if is_of_dpdata(name):
        return _dpdata_frames(path, name, inventory)
    if name:
        return _ase_frames(path, name, inventory)
    stored_as = format_of(path)
    if stored_as is not None and stored_as.frames is not None:
        return stored_as.frames(path)
    try:
        return _ase_frames(
            path, "" if output is None else output.name_of_ase, inventory
        )
    except DataError as error:
        if output is not None:
            raise DataError(
                f"{error} dpdata may read it: --format {output.name}."
            ) from None
        with suppress(DataError):
            return _dpdata_frames(path, "auto", inventory)
        raise


def _ase_frames(
    path: Path, file_format: str, inventory: Inventory
) -> Iterator[StoredFrame]:
    from ase.db import connect
    from ase.io import iread
    from ase.io.formats import filetype, ioformats

    if file_format and file_format not in ioformats:
        raise DataError(
            f"--format {file_format}: ASE has no such format; `ase info --formats` lists them."
        )
    with _readable(
        path, f"ASE{f' as {file_format}' if file_format else ''}", inventory
    ):
        name = file_format or ("db" if path.suffix == ".db" else filetype(str(path)))
        if (
            name not in ioformats
        ):  # filetype returns the suffix of a file that it does not know
            raise ValueError("which does not know its format")
        inventory.reader, inventory.units = f"ASE as {name}", _UNITS.get(name)
        if name == "db":
            # entries that a user has added to a row, often labels, are not in the frames of iread
            base = connect(str(path))
            every = [
                row.toatoms(add_additional_information=True) for row in base.select()
            ]
            # SchNetPack states the units of all rows in one place
            units = base.metadata.get("_property_unit_dict", {})
            stated = {f"{name}_unit": unit for name, unit in units.items()}
            for key, unit in base.metadata.items():
                if "unit" in key.lower():  # _distance_unit, for one
                    stated[key.strip("_")] = str(unit)
            for atoms in every:
                atoms.info |= stated
        else:
            # ASE would read numbers of frames after an @ in a name
            every = list(iread(str(path), ":", name, do_not_split_by_at_sign=True))
        if name == "gaussian-out" and has_turned_dipole(path):
            for atoms in every:
                if atoms.calc is not None and "dipole" in atoms.calc.results:
                    del atoms.calc.results["dipole"]
                    inventory.other[_TURNED_DIPOLE] += 1
    return (_of_atoms(atoms, inventory) for atoms in every)


def _note_what_vasp_left_out(path: Path, is_xml: bool, inventory: Inventory) -> None:
    """Note a last frame that is cut off, and electrons that did not converge, in a file of VASP."""
    end = b"</modeling>" if is_xml else b"General timing and accounting"
    with mapped(path) as text:
        if text.find(end, -_TAIL_BYTES) < 0:
            inventory.other[
                "the end of the file is missing: a frame that was not finished is left out"
            ] = 0
    if number := unconverged_steps_of_vasp(path, is_xml):
        what = (
            "are left out"
            if inventory.reader.startswith("dpdata")
            else "are read, and may be wrong"
        )
        inventory.other[f"EDIFF was not reached: these {what}"] = number


def _of_atoms(atoms: Atoms, inventory: Inventory) -> StoredFrame:
    if atoms.pbc.any() and not atoms.pbc.all():
        raise DataError(f"pbc = {atoms.pbc.tolist()}: {_OPEN_IN_PART}")
    results = (
        {}
        if atoms.calc is None
        else {n: v for n, v in atoms.calc.results.items() if v is not None}
    )
    per_atom = {
        n: a for n, a in atoms.arrays.items() if n not in ("numbers", "positions")
    }
    per_atom |= {
        name: np.asarray(results.pop(name)) for name in _PER_ATOM if name in results
    }
    # RuNNer requires this column, and few programs fill it
    if not per_atom.get("atom_energy", np.ones(1)).any():
        del per_atom["atom_energy"]
    if len(atoms.constraints):
        inventory.other[
            "constraints are not applied: forces are those that were computed"
        ] += 1
    # ASE's data bases keep entries of users in dictionaries in `info`
    nested = [atoms.info[n] for n in _NESTED if isinstance(atoms.info.get(n), dict)]
    direct = {n: v for n, v in atoms.info.items() if n not in (*_NESTED, "unique_id")}
    entries = {
        str(name): value for part in (*nested, direct) for name, value in part.items()
    }
    for name in sorted(_TWICE & results.keys() & entries.keys()):
        if not np.array_equal(np.asarray(entries[name]), np.asarray(results[name])):
            raise DataError(
                f"{name}: atoms.info has another value than the calculator. Remove one of them."
            )
    coord = atoms.get_positions().astype(np.float64)
    box = np.array(atoms.cell.array, np.float64) if atoms.pbc.all() else None
    symbols = atoms.get_chemical_symbols()
    return in_angstrom(StoredFrame(symbols, coord, box, entries | results, per_atom))


def _dpdata_frames(
    path: Path, file_format: str, inventory: Inventory
) -> Iterator[StoredFrame]:
    place = argument_of(path, file_format)
    files = (
        (f"{place}/dftb_pin.hsd", f"{place}/detailed.out")
        if file_format == "dftbplus"
        else str(place)
    )
    with _readable(path, f"dpdata as {file_format}", inventory):
        import dpdata

        data = dpdata.LabeledSystem(files, fmt=file_format).data
        if not len(data.get("coords", ())):
            raise ValueError("it has no frames")
    # forces and stresses that an output does not have are arrays without frames
    data = {name: value for name, value in data.items() if np.size(value)}
    name = (
        path.name.rpartition(".")[2].lower() if file_format == "auto" else file_format
    )
    inventory.reader, inventory.units = f"dpdata as {name}", _UNITS.get(name)
    if "virials" in data:
        _correct_virials(path, data, inventory)
    element_of = {}  # element by kind of atoms
    for name in data["atom_names"]:
        # names of AMBER are those of its force field
        kind = _KIND.fullmatch(name) if file_format != "amber/md" else None
        element_of[name] = kind[1] if kind and kind[1] in SYMBOLS else name
    if kinds := [
        f"{name} as {element}"
        for name, element in element_of.items()
        if name != element
    ]:
        inventory.other[f"kinds of atoms are read as elements: {', '.join(kinds)}"] = 0
    symbols = [element_of[data["atom_names"][number]] for number in data["atom_types"]]
    understood = {
        *NAMES_OF_DPDATA,
        "atom_names",
        "atom_types",
        "atom_numbs",
        "orig",
        "nopbc",
    }
    if "virials" in data:
        understood.add("stress")  # the same quantity
    more = {name: value for name, value in data.items() if name not in understood}

    def frame(k: int) -> StoredFrame:
        per_frame = {
            NAMES_OF_DPDATA[name]: data[name][k]
            for name in ("energies", "virials")
            if name in data
        }
        # arrays of parameters, and of labels that dpdata does not know, have a row for each frame;
        # other values are those of all frames
        per_frame |= {
            n: v[k] if np.shape(v)[:1] == np.shape(data["coords"])[:1] else v
            for n, v in more.items()
        }
        per_atom = {"forces": data["forces"][k]} if "forces" in data else {}
        box = None if data.get("nopbc") else np.asarray(data["cells"][k], np.float64)
        return StoredFrame(
            symbols, np.asarray(data["coords"][k], np.float64), box, per_frame, per_atom
        )

    return map(frame, range(len(data["coords"])))


def _correct_virials(path: Path, data: dict[str, Any], inventory: Inventory) -> None:
    """Give virials of dpdata the sign that they have in all data, or leave them out.

    Its readers multiply stresses by the determinant of the cell, which is negative where the
    vectors are left-handed, some of them by its absolute value. Those of SIESTA have the sign of
    the stress: here the pressures in the file decide.
    """
    reason = ""
    volumes = np.linalg.det(data["cells"])
    if (volumes < 0).any():
        reason = "cell vectors are left-handed, where its readers differ in the sign"
    elif "dpdata as siesta/" in inventory.reader:
        read = np.trace(data["virials"], axis1=1, axis2=2) / (3 * volumes)
        # that of the last step may be there twice
        stated = np.resize(pressures_of_siesta(path, len(read)), len(read)) * 0.1 / GPA
        is_same, is_opposite = (
            np.allclose(sign * read, stated, rtol=1e-3, atol=_ROUNDED_STRESS)
            for sign in (1, -1)
        )
        if is_same == is_opposite:
            reason = "the pressures in the file do not show their sign"
        elif is_opposite:
            data["virials"] = -data["virials"]
    if reason:
        del data["virials"]
        inventory.other[f"virials of dpdata are left out: {reason}"] = 0


@contextmanager
def _readable(path: Path, reader: str, inventory: Inventory) -> Iterator[None]:
    """Raise DataError for any error of a reader, and note in ``inventory`` what it prints."""
    # some hundred formats, whose readers raise and print anything
    printed = io.StringIO()
    log = logging.StreamHandler(printed)
    logging.getLogger().addHandler(log)
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
            warnings.simplefilter("always")
            yield
        said = [
            str(w.message)
            for w in caught
            if not issubclass(w.category, (DeprecationWarning, FutureWarning))
        ]
        for line in (*said, *printed.getvalue().splitlines()):
            if text := " ".join(line.split()):
                inventory.other[f"{reader} says: {_shortened(text)}"] = 0
    except ModuleNotFoundError as error:
        needs = (
            f"{path}: {reader} needs the package {error.name}, which is not installed"
        )
        raise DataError(f"{needs}: pip install {error.name}.") from error
    except Exception as error:
        reason = _shortened(" ".join(str(error).split())) or type(error).__name__
        advice = "It may be cut off, or of a version that the reader does not know."
        if " as " not in reader:
            advice += (
                " Name its format: --format vasp-out, vasp-xml, db (of ASE), cp2k/output (of "
                "dpdata) or another."
            )
        raise DataError(
            f"{path}: cannot be read by {reader} ({reason}). {advice}"
        ) from error
    finally:
        logging.getLogger().removeHandler(log)


def _shortened(text: str) -> str:
    return (
        text
        if len(text) <= _MAX_REASON_CHARACTERS
        else f"{text[:_MAX_REASON_CHARACTERS]} ..."
    )
