"""Files of programs that ASE does not read: by dpdata, where it is installed."""

import logging
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import open_data

from deepmd_ema.data.convert import convert_data
from deepmd_ema.errors import DataError

BOHR, HARTREE = 0.529177210903, 27.211386245988
OUTPUT = " DBCSR| Multiplication driver\n\n CP2K| version string:   CP2K version 7.1\n"


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def dpdata(monkeypatch):
    """Put a package in the place of dpdata that reads one frame of two kinds of iron, and notes how
    it was called.
    """
    called = []

    def read(path, fmt):
        called.append(fmt)
        if fmt == "auto":
            raise NotImplementedError("no format")
        warnings.warn("the stress  is\nmissing", UserWarning, stacklevel=1)
        warnings.warn("numpy changes", DeprecationWarning, stacklevel=1)
        print("a line for the screen")
        data = {
            "atom_names": ["Fe1", "O_s", "Fe2", "Xx1"],
            "atom_types": np.arange(4),
            "coords": 1.3 * np.arange(4)[None, :, None] * np.ones(3),
            "cells": 9 * np.eye(3)[None],
            "energies": np.array([-1.0]),
            "forces": np.ones((1, 4, 3)),
        }
        return types.SimpleNamespace(data=data)

    package = types.ModuleType("dpdata")
    package.LabeledSystem = read
    monkeypatch.setitem(sys.modules, "dpdata", package)
    return called


def test_an_output_of_cp2k_is_known_by_its_content_and_read_by_dpdata(dpdata, capfd):
    Path("md.out").write_text(OUTPUT)
    reported = convert_data(["md.out"], "out")
    assert dpdata == ["cp2k/output"]
    assert (
        "  kinds of atoms are read as elements: Fe1 as Fe, O_s as O, Fe2 as Fe"
        in reported
    )
    assert Path("out/Fe2O1Xx11/type_map.raw").read_text().split() == ["Fe", "O", "Xx1"]
    assert "  dpdata as cp2k/output says: the stress is missing" in reported
    assert "  dpdata as cp2k/output says: a line for the screen" in reported
    assert "numpy changes" not in "\n".join(reported)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(
        DataError,
        match=r"md.out: is read by dpdata as cp2k/output, which knows the units: nearest",
    ):
        convert_data(["md.out"], "out2", units="bohr,hartree")


TRAJECTORY = (
    "       3\n i =        0, time =        0.000, E =       -17.0\n  O 0 0 0\n  H 0 0 1\n  H 0 1 "
    "0\n"
)


@pytest.mark.parametrize("name", ["w-pos-1.xyz", "w-frc-1.xyz"])
def test_a_trajectory_of_cp2k_as_training_data_is_to_be_converted(name):
    Path(name).write_text(TRAJECTORY)
    with pytest.raises(
        DataError,
        match=rf"{name}: is a trajectory of CP2K. Make folders of it first: dp-ema convert",
    ):
        open_data([name], ["O", "H"], ("energy", "force"))


def write_runner(path, length=1.0, energy=1.0):
    """Write two frames of copper for RuNNer, in other units by the numbers of an angstrom and an
    eV.
    """
    cell, basis = (
        3.6 * np.eye(3),
        3.6 * np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0.01]]),
    )
    lines = []
    for k in range(2):
        lines += [
            "begin",
            *("lattice " + " ".join(map(str, row * length)) for row in cell),
        ]
        for place in basis:
            force = (k + 1) * place * energy / length
            lines.append(
                f"atom {' '.join(map(str, place * length))} Cu 0 0 {' '.join(map(str, force))}"
            )
        lines += [f"energy {-3.0 * energy}", "charge 0", "end"]
    Path(path).write_text("\n".join(lines) + "\n")
    return basis


