"""Results of checks that a start remembers: nothing is read twice, and nothing that has changed is
trusted.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import changed, tiny_input, write_system

from deepmd_ema.cli import main
from deepmd_ema.config import load_config
from deepmd_ema.data.check_cache import recall
from deepmd_ema.data.formats.stores import StoredArray
from deepmd_ema.data.formats.system import DeepmdSystem
from deepmd_ema.data.run import check_task, open_run

MEMORY = Path(".dp-ema.checked")


@pytest.fixture
def place(here, tmp_path):
    """A folder with an input and data."""
    write_system("train", frames=6, natoms=6, seed=1, sets=2)
    write_system("valid", frames=3, natoms=6, seed=2)
    Path("input.json").write_text(json.dumps(tiny_input(["train"], ["valid"])))
    return tmp_path


def check():
    config = load_config("input.json")
    [name] = config.tasks
    data = open_run(config, {name: MEMORY})[name]
    return check_task(config, name, data, MEMORY)


def test_a_second_check_reads_no_array_and_finds_the_same(place, monkeypatch):
    first = check()
    assert not first.date
    monkeypatch.setattr(StoredArray, "read", lambda *_: pytest.fail("an array is read"))
    second = check()
    assert second.date
    assert (list(second.warnings), list(second.notes)) == (first.warnings, first.notes)
    for name in ("min_distance", "max_neighbors", "max_total"):
        assert getattr(second.neighbors, name) == getattr(first.neighbors, name)
    for name in ("by_rank", "nearest"):
        np.testing.assert_array_equal(
            getattr(second.neighbors, name), getattr(first.neighbors, name)
        )


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
    content = changed(json.loads(Path("input.json").read_text()), values)
    Path("input.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        put_nan_keeping_times,
        add_frames,
        lambda: np.save("valid/set.000/energy.npy", np.zeros(3)),
        lambda: change_input(model__descriptor__rcut=3.5),
        lambda: change_input(training__training_data__min_pair_dist=0.2),
        lambda: change_input(loss__start_pref_v=0, loss__limit_pref_v=0),
        lambda: change_input(model__pair_exclude_types=[[0, 1]]),
        lambda: change_input(model__type_map=["H", "O"]),
    ],
)
def test_whatever_changes_is_read_again(place, change):
    check()
    assert check().date
    change()
    assert not check().date


def test_a_model_with_other_networks_needs_no_other_check(place):
    check()
    change_input(model__fitting_net__neuron=[7], model__descriptor__neuron=[3, 6])
    assert check().date


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
    assert not check().date
    assert not MEMORY.exists()


def test_flipped_bits_of_a_memory_are_ignored(place):
    """One changed digit trained with another sel: of 7,408 bits 945 were taken with other
    numbers.
    """
    check()
    [file] = MEMORY.iterdir()
    written, whole = file.read_bytes(), recall(MEMORY, file.stem)
    assert whole is not None
    taken = []
    for bit in range(0, 8 * len(written), 5):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        found = recall(MEMORY, file.stem)
        taken += (
            [bit]
            if found is not None and json.dumps(found) != json.dumps(whole)
            else []
        )
    assert len(taken) == 0


@pytest.mark.parametrize("content", ["", "[" * 100_000])
def test_a_damaged_memory_is_no_memory(place, content):
    check()
    [file] = MEMORY.iterdir()
    file.write_text(content)
    assert not check().date
    assert check().date


def test_a_second_run_from_the_same_statistics_is_the_same_run(
    place, monkeypatch, capsys
):
    """Its curve is the same to the last digit, and arrays are read for its batches only."""
    change_input(
        training__stat_file="statistics", training__numb_steps=2, training__disp_freq=1
    )
    curves = []
    for number in range(2):
        if number:
            monkeypatch.setattr(
                DeepmdSystem, "chunks", lambda *_: pytest.fail("all frames are read")
            )
        assert main(["train", "input.json", "--device", "cpu", "-v", "DEBUG"]) == 0
        assert (
            "s (this content was checked before: 20" in capsys.readouterr().err
        ) is bool(number)
        curves.append(Path("lcurve.out").read_text())
        assert len(list(Path("statistics.checked").iterdir())) == 1
    assert curves[0] == curves[1]


def test_statistics_of_other_options_are_computed_anew_or_refused(place, capsys):
    change_input(training__stat_file="statistics", training__numb_steps=1)
    assert main(["train", "input.json", "--device", "cpu"]) == 0
    assert "statistics" not in capsys.readouterr().err
    change_input(model__pair_exclude_types=[[0, 1]])
    reason = "it is of other options: model.pair_exclude_types = [], now [[0, 1]]"
    change_input(training__stat_file_mode="read")
    assert main(["train", "input.json", "--device", "cpu"]) == 2
    expected = (
        'training.stat_file = "statistics" does not hold the statistics of this model, and '
        'stat_file_mode is "read"'
    )
    assert f"{expected}: {reason}. Use " in " ".join(capsys.readouterr().err.split())
    change_input(training__stat_file_mode="update")
    for is_new in (True, False):
        assert main(["train", "input.json", "--device", "cpu"]) == 0
        line = f"training.stat_file = statistics: {reason}. The statistics are computed anew."
        assert (line in " ".join(capsys.readouterr().err.split())) is is_new
