"""Training with `training.validation_fraction`: which frames are in which part, in every format,
run and restart.
"""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import to_hdf5, toy_records, write_kinds, write_lmdb
from helpers import assert_same, tiny_input, trains_in, validated, write_system

from deepmd_ema import cli
from deepmd_ema.config import config_from_dict, to_dict
from deepmd_ema.data.run import choose_validation, open_run, split_off
from deepmd_ema.errors import ConfigError, Interrupted
from deepmd_ema.training.restart import check_resumable
from deepmd_ema.training.trainer import Callback
from deepmd_ema.training.weights import Start


def write_npy():
    return [
        write_system("a", frames=12, natoms=6, sets=3),
        write_system("b", frames=9, natoms=8, seed=1, pbc=False),
    ]


def write_mixed():
    return [
        write_system("m", frames=20, natoms=10, seed=4, mixed=True, virtual=2, sets=2)
    ]


def write_hdf5():
    import h5py

    with h5py.File("data.h5", "w") as root:
        to_hdf5(write_npy()[0], root.create_group("w"))
    return ["data.h5#/w"]


def write_extxyz():
    write_kinds("a.extxyz")
    return ["a.extxyz"]


def write_data_base():
    pytest.importorskip("lmdb")
    write_lmdb("data.lmdb", toy_records(40), type_map=["O", "H"])
    return ["data.lmdb"]


FORMATS = {
    "npy": write_npy,
    "mixed": write_mixed,
    "hdf5": write_hdf5,
    "extxyz": write_extxyz,
    "lmdb": write_data_base,
}


def parts(config, seed=3, memories=None):
    data = open_run(config, memories)
    return data, split_off(
        config, data, choose_validation(config, data, seed, memories)
    )


