"""dargs decides whether an input is accepted; `explain` only says why not. On every bad input of the tests both agree.

``PYTHONPATH=. python tests/test_config_gate.py`` prints the counts.
"""

from __future__ import annotations

import copy
import time

import pytest
import test_bad_input
import test_config_averaging
import test_config_errors
from config_inputs import GOOD, spoiled
from helpers import tiny_input

from deepmd_ema.config import config_from_dict, run_arguments
from deepmd_ema.config import load as loading
from deepmd_ema.config.argcheck import refusal
from deepmd_ema.config.explain import explain
from deepmd_ema.config.schema.run import MultiTaskRun
from deepmd_ema.config.upgrade import upgrade
from deepmd_ema.errors import ConfigError


def cases_of(test):
    """Return the cases of a parametrized test."""
    return next(mark for mark in test.pytestmark if mark.name == "parametrize").args[1]


def desk_input(**changes):
    """Return the input of `test_bad_input`."""
    return tiny_input(["data"], ["valid"], num_steps=2, **{"training__enable_ema": True, **changes})


def collect():
    """Return the bad inputs of the tests, by the test that has them."""
    averaging = test_config_averaging
    swa = {"type": "swa", "name": "first"}
    return {
        "an option": [spoiled(changes) for changes, *_ in test_config_errors.BAD],
        "an entry of averaging": [averaging.bank(swa, entry) for entry, *_ in averaging.BAD],
        "averaging is no list": [
            spoiled({"training.averaging": value}) for value, _ in cases_of(averaging.test_what_is_no_list_is_named)
        ],
        "a rule between options": [spoiled(changes) for changes, *_ in test_config_errors.BROKEN_RULES.values()],
        "a rule of averaging": [
            averaging.bank(*entries, **changes)
            for cases in averaging.BROKEN_RULES.values()
            for entries, changes, *_ in cases
        ],
        "command line, an option": [
            desk_input(**changes)
            for changes, *_ in cases_of(test_bad_input.test_a_wrong_option_is_reported_with_its_line_and_path)
            if changes != {"training__zero_stage": 1}  # a mistake of the start, not of the input
        ],
        "command line, averaging": [
            desk_input(training__averaging=bank)
            for bank, *_ in cases_of(test_bad_input.test_a_wrong_average_is_reported_with_its_entry_and_line)
        ],
        "what dargs reads as YAML does": [
            {**spoiled({}), 2: 3},
            spoiled({"training": {**GOOD["training"], 2: 3}}),
            [],
            spoiled({"training.training_data.systems": {"a": 1}}),
            spoiled({"model.preset_out_bias": {"energy": [True, 1.0]}}),
            spoiled({"model.preset_out_bias": {"energy": [10**400, 1.0]}}),
            spoiled({"optimizer": {"type": "AdaMuon", "lr_adjust": float("nan")}}),
        ],
    }


def verdicts(values):
    """Return whether dargs refuses, and whether `explain` finds something."""
    upgraded = upgrade(values, {})
    if upgraded.problems:  # a key given twice is refused before
        return True, True
    several = upgraded.section is MultiTaskRun
    return refusal(run_arguments(several), upgraded.values) != "", explain(upgraded.section, upgraded.values)[1] != []


def table():
    """Return the counts as text: of each kind of bad input, what dargs refuses and what `explain` finds."""
    lines = [f"{'mistakes of':32s}{'inputs':>8s}{'dargs refuses':>15s}{'explain finds':>15s}{'disagree':>10s}"]
    sums = [0, 0, 0, 0]
    for name, inputs in collect().items():
        found = [verdicts(values) for values in inputs]
        row = [len(found), sum(r for r, _ in found), sum(e for _, e in found), sum(r != e for r, e in found)]
        sums = [a + b for a, b in zip(sums, row)]
        lines.append(f"{name:32s}{row[0]:8d}{row[1]:15d}{row[2]:15d}{row[3]:10d}")
    return "\n".join([*lines, f"{'together':32s}{sums[0]:8d}{sums[1]:15d}{sums[2]:15d}{sums[3]:10d}"])


@pytest.mark.parametrize("kind", list(collect()))
def test_dargs_refuses_what_explain_explains_and_nothing_else(kind):
    for values in collect()[kind]:
        refused, explained = verdicts(values)
        assert refused == explained, values
        with pytest.raises(ConfigError):
            config_from_dict(values)
    structural = kind in ("an option", "an entry of averaging", "averaging is no list", "what dargs reads as YAML does")
    assert not structural or all(verdicts(values) == (True, True) for values in collect()[kind])


def test_the_table_counts_all_bad_inputs():
    head, *rows, last = table().splitlines()
    assert head.split()[-1] == "disagree"
    assert len(rows) == len(collect())
    assert int(last.split()[1]) > 200
    assert last.split()[-1] == "0"


def test_what_dargs_refuses_is_refused_even_if_nobody_can_say_why(monkeypatch):
    monkeypatch.setattr(loading, "explain", lambda section, values, path: (copy.deepcopy(GOOD), []))
    with pytest.raises(ConfigError, match=r"the config: .*undefined key `modle`"):
        config_from_dict(spoiled({"modle": {}}))


def test_a_good_input_is_never_explained(monkeypatch):
    def explain(*_):
        raise AssertionError("dargs had nothing to refuse")

    monkeypatch.setattr(loading, "explain", explain)
    config_from_dict(GOOD)


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
    assert (time.process_time() - started) / 10 < 0.05  # 3 ms on a quiet machine


if __name__ == "__main__":
    print(table())
