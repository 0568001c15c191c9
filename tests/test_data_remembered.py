"""What a start remembers of the check of its data: nothing is read twice, and nothing that has changed is trusted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from toy_models import SECTIONS

from deepmd_ema.cli import main
from deepmd_ema.config import load_config
from deepmd_ema.data.check import remembered
from deepmd_ema.data.check.report import DataReport
from deepmd_ema.data.formats.npy import Rows
from deepmd_ema.data.run import check_unless_unchanged, open_run

MEMORY = ".dp-ema.checked.json"


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A folder with an input and data whose files are old enough to be known by their times."""
    monkeypatch.chdir(tmp_path)
    write_system("train", frames=6, natoms=6, seed=1, sets=2)
    write_system("valid", frames=3, natoms=6, seed=2)
    monkeypatch.setattr(remembered, "_UNSURE_S", 0.0)
    Path("input.json").write_text(json.dumps(tiny_input(["train"], ["valid"])))
    time.sleep(0.01)
    return tmp_path


def check(now=None):
    [(name, task)] = load_config("input.json").tasks.items()
    opened = time.time() if now is None else now
    data = open_run(load_config("input.json"))[name]
    return check_unless_unchanged(task, data, Path(MEMORY), opened)


def was_read(result):
    return isinstance(result, DataReport)


def test_a_second_check_reads_no_array_and_finds_the_same(old, monkeypatch):
    first = check()
    assert was_read(first)
    monkeypatch.setattr(Rows, "read", lambda *_: pytest.fail("an array is read"))
    second = check()
    assert not was_read(second)
    assert (list(second.warnings), list(second.notes)) == (first.warnings, first.notes)
    for name in ("min_distance", "max_neighbors", "max_total"):
        assert getattr(second.neighbors, name) == getattr(first.neighbors, name)
    for name in ("by_rank", "nearest"):
        np.testing.assert_array_equal(getattr(second.neighbors, name), getattr(first.neighbors, name))


@pytest.mark.parametrize("descriptor", ["dpa2", "dpa3"])
def test_descriptors_with_shorter_lists_of_neighbors_are_checked_and_remembered(old, descriptor):
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
        lambda: change_input(training__training_data__min_pair_dist=0.4),
        lambda: change_input(loss__start_pref_v=0, loss__limit_pref_v=0),
    ],
)
def test_whatever_changes_is_read_again(old, change):
    check()
    assert not was_read(check())
    change()
    time.sleep(0.01)
    assert was_read(check())


def test_options_that_choose_no_data_are_free(old):
    check()
    change_input(model__fitting_net__neuron=[7], training__numb_steps=9, training__training_data__batch_size=3)
    assert not was_read(check())
    change_input(training__training_data__batch_size=[1, 2])
    assert "batch_size: a list of 2 numbers" in check().problems[0]


def test_files_that_may_change_within_their_time_are_not_known(old):
    assert was_read(check(now=0.0))
    assert not Path(MEMORY).exists()
    check()
    assert was_read(check(now=0.0))


def test_data_with_problems_are_not_remembered(old):
    put_nan_keeping_times()
    time.sleep(0.01)
    assert check().problems
    assert not Path(MEMORY).exists()


def test_files_that_change_while_they_are_read_are_not_remembered(old, monkeypatch):
    chunks = remembered.os.stat
    stats = []

    def stat(path, *arguments, **options):
        stats.append(str(path))
        if stats.count("train/type.raw") == 2:  # after the check
            Path("train/set.000/force.npy").touch()
        return chunks(path, *arguments, **options)

    monkeypatch.setattr(remembered.os, "stat", stat)
    assert was_read(check())
    assert not Path(MEMORY).exists()


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"KEY": 3}', '{"KEY": {"neighbors": {}}}', '{"KEY": {"neighbors": []}}']
)
def test_a_damaged_memory_is_no_memory(old, content):
    check()
    [key] = json.loads(Path(MEMORY).read_text())
    Path(MEMORY).write_text(content.replace("KEY", key))
    assert was_read(check())
    assert not was_read(check())


def test_only_the_newest_results_are_kept(old, monkeypatch):
    monkeypatch.setattr(remembered, "_MOST_RESULTS", 2)
    for rcut in (3.0, 3.25, 3.5):
        change_input(model__descriptor__rcut=rcut)
        check()
    assert len(json.loads(Path(MEMORY).read_text())) == 2
    assert not was_read(check())


def test_a_memory_that_cannot_be_written_is_a_warning(old, caplog):
    Path(MEMORY).mkdir()
    assert was_read(check())
    assert "is not remembered" in caplog.text


def test_a_second_run_from_the_same_statistics_is_the_same_run(old, monkeypatch):
    """Its weights are bitwise those of the first, and the label files are read for its batches only."""
    change_input(training__stat_file="statistics", training__numb_steps=2, training__disp_freq=1)
    time.sleep(0.01)
    curves = []
    for _ in range(2):
        assert main(["train", "input.json", "--device", "cpu"]) == 0
        curves.append(Path("lcurve.out").read_text())
        assert Path("statistics.checked.json").is_file()
    assert curves[0] == curves[1]
    assert "have not changed" not in curves[0]
