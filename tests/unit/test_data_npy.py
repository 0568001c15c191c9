"""Reading deepmd/npy, deepmd/npy/mixed and HDF5; one message about a file that does not fit, is
damaged or absurd.
"""

import fcntl
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from data_files import hdf5, to_hdf5
from helpers import open_data, toy_labels, write_system

from deepmd_ema.data.check.report import check_systems
from deepmd_ema.errors import DataError
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

LABELS = ("energy", "force", "virial", "atom_energy", "atom_pref")


def problems_of(*paths, rcut=4.0, **spec):
    """Return the messages of opening and checking."""
    try:
        opened = open_data(
            [str(path) for path in paths], ["O", "H"], LABELS[:3], **spec
        )
        return check_systems(
            opened, [], ["O", "H"], SeE2AConfig(rcut=rcut, sel="auto"), LABELS[:3]
        ).problems
    except DataError as error:
        return error.problems


def assert_same_frame(a, b):
    np.testing.assert_array_equal(a.coord, b.coord)
    np.testing.assert_array_equal(a.atom_type, b.atom_type)
    np.testing.assert_equal(a.box, b.box)
    assert a.labels.keys() == b.labels.keys()
    for name in a.labels:
        np.testing.assert_array_equal(a.labels[name], b.labels[name])


@pytest.fixture
def system(here):
    return write_system("water", frames=6, natoms=6, seed=1, sets=2)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_frames_have_the_numbers_of_the_files_in_order_of_the_sets(tmp_path, dtype):
    more = {
        "atom_ener": True,
        "atom_pref": True,
        "fparam": 2,
        "aparam": 3,
        "dtype": dtype,
    }
    path = write_system(
        tmp_path / "w", elements=("H", "O"), frames=7, natoms=5, seed=2, sets=3, **more
    )
    [system] = open_data(
        str(path), ["C", "O", "N", "H"], LABELS, numb_fparam=2, numb_aparam=3
    )
    assert (
        system.num_frames,
        system.natoms,
        system.periodic,
        system.atom_type is None,
    ) == (
        7,
        5,
        True,
        False,
    )

    def stored(name, k, *shape):
        return np.concatenate(
            [np.load(path / f"set.00{s}" / f"{name}.npy") for s in range(3)]
        )[k].reshape(shape)

    for k in range(7):
        frame = system.frame(k)
        assert (frame.source, frame.coord.dtype, tuple(frame.labels)) == (
            (str(path), k),
            np.float64,
            LABELS,
        )
        assert frame.atom_type.tolist() == [3, 1, 3, 1, 3]
        found = {
            "coord": frame.coord,
            "box": frame.box,
            "fparam": frame.fparam,
            "aparam": frame.aparam,
            **frame.labels,
        }
        shapes = {
            "coord": (5, 3),
            "box": (3, 3),
            "energy": (),
            "force": (5, 3),
            "virial": (9,),
            "atom_energy": (5,),
            "atom_pref": (5,),
            "fparam": (2,),
            "aparam": (5, 3),
        }
        for name, shape in shapes.items():
            expected = stored("atom_ener" if name == "atom_energy" else name, k, *shape)
            assert found[name].shape == shape
            np.testing.assert_array_equal(found[name], expected)
    with pytest.raises(IndexError, match="frame 7 of 7"):
        system.frame(7)


def test_mixed_frames_lose_their_virtual_atoms_and_keep_their_own_types(tmp_path):
    path = write_system(
        tmp_path / "m",
        frames=5,
        natoms=7,
        seed=3,
        elements=("H", "O"),
        mixed=True,
        virtual=3,
        sets=2,
    )
    [system] = open_data([str(path)], ["O", "H"], ("energy", "force"))
    assert system.atom_type is None
    assert system.natoms == 10
    orders = set()
    for k in range(5):
        frame = system.frame(k)
        energy, force, _, _ = toy_labels(frame.coord, 1 - frame.atom_type, frame.box)
        assert frame.num_atoms == 7
        assert energy == pytest.approx(frame.labels["energy"])
        np.testing.assert_allclose(force, frame.labels["force"], atol=1e-12)
        assert len(frame.file_index) == 7
        orders.add(tuple(frame.atom_type))
    assert len(orders) > 1


