"""dargs decides: the list of mistakes is empty where it accepts an input, and names one where it
refuses it.
"""

import copy
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from config_inputs import GOOD, spoiled, write
from dargs import Argument
from dargs.dargs import ArgumentError
from dargs.json_schema import generate_json_schema
from helpers import tiny_input

from deepmd_ema import cli
from deepmd_ema.config import (
    config_from_dict,
    gen_args,
    ignored_options,
    load_config,
    run_arguments,
)
from deepmd_ema.config.argcheck import find_mistakes, take_options
from deepmd_ema.config.upgrade import upgrade
from deepmd_ema.errors import ConfigError

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "examples").rglob("input*.json"), *(ROOT / "configs").glob("*.json")])
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    10**18,
    0.5,
    2.0,
    float("nan"),
    "",
    "x",
    "auto",
    "1",
    "a\0",
    [],
    [1],
    ["a"],
    [None],
    [1, "a"],
    [True],
    [[0, 1]],
    {},
    {"a": 1},
    {"type": "x"},
    [{}],
    [{"type": "ema"}],
    {"a": {}},
    1e30,
]


def places(values, path=()):
    """Yield the container and the key of each value in nested sections and lists."""
    items = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else ()
    )
    for key, value in items:
        yield values, key
        yield from places(value, (*path, key))


def mutated(values, rng):
    """Return a copy with one to three changes: a value, a key that goes, comes, is misspelled or
    moves.
    """
    values = copy.deepcopy(values)
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = list(places(values))
        if not every:
            return values
        section, key = rng.choice(every)
        kind = rng.randrange(5)
        if kind == 0 or not isinstance(section, dict):
            section[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 1:
            del section[key]
        elif kind == 2:
            section[str(key)[:-1] + rng.choice("xs_")] = section.pop(key)
        elif kind == 3:
            other, name = rng.choice(every)
            section[str(name)] = copy.deepcopy(other[name])
        else:
            section[
                rng.choice(("type", "sel", "numb_steps", "stop_batch", "neuron", "systems"))
            ] = rng.choice(VALUES)
    return values


def judged(values):
    """Return whether dargs accepts an input, and the mistakes that are found in what it refuses."""
    reading, _ = upgrade("input.json", values, {})
    missing_parts = [mistake for mistake in reading.mistakes if "shared_dict" in str(mistake)]
    reading.mistakes.clear()
    root = run_arguments(reading.has_tasks)
    take_options(root, reading)
    try:
        root.check_value(root.normalize_value(reading.values), strict=True)
        is_accepted = True
    except ArgumentError:
        is_accepted = False
        reading.mistakes += missing_parts  # in whose places nothing is that dargs could accept
    find_mistakes(root, reading)
    return is_accepted, reading.mistakes


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_mistakes_are_found_exactly_where_dargs_refuses(file):
    values = json.loads(file.read_text())
    assert judged(values) == (True, [])
    rng = random.Random(str(file.relative_to(ROOT)))
    for _ in range(40):
        wrong = mutated(values, rng)
        is_accepted, mistakes = judged(wrong)
        assert is_accepted == (not mistakes), (wrong, mistakes)


def refusing(check, name):
    """Return a check of dargs that also refuses the option ``name`` wherever it is."""

    def check_value(self, value, *args, **options):
        if self.name == name or (isinstance(value, dict) and name in str(value)):
            raise ArgumentError(["training"], f"key `{name}` is refused")
        return check(self, value, *args, **options)

    return check_value


@pytest.mark.parametrize("command", ["train", "check"])
def test_what_dargs_refuses_is_refused(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, spoiled({"training.enable_ema": True, "training.ema_decay": 0.9}))
    monkeypatch.setattr(Argument, "check_value", refusing(Argument.check_value, "ema_decay"))
    assert cli.main([command, "input.json"]) == 2
    assert "ema_decay" in capsys.readouterr().err


def test_nothing_else_judges_a_type(monkeypatch):
    wrong = spoiled({"training.disp_freq": "often"})
    with pytest.raises(ConfigError, match="disp_freq"):
        config_from_dict(wrong)
    monkeypatch.setattr(Argument, "check_value", lambda *_, **__: None)
    assert config_from_dict(wrong).training.disp_freq == "often"


def test_a_wrong_option_does_not_hide_wrong_data(tmp_path, monkeypatch, capsys, water_like):
    """An input with a misspelled option hid a NaN in the data until the option was mended."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(water_like, tmp_path / "data")
    file = next((tmp_path / "data").glob("set.*/coord.npy"))
    coord = np.load(file)
    coord[0, 0] = np.nan
    np.save(file, coord)
    values = tiny_input(["data"], training__disp_frq=3)
    write(tmp_path, values)
    for command in ("check", "train"):
        assert cli.main([command, "input.json"]) == 2
        error = capsys.readouterr().err
        assert "disp_frq" in error
        assert "coord.npy: frame 0" in error


def test_programs_of_dargs_know_the_schema(tmp_path):
    file = write(tmp_path, GOOD)
    command = [
        sys.executable,
        "-m",
        "dargs",
        "check",
        "-f",
        "deepmd_ema.config.run_arguments",
        str(file),
    ]
    subprocess.run(command, check=True)
    file = write(tmp_path, spoiled({"training.numb_stepss": 1}))
    done = subprocess.run([*command[:-1], str(file)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "numb_stepss" in done.stderr
    command = [
        sys.executable,
        "-m",
        "dargs",
        "doc",
        "deepmd_ema.config.run_arguments",
        "input/training/ema_decay",
    ]
    assert (
        "Decay per step"
        in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    assert [argument.name for argument in gen_args()] == [*run_arguments().sub_fields]
    assert generate_json_schema(run_arguments())["properties"].keys() >= GOOD.keys()


def test_comments_of_any_kind_may_stand_anywhere(tmp_path):
    text = yaml.safe_dump(
        spoiled({"_a": {"b": [1]}, "training._c": 2, "model.descriptor._d": None})
    )
    assert load_config(write(tmp_path, text, "input.yaml")).training.numb_steps == 2000


def test_a_task_may_have_the_name_of_a_method_of_dict():
    model = {**GOOD["model"], "fitting_net": {"layer_name": ["a"]}, "smin_alpha": 0.2}
    values = {
        "model": {"model_dict": {"items": model}},
        "learning_rate": {"start_lr": 0.001},
        "training": {
            "data_dict": {"items": {"training_data": {"systems": ["data"]}}},
            "numb_steps": 5,
        },
    }
    assert ignored_options(config_from_dict(values)) == [
        'model.model_dict.items.fitting_net.layer_name = ["a"]: no effect, layers are not shared '
        "by name",
        "model.model_dict.items.smin_alpha = 0.2: no effect, use_srtab is not given",
    ]