def assert_is_copper(folder, basis):
    [system] = open_data([folder], ["Cu"], ("energy", "force", "atom_energy"))
    frame = system.frame(1)
    np.testing.assert_allclose(frame.coord, basis, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(frame.box, 3.6 * np.eye(3), rtol=1e-7)
    np.testing.assert_allclose(frame.labels["force"], 2 * basis, rtol=1e-7, atol=1e-9)
    assert frame.labels["energy"] == pytest.approx(-3.0, rel=1e-7)
    assert "atom_energy" not in frame.labels  # a column of zeros


def test_data_of_runner_are_read_in_bohr_and_hartree_where_distances_agree():
    basis = write_runner("input.data", 1 / BOHR, 1 / HARTREE)
    assert "  by ASE as runnerdata, in bohr and hartree" in convert_data(
        ["input.data"], "out"
    )
    assert_is_copper("out", basis)
    text = Path("input.data").read_text()
    Path("input.data.Cu").write_text(
        f"# copper\n\n {text}"
    )  # as RuNNerDecom writes it, which ASE does not recognize
    convert_data(["input.data.Cu"], "again")
    assert_is_copper("again", basis)


def test_data_of_runner_in_angstrom_need_their_units():
    basis = write_runner("input.data")
    with pytest.raises(DataError) as caught:
        convert_data(["input.data"], "out")
    assert str(caught.value) == (
        "input.data: is read by ASE as runnerdata, in bohr and hartree, and nearest atoms are "
        "0.51 sums of their covalent radii apart, expected 0.65 to 1.8 (with angstrom 0.95). Say "
        "which units it has: --units angstrom,eV (or angstrom,hartree), or --units bohr,hartree."
    )
    reported = convert_data(["input.data"], "out", units="Angstrom,EV")
    assert (
        "  by ASE as runnerdata, in Angstrom and EV (--units), not bohr and hartree"
        in reported
    )
    assert_is_copper("out", basis)
    convert_data(["input.data"], "as_said", units="bohr,hartree")
    assert open_data(["as_said"], ["Cu"])[0].frame(0).box[0, 0] == pytest.approx(
        3.6 * BOHR, rel=1e-7
    )


@pytest.mark.parametrize("name", ["a.traj", "a.xyz"])
def test_units_change_every_array_of_a_file(name):
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    atoms = Atoms(
        "Cu2", [[0, 0, 0], [1.8, 1.8, 0]], cell=3.6 * np.eye(3) / BOHR, pbc=True
    )
    stress = np.arange(6.0)
    atoms.calc = SinglePointCalculator(
        atoms, energy=-1.0, forces=np.ones((2, 3)), stress=stress
    )
    write(name, atoms)
    reader = "dp-ema" if name == "a.xyz" else "ASE as traj"
    plainly = convert_data([name], "plain")
    assert f"  by {reader}, in angstrom and eV" in plainly
    assert any("(stress in eV/angstrom^3, positive" in line for line in plainly)
    reported = convert_data([name], "out", units="bohr,kcal/mol")
    assert any("(stress in kcal/mol/bohr^3, positive" in line for line in reported)
    assert (
        f"  by {reader}, in bohr and kcal/mol (--units), not angstrom and eV"
        in reported
    )
    kcal = 4.184 / 96.48533212331
    plain, frame = (
        open_data([folder], ["Cu"], ("energy", "force", "virial"))[0].frame(0)
        for folder in ("plain", "out")
    )
    np.testing.assert_allclose(frame.coord, plain.coord * BOHR, rtol=1e-12)
    np.testing.assert_allclose(frame.box, 3.6 * np.eye(3), rtol=1e-12)
    np.testing.assert_allclose(frame.labels["energy"], -kcal, rtol=1e-12)
    np.testing.assert_allclose(
        frame.labels["force"], np.full((2, 3), kcal / BOHR), rtol=1e-12
    )
    np.testing.assert_allclose(
        frame.labels["virial"], plain.labels["virial"] * kcal, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("ABACUS", " convergence has NOT been achieved!"),
        ("ABACUS", " !! convergence has not been achieved @_@"),
        ("ABACUS", " !!SCF IS NOT CONVERGED!!"),
        (
            "CASTEP",
            " *Warning* max. SCF cycles performed but system has not reached the groundstate.",
        ),
        ("CP2K", "  *** SCF run NOT converged ***"),
        ("CP2K", " *** WARNING in qs_scf.F:542 :: SCF run NOT converged ***"),
        ("FHI-aims", "  ** WARNING! SELF-CONSISTENCY CYCLE DID NOT CONVERGE"),
        ("Gaussian", " >>>>>>>>>> Convergence criterion not met."),
        (
            "ORCA",
            "FINAL SINGLE POINT ENERGY  -76.1 (Wavefunction not fully converged!)",
        ),
        (
            "ORCA",
            "               *        SCF NOT CONVERGED AFTER  125 CYCLES        *",
        ),
        (
            "Quantum ESPRESSO",
            "     convergence NOT achieved after 100 iterations: stopping",
        ),
        ("GAMESS", " SCF IS UNCONVERGED, TOO MANY ITERATIONS"),
        (
            "ABINIT",
            " scprqt:  WARNING -  nstep=    4 was not enough SCF cycles to converge;",
        ),
        ("SIESTA", "SCF_NOT_CONV: SCF did not converge  in maximum number of steps."),
    ],
)
def test_electrons_that_did_not_converge_are_reported_in_the_words_of_the_program(
    dpdata, program, line
):
    Path("run.out").write_text(f"head\n{line}\n more\n{line}\nend\n")
    if program == "Gaussian":
        done = " SCF Done:  E(RB3LYP) =  -1.0     A.U. after   65 cycles\n"
        forces = " Center     Atomic                   Forces (Hartrees/Bohr)\n"
        # in the second step another method has converged after the first
        steps = [f"{line}\n{done}", f"{line}\n{done}{done}", done, f"{line}\n{done}"]
        Path("run.out").write_text(forces.join([*steps, ""]))
    [reported] = [
        text
        for text in convert_data(["run.out"], "out", file_format="any/thing")
        if "converge" in text
    ]
    assert reported.startswith('  electrons did not converge ("')
    assert reported.endswith(
        f", {program}): these frames, where they are read, may be wrong (2 frames)"
    )


