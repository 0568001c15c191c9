"""dargs decides: the list of mistakes is empty where it accepts an input, and names one where it
refuses it.
"""

import json
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from config_inputs import GOOD, spoiled, write
from dargs import Argument
from dargs.dargs import ArgumentError
from dargs.json_schema import generate_json_schema
from helpers import tiny_input
from mutated_inputs import FILES, ROOT, judged, mutated

from deepmd_ema import cli
from deepmd_ema.config import (
    config_from_dict,
    gen_args,
    ignored_options,
    load_config,
    run_arguments,
)
from deepmd_ema.errors import ConfigError


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
    monkeypatch.setattr(
        Argument, "check_value", refusing(Argument.check_value, "ema_decay")
    )
    assert cli.main([command, "input.json"]) == 2
    assert "ema_decay" in capsys.readouterr().err


def test_nothing_else_judges_a_type(monkeypatch):
    wrong = spoiled({"training.disp_freq": "often"})
    with pytest.raises(ConfigError, match="disp_freq"):
        config_from_dict(wrong)
    monkeypatch.setattr(Argument, "check_value", lambda *_, **__: None)
    assert config_from_dict(wrong).training.disp_freq == "often"


def test_a_wrong_option_does_not_hide_wrong_data(
    tmp_path, monkeypatch, capsys, water_like
):
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
    done = subprocess.run(
        [*command[:-1], str(file)], capture_output=True, text=True, check=False
    )
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
