"""Electrons that did not converge, and steps and jobs that are not read, in texts of outputs."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.data.formats.properties import Inventory
from deepmd_ema.text import counted, first_few

# texts that a program writes once for each step whose electrons did not converge; the texts of one
# program are of its versions, or of one event
_FAILURES = {
    "ABINIT": (b"was not enough SCF cycles to converge",),
    "ABACUS": (
        b"convergence has NOT been achieved",
        b"convergence has not been achieved @_@",
        b"SCF IS NOT CONVERGED",
    ),
    "CASTEP": (b"SCF cycles performed but system has not reached the groundstate",),
    "CP2K": (b"SCF run NOT converged",),
    "DFTB+": (b"SCC is NOT converged",),
    "FHI-aims": (b"SELF-CONSISTENCY CYCLE DID NOT CONVERGE",),
    "GAMESS": (b"SCF IS UNCONVERGED, TOO MANY ITERATIONS",),
    "GPAW": (b"Did not converge!",),
    "NWChem": (b"Calculation failed to converge",),
    "ORCA": (b"Wavefunction not fully converged", b"SCF NOT CONVERGED AFTER"),
    "Psi4": (b"Could not converge SCF iterations",),
    "Q-Chem": (b"SCF failed to converge",),
    "Quantum ESPRESSO": (b"convergence NOT achieved after",),
    "SIESTA": (b"SCF did not converge", b"SCF cycle did not converge"),
}
_GAUSSIAN_FAILURE = b"Convergence criterion not met"
_FORCE_TABLES = (
    b"Forces (Hartrees/Bohr)",
    b"CARTESIAN GRADIENT",
    b"Forces acting on atoms",
    b"Total atomic forces (unitary forces cleaned)",
    b"ATOMIC FORCES in [a.u.]",
    b"FORCES| Atomic forces",
    b"DFT ENERGY GRADIENTS",
    b"siesta: Atomic forces (eV/Ang)",
    b"TOTAL-FORCE (eV/Angst",
    b"Forces in eV/Ang:",
    b"Gradient of SCF Energy",
    b"Total Gradient:",
)
# energies of methods beyond the one whose energy readers take, in outputs whose forces are theirs
_OTHER_ENERGIES = (
    b"E(TD-HF/TD-DFT)",
    b"ONIOM: extrapolated energy",
    b"DF-MP2 Energies",
)
# ASE reads an output of ORCA in parts that end so: of each the first forces and the last energy
_ORCA_ENDS = re.compile(rb"ORCA TERMINATED NORMALLY|ORCA GEOMETRY RELAXATION STEP")
_ORCA_ENERGY = b"FINAL SINGLE POINT ENERGY"
# ASE takes the first energy of pw.x after each structure; those of outer iterations of a hybrid
# functional, or of each electronic step, come before the last one
_PW_STRUCTURE = re.compile(rb"Program PWSCF|ATOMIC_POSITIONS")
_PW_ENERGY = b"!    total energy"
# heads of tables that a reader may leave out
_TABLES = {
    FORCE: _FORCE_TABLES,
    ENERGY: (_ORCA_ENERGY,),
    VIRIAL: (b"STRESS| Analytical stress tensor",),
}
# ends a job of Gaussian, with its kind, method, basis and formula, broken into lines; the separator
# on Windows is a bar, with which ASE does not know the end
_ARCHIVE = re.compile(rb"\n 1([\\|])1[\\|][^\\|]+[\\|]((?:[^\\|]+[\\|]){3}[^\\|]+)")
_STANDARD, _INPUT = b"Standard orientation:", b"Input orientation:"
# in one line, or in a table with the unit at the end of its last line
_PRESSURE = re.compile(
    rb"siesta: Pressure \(static\):(?:[^\n]*\n){0,4}?(?:siesta:)?\s*(-?\d+\.\d+)"
    rb"(?:\s+-?\d+\.\d+)?\s+kBar"
)
_GAUSSIAN_EVENT = re.compile(
    rb"(?P<failure>Convergence criterion not met)|(?P<end>SCF Done:)|Forces \(Hartrees/Bohr\)"
)
# FREE ENERGIE closes an ionic step; "ML FREE ENERGIE" is the step of a machine-learned potential
_VASP_EVENT = re.compile(
    rb"Iteration +\d+\( *(?P<step>\d+)\)"
    rb"|energy-change \(2\. order\) *: *(?P<change>[^\s(]+) *\( *(?P<eigenvalues>[^\s)]+)\)"
    rb"|NELM +=(?P<most> *\d+)|EDIFF +=(?P<limit> *\S+)"
    rb"|(?P<reached>aborting loop because EDIFF is reached)"
    rb"|(?P<frame>(?<!ML )FREE ENERGIE OF THE ION-ELECTRON SYSTEM)"
)
# energies occur in each electronic step, and once more for the whole ionic step
_XML_EVENT = re.compile(
    rb"<(?P<start>calculation)|<(?P<step>scstep)"
    rb'|name="NELM">(?P<most>[ \d]+)<|name="EDIFF">(?P<limit>[^<]+)<'
    rb'|name="e_fr_energy">(?P<energy>[^<]+)<|</(?P<end>calculation)|</(?P<step_end>scstep)'
)


def notes_of_output(
    path: Path, inventory: Inventory, other: str = "another --format"
) -> Iterator[tuple[str, int]]:
    """Yield remarks on what the program says in an output, with the number of steps they are about.

    Args:
        path: file, or folder with the output of a program that is read as a folder.
        inventory: of what was read of it.
        other: option that may find forces.
    """
    files = (
        [path]
        if path.is_file()
        else [*path.glob("OUT.*/running_*.log"), *path.glob("*.log")]
    )
    for file in files:
        if not file.stat().st_size:
            continue
        with mapped(file) as text:
            for program, failures in _FAILURES.items():
                # ORCA writes two texts for one step: the number is that of the most frequent
                numbers = {len(_places(text, name)): name for name in failures[::-1]}
                number = max(numbers)
                if number:
                    yield _describe(numbers[number].decode(), program), number
            if number := _gaussian_failures(text):
                yield _describe(_GAUSSIAN_FAILURE.decode(), "Gaussian"), number
            # tables of positions without "Input orientation" are those of the turned molecule, and
            # Gaussian prints forces in the orientation of the input
            is_turned = text.find(_STANDARD) >= 0 > text.find(_INPUT)
            if is_turned and text.find(b"Forces (Hartrees/Bohr)") >= 0:
                yield (
                    "warning: positions are of Gaussian's standard orientation, and forces of "
                    "that of the input, which may be turned. Compute with "
                    "Geom=PrintInputOrient or NoSymm",
                    0,
                )
            yield from _jobs_of_gaussian(text, inventory)
            for label, heads in _TABLES.items():
                frames = inventory.read.get(label, Counter()).total()
                for head in heads:
                    # SIESTA writes the last table twice, the second time with its name in each line
                    number = len(_places(text, head))
                    number -= len(_places(text, head + b":\nsiesta:"))
                    if number > frames:
                        times = f'"{head.decode()}" is in the file {counted(number, "time")}'
                        advice = "" if frames else f": try {other}"
                        read = f"{label} was read of {counted(frames, 'frame')}"
                        yield f"{times}, and {read}{advice}", 0


def mismatch(path: Path, reader: str) -> str:
    """Return why the energy that a reader takes does not belong to the forces; empty if it does."""
    if not path.is_file():
        return ""
    with mapped(path) as text:
        for energy in _OTHER_ENERGIES:
            if text.find(energy) >= 0:
                return (
                    f'"{energy.decode()}" is in it. Its forces belong to that energy, and '
                    f"{reader} reads another one: not available."
                )
        is_ase = reader.startswith("ASE")
        structures = [match.start() for match in _PW_STRUCTURE.finditer(text)]
        for part in pairwise([*structures, len(text)] if is_ase else []):
            if -1 < text.find(_PW_ENERGY, *part) < text.rfind(_PW_ENERGY, *part):
                return (
                    f'"{_PW_ENERGY.decode()}" is there several times for one structure: its forces '
                    f"belong to the last one, and {reader} reads the first. Remove the lines of "
                    "the others, or try --format qe/pw/scf."
                )
        ends = [end.end() for end in _ORCA_ENDS.finditer(text)]
        for part in pairwise([0, *ends] if is_ase else [0, len(text)]):
            find_forces = text.find if is_ase else text.rfind
            last = text.rfind(_ORCA_ENERGY, *part)
            is_before = -1 < find_forces(b"CARTESIAN GRADIENT", *part) < last
            if is_before and text.find(_ORCA_ENERGY, *part) < last:
                return (
                    f'"{_ORCA_ENERGY.decode()}" is there again after "CARTESIAN GRADIENT": '
                    f"{reader} reads energies and forces of different calculations. Make a file "
                    "of each job ($new_job, %compound)."
                )
    return ""


def has_turned_dipole(path: Path) -> bool:
    """Whether dipoles of an output of Gaussian may be turned against its positions.

    Dipoles are those of the standard orientation, and positions those of the input if it is there.
    """
    with mapped(path) as text:
        return text.find(_STANDARD) >= 0 and text.find(_INPUT) >= 0


def pressures_of_siesta(path: Path, num_frames: int) -> list[float]:
    """Return the pressures of an output of SIESTA, kbar, those of static atoms.

    None are returned of more than ``num_frames`` steps: the frames are then not those of the
    pressures, nor of the stresses.
    """
    if not path.is_file():
        return []
    with mapped(path) as text:
        if len(_places(text, b"siesta: E_KS(eV)")) > num_frames:
            return []
        return [float(match[1]) for match in _PRESSURE.finditer(text)]


def unconverged_steps_of_vasp(path: Path, is_xml: bool) -> int:
    """Return the number of ionic steps in a file of VASP whose electrons did not converge.

    VASP 5 writes that EDIFF is reached after NELM steps in any case, and vasprun.xml has no word
    for it: there steps that took NELM electronic steps count, unless the last changes of the energy
    are below EDIFF.
    """
    with mapped(path) as text:
        return _of_xml(text) if is_xml else _of_outcar(text)


def _of_outcar(text: mmap.mmap) -> int:
    head = text[:2000].lstrip()
    # versions after 5 write that EDIFF is reached only where it is
    is_sure = head.startswith(b"vasp.") and not head.startswith((b"vasp.4", b"vasp.5"))
    most = 0  # NELM
    limit = 0.0  # EDIFF, eV
    step = 0  # electronic step
    change = 0.0  # largest change of the energy in this step, eV
    number = 0  # ionic steps that did not converge
    is_reached = False
    for event in _VASP_EVENT.finditer(text):
        if event["step"]:
            step = int(event["step"])
        elif event["change"]:
            change = max(
                abs(_number(event["change"])), abs(_number(event["eigenvalues"]))
            )
        elif event["most"]:
            most = most or int(event["most"])
        elif event["limit"]:
            limit = limit or _number(event["limit"])
        elif event["reached"]:
            is_reached = is_sure or step < most or change < limit
        else:
            # without electronic steps it is a step of a machine-learned potential
            number += step > 0 and not is_reached
            step = 0
            is_reached = False
    return number


def _of_xml(text: mmap.mmap) -> int:
    most = 0  # NELM
    limit = 0.0  # EDIFF, eV
    steps = 0  # electronic steps of an ionic step
    number = 0  # ionic steps that did not converge
    energies = list[float]()
    is_in_step = False
    for event in _XML_EVENT.finditer(text):
        if event["most"]:
            most = most or int(event["most"])
        elif event["limit"]:
            limit = limit or _number(event["limit"])
        elif event["start"]:
            steps = 0
            energies.clear()
        elif event["step"]:
            steps += 1
            is_in_step = True
        elif event["step_end"]:
            is_in_step = False
        elif event["energy"] and is_in_step:
            energies.append(_number(event["energy"]))
        elif event["end"]:
            is_small = len(energies) > 1 and abs(energies[-1] - energies[-2]) < limit
            number += 0 < most <= steps and not is_small
    return number


def _gaussian_failures(text: mmap.mmap) -> int:
    """Return the number of steps whose last method for the electrons did not converge.

    With SCF=XQC a second method follows where the first one fails.
    """
    # Gaussian prints an energy after a failure as well: a second energy is that of another method
    number = 0
    ends = 2  # energies since the failure; 2 without one
    for event in _GAUSSIAN_EVENT.finditer(text):
        if event["failure"]:
            ends = 0
        elif event["end"]:
            ends += 1
        else:
            number += ends < 2
            ends = 2
    return number + (ends < 2)


def _jobs_of_gaussian(
    text: mmap.mmap, inventory: Inventory
) -> Iterator[tuple[str, int]]:
    """Yield a remark on jobs of Gaussian that are left out, or whose methods differ."""
    jobs = list(_ARCHIVE.finditer(text))
    names = [job[2].replace(b"\n ", b"").replace(job[1], b" ").decode() for job in jobs]
    if jobs and jobs[0][1] == b"\\" and inventory.reader.startswith("ASE"):
        number = sum(place > jobs[0].end() for place in _places(text, b"SCF Done:"))
        if number or names[1:]:
            later = first_few(names[1:]) or "not complete"
            yield f"jobs after the first are left out ({number} SCF Done): {later}", 0
    elif inventory.num_frames > 1 and len({tuple(n.split()[1:3]) for n in names}) > 1:
        yield (
            f"warning: methods of the jobs that are read differ: {first_few(names)}",
            0,
        )


def _describe(failure: str, program: str) -> str:
    return (
        f'electrons did not converge ("{failure}", {program}): these frames, where they are read, '
        "may be wrong"
    )


def _number(word: bytes) -> float:
    """Return a number, infinity for asterisks, which Fortran writes for what has no room."""
    try:
        return float(word)
    except ValueError:
        return float("inf")


def _places(text: mmap.mmap, pattern: bytes) -> list[int]:
    """Return the places at which ``pattern`` begins in a text."""
    return [match.start() for match in re.finditer(re.escape(pattern), text)]


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Open a file, which must not be empty, and give its content."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        yield text
