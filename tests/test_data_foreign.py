"""Files of programs that ASE does not read: by dpdata, where it is installed."""

import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import open_data

from deepmd_ema.data.convert import convert_data
from deepmd_ema.errors import DataError

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


TRAJECTORY = "       3\n i =        0, time =        0.000, E =       -17.0\n  O 0 0 0\n  H 0 0 1\n  H 0 1 0\n"


def test_a_trajectory_of_cp2k_is_read_by_dpdata_from_its_folder(dpdata):
    Path("run").mkdir()
    Path("run/w-pos-1.xyz").write_text(TRAJECTORY)
    assert "  dpdata as cp2k/aimd_output says: the stress is missing" in convert_data(["run/w-pos-1.xyz"], "out")
    assert dpdata == ["cp2k/aimd_output"]
    Path("run/v-pos-1.xyz").write_text(TRAJECTORY)
    with pytest.raises(DataError, match=r"dpdata reads one trajectory of CP2K in a folder. Move the others away"):
        convert_data(["run/w-pos-1.xyz"], "out2")


def test_a_trajectory_of_cp2k_without_dpdata_says_what_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpdata", None)
    Path("w-pos-1.xyz").write_text(TRAJECTORY)
    with pytest.raises(DataError, match=r"w-pos-1.xyz: is a trajectory of CP2K, which dpdata reads, and dpdata is not"):
        convert_data(["w-pos-1.xyz"], "out")


@pytest.mark.parametrize("name", ["w-pos-1.xyz", "w-frc-1.xyz"])
def test_a_trajectory_of_cp2k_as_training_data_is_to_be_converted(name):
    Path(name).write_text(TRAJECTORY)
    with pytest.raises(DataError, match=rf"{name}: is a trajectory of CP2K. Make folders of it first: dp-ema convert"):
        open_data([name], ["O", "H"], ("energy", "force"))