def test_the_logs_of_a_program_that_is_read_as_a_folder_are_looked_at(dpdata):
    Path("run/OUT.ABACUS").mkdir(parents=True)
    Path("run/OUT.ABACUS/running_md.log").write_text(
        " convergence has NOT been achieved!\n"
    )
    Path("run/empty.log").touch()
    reported = "\n".join(convert_data(["run"], "out", file_format="abacus/md"))
    assert (
        'electrons did not converge ("convergence has NOT been achieved", ABACUS)'
        in reported
    )


def test_an_error_of_a_reader_names_the_electrons_that_did_not_converge(monkeypatch):
    package = types.ModuleType("dpdata")
    package.LabeledSystem = lambda path, fmt: types.SimpleNamespace(data={})
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("md.out").write_text(OUTPUT + "\n *** SCF run NOT converged ***\n")
    with pytest.raises(DataError) as caught:
        convert_data(["md.out"], "out")
    assert 'md.out: electrons did not converge ("SCF run NOT converged", CP2K)' in str(
        caught.value
    )
    assert "(it has no frames)" in caught.value.problems[0]


def test_forces_in_a_file_that_were_not_read_are_reported(monkeypatch):
    package = types.ModuleType("dpdata")
    data = {
        "atom_names": ["H"],
        "atom_types": np.zeros(1, int),
        "coords": np.zeros((1, 1, 3)),
        "nopbc": True,
        "energies": np.ones(1),
        "cells": np.zeros((1, 3, 3)),
    }
    package.LabeledSystem = lambda path, fmt: types.SimpleNamespace(data=data)
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("run.out").write_text("                   Forces (Hartrees/Bohr)\n")
    reported = convert_data(["run.out"], "out", file_format="gaussian/log")
    assert (
        '  "Forces (Hartrees/Bohr)" is in the file 1 time, and force was read of 0 frames: try '
        "another --format" in reported
    )


def one_atom(**changes):
    """Return the arrays of dpdata of one frame with one atom."""
    return {
        "atom_names": ["H"],
        "atom_types": np.zeros(1, int),
        "coords": np.zeros((1, 1, 3)),
        "energies": np.ones(1),
        "forces": np.zeros((1, 1, 3)),
        "cells": 4 * np.eye(3)[None],
        "virials": 2.0 * np.eye(3)[None],
    } | changes


def test_of_virials_and_stresses_in_one_frame_the_virials_are_read(monkeypatch):
    """Relaxations of ABACUS have both in dpdata."""
    package = types.ModuleType("dpdata")
    data = one_atom(stress=7.0 * np.eye(3)[None])
    package.LabeledSystem = lambda path, fmt: types.SimpleNamespace(data=data)
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("run.out").write_text("a relaxation\n")
    convert_data(["run.out"], "out", file_format="abacus/relax")
    [source] = open_data(["out/H1"], ["H"], ["virial"])
    np.testing.assert_array_equal(
        source.frame(0).labels["virial"].reshape(3, 3), 2.0 * np.eye(3)
    )


def parts(name, *ends):
    return {f"{name}.{end}": "\n" for end in ends}


INPUT = {
    "run/INPUT": "INPUT_PARAMETERS\ncalculation {}\nsuffix x\n",
    "run/OUT.x/running_{}.log": "   ABACUS v3.2\n",
}
QE, AMBER, OPENMX = (
    parts("run.1/oh-md", "in", "pos", "for", "evp", "cel"),
    parts("heat", "parm7", "nc", "mdfrc", "mden"),
    parts("Methane", "md", "dat"),
)
MANY = "head\n" * 6000


