"""The declaration for other tools, arguments of dargs, judges single values as dp-ema does."""

from __future__ import annotations

import time

import pytest
import test_config_averaging
import test_config_errors
from config_inputs import GOOD, spoiled
from dargs.dargs import ArgumentError

from deepmd_ema.config import config_from_dict, run_arguments
from deepmd_ema.errors import ConfigError

TWICE = {"training.stop_batch", "model.use_compile"}  # what dargs does not know: an option at two places
OPTIONS = [spoiled(changes) for changes, *_ in test_config_errors.BAD if not TWICE & set(changes)]
FIRST = {"type": "swa", "name": "first"}
AVERAGES = [test_config_averaging.bank(FIRST, entry) for entry, *_ in test_config_averaging.BAD]
MORE = [
    {**spoiled({}), 2: 3},
    spoiled({"training": {**GOOD["training"], 2: 3}}),
    spoiled({"training.training_data.systems": {"a": 1}}),
    spoiled({"model.preset_out_bias": {"energy": [True, 1.0]}}),
    spoiled({"model.preset_out_bias": {"energy": [10**400, 1.0]}}),
    spoiled({"model.fitting_net.atom_ener": ["1", None]}),
    spoiled({"training.num_epoch_dict": 3}),
    spoiled({"optimizer": {"type": "AdaMuon", "lr_adjust": float("nan")}}),
]


@pytest.mark.parametrize("values", [*OPTIONS, *AVERAGES, *MORE], ids=repr)
def test_dargs_refuses_what_is_refused_here(values):
    with pytest.raises(ConfigError):
        config_from_dict(values)
    with pytest.raises((ArgumentError, TypeError, AttributeError)):  # it expects texts as keys, and sections
        run_arguments().check_value(run_arguments().normalize_value(values, trim_pattern="_*"), strict=True)


def test_an_input_that_is_no_section_is_refused():
    with pytest.raises(ConfigError, match=r"the config = \[\]: expected a section"):
        config_from_dict([])


def test_other_tools_get_defaults_aliases_and_a_manual_from_the_declaration():
    declared = run_arguments()
    values = declared.normalize_value({"training": {"stop_batch": 5}})
    assert values["training"]["numb_steps"] == 5
    assert values["training"]["enable_ema"] is False
    text = declared.gen_doc()
    assert "ema_decay" in text
    assert "Cutoff radius." in text


def test_an_input_is_checked_in_a_few_milliseconds():
    config_from_dict(GOOD)
    started = time.process_time()
    for _ in range(10):
        config_from_dict(GOOD)
    assert (time.process_time() - started) / 10 < 0.05  # 1 ms on a quiet machine
