"""Reading deepmd/npy, deepmd/npy/mixed and HDF5, and the messages about files that do not fit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from helpers import open_data, toy_labels, write_system

from deepmd_ema.errors import DataError

LABELS = ("energy", "force", "virial", "atom_energy", "atom_pref")


def problems_of(*args, **kwargs):
    with pytest.raises(DataError) as caught:
        open_data(*args, **kwargs)
    return caught.value.problems


def only_problem(*args, **kwargs):
    problems = problems_of(*args, **kwargs)
    assert len(problems) == 1, problems
    return problems[0]


def to_hdf5(folder, group):
    """Write a system's folder into an HDF5 group, as dpdata does."""
    group["type.raw"] = np.loadtxt(folder / "type.raw", dtype=int)
    group["type_map.raw"] = np.array((folder / "type_map.raw").read_text().split(), dtype="S")
    if (folder / "nopbc").exists():
        group["nopbc"] = True
    for file in sorted(folder.glob("set.*/*.npy")):
        group[f"{file.parent.name}/{file.name}"] = np.load(file)


def assert_same_frame(a, b):
    np.testing.assert_array_equal(a.coord, b.coord)
    np.testing.assert_array_equal(a.atom_type, b.atom_type)
    np.testing.assert_equal(a.box, b.box)
    assert a.labels.keys() == b.labels.keys()
    for name in a.labels:
        np.testing.assert_array_equal(a.labels[name], b.labels[name])


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_system("water", frames=6, natoms=12, seed=1, sets=3)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_frames_have_the_numbers_of_the_files_in_order_of_the_sets(tmp_path, dtype):
    more = {"atom_ener": True, "atom_pref": True, "fparam": 2, "aparam": 3, "dtype": dtype}
    path = write_system(tmp_path / "w", elements=("H", "O"), frames=7, natoms=5, seed=2, sets=3, **more)
    [system] = open_data(str(path), ["C", "O", "N", "H"], LABELS, numb_fparam=2, numb_aparam=3)
    assert (system.num_frames, system.natoms, system.periodic, system.atom_type is None) == (7, 5, True, False)

    def stored(name, k, *shape):
        return np.concatenate([np.load(path / f"set.00{s}" / f"{name}.npy") for s in range(3)])[k].reshape(shape)

    for k in range(7):
        frame = system.frame(k)
        assert (frame.source, frame.coord.dtype, tuple(frame.labels)) == ((str(path), k), np.float64, LABELS)
        assert frame.atom_type.tolist() == [3, 1, 3, 1, 3]
        found = {"coord": frame.coord, "box": frame.box, "fparam": frame.fparam, "aparam": frame.aparam, **frame.labels}
        shapes = {"coord": (5, 3), "box": (3, 3), "energy": (), "force": (5, 3), "virial": (9,), "atom_energy": (5,),
                  "atom_pref": (5,), "fparam": (2,), "aparam": (5, 3)}  # fmt: skip
        for name, shape in shapes.items():
            expected = stored("atom_ener" if name == "atom_energy" else name, k, *shape)
            assert found[name].shape == shape
            np.testing.assert_array_equal(found[name], expected)
    with pytest.raises(IndexError, match="frame 7 of 7"):
        system.frame(7)


def test_mixed_frames_lose_their_virtual_atoms_and_keep_their_own_types(tmp_path):
    path = write_system(tmp_path / "m", frames=5, natoms=7, seed=3, elements=("H", "O"), mixed=True, virtual=3, sets=2)
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
    import h5py

    path = write_system(tmp_path / "w", frames=1, natoms=5, mixed=mixed, atom_ener=True, fparam=2, aparam=1)
    parameters = {"numb_fparam": 2, "numb_aparam": 1}
    expected = open_data([str(path)], ["O", "H"], LABELS, **parameters)[0].frame(0)
    for file in (path / "set.000").iterdir():
        np.save(file, np.load(file)[0])
    with h5py.File(tmp_path / "data.h5", "w") as root:
        to_hdf5(path, root)
    for place in (path, tmp_path / "data.h5"):
        [system] = open_data([str(place)], ["O", "H"], LABELS, **parameters)
        assert system.num_frames == 1
        frame = system.frame(0)
        assert_same_frame(frame, expected)
        np.testing.assert_array_equal(frame.fparam, expected.fparam)
        np.testing.assert_array_equal(frame.aparam, expected.aparam)


@pytest.mark.parametrize("is_hdf5", [False, True])
@pytest.mark.parametrize("name", [
    "set.000.bak",
])  # fmt: skip
def test_a_set_that_is_a_backup_is_left_out_and_named(tmp_path, name, is_hdf5):
    import h5py

    path = place = write_system(tmp_path / "w", frames=3, natoms=5)
    shutil.copytree(path / "set.000", path / name)
    if is_hdf5:
        place = tmp_path / "data.h5"
        with h5py.File(place, "w") as root:
            to_hdf5(path, root)
    [system] = open_data([str(place)], ["O", "H"], LABELS)
    assert system.num_frames == 3
    [warning] = system.warnings
    assert warning.endswith(f": left out, since their names end as those of backups do: {name}.")


def test_parents_are_searched_at_any_depth_in_order_and_links_do_not_loop(tmp_path):
    for name in ("b", "a/x", "a/deep/er/y", "c/z"):
        write_system(tmp_path / name, frames=1, natoms=3)
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = open_data([str(tmp_path)], ["O", "H"])
    assert [s.name for s in found] == [str(tmp_path / n) for n in ("a/deep/er/y", "a/x", "b", "c/z")]
    some = open_data([str(tmp_path)], ["O", "H"], rglob_patterns=["c/*", "b"])
    assert [s.name for s in some] == [str(tmp_path / n) for n in ("b", "c/z")]