@pytest.mark.parametrize(
    ("files", "given", "name", "passed"),
    [
        (QE, "run.1/oh-md", "qe/cp/traj", "run.1/oh-md"),
        (QE, "run.1/oh-md.pos", "qe/cp/traj", "run.1/oh-md"),
        (QE, "run.1/oh-md.cel", "qe/cp/traj", "run.1/oh-md"),
        (AMBER, "heat", "amber/md", "heat"),
        (AMBER, "heat.mden", "amber/md", "heat"),
        (OPENMX, "Methane.dat", "openmx/md", "Methane"),
        (INPUT, "run", "abacus/{}", "run"),
        (INPUT, "run/INPUT", "abacus/{}", "run"),
        (INPUT, "run/OUT.x/running_{}.log", "abacus/{}", "run"),
        (
            {
                "d/dftb_pin.hsd": "",
                "d/detailed.out": " iSCC Total electronic   Diff electronic\n",
            },
            "d/detailed.out",
            "dftbplus",
            ("d/dftb_pin.hsd", "d/detailed.out"),
        ),
        (
            {"d/w-pos-1.xyz": TRAJECTORY, "d/cp2k.log": OUTPUT},
            "d/cp2k.log",
            "cp2k/aimd_output",
            "d",
        ),
        ({"a.log": "   WELCOME TO SIESTA\n"}, "a.log", "siesta/output", "a.log"),
        (
            {"a.log": f"Siesta Version: 4\n{MANY}  Begin MD step = 1\n"},
            "a.log",
            "siesta/aimd_output",
            "a.log",
        ),
        (
            {"M": "  72 atoms,Iteration (fs) = 0.1E+01, Etot\n"},
            "M",
            "pwmat/movement",
            "M",
        ),
        (
            {"a.fchk": "water\nFreq RB3LYP\nNumber of atoms            I      3\n"},
            "a.fchk",
            "gaussian/fchk",
            "a.fchk",
        ),
        (
            {"sqm.out": "          AMBER SQM VERSION 19\n"},
            "sqm.out",
            "sqm/out",
            "sqm.out",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["md", "scf"])
@pytest.mark.parametrize("is_named", [False, True])
def test_outputs_that_ase_does_not_read_go_to_dpdata(
    monkeypatch, files, given, name, passed, kind, is_named
):
    calls = []

    def read(path, fmt):
        calls.append((path, fmt))
        raise ValueError("no frames")

    monkeypatch.setitem(
        sys.modules, "dpdata", types.SimpleNamespace(LabeledSystem=read)
    )
    given, name = given.format(kind), name.format(kind)
    for file, text in files.items():
        place = Path(file.format(kind))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text.replace("{}", kind))
    with pytest.raises(
        DataError, match=rf"{given}: cannot be read by dpdata as {name} \(no frames\)"
    ):
        convert_data([given], "out", file_format=name if is_named else None)
    assert calls == [(passed, name)]


@pytest.mark.parametrize(
    ("name", "text", "reason", "option"),
    [
        (
            "OUTCAR",
            " vasp.6.4.2\n",
            "ASE as vasp-out (Incomplete OUTCAR)",
            "vasp/outcar",
        ),
        ("vasprun.xml", "<modeling>\n", "ASE as vasp-xml (", "vasp/xml"),
        (
            "md.log",
            f" Invoking FHI-aims ...\n{MANY} Molecular dynamics\n",
            "ASE as aims-output (",
            "fhi_aims/md",
        ),
    ],
)
def test_a_file_that_ase_cannot_read_names_the_format_of_dpdata(
    name, text, reason, option
):
    Path(name).write_text(text)
    with pytest.raises(DataError) as caught:
        convert_data([name], "out")
    assert str(caught.value).startswith(f"{name}: cannot be read by {reason}")
    assert str(caught.value).endswith(
        "). It may be cut off, or of a version that the reader does not know. dpdata may read it: "
        f"--format {option}."
    )


def test_files_that_a_format_needs_are_named():
    with pytest.raises(DataError, match="oh-md: no such file"):
        convert_data(["oh-md"], "out")
    Path("d").mkdir()
    Path("d/dftb_pin.hsd").write_text("Geometry = GenFormat {\n 2 S\n Si\n")
    with pytest.raises(
        DataError,
        match=r"dftb_pin\.hsd: is periodic, and dpdata does not read the cell",
    ):
        convert_data(["d"], "out", file_format="dftbplus")


@pytest.mark.parametrize("name", ["forces", "stress", "virials"])
def test_an_array_of_dpdata_without_frames_is_none(monkeypatch, name):
    """Calculations of ABACUS without forces, or without stresses, are such."""
    data = {
        "atom_names": ["H"],
        "atom_types": np.zeros(2, int),
        "coords": np.array([[[0, 0, 0], [0, 0, 0.7]]]),
        "energies": np.ones(1),
        "cells": 4 * np.eye(3)[None],
        name: np.zeros((0, 3, 3)),
    }
    package = types.SimpleNamespace(
        LabeledSystem=lambda path, fmt: types.SimpleNamespace(data=data)
    )
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("run.out").write_text("a calculation\n")
    assert "  reads energy" in convert_data(
        ["run.out"], "out", file_format="abacus/scf"
    )


def test_a_reader_that_lacks_a_package_names_it(monkeypatch):
    def read(path, fmt):
        raise ModuleNotFoundError("No module named 'parmed'", name="parmed")

    monkeypatch.setitem(
        sys.modules, "dpdata", types.SimpleNamespace(LabeledSystem=read)
    )
    Path("run.out").write_text("a calculation\n")
    with pytest.raises(
        DataError,
        match=r"needs the package parmed, which is not installed: pip install parmed",
    ):
        convert_data(["run.out"], "out", file_format="amber/md")


def test_what_a_reader_logs_and_turned_molecules_of_gaussian_are_reported(
    monkeypatch, capfd
):
    data = {
        "atom_names": ["H"],
        "atom_types": np.zeros(1, int),
        "coords": np.zeros((1, 1, 3)),
        "nopbc": True,
        "energies": np.ones(1),
        "cells": np.zeros((1, 3, 3)),
        "forces": np.zeros((1, 1, 3)),
    }

    def read(path, fmt):
        logging.getLogger("ase").warning("positions are of another orientation")
        return types.SimpleNamespace(data=data)

    monkeypatch.setitem(
        sys.modules, "dpdata", types.SimpleNamespace(LabeledSystem=read)
    )
    text = "  Standard orientation:\n  Forces (Hartrees/Bohr)\n"
    Path("run.out").write_text(text)
    reported = "\n".join(convert_data(["run.out"], "out", file_format="gaussian/log"))
    assert (
        "dpdata as gaussian/log says: positions are of another orientation" in reported
    )
    assert (
        "warning: positions are of Gaussian's standard orientation, and forces of that of the input"
        in reported
    )
    assert capfd.readouterr() == ("", "")
    Path("run.out").write_text(f"  Input orientation:\n{text}")
    assert "warning" not in "\n".join(
        convert_data(["run.out"], "out2", file_format="gaussian/log")
    )


def test_dpdata_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpdata", None)
    Path("sqm.out").write_text("          AMBER SQM VERSION 19\n")
    with pytest.raises(
        DataError,
        match=r"sqm.out: dpdata as sqm/out needs the package dpdata, which .* pip install dpdata",
    ):
        convert_data(["sqm.out"], "out")


def test_files_of_one_name_are_data_for_both_commands(monkeypatch, capsys):
    from deepmd_ema.cli.main import main

    data = {
        "atom_names": ["H"],
        "atom_types": np.zeros(2, int),
        "coords": np.array([[[0, 0, 0], [0, 0, 0.7]]] * 12),
        "energies": np.ones(12),
        "cells": np.tile(4 * np.eye(3), (12, 1, 1)),
    }
    package = types.SimpleNamespace(
        LabeledSystem=lambda path, fmt: types.SimpleNamespace(data=data)
    )
    monkeypatch.setitem(sys.modules, "dpdata", package)
    for file in parts("oh-md", "in", "pos", "for", "evp"):
        Path(file).write_text("\n")
    assert main(["convert", "oh-md", "out"]) == 0
    assert main(["init", "oh-md"]) == 0
    assert "converted oh-md to oh-md_data" in capsys.readouterr().out


_SIESTA = " WELCOME TO SIESTA\nsiesta: Pressure (static):"
_TABLE = "\nsiesta:  Solid  Molecule  Units\nsiesta:  -1.0  0.1  Ry/Bohr**3"


@pytest.mark.parametrize(
    ("text", "cell", "factor"),
    [
        ("a run of another program", np.eye(3), 1),
        ("a run of another program", np.eye(3)[[1, 0, 2]], None),
        (f"{_SIESTA} 50.068 kBar", np.eye(3), 1),
        (f"{_SIESTA} -50.068 kBar", np.eye(3), -1),
        (f"{_SIESTA}{_TABLE}\nsiesta:  -50.068  0.1  kBar", np.eye(3), -1),
        (f"{_SIESTA} 7.646 kBar", np.eye(3), None),
        (" WELCOME TO SIESTA\n", np.eye(3), None),
    ],
    ids=["other", "left-handed", "pressure", "opposite", "table", "another", "none"],
)
def test_virials_of_dpdata_have_the_sign_of_the_pressure_or_are_left_out(
    monkeypatch, text, cell, factor
):
    """Its reader of SIESTA gives the sign of the stress, and some multiply by the determinant."""
    data = one_atom(cells=4 * cell[None])
    package = types.SimpleNamespace(
        LabeledSystem=lambda path, fmt: types.SimpleNamespace(data=dict(data))
    )
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("run.out").write_text(text)
    name = "siesta/output" if "SIESTA" in text else "cp2k/output"
    reported = "\n".join(convert_data(["run.out"], "out", file_format=name))
    [source] = open_data(["out/H1"], ["H"], ["virial"])
    labels = source.frame(0).labels
    assert ("virials of dpdata are left out" in reported) == (factor is None)
    if factor is None:
        assert "virial" not in labels
    else:
        np.testing.assert_array_equal(
            labels["virial"].reshape(3, 3), factor * 2.0 * np.eye(3)
        )


@pytest.mark.parametrize(
    "text", ["E(TD-HF/TD-DFT)", "ONIOM: extrapolated energy", "DF-MP2 Energies"]
)
def test_forces_of_another_energy_than_the_one_that_is_read_are_refused(dpdata, text):
    Path("run.out").write_text(f"{OUTPUT} {text} = -1.0\n")
    with pytest.raises(DataError) as caught:
        convert_data(["run.out"], "out")
    assert f'run.out: "{text}" is in it. Its forces belong to that' in str(caught.value)
    assert not Path("out").exists()


def test_a_label_beside_another_result_of_the_calculator_of_ase_is_refused():
    io = pytest.importorskip("ase.io")
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1]])
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.zeros((2, 3)))
    for energy in (-1.0, -100.0):
        atoms.info["energy"] = energy
        io.write("some.traj", atoms)
        if energy == -1.0:
            convert_data(["some.traj"], "same")
            continue
        with pytest.raises(DataError, match="frame 0: energy: atoms"):
            convert_data(["some.traj"], "out")


