"""A good input as a dictionary, and ways to spoil it, for the tests of the config."""

import copy
import json
import re

import pytest
from dargs.dargs import ArgumentError

from deepmd_ema.config import (
    config_from_dict,
    run_arguments,
)
from deepmd_ema.errors import ConfigError

GOOD = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [46, 92],
            "rcut": 6.0,
            "rcut_smth": 0.5,
            "neuron": [10, 20, 40],
        },
        "fitting_net": {"neuron": [20, 20]},
    },
    "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-8},
    "loss": {"start_pref_e": 0.02, "limit_pref_e": 1},
    "training": {
        "training_data": {"systems": ["data"], "batch_size": 1},
        "validation_data": {"systems": ["validation"]},
        "numb_steps": 2000,
    },
    "validating": {},
}
REMOVE = object()


def spoiled(changes):
    """Return the good input with dotted paths set to values, or taken away."""
    values = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *above, name = path.split(".")
        section = values
        for key in above:
            section = section.setdefault(key, {})
        if value is REMOVE:
            section.pop(name, None)
        else:
            section[name] = value
    return values


def write(folder, text, name="input.json"):
    """Write a text, or a dictionary as JSON, and return the file."""
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text, indent=2))
    return path


def problems_of(values):
    """Return the messages about an input with mistakes."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, "input.json")
    return caught.value.problems


def assert_refused(values, text):
    """Check that an input has one message, which begins with ``text``; " ... " in it is any
    text.
    """
    (found,) = problems_of(values)
    assert re.match(
        r"input\.json: " + ".*".join(map(re.escape, text.split(" ... "))), found
    ), found


def assert_refused_by_dargs(values):
    """Other tools read the declaration for dargs, which judges single values as dp-ema does."""
    with pytest.raises(
        (ArgumentError, TypeError, AttributeError)
    ):  # it expects texts as keys, and sections
        run_arguments().check_value(
            run_arguments().normalize_value(values, trim_pattern="_*"), strict=True
        )
