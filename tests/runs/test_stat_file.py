"""A run with the statistics of an earlier one: whose data these are."""

import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from parallel_runs import train as train_ranks
from two_tasks import input_of_two_tasks, write_data

from deepmd_ema.model.stat_file import SETTINGS
from deepmd_ema.training.run import run_training

OTHER = "its statistics are of other training data"
STAT = {"training__stat_file": "stat"}


@pytest.fixture
def train(here, caplog):
    """Return a function that trains one step and returns the warnings about statistics."""

    def start(values, **how):
        caplog.clear()
        caplog.set_level(logging.INFO, logger="deepmd_ema")
        Path("input.json").write_text(json.dumps(values))
        run_training("input.json", device="cpu", **how)
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelno >= logging.WARNING and OTHER in record.getMessage()
        ]

    return start


def values_of(*systems, **changes):
    return tiny_input(systems, **{"num_steps": 1, **STAT, **changes})


def remove(path):
    if Path(path).is_dir():
        shutil.rmtree(path)
    else:
        Path(path).unlink()


def scale_energies(system):
    """Change the energies of a system as another code would: other zero, other unit."""
    for file in Path(system).glob("set.*/energy.npy"):
        np.save(file, 2 * np.load(file) - 1000)


@pytest.mark.parametrize("file", ["stat", "stat.h5"])
@pytest.mark.parametrize("mode", ["update", "read"])
def test_statistics_of_other_data_are_named(train, here, mode, file):
    write_system("data")
    assert train(values_of("data", training__stat_file=file)) == []
    values = values_of("data", training__stat_file=file, training__stat_file_mode=mode)
    assert train(values) == []
    scale_energies("data")
    (text,) = train(values)
    assert text.startswith(f"training.stat_file = {file}: {OTHER} than those of this ")
    # removed, as the message has it, they are those of the data
    if mode == "update":
        remove(file)
        assert train(values) == train(values) == []


def test_the_same_data_under_another_path_are_no_other(train):
    write_system("data")
    train(values_of("data"))
    shutil.move("data", "moved")
    assert train(values_of("moved")) == []


@pytest.mark.parametrize("writer", ["DeePMD-kit", "dp-ema 0.3.0"])
def test_nothing_is_said_of_statistics_that_do_not_name_their_data(train, writer):
    write_system("data")
    train(values_of("data"))
    settings = Path("stat/O H", SETTINGS)
    stored = np.load(io.BytesIO(settings.read_bytes()))
    settings.unlink()
    if writer != "DeePMD-kit":
        with settings.open("wb") as stream:
            np.save(stream, stored[:1])
    scale_energies("data")
    assert train(values_of("data")) == []


def test_statistics_are_of_the_frames_that_are_not_split_off(train):
    write_system("data", frames=20)
    options = {"training__validation_fraction": 0.2}
    train(values_of("data", **options))
    assert train(values_of("data", **options)) == []
    # another seed is another choice of validation frames, of which the statistics have some
    assert train(values_of("data", **options, training__seed=11))
    assert train(values_of("data"))


def test_the_file_of_the_task_whose_data_have_changed_is_named(train, here):
    values = input_of_two_tasks(write_data(here / "data"), num_steps=1)
    for name, section in values["training"]["data_dict"].items():
        section["stat_file"] = f"stat-{name}"
    assert train(values) == train(values) == []
    scale_energies("data/salt1")
    (text,) = train(values)
    assert text.startswith(f"training.data_dict.salt.stat_file = stat-salt: {OTHER}")


def test_a_restart_does_not_compare_statistics_that_it_does_not_read(train, caplog):
    write_system("data")
    train(values_of("data"))
    scale_energies("data")
    values = values_of("data", num_steps=2)
    assert train(values, restart="model.ckpt.pt") == []
    assert "the training data have changed since" in caplog.text
    # nor are those in the file taken for statistics of the data of the restart
    assert train(values)


def test_ranks_have_the_digest_of_one_process_and_one_warning(train, here):
    system = write_system(here / "data")
    values = values_of(system)
    train(values)
    ended = train_ranks(here, 2, values)
    assert OTHER not in "".join(end.log for end in ended)
    scale_energies(system)
    ended = train_ranks(here, 2, values)
    assert [end.log.count(OTHER) for end in ended] == [1, 0]