def orca_text(*jobs):
    """Return an output of ORCA with jobs of energy, position of the second atom, and force."""
    lines = [" * O   R   C   A *"]
    for number, (energy, place, force) in enumerate(jobs, 1):
        lines += [
            f"   $$$$$$$$$$$$$$$$  JOB NUMBER  {number} $$$$$$$$$$$$$$",
            "Number of atoms             ...      2",
            "CARTESIAN COORDINATES (ANGSTROEM)",
            "---------------------------------",
            "  H      0.000000    0.000000    0.000000",
            f"  H      0.000000    0.000000    {place:.6f}",
            "",
            f"FINAL SINGLE POINT ENERGY      {energy:.9f}",
        ]
        if force is not None:
            lines += [
                "------------------",
                "CARTESIAN GRADIENT",
                "------------------",
                "",
                f"   1   H   :    0.0    0.0    {-force}",
                f"   2   H   :    0.0    0.0    {force}",
                "",
            ]
    return "\n".join([*lines, "             ****ORCA TERMINATED NORMALLY****", ""])


ORCA_JOBS = [(-1.0, 0.7, 0.1), (-2.0, 0.8, None)]


def test_forces_and_energies_of_two_jobs_of_orca_are_refused():
    pytest.importorskip("ase.io")
    for jobs in (ORCA_JOBS, [(-1.0, 0.7, 0.1), (-2.0, 0.8, 0.2)]):
        Path("run.out").write_text(orca_text(*jobs))
        with pytest.raises(DataError) as caught:
            convert_data(["run.out"], "out")
        assert str(caught.value) == (
            'run.out: "FINAL SINGLE POINT ENERGY" is there again after "CARTESIAN GRADIENT": '
            "ASE as orca-output reads energies and forces of different calculations. Make a file "
            "of each job ($new_job, %compound)."
        )
    # an optimization, whose last step has no forces
    text = orca_text(*ORCA_JOBS)
    mark = "$$$$$$$$$$$$$$$$  JOB NUMBER  2 $$$$$$$$$$$$$$"
    Path("run.out").write_text(text.replace(mark, "ORCA GEOMETRY RELAXATION STEP"))
    assert "  reads energy, force from forces in 1 frame" in convert_data(
        ["run.out"], "steps"
    )
    # the last job has all of what is read
    Path("run.out").write_text(orca_text(*reversed(ORCA_JOBS)))
    convert_data(["run.out"], "right")
    [source] = open_data(["right"], ["H"], ("energy", "force"))
    frame = source.frame(0)
    assert frame.labels["energy"] == pytest.approx(-HARTREE, rel=1e-6)
    assert frame.coord[1, 2] == 0.7
    assert frame.labels["force"][0, 2] == pytest.approx(0.1 * HARTREE / BOHR, rel=1e-6)


