"""Outputs of other programs: their formats in dpdata and ASE, and the paths that dpdata takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from deepmd_ema.data.formats.convergence import mapped
from deepmd_ema.data.formats.discover import (
    format_of,
    is_cp2k_trajectory,
    split_address,
)
from deepmd_ema.data.formats.extxyz import is_extxyz
from deepmd_ema.data.formats.stores import is_there
from deepmd_ema.errors import DataError

_HEAD_BYTES = 20_000  # bytes of a file in which marks are searched


class Output(NamedTuple):
    """The names of the format of an output.

    Attributes:
        name: of dpdata.
        name_of_ase: empty where ASE does not read the format, or takes it for another one.
    """

    name: str
    name_of_ase: str = ""


# texts in the first bytes of a file; the first that matches counts
_MARKS = {
    rb"CP2K\|": Output("cp2k/output"),
    rb"Psi4: An Open-Source": Output("psi4/out"),
    rb"AMBER SQM VERSION": Output("sqm/out"),
    rb"WELCOME TO ABACUS|ABACUS v\d|\AINPUT_PARAMETERS|\AMDSTEP:": Output("abacus/scf"),
    rb"WELCOME TO SIESTA|\ASiesta Version": Output("siesta/output"),
    rb"\A *\d+ atoms, *Iteration": Output("pwmat/movement"),
    rb"\A *\d+\s+time= *\S+ \(fs\) +Energy=|^ *System\.Name\s": Output("openmx/md"),
    rb"^Number of atoms +I +\d": Output("gaussian/fchk"),
    rb"iSCC Total electronic|^Total Mermin free energy": Output("dftbplus"),
    rb"\A.{,2000}<modeling": Output("vasp/xml", "vasp-xml"),
    rb"\A\s*vasp\.": Output("vasp/outcar", "vasp-out"),
    rb"Invoking FHI-aims": Output("fhi_aims/scf", "aims-output"),
    rb"Entering Gaussian System": Output("gaussian/log", "gaussian-out"),
    rb"Program PWSCF": Output("qe/pw/scf", "espresso-out"),
    rb"\* +O +R +C +A +\*": Output("orca/spout", "orca-output"),
    # also with blanks before "begin", which ASE does not expect
    rb"\A\s*(?:(?:[#!]|comment)[^\n]*\n\s*)*begin\b": Output("n2p2", "runnerdata"),
}
# formats of a trajectory, by a text anywhere in the output; moves of SIESTA count from 0
_TRAJECTORIES = {
    "siesta/output": ("siesta/aimd_output", rb"Begin (MD step|[\w. ]+ move = *[1-9])"),
    "fhi_aims/scf": ("fhi_aims/md", b"Molecular dynamics"),
}
# formats of several files with one name: the suffixes of files that all data have
_PARTS = {
    "qe/cp/traj": ("in", "pos", "for", "evp"),
    "amber/md": ("parm7", "nc", "mdfrc"),
    "openmx/md": ("md", "dat"),
}
_MORE_ENDS = ("cel", "str", "mden", "mdout")  # suffixes of files that some data have
_ABACUS = {"md": "abacus/md", "relax": "abacus/relax", "cell-relax": "abacus/relax"}
_PLAIN_NAMES = (
    "n2p2",
    "dftbplus",
    "movement",
    "mlmd",
    "outcar",
)  # names of dpdata without a slash


def is_of_dpdata(file_format: str) -> bool:
    """Whether a name of a format is one of dpdata, not of ASE."""
    return "/" in file_format or file_format in _PLAIN_NAMES


def needs_conversion(path: str) -> bool:
    """Whether ``path`` is what ``dp-ema convert`` may read and training does not."""
    file = split_address(path)[0]
    return recognized(file) is not None or (file.is_file() and format_of(file) is None)


def recognized(path: Path) -> Output | None:
    """Return the format of a file, a folder, or files of one name; None where nothing shows it."""
    for name, ends in _PARTS.items():
        prefix = path.with_suffix("") if path.suffix[1:] in ends + _MORE_ENDS else path
        if all(Path(f"{prefix}.{end}").is_file() for end in ends):
            return Output(name)
    if path.is_dir():
        return recognized(path / "INPUT") if any(path.glob("OUT.*")) else None
    if path.is_file() and is_cp2k_trajectory(path):
        return Output("cp2k/aimd_output")
    if not path.is_file() or is_extxyz(path):
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    matching = (
        output
        for mark, output in _MARKS.items()
        if re.search(mark, head, re.DOTALL | re.MULTILINE)
    )
    output = next(matching, None)
    if output is None:
        return None
    name = output.name
    if name == "abacus/scf":
        # INPUT of ABACUS names the kind of calculation, if the name of the log does not
        log = re.match(r"running_(.+)\.log", path.name)
        kind = log[1] if log else _abacus_option(argument_of(path, name), "calculation")
        name = _ABACUS.get(kind, name)
    elif name in _TRAJECTORIES:
        trajectory_name, mark = _TRAJECTORIES[name]
        with mapped(path) as content:
            if re.search(mark, content):
                name = trajectory_name
    elif (
        name == "cp2k/output"
        and path.suffix == ".log"
        and any(path.parent.glob("*pos*.xyz"))
    ):
        name = "cp2k/aimd_output"
    return output._replace(name=name)


def _abacus_option(folder: Path, name: str) -> str:
    """Return an option of the INPUT of ABACUS in a folder; empty without it."""
    file = folder / "INPUT"
    text = file.read_text(errors="replace") if file.is_file() else ""
    option = re.search(rf"^\s*{name}\s+(\S+)", text, re.MULTILINE)
    return option[1] if option else ""


def argument_of(path: Path, name: str) -> Path:
    """Return the path that dpdata takes for an output; ``path`` itself for ASE.

    Raises:
        DataError: if it does not exist, or dpdata would read a part of it.
    """
    if name in _PARTS:
        return path.with_suffix("") if path.is_file() else path
    if not is_there(path):
        raise DataError(f"{path}: no such file.")
    folder = path if path.is_dir() else path.parent
    if name.startswith("abacus/"):
        if not folder.name.startswith("OUT."):
            return folder
        suffix = _abacus_option(folder.parent, "suffix") or "ABACUS"
        if folder.name != f"OUT.{suffix}":
            raise DataError(
                f"{path}: dpdata reads OUT.{suffix}, after suffix in {folder.parent}/INPUT "
                f"(ABACUS without one), not {folder.name}. Set suffix to that of {folder.name} in "
                f"a copy of {folder.parent}."
            )
        return folder.parent
    if name == "cp2k/aimd_output":
        if len(list(folder.glob("*pos*.xyz"))) > 1:
            raise DataError(
                f"{path}: dpdata reads one trajectory of CP2K in a folder. Move the others away."
            )
        return folder
    if name == "dftbplus":
        geometry = folder / "dftb_pin.hsd"
        if geometry.is_file() and re.search(
            rb"GenFormat\s*\{\s*\d+\s+[SFsf]\b", geometry.read_bytes()
        ):
            raise DataError(
                f"{geometry}: is periodic, and dpdata does not read the cell. Write extended XYZ "
                "with ASE."
            )
        return folder
    return path