@pytest.mark.parametrize("mixed", [False, True])
def test_a_single_frame_that_was_saved_without_its_axis_is_read(tmp_path, mixed):
    path = write_system(
        tmp_path / "w",
        frames=1,
        natoms=5,
        mixed=mixed,
        atom_ener=True,
        fparam=2,
        aparam=1,
    )
    parameters = {"numb_fparam": 2, "numb_aparam": 1}
    expected = open_data([str(path)], ["O", "H"], LABELS, **parameters)[0].frame(0)
    for file in (path / "set.000").iterdir():
        np.save(file, np.load(file)[0])
    for place in (path, hdf5(path, tmp_path / "data.h5", "/")):
        [system] = open_data([str(place)], ["O", "H"], LABELS, **parameters)
        assert system.num_frames == 1
        frame = system.frame(0)
        assert_same_frame(frame, expected)
        np.testing.assert_array_equal(frame.fparam, expected.fparam)
        np.testing.assert_array_equal(frame.aparam, expected.aparam)


def test_a_set_that_is_a_backup_is_left_out_and_named(tmp_path):
    path = write_system(tmp_path / "w", frames=3, natoms=5)
    shutil.copytree(path / "set.000", path / "set.000.bak")
    for place in (path, hdf5(path, tmp_path / "data.h5", "/")):
        [system] = open_data([str(place)], ["O", "H"], LABELS)
        assert system.num_frames == 3
        [warning] = system.warnings
        assert warning.endswith(
            ": left out, since their names end as those of backups do: set.000.bak."
        )


def test_parents_are_searched_at_any_depth_in_order_and_links_do_not_loop(tmp_path):
    for name in ("b", "a/x", "a/deep/er/y", "c/z"):
        write_system(tmp_path / name, frames=1, natoms=3)
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = open_data([str(tmp_path)], ["O", "H"])
    assert [s.name for s in found] == [
        str(tmp_path / n) for n in ("a/deep/er/y", "a/x", "b", "c/z")
    ]
    some = open_data([str(tmp_path)], ["O", "H"], rglob_patterns=["c/*", "b"])
    assert [s.name for s in some] == [str(tmp_path / n) for n in ("b", "c/z")]


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("#/water/one", ["/water/one"]),
        ("#water", ["/water/one", "/water/two"]),
        ("", ["/mol", "/water/one", "/water/two"]),
    ],
)
def test_hdf5_groups_read_as_the_folders_they_came_from(tmp_path, address, names):
    folders = {
        "water/one": write_system(tmp_path / "1", frames=4, seed=1, sets=2),
        "water/two": write_system(
            tmp_path / "2", frames=2, seed=2, mixed=True, virtual=1
        ),
        "mol": write_system(tmp_path / "3", frames=3, natoms=5, seed=3, pbc=False),
    }
    import h5py

    file = tmp_path / "data.h5"
    with h5py.File(file, "w") as root:
        for name, folder in folders.items():
            to_hdf5(folder, root.create_group(name))
    found = open_data([str(file) + address], ["O", "H"], LABELS)
    assert [s.name for s in found] == [f"{file}#{n}" for n in names]
    for system in found:
        [plain] = open_data(
            [str(folders[system.name.split("#/")[1]])], ["O", "H"], LABELS
        )
        assert system.num_frames == plain.num_frames
        for k in range(plain.num_frames):
            assert_same_frame(system.frame(k), plain.frame(k))


