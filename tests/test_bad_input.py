"""Bad inputs through the real command line: one screen that names the place and what to do, and exit code 2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from bad_inputs import GOOD, USER, sit_down, write_systems

from deepmd_ema.cli.read import chosen_systems


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


def test_a_missing_file_is_reported_with_the_inputs_that_are_there(desk):
    desk.run("train", "inptu.json").must_say("dp-ema: inptu.json: no such file. There is: input.json.")


def test_text_that_is_no_json_is_reported_with_line_and_column(desk):
    text = Path("input.json").read_text().replace('"rcut": 4.0,', '"rcut": 4.0')
    Path("input.json").write_text(text)
    place = f"input.json:{line_of('rcut_smth')}:13: not JSON: a comma"
    desk.train().must_say(place, '"rcut_smth": 1.0')


def test_tabs_in_yaml_are_reported_with_their_line(desk):
    Path("input.yaml").write_text("model:\n\ttype_map: [O, H]\n")
    desk.run("train", "input.yaml").must_say("input.yaml:2: not YAML: a tab. Indent with spaces only.")


# ---- its options


@pytest.mark.parametrize(
    ("changes", "line", "phrases"),
    [
        ({"modle": {}}, '"modle"', ["modle: unknown key. Did you mean model?"]),
        ({"training__disp_frek": 1}, "disp_frek", ["training.disp_frek: unknown key. Did you mean disp_freq"]),
        (
            {"model__descriptor__rcut_smooth": 1.0},
            "rcut_smooth",
            ["model.descriptor.rcut_smooth: unknown key. Did you mean rcut_smth?"],
        ),
        ({"training__save_freq": "often"}, "save_freq", ['training.save_freq = "often": expected a whole number']),
        ({"learning_rate__start_lr": "1e-3"}, "start_lr", ["a number > 0. Write the number without quotes."]),
        ({"training__ema_decay": 1.5}, "ema_decay", ["training.ema_decay = 1.5: expected a number >= 0 and < 1"]),
        ({"training__zero_stage": 4}, "zero_stage", ["training.zero_stage = 4: expected 0, 1, 2 or 3"]),
        ({"training__numb_epoch": 2}, "numb_epoch", ["numb_epoch = 2: numb_steps = 2 is given too. Remove one."]),
        (
            {"model__descriptor__type": "se_e3_z"},
            '"se_e3_z"',
            ['model.descriptor.type = "se_e3_z": unknown. Did you mean se_e3? Known: se_e2_a'],
        ),
        (
            {"training__enable_ema": False, "validating__ema_full_validation": True},
            "ema_full_validation",
            ['validating.ema_full_validation = true: needs "enable_ema": true in training. Add it'],
        ),
    ],
)
def test_a_wrong_option_is_reported_with_its_line_and_path(desk, changes, line, phrases):
    desk.write(**changes)
    reported = desk.train()
    reported.must_say(f"dp-ema: input.json:{line_of(line)}: ", *phrases)
    assert len(reported.text.splitlines()) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_input_for_several_processes_is_good_in_one_that_does_not_train(desk, stage):
    """`check`, `test --valid-data` and `posthoc --valid-data` refused it: this process was alone."""
    desk.write(training__zero_stage=stage)
    assert desk.run("check", "input.json", "--config-only").code == GOOD
    assert desk.run("check", "input.json").code == GOOD
    assert chosen_systems(Namespace(valid_data="input.json"))[0] == ["valid"]
    desk.change_array("force", lambda forces: forces[:, :-1])
    desk.run("check", "input.json").must_say("force.npy: shape")


AVERAGE = {"name": "slow", "decay": 0.5}


@pytest.mark.parametrize(
    ("bank", "above", "phrase"),
    [
        (AVERAGE, '"averaging"', "training.averaging = {"),
        ([3], '"averaging"', "training.averaging[0] = 3: expected a section {...}."),
        ([{"decay": 0.5}], '"averaging"', "training.averaging[0].name: required, but missing. Expected a name"),
        ([{**AVERAGE, "name": "a.b"}], '"a.b"', 'training.averaging[0].name = "a.b": expected a name of at most 40'),
        ([{**AVERAGE, "decai": 1}], '"decai"', "training.averaging[0].decai: unknown key. Did you mean decay?"),
        (
            [AVERAGE, {"type": "power", "name": "p", "half_life": 5}],
            '"half_life"',
            "training.averaging[1].half_life: unknown key here. It belongs to type ema, and this one is of type power.",
        ),
        (
            [{**AVERAGE, "type": "sma"}],
            '"sma"',
            'training.averaging[0].type = "sma": unknown. Known: ema, power, swa, schedule',
        ),
        ([{**AVERAGE, "decay": 1}], '"decay": 1', "training.averaging[0].decay = 1: expected a number >= 0 and < 1"),
        (
            [{"name": "a", "half_life": 5, "half_life_unit": "hours"}],
            '"hours"',
            'training.averaging[0].half_life_unit = "hours": unknown. Known: steps, frames, epochs.',
        ),
        ([AVERAGE, {"_second": 1, **AVERAGE}], '"_second"', "training.averaging[0] has this name. Choose another."),
        ([{**AVERAGE, "name": "ema"}], '"name": "ema"', "training.enable_ema already tracks one of that name"),
        ([{"name": "a"}], '"averaging"', "training.averaging[0]: decay or half_life is required for type ema."),
        (
            [{"type": "power", "name": "p", "gamma": 1, "sigma_rel": 0.1}],
            '"sigma_rel"',
            "training.averaging[0].sigma_rel = 0.1: gamma = 1 is given too. Remove one of the two.",
        ),
        ([{"type": "power", "name": "p", "sigma_rel": 0.3}], '"sigma_rel"', "expected a number > 0 and <= 0.288675 ("),
        (
            [{**AVERAGE, "start_step": 1, "start_epoch": 0.5}],
            '"start_epoch"',
            "training.averaging[0].start_epoch = 0.5: start_step = 1 is given too. Remove one of the two.",
        ),
        ([{**AVERAGE, "half_life": 3}], '"half_life"', "training.averaging[0].half_life = 3: decay = 0.5 is given too"),
    ],
)
def test_a_wrong_average_is_reported_with_its_entry_and_line(desk, bank, above, phrase):
    """``above`` is in the line that is named, or in the one before it where an entry begins."""
    desk.write(training__averaging=bank)
    reported = desk.train()
    reported.must_say(phrase)
    assert len(reported.text.splitlines()) == 1
    place = line_of(above) + (above in ('"averaging"', '"_second"') and isinstance(bank, list))
    assert reported.text.startswith(f"dp-ema: input.json:{place}: training.averaging")
    assert desk.run("check", "input.json", "--config-only").problem == reported.problem


@pytest.mark.parametrize(
    ("average", "changes", "phrase"),
    [
        (
            {**AVERAGE, "lcurve": True},
            {"training__disp_training": False},
            "training.averaging[0].lcurve = true: needs training.disp_training, which is false. Set it to true, or",
        ),
        (
            {"type": "swa", "name": "flat", "snapshots": True},
            {"training__save_freq": 0},
            "training.averaging[0].snapshots = true: needs snapshot_freq, because training.save_freq = 0 writes the",
        ),
        (
            {**AVERAGE, "full_validation": True},
            {"training__validation_data": None},
            "training.averaging[0].full_validation = true: needs training.validation_data (or validation_fraction)",
        ),
        (
            {**AVERAGE, "full_validation": True, "lcurve": True},
            {"training__disp_file": "val.log"},
            "validating.full_val_file: validation of slow would be written to val_slow.log, as the learning curve of",
        ),
    ],
)
def test_an_average_that_does_not_fit_the_run_is_reported(desk, average, changes, phrase):
    desk.write(training__averaging=[average], validating__full_validation=False, **changes)
    reported = desk.train()
    reported.must_say(phrase)
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


def flatten_cell(boxes):
    boxes[1, 6:9] = boxes[1, 3:6]
    return boxes


def move_together(coords):
    coords[1, 3:6] = coords[1, 0:3] + 0.05
    return coords


def remove_sets(desk):
    for folder in Path("data").glob("set.*"):
        shutil.rmtree(folder)


def remove_frames(desk):
    for file in Path("data").glob("set.*/*.npy"):
        np.save(file, np.load(file)[:0])


def truncate(desk):
    file = Path("data/set.000/coord.npy")
    file.write_bytes(file.read_bytes()[:300])


BAD_DATA = {
    "no such folder": (
        lambda desk: shutil.move("data", "water"),
        ["training.training_data.systems[0]: data: no such file or folder.", "holds: input.json, valid, water"],
    ),
    "nothing in it": (
        lambda desk: [shutil.rmtree("data"), Path("data").mkdir()],
        ["systems[0]: data: no system in it or below it. A system has type.raw and set.*/coord.npy."],
    ),
    "no sets": (remove_sets, ["data: no frames: it has type.raw but no set.* folder. Add one, or leave it out."]),
    "no frames": (remove_frames, ["data: no frames: the arrays of set.000, set.001 have no rows. Leave it out."]),
    "unknown element": (
        lambda desk: Path("data/type_map.raw").write_text("O\nSi\n"),
        ['data/type_map.raw: element "Si" is not in model.type_map. Known: O, H. Add it to model.type_map'],
    ),
    "shape": (
        lambda desk: desk.change_array("force", lambda a: a[:, :-3]),
        ["data/set.000/force.npy: shape (4, 33), expected (4, 36) for 12 atoms."],
    ),
    "fewer energies": (
        lambda desk: desk.change_array("energy", lambda a: a[:-1]),
        ["data/set.000/energy.npy: shape (3,), expected (4,): coord.npy has 4 frames."],
    ),
    "truncated": (truncate, ["data/set.000/coord.npy: is truncated: 300 bytes, expected 1280 for shape (4, 36)."]),
    "nan": (
        lambda desk: desk.change_array("force", put_nan),
        ["data/set.000/force.npy: frame 2 (of 4, from 0): nan at atom 1.", "remove the frame or compute it again"],
    ),
    "flat cell": (
        lambda desk: desk.change_array("box", flatten_cell),
        ["data/set.000/box.npy: frame 1 (of 4, from 0): the cell has no volume", "add an empty file nopbc"],
    ),
    "too close": (
        lambda desk: desk.change_array("coord", move_together),
        [
            "data/set.000/coord.npy: frame 1",
            "atoms 0 (O) and 1 (H) are 0.087 angstrom apart",
            "training.training_data.min_pair_dist: 0.3 leaves",
        ],
    ),
    "mixed and plain": (
        lambda desk: np.save("data/set.001/real_atom_types.npy", np.zeros((4, 12), int)),
        ["data: mixed and plain sets in one folder: set.001", "Put them into two systems."],
    ),
}


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


@pytest.mark.parametrize(
    ("data", "phrase"),
    [
        ({"sys_probs": [0.5, 0.5]}, "training.training_data.sys_probs: 2 numbers, expected one per system: 1."),
        ({"batch_size": [2, 3]}, "training.training_data.batch_size: a list of 2 numbers, expected one per system: 1."),
        ({"batch_size": "filter:3"}, "batch_size = filter:3: every system has more atoms. Use a larger number."),
        ({"auto_prob": "prob_sys_size;0:3:1.0"}, '"0:3:1.0" does not fit 1 system: expected 0 <= start < stop <= 1'),
    ],
)
def test_options_that_do_not_fit_the_systems_are_reported_with_the_problems_of_the_data(desk, data, phrase):
    desk.write(**{f"training__training_data__{key}": value for key, value in data.items()})
    desk.change_array("force", put_nan)
    reported = desk.train()
    reported.must_say(
        "2 problems in the data of input.json\n  1. training.training_data.", phrase, "\n  2. data/set.000/force"
    )
    assert desk.run("check", "input.json").problem == reported.problem


def test_problems_of_training_and_validation_data_come_at_once(desk):
    truncate(desk)
    Path("valid/type_map.raw").write_text("O\nSi\n")
    desk.train().must_say(
        "2 problems in the data of input.json", "1. data/set.000/coord.npy", '2. valid/type_map.raw: element "Si"'
    )


def test_wrong_numbers_in_several_files_come_at_once(desk):
    for name in ("energy", "force", "virial"):
        desk.change_array(name, lambda a: a * np.nan)
    reported = desk.train()
    reported.must_say(
        "3 problems in the data of input.json", "1. data/set.000/energy.npy: frame 0 and 3 more frames (of 4"
    )
    assert len(reported.text.splitlines()) == 4


# ---- data that can be trained on, with a word of warning


def remove_virials(desk):
    for file in Path("data").glob("set.*/virial.npy"):
        file.unlink()


WARNED = {
    "no virial": (
        remove_virials,
        ["WARNING: no virial in the training data, but the loss has a prefactor for it", "set the prefactor to 0"],
    ),
    "small sel": (
        lambda desk: desk.write(model__descriptor__sel=[3, 40]),
        ["WARNING: sel = [3, 40] is too small: an atom has up to [16, 16] neighbors", "Use sel [16, 40] or more"],
    ),
    "training frames in validation": (
        lambda desk: desk.write(training__validation_data__systems=["data"]),
        ["WARNING: 8 of 8 validation frames are also training frames", "validation errors will look too good"],
    ),
}


@pytest.mark.parametrize("kind", WARNED)
def test_doubtful_data_are_trained_on_with_a_warning(desk, kind):
    break_it, phrases = WARNED[kind]
    break_it(desk)
    desk.train().must_say(*phrases, code=GOOD)
    assert Path("model.ckpt-2.pt").exists()


def test_the_number_that_a_warning_requests_is_enough(desk):
    desk.write(model__descriptor__sel=[16, 40])
    assert "too small" not in desk.train().text


# ---- the command line


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["trian", "input.json"], ["the command 'trian' is unknown. Did you mean train? Known: init, train, check"]),
        (["train", "input.json", "--restrt", "x"], ["train has no option --restrt. Did you mean --restart?"]),
        (["check"], ["required: INPUT. `dp-ema check --help` shows what it takes."]),
        (
            ["train", "input.json", "--device", "gpu"],
            ["--device gpu: is not usable here (", "Use cpu, cuda or cuda:0."],
        ),
        (["train", "input.json", "--device", "meta"], ["--device meta: is not usable here (", "Use cpu, cuda"]),
        (["freeze", "-o", "/proc/m.dp"], ["no file 'checkpoint' here that names the newest checkpoint"]),
        (["test", "-m", "m.dp"], ["m.dp: no such file."]),
        (["show", "input.json"], ["input.json: not a checkpoint"]),
        (["plot", "input.json"], ["input.json: has no header line", "Give lcurve.out, val.log or val_ema.log."]),
    ],
)
def test_a_wrong_command_is_reported_with_what_to_write_instead(desk, words, phrases):
    desk.run(*words).must_say(*phrases)


def test_the_real_command_leaves_with_2_and_one_line(desk):
    desk.write(training__ema_decay=1.5)
    done = subprocess.run([sys.executable, "-m", "deepmd_ema", "train", "input.json"], capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    assert done.returncode == USER
    assert done.stdout == ""
    assert done.stderr.startswith(f"dp-ema: input.json:{line_of('ema_decay')}: training.ema_decay = 1.5: expected")
    assert len(done.stderr.splitlines()) == 1