def energies_of(sources):
    return [
        float(source.frame(k).labels["energy"])
        for source in sources
        for k in range(source.num_frames)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_every_frame_of_every_format_is_in_one_part_and_reads_as_before(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    config = config_from_dict(
        tiny_input(FORMATS[name](), training__validation_fraction=0.2)
    )
    (whole, _), (train_part, valid_part) = (of_run[""][:2] for of_run in parts(config))
    every = energies_of(whole)
    assert sorted(energies_of(train_part) + energies_of(valid_part)) == sorted(every)
    assert len(set(every)) == len(every)
    assert 0.1 * len(every) < len(energies_of(valid_part)) < 0.3 * len(every)
    for source in (*train_part, *valid_part):
        assert len(source.frame_sizes) == source.num_frames
        for chunk in source.chunks():
            for row in range(len(chunk.types)):
                frame = source.frame(chunk.first + row)
                exists = chunk.types[row] >= 0
                assert chunk.types[row][exists].tolist() == frame.atom_type.tolist()
                assert np.array_equal(chunk.arrays["coord"][row][exists], frame.coord)
                assert chunk.arrays["energy"][row].item() == frame.labels["energy"]
                where, own = source.where(chunk.first + row), source.whole
                assert where == own.where(
                    frame.source[1]
                )  # messages name the frame of the file


VALIDATED = {
    "training__validation_fraction": 0.2,
    **validated(4, training__disp_freq=1),
}


class Parts(Callback):
    """Notes which frames are trained on, and which are there to validate on; ends the run at a
    step.
    """

    def __init__(self, stop=0):
        self.trained, self.stop = set(), stop

    def on_start(self, trainer):
        [task] = trainer.tasks
        self.valid = {
            s.frame(k).source
            for s in trainer.validator.tasks[""].valid
            for k in range(s.num_frames)
        }
        self.displayed = {
            s.frame(k).source
            for s in task.display_loader.systems
            for k in range(s.num_frames)
        }
        self.loader, self.first = task.train_loader, task.train_loader.position

    def after_step(self, trainer):
        self.trained.update(self.loader.frames_at(self.loader.position - 1))
        if trainer.step == self.stop:
            trainer.stop.request(signal.SIGTERM)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_kinds("a.extxyz")
    return trains_in(tmp_path, monkeypatch, ([tmp_path / "a.extxyz"],), VALIDATED)


def test_validation_frames_are_not_trained_on_and_a_restart_has_the_same(start):
    seen, before, after = Parts(), Parts(stop=6), Parts()
    whole = start("whole", 16, callback=seen)
    assert len(seen.valid) == 6
    assert seen.displayed == seen.valid
    assert len(seen.trained) == 25  # all others: an epoch has 13 batches
    assert not seen.trained & seen.valid
    with pytest.raises(Interrupted):
        start("parts", 16, callback=before)
    folder = start("parts", 16, restart="model.ckpt.pt", callback=after)
    assert before.valid == after.valid == seen.valid
    assert_same(
        torch.load(whole / "model.ckpt.pt"), torch.load(folder / "model.ckpt.pt")
    )
    for name in ("lcurve.out", "val.log"):
        assert (whole / name).read_bytes() == (folder / name).read_bytes()


def test_statistics_are_of_training_frames_only(start, tmp_path):
    path = tmp_path / "a.extxyz"
    config = config_from_dict(tiny_input([path], **VALIDATED))
    chosen = choose_validation(config, open_run(config), 10)[""].mask
    blocks = path.read_text().splitlines(keepends=True)
    frames = ["".join(blocks[k : k + 14]) for k in range(0, len(blocks), 14)]
    (tmp_path / "t.extxyz").write_text(
        "".join(f for f, c in zip(frames, chosen) if not c)
    )
    options = {
        "training__training_data__batch_size": 25,
        "model__data_stat_nbatch": 100,
    }
    split = start("split", 1, options)
    alone = {
        "training__training_data__systems": [str(tmp_path / "t.extxyz")],
        "training__validation_fraction": None,
    }
    alone |= {
        "validating__full_validation": False,
        "validating__ema_full_validation": False,
    }
    other = start("alone", 1, {**options, **alone})
    one, two = (
        torch.load(folder / "model.ckpt.pt")["model"] for folder in (split, other)
    )
    for name in ("out_bias", "descriptor.mean", "descriptor.stddev"):
        assert torch.allclose(one[name], two[name], rtol=1e-12, atol=0), name


def test_a_choice_for_another_model_is_made_anew(tmp_path, monkeypatch):
    """The order of the elements is in the distances of frames."""
    monkeypatch.chdir(tmp_path)
    systems, memory = write_npy(), tmp_path / "memory"
    for type_map in (["O", "H"], ["H", "O"]):
        values = tiny_input(systems, training__validation_fraction=0.2)
        values["model"]["type_map"] = type_map
        before = set(memory.glob("*.json"))
        parts(config_from_dict(values), memories={"": memory})
        assert set(memory.glob("*.json")) - before


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_wrong_fractions_are_refused(fraction):
    with pytest.raises(
        ConfigError,
        match=rf"validation_fraction = {fraction}: expected a number > 0 and < 0.5",
    ):
        config_from_dict(tiny_input(["a"], training__validation_fraction=fraction))


def test_check_says_that_a_run_without_a_seed_draws_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tiny_input(
        write_extxyz(), training__validation_fraction=0.2, training__seed=None
    )
    Path("input.json").write_text(json.dumps(config))
    assert cli.main(["check", "input.json"]) == 0
    assert (
        "training.seed is not given: a run draws one, and chooses other frames"
        in capsys.readouterr().out
    )


def test_another_fraction_at_a_restart_is_another_run():
    """Frames of validation would come into training, and best files would be of other frames."""
    before, now = (
        config_from_dict(tiny_input(["data"], training__validation_fraction=fraction))
        for fraction in (0.2, 0.3)
    )
    start = Start(
        path=Path("model.ckpt.pt"), config=to_dict(before), saved={"": before.model}
    )
    check_resumable(start, before, False)
    text = "training.validation_fraction: 0.2 in the checkpoint, 0.3 in the input"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_resumable(start, now, False)