def pw_text(*energies):
    """Return an output of pw.x of two atoms, with energies (Ry) of one structure."""
    lines = "\n".join(
        f"!    total energy              = {e:15.8f} Ry" for e in energies
    )
    return f"""
     Program PWSCF v.6.3 starts on  1Jan2020 at  1: 1: 1

     bravais-lattice index     =            0
     lattice parameter (alat)  =       7.5589  a.u.
     number of atoms/cell      =            2
     number of atomic types    =            1

     celldm(1)=   7.558904  celldm(2)=   0.000000  celldm(3)=   0.000000

     crystal axes: (cart. coord. in units of alat)
               a(1) = (   1.000000   0.000000   0.000000 )
               a(2) = (   0.000000   1.000000   0.000000 )
               a(3) = (   0.000000   0.000000   1.000000 )

     Cartesian axes

     site n.     atom                  positions (alat units)
         1           H   tau(   1) = (   0.0000000   0.0000000   0.0000000  )
         2           H   tau(   2) = (   0.0000000   0.0000000   0.2000000  )

{lines}

     Forces acting on atoms (cartesian axes, Ry/au):

     atom    1 type  1   force =     0.00000000    0.00000000    0.02000000
     atom    2 type  1   force =     0.00000000    0.00000000   -0.02000000

     Total force =     0.028284     Total SCF correction =     0.000000
"""