@pytest.mark.parametrize(("address", "names"), [
    ("#/water/one", ["/water/one"]), ("#water", ["/water/one", "/water/two"]),
    ("", ["/mol", "/water/one", "/water/two"]),
])  # fmt: skip
def test_hdf5_groups_read_as_the_folders_they_came_from(tmp_path, address, names):
    folders = {
        "water/one": write_system(tmp_path / "1", frames=4, seed=1, sets=2),
        "water/two": write_system(tmp_path / "2", frames=2, seed=2, mixed=True, virtual=1),
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
        [plain] = open_data([str(folders[system.name.split("#/")[1]])], ["O", "H"], LABELS)
        assert system.num_frames == plain.num_frames
        for k in range(plain.num_frames):
            assert_same_frame(system.frame(k), plain.frame(k))


def test_all_problems_of_all_systems_come_at_once(system):
    shutil.copytree(system, "other")
    (system / "set.000" / "box.npy").unlink()
    np.save("other/set.001/virial.npy", np.zeros((2, 6)))
    np.save("other/set.002/force.npy", np.zeros((2, 7)))
    found = problems_of(["water", "other", "absent"], ["O", "H"], LABELS, where="training.training_data.systems")
    assert len(found) == 4
    assert found[0].startswith("training.training_data.systems[2]: absent: no such file or folder.")
    assert found[1] == (
        "water/set.000/box.npy: missing. A periodic system needs it; for open boundaries add an empty file water/nopbc."
    )
    assert found[2] == "other/set.001/virial.npy: shape (2, 6), expected (2, 9)."
    assert "other/set.002/force.npy" in found[3]


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_not_npy_is_reported(system, content):
    (system / "set.000" / "force.npy").write_bytes(content)
    assert "water/set.000/force.npy: is not an npy file" in only_problem(["water"], ["O", "H"], LABELS)


def test_pickled_objects_are_refused(system):
    np.save(system / "set.000" / "energy.npy", np.array([{}, None], dtype=object))
    assert "energy.npy: holds pickled Python objects" in only_problem(["water"], ["O", "H"], LABELS)


def test_a_mixed_frame_without_real_atoms_is_refused(tmp_path):
    path = write_system(tmp_path / "m", frames=2, natoms=3, mixed=True)
    types = np.load(path / "set.000" / "real_atom_types.npy")
    types[1] = -1
    np.save(path / "set.000" / "real_atom_types.npy", types)
    assert "frame 1 has only virtual atoms" in only_problem([str(path)], ["O", "H"])


@pytest.mark.parametrize(("break_it", "message"), [
    (lambda p: shutil.rmtree(p / "set.000"), "no frames: it has type.raw but no set.* folder"),
    (lambda p: (p / "type.raw").unlink(), "type.raw is missing (the folder has set.000)"),
    (lambda p: (p / "set.000" / "coord.npy").unlink(), "set.000/coord.npy: missing. Every set needs it."),
    (lambda p: np.save(p / "set.000" / "numb_copy.npy", [1, 2]), "numb_copy is not supported"),
    (lambda p: (p / "set.000").rename(p / "set.old"), "backups do: set.old. Rename one to set.000, or leave it out."),
    (lambda p: (p / "type_map.raw").write_text("O\nh\n"), "Did you mean H? Known: O, H. Add it to model.type_map"),
    (lambda p: write_system(p, frames=1, mixed=True) and (p / "type_map.raw").unlink(), "A mixed system (with"),
    (lambda p: (p / "type.raw").write_text("2 " * 12), "type 2, but type_map.raw has only 2 elements"),
    (lambda p: write_system(p, frames=4, mixed=True, sets=2) and (p / "set.001" / "real_atom_types.npy").unlink(),
     "set.000 with real_atom_types.npy, set.001 without. Put them into two systems."),
])  # fmt: skip
def test_a_system_that_lacks_something_says_what(tmp_path, break_it, message):
    path = write_system(tmp_path / "w", frames=2)
    break_it(path)
    assert message in only_problem([str(path)], ["O", "H"])


def test_missing_parameters_name_the_option(system):
    found = problems_of(["water"], ["O", "H"], numb_fparam=1, numb_aparam=2)
    assert "water/set.000/fparam.npy: missing. numb_fparam = 1 needs it, unless default_fparam is given." in found
    assert "water/set.002/aparam.npy: missing. numb_aparam = 2 needs it." in found


@pytest.mark.parametrize(("path", "message"), [
    ("watr", "systems[0]: watr: no such file or folder. Did you mean water?"),
    ("empty", "systems[0]: empty: no system in it or below it."),
    ("water/type.raw", "is a file. Expected a folder with type.raw"), ("broken.h5", "cannot be read as HDF5"),
    ("good.h5#/nothing", "good.h5: has no group /nothing. Groups of the file: w."),
])  # fmt: skip
def test_a_path_without_a_system_says_what_is_there(system, path, message):
    import h5py

    (system.parent / "empty").mkdir()
    (system.parent / "broken.h5").write_text("no")
    with h5py.File("good.h5", "w") as root:
        root.create_group("w")
    assert message in only_problem([path], ["O", "H"])


def test_a_file_that_shrinks_while_it_is_in_use_is_reported(system):
    [opened] = open_data(["water"], ["O", "H"])
    file = system / "set.000" / "coord.npy"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"coord.npy: has become shorter while it was in use"):
        opened.frame(1)
