"""Results of checks that a start remembers: nothing is read twice, and nothing that has changed is trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from toy_models import SECTIONS

from deepmd_ema.cli import main
from deepmd_ema.config import load_config
from deepmd_ema.data import check_cache
from deepmd_ema.data.check_cache import recall
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.formats.stores import StoredArray
from deepmd_ema.data.formats.system import DeepmdSystem
from deepmd_ema.data.run import check_task, open_run
from deepmd_ema.data.source import ReadSpec

MEMORY = Path(".dp-ema.checked")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an input and data."""
    monkeypatch.chdir(tmp_path)
    write_system("train", frames=6, natoms=6, seed=1, sets=2)
    write_system("valid", frames=3, natoms=6, seed=2)
    Path("input.json").write_text(json.dumps(tiny_input(["train"], ["valid"])))
    return tmp_path


def check():
    [(name, task)] = load_config("input.json").tasks.items()
    data = open_run(load_config("input.json"), {name: MEMORY})[name]
    return check_task(task, data, MEMORY)


def was_read(result):
    return not result.date


def test_a_second_check_reads_no_array_and_finds_the_same(place, monkeypatch):
    first = check()
    assert was_read(first)
    monkeypatch.setattr(StoredArray, "read", lambda *_: pytest.fail("an array is read"))
    second = check()
    assert not was_read(second)
    assert (list(second.warnings), list(second.notes)) == (first.warnings, first.notes)
    for name in ("min_distance", "max_neighbors", "max_total"):
        assert getattr(second.neighbors, name) == getattr(first.neighbors, name)
    for name in ("by_rank", "nearest"):
        np.testing.assert_array_equal(getattr(second.neighbors, name), getattr(first.neighbors, name))


@pytest.mark.parametrize("descriptor", ["dpa2", "dpa3"])
def test_descriptors_with_shorter_lists_of_neighbors_are_checked_and_remembered(place, descriptor):
    """Such runs ended with "Object of type generator is not JSON serializable"."""
    config = tiny_input(["train"], ["valid"])
    config["model"]["descriptor"] = SECTIONS[descriptor]
    Path("input.json").write_text(json.dumps(config))
    assert was_read(check())
    assert not was_read(check())


def put_nan_keeping_times():
    path = Path("train/set.001/force.npy")
    before = path.stat()
    force = np.load(path)
    force[0, 0] = np.nan
    np.save(path, force)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_frames():
    Path("train/set.002").mkdir()
    for path in Path("train/set.001").glob("*.npy"):
        np.save(f"train/set.002/{path.name}", np.load(path))


def change_input(**values):
    content = json.loads(Path("input.json").read_text())
    for place, value in values.items():
        *sections, key = place.split("__")
        part = content
        for section in sections:
            part = part[section]
        part[key] = value
    Path("input.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        put_nan_keeping_times,
        add_frames,
        lambda: np.save("valid/set.000/energy.npy", np.zeros(3)),
        lambda: Path("valid/set.000/virial.npy").unlink(),
        lambda: Path("train/type.raw").write_text(Path("train/type.raw").read_text() + "\n"),
        lambda: change_input(model__descriptor__rcut=3.5),
        lambda: change_input(training__training_data__min_pair_dist=0.2),
        lambda: change_input(loss__start_pref_v=0, loss__limit_pref_v=0),
    ],
)
def test_whatever_changes_is_read_again(place, change):
    check()
    assert not was_read(check())
    change()
    assert was_read(check())


def test_options_that_choose_no_data_are_free(place):
    check()
    change_input(model__fitting_net__neuron=[7], training__numb_steps=9, training__training_data__batch_size=3)
    assert not was_read(check())
    change_input(training__training_data__batch_size=[1, 2])
    assert "batch_size: a list of 2 numbers" in check().problems[0]


def test_data_with_problems_are_not_remembered(place):
    put_nan_keeping_times()
    assert check().problems
    assert not MEMORY.exists()


def test_files_that_change_while_they_are_read_are_not_remembered(place, monkeypatch):
    chunks = DeepmdSystem.chunks

    def changed(*arguments):
        yield from chunks(*arguments)
        np.save("train/set.000/energy.npy", np.load("train/set.000/energy.npy") + 1)

    monkeypatch.setattr(DeepmdSystem, "chunks", changed)
    assert was_read(check())
    assert not MEMORY.exists()


def test_a_write_through_a_memory_map_that_was_open_before_the_check_is_seen(place):
    """Its page is dirty already, so that the write changes no time of the file."""
    mapped = np.load("train/set.000/force.npy", mmap_mode="r+")
    mapped[0, 0] = 1.0
    check()
    assert not was_read(check())
    mapped[0, 0] = np.nan
    found = check()
    assert was_read(found)
    assert "force.npy: frame 0" in found.problems[0]