def test_all_problems_of_all_systems_come_at_once(system):
    shutil.copytree(system, "other")
    (system / "set.000" / "box.npy").unlink()
    np.save("other/set.000/virial.npy", np.zeros((3, 6)))
    np.save("other/set.001/force.npy", np.zeros((3, 7)))
    found = problems_of(
        "water", "other", "absent", where="training.training_data.systems"
    )
    assert len(found) == 4
    assert found[0].startswith(
        "training.training_data.systems[2]: absent: no such file or folder."
    )
    assert found[1] == (
        "water/set.000/box.npy: missing. A periodic system needs it; for open boundaries add an "
        "empty file water/nopbc."
    )
    assert found[2] == "other/set.000/virial.npy: shape (3, 6), expected (3, 9)."
    assert "other/set.001/force.npy" in found[3]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda p: shutil.rmtree(p / "set.000"),
            "no frames: it has type.raw but no set.* folder",
        ),
        (
            lambda p: (p / "type.raw").unlink(),
            "type.raw is missing (the folder has set.000)",
        ),
        (
            lambda p: (p / "set.000" / "coord.npy").unlink(),
            "set.000/coord.npy: missing. Every set needs it.",
        ),
        (
            lambda p: np.save(p / "set.000" / "numb_copy.npy", [1, 2]),
            "numb_copy is not supported",
        ),
        (
            lambda p: (p / "set.000").rename(p / "set.old"),
            "backups do: set.old. Rename one to set.000, or leave it out.",
        ),
        (
            lambda p: (p / "type_map.raw").write_text("O\nh\n"),
            "Did you mean H? Known: O, H. Add it to model.type_map",
        ),
        (
            lambda p: (
                write_system(p, frames=1, mixed=True) and (p / "type_map.raw").unlink()
            ),
            "A mixed system (with",
        ),
        (
            lambda p: (p / "type.raw").write_text("2 " * 12),
            "type 2, but type_map.raw has only 2 elements",
        ),
        (
            lambda p: (p / "type.raw").write_text("0 -1"),
            "'-1' is not a type. Expected one integer from 0 per atom.",
        ),
        (
            lambda p: (p / "type.raw").write_text("0 ²", "utf-8"),
            "'²' is not a type. Expected one integer from 0 per atom.",
        ),
        (
            lambda p: (
                write_system(p, frames=2, mixed=True)
                and put(p, "real_atom_types", 1, -1)
            ),
            "frame 1 has only virtual",
        ),
        (
            lambda p: (
                write_system(p, frames=4, mixed=True, sets=2)
                and (p / "set.001" / "real_atom_types.npy").unlink()
            ),
            "set.000 with real_atom_types.npy, set.001 without. Put them into two systems.",
        ),
    ],
)
def test_a_system_that_lacks_something_says_what(tmp_path, break_it, message):
    path = write_system(tmp_path / "w", frames=2)
    break_it(path)
    [problem] = problems_of(path)
    assert message in problem


def npy(shape, descr="'<f8'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * ((-len(text) - 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 32


NO_NPY = (
    "is not an npy file, or it is damaged. Expected an array written by numpy.save."
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", NO_NPY),
        (b"\x93NUMPY\x01\x00", NO_NPY),
        (npy("(3.5,)"), NO_NPY),
        (npy("(4,)", "[1, 2"), NO_NPY),
        (
            npy("(18446744073709551616,)"),
            "its header is damaged: it says shape (18446744073709551616,)",
        ),
        (npy("(-4,)"), "its header is damaged: it says shape (-4,)"),
        (
            npy("(9223372036854775807, 0)"),
            "its header is damaged: it says shape (9223372036854775807, 0)",
        ),
        (None, "holds pickled Python objects"),
    ],
)
def test_a_file_that_is_no_array_is_reported(system, content, message):
    path = system / "set.000" / "energy.npy"
    np.save(path, np.array([{}, None], dtype=object))
    if content is not None:
        path.write_bytes(content)
    [problem] = problems_of("water")
    assert problem.startswith(f"water/set.000/energy.npy: {message}")


def test_missing_parameters_name_the_option(system):
    found = problems_of("water", numb_fparam=1, numb_aparam=2)
    assert (
        "water/set.000/fparam.npy: missing. numb_fparam = 1 needs it, unless default_fparam is "
        "given." in found
    )
    assert "water/set.001/aparam.npy: missing. numb_aparam = 2 needs it." in found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("watr", "systems[0]: watr: no such file or folder. Did you mean water?"),
        ("empty", "systems[0]: empty: no system in it or below it."),
        ("water/type.raw", "is a file. Expected a folder with type.raw"),
        ("broken.h5", "cannot be read as HDF5"),
        ("good.h5#/nothing", "good.h5: has no group /nothing. Groups of the file: w."),
    ],
)
def test_a_path_without_a_system_says_what_is_there(system, path, message):
    import h5py

    (system.parent / "empty").mkdir()
    (system.parent / "broken.h5").write_text("no")
    with h5py.File("good.h5", "w") as root:
        root.create_group("w")
    assert message in problems_of(path)[0]