def test_an_energy_of_pw_x_before_the_last_of_a_structure_is_refused():
    """The energy of the first electronic step was read with the forces of the last."""
    pytest.importorskip("ase.io")
    Path("run.out").write_text(pw_text(-2.1, -2.3))
    with pytest.raises(DataError) as caught:
        convert_data(["run.out"], "out")
    assert str(caught.value) == (
        'run.out: "!    total energy" is there several times for one structure: its forces belong '
        "to the last one, and ASE as espresso-out reads the first. Remove the lines of the "
        "others, or try --format qe/pw/scf."
    )
    # one for each structure
    Path("run.out").write_text(pw_text(-2.3) + pw_text(-2.2))
    convert_data(["run.out"], "right")
    [source] = open_data(["right"], ["H"], ("energy", "force"))
    energies = [source.frame(k).labels["energy"] for k in range(2)]
    assert energies == pytest.approx([-2.3 * HARTREE / 2, -2.2 * HARTREE / 2], rel=1e-6)


def test_an_energy_of_orca_after_the_last_forces_is_refused_for_dpdata(dpdata):
    for number, jobs in enumerate([ORCA_JOBS, ORCA_JOBS[::-1], ORCA_JOBS[:1] * 2]):
        Path("run.out").write_text(orca_text(*jobs))
        if number:
            convert_data(["run.out"], f"out{number}", file_format="orca/spout")
            continue
        with pytest.raises(DataError, match=r"dpdata as orca/spout reads energies and"):
            convert_data(["run.out"], "out", file_format="orca/spout")


def gaussian_text(*jobs, separator="\\"):
    """Return an output of Gaussian with jobs of kind, method, energy, and force or None."""
    lines = [" Entering Gaussian System, Link 0=g16"]
    rule = " " + 69 * "-"
    for kind, method, energy, force in jobs:
        lines += [26 * " " + "Input orientation:", rule, "  Number", "  Number", rule]
        lines += [
            f"      {k + 1}          1           0        0.0    0.0    {0.7 * k:.6f}"
            for k in range(2)
        ]
        lines += [
            rule,
            f" SCF Done:  E({method}) =  {energy}     A.U. after   10 cycles",
        ]
        if force is not None:
            heading = " Center     Atomic                   Forces (Hartrees/Bohr)"
            lines += [heading, "  Number", rule]
            lines += [
                f"      {k + 1}        1           0.000000000    0.000000000 {sign * force:14.9f}"
                for k, sign in enumerate((-1, 1))
            ]
            lines.append(rule)
        # Gaussian breaks these lines anywhere
        fields = ["1", "1", "GINC-NODE", kind, method, "6-31\n G(d)", "H2", "ME", "0"]
        lines += [f" {separator.join(fields)}", " Normal termination of Gaussian 16"]
    return "\n".join([*lines, ""])


def test_jobs_of_gaussian_after_the_first_are_reported_and_left_out():
    pytest.importorskip("ase.io")
    jobs = [("SP", "RHF", -1.0, 0.1), ("Freq", "RB3LYP", -2.0, None)]
    Path("run.log").write_text(gaussian_text(*jobs))
    assert (
        "  jobs after the first are left out (1 SCF Done): Freq RB3LYP 6-31G(d) H2"
        in (convert_data(["run.log"], "out"))
    )
    [source] = open_data(["out"], ["H"], ("energy", "force"))
    assert source.num_frames == 1
    assert source.frame(0).labels["energy"] == pytest.approx(-HARTREE, rel=1e-6)
    # a second job that is cut off, and one job
    text = gaussian_text(*jobs)
    Path("run.log").write_text(text[: text.rindex("1\\1\\GINC")])
    assert "  jobs after the first are left out (1 SCF Done): not complete" in (
        convert_data(["run.log"], "cut")
    )
    Path("run.log").write_text(gaussian_text(jobs[0]))
    assert "left out" not in "\n".join(convert_data(["run.log"], "one"))


