"""Data that are damaged, absurd, or lead nowhere: one message with the file, whatever reads it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers import open_data, write_system
from test_data_npy import to_hdf5

from deepmd_ema.data.check.report import check_systems
from deepmd_ema.errors import DataError
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

LABELS = ("energy", "force", "virial")


def problems_of(path, rcut=4.0):
    try:
        opened = open_data([str(path)], ["O", "H"], LABELS)
        return check_systems(opened, [], ["O", "H"], SeE2AConfig(rcut=rcut, sel="auto"), LABELS).problems
    except DataError as error:
        return error.problems


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_system("water", frames=4, natoms=6, seed=1)


def put(system, name, index, value):
    file = system / "set.000" / f"{name}.npy"
    array = np.load(file)
    array[index] = value
    np.save(file, array)


# links


@pytest.mark.parametrize("file", [
    "type_map.raw", "set.001", "set.000/force.npy",
])  # fmt: skip
def test_a_link_that_leads_nowhere_is_no_absence(system, file):
    """A type_map.raw on a disk that is not mounted was left out, and elements were swapped."""
    (system / file).unlink(missing_ok=True)
    (system / file).symlink_to("/gone/away")
    [problem] = problems_of("water")
    where = "" if "/" in file else "systems[0]: "  # those of the folder are seen while it is searched
    assert problem == (
        f"{where}water/{file}: is a link to /gone/away, which does not exist. Restore its target, or remove the link."
    )


def test_a_system_that_is_a_link_to_nowhere_is_not_skipped(system, tmp_path):
    (tmp_path / "other").symlink_to("/gone/away")
    (tmp_path / ".#lock").symlink_to("user@host.1")
    [problem] = problems_of(tmp_path)
    assert "other: is a link to /gone/away, which does not exist" in problem


# numbers


@pytest.mark.parametrize("word", [
    "²", "-1",
])  # fmt: skip
def test_a_type_that_is_no_number_is_reported(system, word):
    (system / "type.raw").write_text(f"0 1 0 1 0 {word}", encoding="utf-8")
    [problem] = problems_of("water")
    assert problem.startswith(f"water/type.raw: '{word}' is not a type. Expected one integer from 0 per atom.")


def npy(shape, descr="'<f8'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * ((-len(text) - 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 32


@pytest.mark.parametrize("shape", ["(18446744073709551616,)", "(-4,)", "(9223372036854775807, 0)"])
def test_a_header_of_absurd_size_is_reported(system, shape):
    (system / "set.000" / "energy.npy").write_bytes(npy(shape))
    [problem] = problems_of("water")
    assert problem.startswith(f"water/set.000/energy.npy: its header is damaged: it says shape {shape}")


@pytest.mark.parametrize("header", [npy("(3.5,)"), npy("(4,)", "[1, 2")])
def test_a_header_that_is_damaged_is_reported(system, header):
    (system / "set.000" / "energy.npy").write_bytes(header)
    assert problems_of("water") == [
        "water/set.000/energy.npy: is not an npy file, or it is damaged. Expected an array written by numpy.save."
    ]


@pytest.mark.parametrize(("pbc", "value", "reported"), [
    (True, 1e30, "a position of 1e+30 angstrom, expected less than 1e+06. Is the file damaged?"),
    (False, 2e5, "the atoms of this open system are 2e+05 angstrom apart, expected less than 100000"),
])  # fmt: skip
def test_positions_of_no_atom_are_reported_with_the_frame(tmp_path, pbc, value, reported):
    path = write_system(tmp_path / "w", frames=4, natoms=6, seed=1, pbc=pbc)
    put(path, "coord", (2, 3), value)
    [problem] = problems_of(path)
    assert problem.startswith(f"{path}/set.000/coord.npy: frame 2 (of 4, from 0): {reported}")


# cells


CELLS = [
    (np.eye(3) * 0.007, "the cell is 0.007 angstrom thin"),
    ([[10, 0, 0], [0, 10, 0], [10, 10, 0.03]], "the cell is 0.03 angstrom thin (10 0 0 0 10 0 10 10 0.03): "),
    (np.diag([1e6, 10, 10]), "an edge of the cell is 1e+06 angstrom long"),
]


@pytest.mark.parametrize(("cell", "reported"), CELLS)
def test_a_cell_that_cannot_be_searched_is_reported_with_the_frame(system, cell, reported):
    """Some took all memory, some never ended, some ended the process without a word."""
    put(system, "box", 1, np.ravel(cell))
    [problem] = problems_of("water", rcut=6.0)
    assert problem.startswith(f"water/set.000/box.npy: frame 1 (of 4, from 0): {reported}")


# HDF5


def hdf5(system, path="data.h5"):
    import h5py

    with h5py.File(path, "w") as file:
        to_hdf5(system, file.create_group("w"))
    return path


def linked(file, name):
    import h5py

    del file[name]
    file[name] = h5py.ExternalLink("other.h5", name)


def linked_from_here(file, name):
    import h5py

    del file[name]
    file["hidden"] = h5py.ExternalLink("other.h5", name)
    file[name] = h5py.SoftLink("/hidden")


def stored_outside(file, name):
    values = file[name][:]
    Path("secret").write_bytes(values.tobytes())
    del file[name]
    file.create_dataset(name, values.shape, values.dtype, external=[("secret", 0, values.nbytes)])


def composed_of(source):
    def damage(file, name):
        import h5py

        layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
        if source == ".":  # of a part of this file, which is stored outside
            stored_outside(file, name)
            file.move(name, "part")
            layout[...] = h5py.VirtualSource(file["part"])
        else:
            layout[...] = h5py.VirtualSource(source, name, file[name].shape)
            del file[name]
        file.create_virtual_dataset(name, layout)

    return damage


OUTSIDE = {"link": linked,  "external": stored_outside,
           "virtual": composed_of("other.h5"), "virtual_external": composed_of(".")}  # fmt: skip


@pytest.mark.parametrize("name", ["type.raw", "set.000/coord.npy"])
@pytest.mark.parametrize("damage", OUTSIDE.values(), ids=OUTSIDE)
def test_hdf5_data_that_are_in_another_file_are_refused(system, damage, name):
    """Any file of the machine was read as positions, and the converter wrote them out."""
    import h5py

    hdf5(system, "other.h5")
    path = hdf5(system)
    with h5py.File(path, "a") as file:
        damage(file, f"w/{name}")
    others = {linked: Path("other.h5").resolve(), linked_from_here: Path("other.h5").resolve(),
              OUTSIDE["virtual"]: "other.h5"}  # fmt: skip
    refers = f"refers to the file {others.get(damage, 'secret')}"
    assert problems_of(path) == [f"data.h5#/w/{name}: {refers}. Expected data in data.h5 itself: write them there."]


@pytest.mark.parametrize("name", ["type.raw", "set.000/energy.npy", "set.000/coord.npy"])
def test_hdf5_that_lacks_something_is_reported(system, name):
    import h5py

    broken = [
        lambda group: group.__setitem__(name, h5py.SoftLink("/gone")),
        lambda group: group.__setitem__(name, h5py.ExternalLink("gone.h5", "/x")),
        lambda group: group.__setitem__(name, h5py.Empty("f8")),
        lambda group: group.create_group(name),
        lambda group: group.create_dataset(name, (4, 18), "f8"),
    ]
    for damage in broken:
        path = hdf5(system)
        with h5py.File(path, "a") as file:
            del file[f"w/{name}"]
            damage(file["w"])
        problem = problems_of(path)[0]
        assert f"data.h5#/w/{name}" in problem
        assert re.search("a link to what does not exist|is a group|holds no data|cannot be read as HDF5", problem), (
            problem
        )


def test_hdf5_of_which_a_part_was_never_written_is_reported(system):
    """The part was read as zeros, and a trillion of them took all memory."""
    import h5py

    path = hdf5(system)
    with h5py.File(path, "a") as file:
        data = file["w/set.000/force.npy"][()]
        del file["w/set.000/force.npy"]
        file.create_dataset("w/set.000/force.npy", data.shape, "f8", chunks=(1, data.shape[1]))[:1] = data[:1]
    [problem] = problems_of(path)
    assert problem.startswith("data.h5#/w/set.000/force.npy: has shape (")
    assert f"and 1 of its {len(data)} chunks were written. Was the file written completely?" in problem


def test_hdf5_with_damaged_bytes_is_reported(system):
    import h5py

    path = hdf5(system)
    with h5py.File(path, "a") as file:
        data = file["w/set.000/force.npy"][()]
        del file["w/set.000/force.npy"]
        file.create_dataset("w/set.000/force.npy", data=data, chunks=data.shape, fletcher32=True)
    content = Path(path).read_bytes()
    start = data.tobytes()[:64]
    assert start in content
    Path(path).write_bytes(content.replace(start, b"\xff" * 8 + start[8:]))
    [problem] = problems_of(path)
    assert problem.startswith("data.h5#/w/set.000/force.npy: cannot be read as HDF5: the file is damaged")