def test_every_flipped_bit_of_a_memory_is_ignored(place):
    """One changed digit trained with another sel: of 7,408 bits 945 were taken with other numbers."""
    check()
    [file] = MEMORY.iterdir()
    written, whole = file.read_bytes(), recall(MEMORY, file.stem)
    assert whole is not None
    taken = []
    for bit in range(8 * len(written)):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        found = recall(MEMORY, file.stem)
        taken += [bit] if found is not None and json.dumps(found) != json.dumps(whole) else []
    assert len(taken) == 0


def test_a_memory_of_another_name_is_ignored(place):
    check()
    [file] = MEMORY.iterdir()
    other = file.rename(MEMORY / f"{'0' * len(file.stem)}.json")
    assert recall(MEMORY, other.stem) is None


def test_a_change_of_the_program_within_a_version_is_checked_again(place, monkeypatch):
    check()
    package = place / "package"
    package.mkdir()
    (package / "check.py").write_text("BOUND = 1")
    monkeypatch.setattr(check_cache, "_PACKAGE", package)
    for text in ("BOUND = 1", "BOUND = 2"):
        (package / "check.py").write_text(text)
        check_cache._source_digest.cache_clear()
        assert was_read(check())
        assert not was_read(check())
    check_cache._source_digest.cache_clear()


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"neighbors": {}}', '{"neighbors": []}', "[" * 100_000])
def test_a_damaged_memory_is_no_memory(place, content):
    check()
    [file] = MEMORY.iterdir()
    file.write_text(content)
    assert was_read(check())
    assert not was_read(check())


def test_only_the_newest_findings_are_kept(place, monkeypatch):
    monkeypatch.setattr(check_cache, "_MAX_RESULTS", 2)
    for rcut in (3.0, 3.25, 3.5):
        change_input(model__descriptor__rcut=rcut)
        check()
    assert len(list(MEMORY.iterdir())) == 2
    assert not was_read(check())


def test_a_memory_that_cannot_be_written_is_a_warning(place, caplog):
    MEMORY.touch()
    assert was_read(check())
    assert "is not remembered" in caplog.text


def test_a_second_run_from_the_same_statistics_is_the_same_run(place, monkeypatch, capsys):
    """Its curve is the same to the last digit, and arrays are read for its batches only."""
    change_input(training__stat_file="statistics", training__numb_steps=2, training__disp_freq=1)
    curves = []
    for number in range(2):
        if number:
            monkeypatch.setattr(DeepmdSystem, "chunks", lambda *_: pytest.fail("all frames are read"))
        assert main(["train", "input.json", "--device", "cpu", "-v", "DEBUG"]) == 0
        assert ("s (this content was checked before: 20" in capsys.readouterr().err) is bool(number)
        curves.append(Path("lcurve.out").read_text())
        assert len(list(Path("statistics.checked").iterdir())) == 1
    assert curves[0] == curves[1]


def test_an_lmdb_data_set_is_read_completely_once(place, monkeypatch):
    pytest.importorskip("lmdb")
    pytest.importorskip("msgpack")
    from test_data_lmdb import toy_records, write_lmdb

    def opened():
        return open_systems(["train.lmdb"], ReadSpec(["O", "H"], ("energy",), results=MEMORY))[0]

    write_lmdb(Path("train.lmdb"), toy_records(6))
    first = opened()
    with monkeypatch.context() as patch:
        patch.setattr("deepmd_ema.data.formats.lmdb._frame", lambda *_: pytest.fail("a frame is read"))
        second = opened()
    assert second.frame_sizes.tolist() == first.frame_sizes.tolist()
    assert (second.notes, second.unread, second.index_of.tolist()) == (
        first.notes,
        first.unread,
        first.index_of.tolist(),
    )
    [file] = MEMORY.iterdir()
    for damaged in ("{}", '{"sizes": 3, "types": [], "names": []}', "nothing"):
        file.write_text(damaged)
        assert opened().frame_sizes.tolist() == first.frame_sizes.tolist()


def test_the_file_of_arrays_that_are_composed_of_others_in_it_is_known(place):
    h5py = pytest.importorskip("h5py")
    with h5py.File("whole.h5", "w") as file:
        for name in ("type.raw", "type_map.raw"):
            file[f"whole/{name}"] = Path("train", name).read_text().split()
        for path in Path("train/set.000").glob("*.npy"):
            part = file.create_dataset(f"parts/{path.stem}", data=np.load(path))
            layout = h5py.VirtualLayout(part.shape, part.dtype)
            layout[...] = h5py.VirtualSource(part)
            file.create_virtual_dataset(f"whole/set.000/{path.name}", layout)
    [whole] = open_systems(["whole.h5"], ReadSpec(["O", "H"], ("energy",)))
    assert {file.name for file in whole.files()} == {"whole.h5"}
    assert whole.is_slow
    [plain] = open_systems(["train"], ReadSpec(["O", "H"], ("energy",)))
    np.testing.assert_array_equal(whole.frame(1).coord, plain.frame(1).coord)