def test_a_file_that_shrinks_while_it_is_in_use_is_reported(system):
    [opened] = open_data(["water"], ["O", "H"])
    file = system / "set.000" / "coord.npy"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(
        DataError, match=r"coord.npy: has become shorter while it was in use"
    ):
        opened.frame(1)


def put(system, name, index, value):
    file = system / "set.000" / f"{name}.npy"
    array = np.load(file)
    array[index] = value
    np.save(file, array)


# links


@pytest.mark.parametrize("file", ["type_map.raw", "set.002", "set.000/force.npy"])
def test_a_link_that_leads_nowhere_is_no_absence(system, file):
    """A type_map.raw on a disk that is not mounted was left out, and elements were swapped."""
    (system / file).unlink(missing_ok=True)
    (system / file).symlink_to("/gone/away")
    [problem] = problems_of("water")
    where = (
        "" if "/" in file else "systems[0]: "
    )  # those of the folder are seen while it is searched
    assert problem == (
        f"{where}water/{file}: is a link to /gone/away, which does not exist. Restore its target, "
        "or remove the link."
    )


def test_a_system_that_is_a_link_to_nowhere_is_not_skipped(system, tmp_path):
    (tmp_path / "other").symlink_to("/gone/away")
    (tmp_path / ".#lock").symlink_to("user@host.1")
    [problem] = problems_of(tmp_path)
    assert "other: is a link to /gone/away, which does not exist" in problem


@pytest.mark.parametrize(
    ("pbc", "value", "reported"),
    [
        (
            True,
            1e30,
            "a position of 1e+30 angstrom, expected less than 1e+06. Is the file damaged?",
        ),
        (
            False,
            2e5,
            "the atoms of this open system are 2e+05 angstrom apart, expected less than 100000",
        ),
    ],
)
def test_positions_of_no_atom_are_reported_with_the_frame(
    tmp_path, pbc, value, reported
):
    path = write_system(tmp_path / "w", frames=4, natoms=6, seed=1, pbc=pbc)
    put(path, "coord", (2, 3), value)
    [problem] = problems_of(path)
    assert problem.startswith(
        f"{path}/set.000/coord.npy: frame 2 (of 4, from 0): {reported}"
    )


@pytest.mark.parametrize(
    ("cell", "reported"),
    [
        (
            [[10, 0, 0], [0, 10, 0], [10, 10, 0.03]],
            "the cell is 0.03 angstrom thin (10 0 0 0 10 0 10 10 0.03): ",
        ),
        (np.diag([1e6, 10, 10]), "an edge of the cell is 1e+06 angstrom long"),
    ],
)
def test_a_cell_that_cannot_be_searched_is_reported_with_the_frame(
    system, cell, reported
):
    """Some took all memory, some never ended, some ended the process without a word."""
    put(system, "box", 1, np.ravel(cell))
    [problem] = problems_of("water", rcut=6.0)
    assert problem.startswith(
        f"water/set.000/box.npy: frame 1 (of 3, from 0): {reported}"
    )


# HDF5


def linked(file, name):
    import h5py

    del file[name]
    file[name] = h5py.ExternalLink("other.h5", name)


def stored_outside(file, name):
    values = file[name][:]
    Path("secret").write_bytes(values.tobytes())
    del file[name]
    file.create_dataset(
        name, values.shape, values.dtype, external=[("secret", 0, values.nbytes)]
    )


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


OUTSIDE = {
    "link": linked,
    "external": stored_outside,
    "virtual": composed_of("other.h5"),
    "virtual_external": composed_of("."),
}


@pytest.mark.parametrize("name", ["type.raw", "set.000/coord.npy"])
@pytest.mark.parametrize("damage", OUTSIDE.values(), ids=OUTSIDE)
def test_hdf5_data_that_are_in_another_file_are_refused(system, damage, name):
    """Any file of the machine was read as positions, and the converter wrote them out."""
    import h5py

    hdf5(system, "other.h5")
    path = hdf5(system)
    with h5py.File(path, "a") as file:
        damage(file, f"w/{name}")
    others = {linked: Path("other.h5").resolve(), OUTSIDE["virtual"]: "other.h5"}
    refers = f"refers to the file {others.get(damage, 'secret')}"
    assert problems_of(path) == [
        f"data.h5#/w/{name}: {refers}. Expected data in data.h5 itself: write them there."
    ]