def test_jobs_of_gaussian_of_several_methods_that_are_read_together_are_reported():
    """ASE reads the next job of files from Windows, whose separator is another one."""
    pytest.importorskip("ase.io")
    jobs = [("SP", "RHF", -1.0, 0.1), ("SP", "RB3LYP", -2.0, 0.1)]
    for name, second, is_reported in (("a", jobs[1], True), ("b", jobs[0], False)):
        Path("run.log").write_text(gaussian_text(jobs[0], second, separator="|"))
        reported = convert_data(["run.log"], name)
        assert is_reported is any(
            "warning: methods of the jobs that are read differ: SP RHF 6-31G(d) H2, SP RB3LYP"
            in line
            for line in reported
        )


def test_steps_in_a_file_of_which_one_is_read_are_counted(dpdata):
    Path("run.out").write_text(orca_text(*ORCA_JOBS[:1] * 3))
    reported = convert_data(["run.out"], "out", file_format="orca/spout")
    for head, label in (
        ("CARTESIAN GRADIENT", "force"),
        ("FINAL SINGLE POINT ENERGY", "energy"),
    ):
        assert (
            f'  "{head}" is in the file 3 times, and {label} was read of 1 frame'
            in reported
        )
    # SIESTA writes the table of the last step twice
    head = "siesta: Atomic forces (eV/Ang):\n"
    Path("run.out").write_text(f"{head}  1 0. 0. 0.\n{head}siesta:  1 0. 0. 0.\n")
    reported = convert_data(["run.out"], "out2", file_format="siesta/output")
    assert "is in the file" not in "\n".join(reported)


def test_a_log_of_abacus_in_another_folder_than_that_of_input_is_refused():
    """It was read from the folder of the suffix, without a word."""
    for name in ("a", "b"):
        Path(f"run/OUT.{name}").mkdir(parents=True)
        Path(f"run/OUT.{name}/running_scf.log").write_text("   ABACUS v3.2\n")
        Path(f"run/OUT.{name}/MD_dump").write_text("MDSTEP:  0\n")
    Path("run/INPUT").write_text(
        "INPUT_PARAMETERS\ncalculation md\nsuffix  a # of run 1\n"
    )
    for file in ("running_scf.log", "MD_dump"):
        with pytest.raises(DataError) as caught:
            convert_data([f"run/OUT.b/{file}"], "out")
        assert str(caught.value) == (
            f"run/OUT.b/{file}: dpdata reads OUT.a, after suffix in run/INPUT (ABACUS without "
            "one), not OUT.b. Set suffix to that of OUT.b in a copy of run."
        )


def siesta_text(mark, first, steps):
    """Return an output of SIESTA of some steps, from a number on."""
    lines = [" WELCOME TO SIESTA"]
    for k in range(first, first + steps):
        lines += [f"        {mark} =      {k}", f"siesta: E_KS(eV) = {-1.0 - k}"]
    return "\n".join([*lines, "siesta: Pressure (static): 50.068 kBar", ""])


@pytest.mark.parametrize(
    ("mark", "first", "steps", "name"),
    [
        ("Begin CG opt. move", 0, 1, "siesta/output"),
        ("Begin CG opt. move", 0, 2, "siesta/aimd_output"),
        ("Begin FIRE opt. move", 0, 12, "siesta/aimd_output"),
        ("Begin CG move", 0, 2, "siesta/aimd_output"),
        ("Begin MD step", 1, 1, "siesta/aimd_output"),
    ],
)
def test_relaxations_of_siesta_of_several_steps_are_trajectories(
    dpdata, mark, first, steps, name
):
    """The format of one step has energy and forces of the first, and the stress of the last."""
    Path("run.out").write_text(siesta_text(mark, first, steps))
    convert_data(["run.out"], "out")
    assert dpdata == [name]


@pytest.mark.parametrize("steps", [1, 2])
def test_virials_of_siesta_of_another_step_than_the_frame_are_left_out(
    monkeypatch, steps
):
    data = one_atom()
    package = types.SimpleNamespace(
        LabeledSystem=lambda path, fmt: types.SimpleNamespace(data=data)
    )
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("run.out").write_text(siesta_text("Begin CG opt. move", 0, steps))
    reported = convert_data(["run.out"], "out", file_format="siesta/output")
    assert ("virials of dpdata are left out" in "\n".join(reported)) == (steps > 1)


def test_a_stress_of_cp2k_that_dpdata_does_not_read_is_named(dpdata):
    """CP2K 8 and later write it so."""
    Path("run.out").write_text(f"{OUTPUT} STRESS| Analytical stress tensor [bar]\n")
    assert (
        '  "STRESS| Analytical stress tensor" is in the file 1 time, and virial was read of 0 '
        "frames: try another --format" in convert_data(["run.out"], "out")
    )
