"""Bad inputs through the real command line: one screen that names the place and what to do, and exit code 2."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from bad_inputs import GOOD, USER, sit_down, write_systems


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    return write_systems(tmp_path_factory.mktemp("systems"))


@pytest.fixture
def desk(tmp_path, systems, monkeypatch, capsys):
    return sit_down(tmp_path, systems, monkeypatch, capsys)


def line_of(text, nth=1):
    """Return the number of the line of ``input.json`` that holds ``text``."""
    found = [n for n, line in enumerate(Path("input.json").read_text().splitlines(), 1) if text in line]
    return found[nth - 1]


# ---- the text of the input


# ---- its options


@pytest.mark.parametrize(("changes", "line", "phrases"), [
    ({"modle": {}}, '"modle"', ["modle: unknown key. Did you mean model?"]),
    ({"training__ema_decay": 1.5}, "ema_decay", ["training.ema_decay = 1.5: expected a number >= 0 and < 1"]),
    ({"training__enable_ema": False, "validating__ema_full_validation": True}, "ema_full_validation",
     ['validating.ema_full_validation = true: needs "enable_ema": true in training. Add it']),
])  # fmt: skip
def test_a_wrong_option_is_reported_with_its_line_and_path(desk, changes, line, phrases):
    desk.write(**changes)
    reported = desk.train()
    reported.must_say(f"dp-ema: input.json:{line_of(line)}: ", *phrases)
    assert len(reported.text.splitlines()) == 1


def test_several_mistakes_come_on_one_screen_with_numbers(desk):
    config = desk.config(training__ema_decay=1.5, training__zero_stage=4, training__numb_epoch=2)
    config["modle"] = config["model"]["descriptor"]["rcut_smooth"] = config["loss"]["start_pref_g"] = 1
    desk.write(config)
    reported = desk.train()
    reported.must_say("dp-ema: 6 problems in input.json\n  1. input.json:", "\n  6. input.json:")
    places = [int(line.split(":")[1]) for line in reported.text.splitlines()[1:]]
    assert places == sorted(places)


def test_a_hundred_mistakes_still_fit_one_screen(desk):
    config = desk.config()
    config["training"] |= {f"option_{n}": n for n in range(100)}
    desk.write(config)
    reported = desk.train()
    assert reported.code == USER
    assert "100 problems in input.json" in reported.text
    assert "more; `dp-ema check` shows all" in reported.text
    assert len(reported.text.splitlines()) < 30
    assert "100. input.json" in desk.run("check", "input.json").text


# ---- the data


def put_nan(array):
    array[2, 4] = np.nan
    return array


def move_together(coords):
    coords[1, 3:6] = coords[1, 0:3] + 0.05
    return coords


def remove_sets(desk):
    for folder in Path("data").glob("set.*"):
        shutil.rmtree(folder)


BAD_DATA = {
    "no such folder": (lambda desk: shutil.move("data", "water"),
     ["training.training_data.systems[0]: data: no such file or folder.", "holds: input.json, valid, water"]),
    "no sets": (remove_sets, ["data: no frames: it has type.raw but no set.* folder. Add one, or leave it out."]),
    "unknown element": (lambda desk: Path("data/type_map.raw").write_text("O\nSi\n"),
     ['data/type_map.raw: element "Si" is not in model.type_map. Known: O, H. Add it to model.type_map']),
    "shape": (lambda desk: desk.change_array("force", lambda a: a[:, :-3]),
     ["data/set.000/force.npy: shape (4, 33), expected (4, 36) for 12 atoms."]),
    "nan": (lambda desk: desk.change_array("force", put_nan),
     ["data/set.000/force.npy: frame 2 (of 4, from 0): nan at atom 1.", "remove the frame or compute it again"]),
    "too close": (lambda desk: desk.change_array("coord", move_together),
     ["data/set.000/coord.npy: frame 1", "atoms 0 (O) and 1 (H) are 0.087 angstrom apart",
     "training.training_data.min_pair_dist: 0.3 leaves"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_DATA)
def test_wrong_data_are_reported_with_file_and_frame_before_anything_is_trained(desk, kind):
    break_it, phrases = BAD_DATA[kind]
    break_it(desk)
    reported = desk.train()
    reported.must_say(*phrases)
    assert len(reported.text.splitlines()) == 1
    assert not Path("out.json").exists()
    assert not Path("lcurve.out").exists()
    assert desk.run("check", "input.json").problem == reported.problem


# ---- data that can be trained on, with a word of warning


def remove_virials(desk):
    for file in Path("data").glob("set.*/virial.npy"):
        file.unlink()


WARNED = {
    "no virial": (remove_virials, ["WARNING: no virial in the training data, but the loss has a prefactor for it",
     "set the prefactor to 0"]),
    "small sel": (lambda desk: desk.write(model__descriptor__sel=[3, 40]),
     ["WARNING: sel = [3, 40] is too small: an atom has up to [16, 16] neighbors", "Use sel [16, 40] or more"]),
    "training frames in validation": (lambda desk: desk.write(training__validation_data__systems=["data"]),
     ["WARNING: 8 of 8 validation frames are also training frames", "validation errors will look too good"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WARNED)
def test_doubtful_data_are_trained_on_with_a_warning(desk, kind):
    break_it, phrases = WARNED[kind]
    break_it(desk)
    desk.train().must_say(*phrases, code=GOOD)
    assert Path("model.ckpt-2.pt").exists()


# ---- the command line


@pytest.mark.parametrize(("words", "phrases"), [
    (["train", "input.json", "--device", "gpu"],
     ["--device gpu: is not usable here (", "Use cpu, cuda or cuda:0."]),
    (["train", "input.json", "--device", "meta"], ["--device meta: is not usable here (", "Use cpu, cuda"]),
    (["freeze", "-o", "/proc/m.dp"], ["no file 'checkpoint' here that names the newest checkpoint"]),
    (["test", "-m", "m.dp"], ["m.dp: no such file."]), (["show", "input.json"], ["input.json: not a checkpoint"]),
    (["plot", "input.json"], ["input.json: has no header line", "Give lcurve.out, val.log or val_ema.log."]),
])  # fmt: skip
def test_a_wrong_command_is_reported_with_what_to_write_instead(desk, words, phrases):
    desk.run(*words).must_say(*phrases)


@pytest.mark.parametrize(("env", "phrase"), [
    ({"LOCAL_RANK": "²"}, "LOCAL_RANK = '²': expected a whole number, "),
    ({"LOCAL_RANK": "9" * 5000}, "9'... (5,000 characters): expected a whole number, "),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0': expected a whole number, 1 to "),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = 2"),
    ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "99999"}, "'99999': expected a whole number, 1 to 65535"),
])  # fmt: skip
def test_ranks_and_ports_that_are_no_numbers_are_reported(desk, monkeypatch, env, phrase):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    desk.run("check", "input.json", "--config-only").must_say(phrase)


def test_numbers_of_frames_and_names_of_outputs_are_checked(desk):
    for words in ("test -m m.pt -n -5", "change-bias m.pt -n ²", "test -m m.pt -n 1.5"):
        desk.run(*words.split()).must_say("expected a number of frames, 0 for all")
    for words in ("freeze -o", "plot val.log -o", "train input.json -o", "test --plot", "train input.json -l"):
        desk.run(*words.split(), "").must_say("'': expected the name of a file")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["type.raw", "set.000/coord.npy"])
def test_a_pipe_among_the_data_is_reported_and_not_waited_for(desk, name):
    file = Path("data", name)
    file.unlink()
    os.mkfifo(file)
    desk.run("check", "input.json").must_say(f"data/{name}: is a pipe or a device, expected a file.")


def test_advice_names_the_input_as_it_is_called(desk):
    desk.write(training__zero_stage=1)
    Path("input.json").rename("water.json")
    advice = "export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 dp-ema train water.json"
    desk.run("train", "water.json", "--device", "cpu").must_say(advice, code=GOOD)


def test_the_end_of_a_run_names_its_files_and_the_next_command(desk):
    desk.write(
        validating__full_validation=True, validating__ema_full_validation=True, validating__validation_freq=2,
        validating__full_val_start=0.0,
    )  # fmt: skip
    reported = desk.train()
    reported.must_say("trained model: model.ckpt.pt\n", "averaged  model_ema.ckpt.pt (ema)",
        "best      best.ckpt-2.t-1.pt (live, E:MAE = ", "errors    ema, step 2, MAE / RMSE: E ",
        "for 2 steps, validation included", "next      dp-ema test -m model_ema.ckpt.pt --valid-data input.json --plot",
        "dp-ema freeze -c model_ema.ckpt.pt", code=GOOD)  # fmt: skip
    for line in re.findall(r"dp-ema ((?:test|freeze) .*)", reported.text):
        assert desk.run(*line.split()).code == GOOD