@pytest.mark.parametrize(
    "name", ["type.raw", "set.000/energy.npy", "set.000/coord.npy"]
)
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
        assert re.search(
            "a link to what does not exist|is a group|holds no data|cannot be read as HDF5",
            problem,
        ), problem


def test_hdf5_that_another_program_writes_is_reported(system):
    path = hdf5(system)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as HDF5 does in the other program
        with pytest.raises(DataError) as caught:
            open_data([path], ["O", "H"])
    assert str(caught.value) == (
        f"systems[0]: {path}: another program has it open for writing. Wait until it has closed "
        "it, or set HDF5_USE_FILE_LOCKING=FALSE if it does not write any more."
    )


def test_hdf5_of_which_a_part_was_never_written_is_reported(system):
    """The part was read as zeros, and a trillion of them took all memory."""
    import h5py

    path = hdf5(system)
    with h5py.File(path, "a") as file:
        data = file["w/set.000/force.npy"][()]
        del file["w/set.000/force.npy"]
        file.create_dataset(
            "w/set.000/force.npy", data.shape, "f8", chunks=(1, data.shape[1])
        )[:1] = data[:1]
    [problem] = problems_of(path)
    assert problem.startswith("data.h5#/w/set.000/force.npy: has shape (")
    assert (
        f"and 1 of its {len(data)} chunks were written. Was the file written completely?"
        in problem
    )


def test_hdf5_with_damaged_bytes_is_reported(system):
    import h5py

    path = hdf5(system)
    with h5py.File(path, "a") as file:
        data = file["w/set.000/force.npy"][()]
        del file["w/set.000/force.npy"]
        file.create_dataset(
            "w/set.000/force.npy", data=data, chunks=data.shape, fletcher32=True
        )
    content = Path(path).read_bytes()
    start = data.tobytes()[:64]
    assert start in content
    Path(path).write_bytes(content.replace(start, b"\xff" * 8 + start[8:]))
    [problem] = problems_of(path)
    assert problem.startswith(
        "data.h5#/w/set.000/force.npy: cannot be read as HDF5: the file is damaged"
    )


@pytest.mark.parametrize(
    ("place", "key", "text", "problem"),
    [
        (
            "w/set.000/energy.npy",
            "units",
            "hartree",
            "energy_units = hartree: expected eV and angstrom. Convert the numbers.",
        ),
        ("w/set.001/force.npy", "unit", np.bytes_("hartree/bohr"), "force_unit = "),
        ("w/set.001/coord.npy", "unit", "nm", "coord_unit = nm: expected"),
        ("w/set.000/virial.npy", "unit", "foo", "virial_unit = 'foo': is not a known"),
        ("w", "energy_unit", "kcal/mol", "energy_unit = kcal/mol: expected"),
        ("w/set.000", "length_unit", "bohr", "length_unit = bohr: expected"),
        ("/", "units", ["real"], "units = real: expected"),
        ("/", "units", "metal", ""),
        ("/", "unit_cell", np.eye(3), ""),
        ("w/set.000/energy.npy", "unit", "eV", ""),
        ("w/set.000/force.npy", "unit", np.bytes_("eV / Angstrom"), ""),
        ("w/set.000/gap.npy", "unit", "hartree", ""),  # a property has any unit
        ("w/set.000/coord.npy", "written_by", "an MD program", ""),
    ],
)
def test_hdf5_whose_attributes_state_other_units_is_refused(
    system, place, key, text, problem
):
    import h5py

    path = hdf5(system)
    with h5py.File(path, "a") as file:
        if "gap" in place:
            file[place] = np.zeros(3)
        file[place].attrs[key] = text
    found = problems_of(path)
    assert len(found) == bool(problem)
    if problem:
        where = f"/{place}".replace("//", "/")
        assert re.fullmatch(
            f"(systems.0.: )?data.h5#{where}: {re.escape(problem)}.*", found[0]
        ), found
