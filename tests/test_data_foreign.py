"""Files of programs that ASE does not read: by dpdata, where it is installed, and trajectories of CP2K."""

import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import open_data

from deepmd_ema.data.convert import convert_data
from deepmd_ema.data.formats.cp2k import HARTREE
from deepmd_ema.errors import DataError

BOHR = 0.529177210903
OUTPUT = " DBCSR| Multiplication driver\n\n CP2K| version string:   CP2K version 7.1\n"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def dpdata(monkeypatch):
    """Put a package in the place of dpdata that reads one frame of two kinds of iron, and notes how it was called."""
    called = []

    def read(path, fmt):
        called.append(fmt)
        if fmt == "auto":
            raise NotImplementedError("no format")
        warnings.warn("the stress  is\nmissing", UserWarning, stacklevel=1)
        warnings.warn("numpy changes", DeprecationWarning, stacklevel=1)
        print("a line for the screen")
        data = {"atom_names": ["Fe1", "O_s", "Fe2", "Xx1"], "atom_types": np.arange(4), "coords": np.ones((1, 4, 3)),
                "cells": 9 * np.eye(3)[None], "energies": np.array([-1.0]), "forces": np.ones((1, 4, 3))}  # fmt: skip
        return types.SimpleNamespace(data=data)

    package = types.ModuleType("dpdata")
    package.LabeledSystem = read
    monkeypatch.setitem(sys.modules, "dpdata", package)
    return called


def test_an_output_of_cp2k_is_known_by_its_content_and_read_by_dpdata(dpdata, capfd):
    Path("md.out").write_text(OUTPUT)
    reported = convert_data(["md.out"], "out")
    assert dpdata == ["cp2k/output"]
    assert "  kinds of atoms are read as elements: Fe1 as Fe, O_s as O, Fe2 as Fe" in reported
    assert Path("out/Fe2O1Xx11/type_map.raw").read_text().split() == ["Fe", "O", "Xx1"]
    assert "  dpdata as cp2k/output says: the stress is missing" in reported
    assert "  dpdata as cp2k/output says: a line for the screen" in reported
    assert "numpy changes" not in "\n".join(reported)
    assert capfd.readouterr() == ("", "")


def test_an_output_of_cp2k_without_dpdata_says_what_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpdata", None)
    Path("md.out").write_text(OUTPUT)
    with pytest.raises(
        DataError, match=r"md.out: is an output of CP2K, which dpdata reads, and dpdata is not installed"
    ):
        convert_data(["md.out"], "out")


def test_what_neither_ase_nor_dpdata_reads_is_reported_as_ase_does(dpdata):
    Path("noise.bin").write_bytes(bytes(range(256)) * 9)
    with pytest.raises(DataError, match=r"noise.bin: cannot be read by ASE"):
        convert_data(["noise.bin"], "out")
    assert dpdata == ["auto"]


def test_what_dpdata_says_of_an_error_is_not_cut(monkeypatch):
    package, words = types.ModuleType("dpdata"), "please check " * 30
    package.LabeledSystem = lambda path, fmt: (_ for _ in ()).throw(RuntimeError(f"{words}the end"))
    monkeypatch.setitem(sys.modules, "dpdata", package)
    Path("md.out").write_text(OUTPUT)
    with pytest.raises(DataError) as caught:
        convert_data(["md.out"], "out")
    assert f"cannot be read by dpdata as cp2k/output ({words}the end)" in str(caught.value)


def write_trajectory(steps=3, forces=3, name="w"):
    """Write positions, forces and energies of water as CP2K does; return the numbers in the files."""
    rng = np.random.default_rng(0)
    coord, force, energy = rng.normal(size=(steps, 3, 3)), rng.normal(size=(steps, 3, 3)), -17.0 - np.arange(steps)
    for kind, rows, number in (("pos", coord, steps), ("frc", force, forces)):
        text = ""
        for k in range(number):
            text += f"       3\n i = {k:8d}, time = {k / 2:12.3f}, E = {energy[k]:20.10f}\n"
            text += "".join(f"  {e} {x!r} {y!r} {z!r}\n" for e, (x, y, z) in zip("OHH", rows[k].tolist()))
        if number:
            Path(f"{name}-{kind}-1.xyz").write_text(text)
    return coord, energy, force


def frames_of(folder):
    [source] = open_data([folder], ["O", "H"], ("energy", "force"))
    return [source.frame(k) for k in range(source.num_frames)]


INPUT = "&FORCE_EVAL\n &CELL\n  B 0.0 5.5 0.0\n  A [angstrom] 5 0 0\n  PERIODIC XYZ\n  C 0 1 6\n &END CELL\n"
CELL = "# Step Time Ax Ay Az Bx By Bz Cx Cy Cz Volume\n" + "".join(
    f" {k} {k / 2} {5 + k} 0 0 0 5.5 0 0 1 6 {(5 + k) * 33}\n" for k in range(3)
)


@pytest.mark.parametrize("cell", ["w-1.cell", "w-1.restart", "any.inp", "ABC", "angles", "NONE"])
def test_a_trajectory_of_cp2k_is_read_with_forces_and_cell(cell):
    from ase.cell import Cell

    coord, energy, force = write_trajectory()
    boxes = [np.array([[5 + k * (cell == "w-1.cell"), 0, 0], [0, 5.5, 0], [0, 1, 6]]) for k in range(3)]
    if cell in ("ABC", "angles", "NONE"):
        angles = "  ALPHA_BETA_GAMMA [deg] 80 100 60\n" * (cell == "angles")
        line = "PERIODIC NONE\n ABC 5 6 7" if cell == "NONE" else f"ABC [angstrom] 5 6 7  ! of the box\n{angles}"
        Path("w.inp").write_text(f" &CELL\n {line}\n &END CELL\n")
        of_angles = Cell.new([5, 6, 7, 80, 100, 60]).array  # as ASE, which has the same convention
        boxes = [{"ABC": np.diag([5.0, 6, 7]), "angles": of_angles, "NONE": None}[cell]] * 3
    else:
        Path(cell).write_text(CELL if cell.endswith(".cell") else INPUT)
    reported = convert_data(["w-pos-1.xyz"], "out")
    assert "  energies are from the comments (hartree), forces from w-frc-1.xyz (hartree/bohr)" in reported
    for k, frame in enumerate(frames_of("out")):
        assert np.allclose(frame.coord, coord[k], rtol=1e-12)
        assert frame.labels["energy"] == pytest.approx(energy[k] * HARTREE)
        assert np.allclose(frame.labels["force"], force[k] * HARTREE / BOHR, rtol=1e-12)
        assert (frame.box is None) == (boxes[k] is None)
        assert frame.box is None or np.allclose(frame.box, boxes[k], rtol=0, atol=1e-9 * (cell == "angles"))


@pytest.mark.parametrize("name", ["w-pos-1.xyz", "w-frc-1.xyz"])
def test_a_trajectory_of_cp2k_as_training_data_is_to_be_converted(name):
    write_trajectory()
    with pytest.raises(DataError, match=rf"{name}: is a trajectory of CP2K. Make folders of it first: dp-ema convert"):
        open_data([name], ["O", "H"], ("energy", "force"))


def test_a_trajectory_of_cp2k_without_forces_says_so():
    write_trajectory(forces=0)
    Path("w-1.cell").write_text(CELL)
    assert "forces from nowhere: w-frc-1.xyz is not there, or empty" in "\n".join(convert_data(["w-pos-1.xyz"], "out"))


def test_steps_of_cp2k_without_forces_are_counted():
    write_trajectory(forces=2)
    Path("w-1.cell").write_text(CELL)
    assert "  no forces in w-frc-1.xyz (1 frame)" in convert_data(["w-pos-1.xyz"], "out")
    assert sorted("force" in frame.labels for frame in frames_of("out")) == [False, True, True]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w-pos-1.xyz", lambda: None, "a trajectory of CP2K without its cell. Expected beside it w-1.cell"),
        ("w-pos-1.xyz", lambda: Path("w-1.cell").write_text(CELL[:77]), "step 1 is not in w-1.cell. Print cell and"),
        ("w-pos-1.xyz", lambda: Path("w-1.cell").write_text(CELL[:120]), "w-1.cell: is no table of cells of CP2K: "),
        ("w-frc-1.xyz", lambda: None, "holds forces or velocities of CP2K. Name w-pos-1.xyz"),
        (
            "w-1.ener",
            lambda: Path("w-1.ener").write_text("# Step Nr.\n"),
            "has energies of CP2K only. Name NAME-pos-1.xyz",
        ),
        (
            "w-pos-1.xyz",
            lambda: Path("w-frc-1.xyz").write_text("1\n i = 0, E = x\nO 1 2 3\n"),
            "w-frc-1.xyz: frame 0: ",
        ),
        ("w-pos-1.xyz", lambda: Path("w-frc-1.xyz").write_text("1\n i = 0, E = 1\nO 1 2\n"), "expected three numbers"),
    ],
)
def test_files_of_cp2k_that_cannot_be_used_say_what_to_do(name, change, message):
    write_trajectory()
    change()
    with pytest.raises(DataError) as caught:
        convert_data([name], "out")
    assert message in "\n".join(caught.value.problems)
