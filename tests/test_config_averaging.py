"""``training.averaging``: a list of averages, each chosen by its type and checked as strictly as the rest."""

from __future__ import annotations

import json
import math
from typing import get_type_hints

import pytest
from config_inputs import REMOVE, spoiled, write

from deepmd_ema.config import config_from_dict, config_summary, config_warnings, ignored_options, load_config, to_dict
from deepmd_ema.config.manual import manual
from deepmd_ema.config.messages import dotted, path_of
from deepmd_ema.config.schema.averaging import EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.errors import ConfigError

SLOW = {"name": "slow", "decay": 0.99}
POWER = {"type": "power", "name": "p1", "sigma_rel": 0.05}
FLAT = {"type": "swa", "name": "flat"}


@pytest.mark.parametrize("profile", [EmaProfile, PowerProfile, SwaProfile])
def test_annotations_of_an_average_are_types(profile):
    """The mark KW_ONLY is none for Python 3.10, which read no input."""
    assert "_" not in get_type_hints(profile)


def bank(*entries, **changes):
    """Return a good input with these averages; ``changes`` are of other options, ``training__numb_steps=5``."""
    return spoiled({"training.averaging": list(entries)} | {k.replace("__", "."): v for k, v in changes.items()})


def bank_of(*entries, **changes):
    return config_from_dict(bank(*entries, **changes)).training.averaging


def problems_of(values):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, "input.json")
    return caught.value.problems


def lines_about(lines, word="averaging"):
    return [line for line in lines if word in line]


# ---- what is read


def test_there_is_no_average_unless_requested():
    assert config_from_dict(spoiled({})).training.averaging == []


def test_an_average_has_these_defaults():
    (average,) = bank_of(SLOW)
    assert average == EmaProfile(
        name="slow", decay=0.99, half_life=None, half_life_unit="steps", warmup=True, start_step=0, start_epoch=None,
        update_every=1, device="live", dtype="float64", layout="local_shard", buffers="copy", full_validation=False,
        lcurve=False, ckpt_keep=None,
    )  # fmt: skip
    assert bank_of(POWER) == [PowerProfile(name="p1", sigma_rel=0.05, gamma=None, snapshots=False, snapshot_freq=None)]
    assert bank_of({"name": "flat", "type": "swa", "start_step": 5}) == [
        SwaProfile(name="flat", start_step=5, snapshots=False, snapshot_freq=None)
    ]


def test_the_type_of_an_entry_is_ema_unless_said_otherwise():
    assert bank_of(SLOW) == bank_of({"type": "ema", **SLOW})


def test_the_short_form_is_an_entry_named_ema_before_the_others():
    config = config_from_dict(bank(POWER, {"type": "swa", "name": "flat"}, training__enable_ema=True))
    assert config.training.averaging == [EmaProfile(name="ema", decay=0.999), *bank_of(POWER), *bank_of(FLAT)]
    changes = {"ema_decay": 0.9, "ema_warmup": False, "ema_ckpt_keep": 3, "enable_ema": True}
    (average,) = config_from_dict(
        spoiled({f"training.{k}": v for k, v in changes.items()} | {"validating.ema_full_validation": True})
    ).training.averaging
    assert average == EmaProfile(name="ema", decay=0.9, warmup=False, ckpt_keep=3, full_validation=True)


def test_the_normalized_config_has_the_short_form_as_an_entry_and_is_read_back_the_same():
    config = config_from_dict(bank(SLOW, training__enable_ema=True, validating__ema_full_validation=True))
    written = json.loads(json.dumps(to_dict(config)))
    assert [entry["name"] for entry in written["training"]["averaging"]] == ["ema", "slow"]
    assert not {"enable_ema", "ema_decay", "ema_full_validation"} & {*written["training"], *written["validating"]}
    assert config_from_dict(written) == config


def test_messages_name_entries_and_options_of_the_short_form_as_the_input_has_them(tmp_path):
    values = bank({**SLOW, "lcurve": True}, SLOW, training__enable_ema=True, training__disp_training=False,
                  training__validation_data=REMOVE, validating__ema_full_validation=True)  # fmt: skip
    path = write(tmp_path, values)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = path.read_text().splitlines()
    found = [p.removeprefix(f"{path}:").split(": ", 1) for p in caught.value.problems]
    assert [text.split(" ")[0] for _, text in found] == [
        "training.averaging[0].lcurve", "training.averaging[1].name", "validating.ema_full_validation",
    ]  # fmt: skip
    for line, text in found:
        assert text.split(" ")[0].rpartition(".")[2] in lines[int(line) - 1]
    assert "training.averaging[0] has this name" in found[1][1]


def test_options_of_the_short_form_count_as_given():
    config = config_from_dict(bank(SLOW, training__enable_ema=True, training__ema_decay=0.9))
    given = set(map(dotted, config.source.given))
    assert {"training.averaging[0].decay", "training.averaging[1].decay"} <= given
    assert "training.averaging[0].warmup" not in given
    never = bank(training__enable_ema=True, validating__ema_full_validation=True, validating__full_val_start=1)
    assert ignored_options(config_from_dict(never)) == [
        "validating.ema_full_validation = true: no effect, validating.full_val_start = 1 means never"
    ]


def test_whole_numbers_stand_for_numbers_in_an_entry():
    (average,) = bank_of({"name": "a", "half_life": 50, "half_life_unit": "epochs", "start_epoch": 2})
    assert (average.half_life, average.start_epoch) == (50.0, 2.0)
    assert isinstance(average.half_life, float)
    assert isinstance(average.start_epoch, float)


def test_equal_weights_may_be_written_as_a_power_average():
    assert bank_of({"type": "power", "name": "a", "gamma": 0})[0].gamma == 0
    assert bank_of({"type": "power", "name": "a", "sigma_rel": 1 / math.sqrt(12)})[0].sigma_rel == 1 / math.sqrt(12)


def test_averages_survive_the_way_through_json():
    config = config_from_dict(bank(SLOW, {**POWER, "snapshots": True}, {"type": "swa", "name": "flat"}))
    written = json.loads(json.dumps(to_dict(config)))
    assert config_from_dict(written) == config
    assert [list(entry)[:2] for entry in written["training"]["averaging"]] == [["type", "name"]] * 3


def test_options_of_entries_count_as_given():
    config = config_from_dict(bank(SLOW, POWER))
    given = set(map(dotted, config.source.given))
    assert {"training.averaging", "training.averaging[0].decay", "training.averaging[1].sigma_rel"} <= given
    assert "training.averaging[0].warmup" not in given


def test_an_entry_may_have_comments():
    assert bank_of({**SLOW, "_why": "late"}) == bank_of(SLOW)


def test_the_bias_may_be_fitted_again_after_training():
    config = config_from_dict(spoiled({"training.change_bias_after_training": True}))
    assert config.training.change_bias_after_training is True
    assert ignored_options(config) == []


def test_weights_that_are_fully_validated_are_named():
    config = config_from_dict(bank(SLOW, {**POWER, "full_validation": True}, validating__full_validation=True,
                                   validating__ema_full_validation=True, training__enable_ema=True))  # fmt: skip
    assert config.fully_validated == ["live", "ema", "p1"]
    assert config_from_dict(bank(SLOW)).fully_validated == []


def test_a_path_is_read_as_it_is_written():
    for path in ((), ("training",), ("training", "averaging", 10, "name"), ("a", 0)):
        assert path_of(dotted(path)) == path or path == ()


# ---- mistakes of an entry: entry -> where the one message is, what it holds

BAD = [
    ({"decay": 0.9}, ".name", ["required, but missing", "at most 40 letters, digits, _ and -"]),
    ({"nam": "a", "decay": 0.9}, ".nam", ["Did you mean name, which is required and missing?"]),
    ({**SLOW, "nmae": 1}, ".nmae", ["unknown key. Did you mean name?"]),
    ({**SLOW, "half_live": 5}, ".half_live", ["unknown key. Did you mean half_life or half_life_unit?"]),
    ({"name": "a", "decy": 0.9}, ".decy", ["unknown key. Did you mean decay?"]),
    ({**SLOW, "zzz": 5}, ".zzz", ["unknown key. Known: type, name, start_step", "half_life, half_life_unit."]),
    ({**SLOW, "snapshots": True}, ".snapshots", ["It belongs to type power or swa, and this one is of type ema."]),
    ({"name": "a", "sigma_rel": 0.1}, ".sigma_rel", ["It belongs to type power, and this one is of type ema."]),
    ({**POWER, "decay": 0.9}, ".decay", ["It belongs to type ema, and this one is of type power."]),
    ({"type": "power", "name": "a", "decay": 0.9}, ".decay", ["It belongs to type ema"]),
    ({"type": "swa", "name": "a", "gamma": 1}, ".gamma", ["It belongs to type power, and this one is of type swa."]),
    ({"name": "a", "ema_decay": 0.9}, ".ema_decay", ["It belongs to training.ema_decay. Or did you mean decay?"]),
    ({**SLOW, "type": "edm"}, '.type = "edm"', ["unknown", "Known: ema, power, swa, schedule_free."]),
    ({**SLOW, "type": "pwoer"}, '.type = "pwoer"', ["Did you mean power?"]),
    ({**SLOW, "type": 3}, ".type = 3", ["Known: ema, power, swa"]),
    ({**SLOW, "name": ""}, '.name = ""', ["a name of at most 40 letters"]),
    ({**SLOW, "name": "a b"}, '.name = "a b"', ["letters, digits, _ and -"]),
    ({**SLOW, "name": "a/b"}, '.name = "a/b"', ["letters, digits, _ and -"]),
    ({**SLOW, "name": "a\n"}, '.name = "a\\n"', ["letters, digits, _ and -"]),
    ({**SLOW, "name": "-a"}, '.name = "-a"', ["the first a letter or digit"]),
    ({**SLOW, "name": "a" * 41}, ".name", ["at most 40"]),
    ({**SLOW, "name": "live"}, '.name = "live"', ["and not live"]),
    ({**SLOW, "name": "LIVE"}, '.name = "LIVE"', ["and not live"]),
    ({**SLOW, "name": "posthoc"}, '.name = "posthoc"', ["and not live or posthoc"]),
    ({**SLOW, "name": "a-10"}, '.name = "a-10"', ["without a number after a - at the end"]),
    ({**SLOW, "name": 3}, ".name = 3", ["a name of"]),
    ({**SLOW, "decay": 1.0}, ".decay = 1.0", [">= 0 and < 1"]),
    ({**SLOW, "decay": -0.1}, ".decay = -0.1", [">= 0 and < 1"]),
    ({**SLOW, "decay": "0.9"}, '.decay = "0.9"', ["Write the number without quotes"]),
    ({**SLOW, "decay": float("nan")}, ".decay = NaN", ["expected"]),
    ({"name": "a", "half_life": 0}, ".half_life = 0", ["a number > 0 and <= 1e9"]),
    ({"name": "a", "half_life": 1e10}, ".half_life = 1", ["a number > 0 and <= 1e9"]),
    ({"name": "a", "half_life": 5, "half_life_unit": "step"}, '.half_life_unit = "step"', ["Did you mean steps?"]),
    ({**SLOW, "warmup": 1}, ".warmup = 1", ["Write true."]),
    ({**SLOW, "start_step": -1}, ".start_step = -1", ["a whole number >= 0"]),
    ({**SLOW, "start_step": 1.5}, ".start_step = 1.5", ["a whole number"]),
    ({**SLOW, "start_epoch": -1}, ".start_epoch = -1", ["a number >= 0"]),
    ({**SLOW, "update_every": 0}, ".update_every = 0", ["a whole number > 0"]),
    ({**SLOW, "device": "gpu"}, '.device = "gpu"', ["Known: live, cpu"]),
    ({**SLOW, "dtype": "float16"}, '.dtype = "float16"', ["Known: float32, float64"]),
    ({**SLOW, "layout": "full"}, '.layout = "full"', ["Known: local_shard, full_tensor"]),
    ({**SLOW, "layout": "rank_range"}, '.layout = "rank_range"', ["was removed", "Use local_shard"]),
    ({**SLOW, "buffers": "averaged"}, '.buffers = "averaged"', ["Did you mean average?"]),
    ({**SLOW, "full_validation": "yes"}, '.full_validation = "yes"', ["Write true, without quotes"]),
    ({**SLOW, "lcurve": None}, ".lcurve = null", ["true or false"]),
    ({**SLOW, "ckpt_keep": 0}, ".ckpt_keep = 0", ["a whole number > 0"]),
    ({"type": "power", "name": "a", "gamma": -1}, ".gamma = -1", ["a number >= 0"]),
    ({"type": "power", "name": "a", "sigma_rel": 0}, ".sigma_rel = 0", ["a number > 0 and <= 0.288675"]),
    ({"type": "power", "name": "a", "sigma_rel": 0.289}, ".sigma_rel = 0.289", ["gamma is 0 there, equal weights"]),
    ({**POWER, "snapshot_freq": 0}, ".snapshot_freq = 0", ["a whole number > 0"]),
    ({**POWER, "snapshots": 1000}, ".snapshots = 1000", ["true or false"]),
    ("ema", ' = "ema"', ["expected a section {...}"]),
    (None, " = null", ["expected a section {...}"]),
    ([SLOW], " = [{", ["expected a section {...}"]),
]


@pytest.mark.parametrize(("entry", "place", "phrases"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_a_mistake_in_an_entry_gets_one_message_with_its_place(entry, place, phrases):
    found = problems_of(bank({"type": "swa", "name": "first"}, entry))
    assert len(found) == 1, found
    assert found[0].startswith(f"input.json: training.averaging[1]{place}"), found[0]
    for phrase in phrases:
        assert phrase in found[0]


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (SLOW, "Put [ ] around the section."),
        ("ema", 'averaging = "ema": expected a list of sections [{...}, {...}].'),
        (None, "Remove the key to get the default."),
        (True, "expected a list of sections [{...}, {...}]."),
    ],
)
def test_what_is_no_list_is_named(value, phrase):
    (found,) = problems_of(spoiled({"training.averaging": value}))
    assert found.startswith("input.json: training.averaging = ")
    assert phrase in found


def test_an_option_of_an_entry_outside_of_the_list_is_reported_its_place():
    (found,) = problems_of(spoiled({"training.half_life": 5}))
    assert found == "input.json: training.half_life: unknown key here. It belongs to an entry of averaging."
    (found,) = problems_of(spoiled({"learning_rate.sigma_rel": 5}))
    assert "sigma_rel: unknown key. Known" in found


def test_all_mistakes_of_all_entries_come_at_once_with_their_lines(tmp_path):
    text = json.dumps(spoiled({}), indent=1)
    entries = """"averaging": [
  {"name": "a",
   "decay": 2},
  {"name": "a b", "half_life": 5,
   "half_life_unit": "hours"},
  {"type": "power", "gamma": 1, "name": "p",
   "sigma_rel": 0.1},
  7
 ],
 "numb_steps\""""
    path = write(tmp_path, text.replace('"numb_steps"', entries))
    first = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if "averaging" in line)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    places = [p.removeprefix(f"{path}:").split(" ")[:2] for p in caught.value.problems]
    assert places == [
        [f"{first + 2}:", "training.averaging[0].decay"],
        [f"{first + 3}:", "training.averaging[1].name"],
        [f"{first + 4}:", "training.averaging[1].half_life_unit"],
        [f"{first + 6}:", "training.averaging[2].sigma_rel"],
        [f"{first + 7}:", "training.averaging[3]"],
    ]


def test_mistakes_of_entries_carry_their_lines_in_yaml(tmp_path):
    text = "learning_rate: {start_lr: 1e-3}\nmodel:\n  type_map: [O]\n  descriptor: {type: se_e2_a}\n"
    text += "  fitting_net: {}\ntraining:\n  training_data: {systems: data}\n  numb_steps: 9\n  averaging:\n"
    text += "  - name: a\n    decay: 0.9\n  - name: a\n    decay: 0.9\n    gamma: 3\n"
    path = write(tmp_path, text, "input.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [p.removeprefix(str(path)).split(" ")[0] for p in caught.value.problems] == [":12:", ":14:"]


# ---- rules: name of a rule -> entries and other changes that break it, where the message is, what it says

DECAYS = {"name": "a", "decay": 0.9, "half_life": 10}
POINT, FREE = {"name": "x", "type": "schedule_free"}, {"optimizer": {"type": "AdamWScheduleFree"}}
BROKEN_RULES = {
    "names_are_unique": [
        ((SLOW, SLOW), {}, '[1].name = "slow"', "training.averaging[0] has this name. Choose another."),
        ((SLOW, {**SLOW, "name": "Slow"}), {}, '[1].name = "Slow"', "but for upper and lower case, and so have its"),
        (
            ({**SLOW, "name": "ema"},),
            {"training__enable_ema": True},
            '[0].name = "ema"',
            "training.enable_ema already tracks one of that name. Choose another name, or remove enable_ema.",
        ),
    ],
    "one_length_of_the_average": [
        ((DECAYS,), {}, "[0].half_life = 10", "decay = 0.9 is given too. Remove one of the two."),
        ((SLOW, {"name": "a"}), {}, "[1]: decay or half_life is required for type ema", 'Add one, e.g. "decay": 0.999'),
        (({**POWER, "gamma": 5},), {}, "[0].sigma_rel = 0.05", "gamma = 5 is given too. Remove one of the two."),
        (({"type": "power", "name": "a"},), {}, "[0]: gamma or sigma_rel is required", 'e.g. "sigma_rel": 0.05'),
    ],
    "averaged_point_is_that_of_an_optimizer": [
        (
            (POINT,),
            {},
            '[0].type = "schedule_free"',
            "optimizer.type is Adam, and only AdamWScheduleFree has this average. Change one of the two.",
        ),
    ],
    "averaged_point_takes_every_step": [
        (({**POINT, name: value},), FREE, f"[0].{name} = {value}", "updated in every step. Remove it.")
        for name, value in (("start_step", 5), ("start_epoch", 1), ("update_every", 2))
    ],
    "one_start_of_the_average": [
        (
            ({**SLOW, "start_step": 5, "start_epoch": 1.5},),
            {},
            "[0].start_epoch = 1.5",
            "start_step = 5 is given too. Remove one of the two.",
        ),
    ],
    "validated_average_needs_data": [
        (
            (SLOW, {**POWER, "full_validation": True}),
            {"training__validation_data": REMOVE},
            "[1].full_validation = true",
            "needs training.validation_data (or validation_fraction). Add it, or set this to false.",
        ),
    ],
    "displayed_average_needs_display": [
        (
            ({**SLOW, "lcurve": True},),
            {"training__disp_training": False},
            "[0].lcurve = true",
            "needs training.disp_training, which is false",
        ),
    ],
    "snapshots_have_a_frequency": [
        (
            ({**POWER, "snapshots": True},),
            {"training__save_freq": 0},
            "[0].snapshots = true",
            "needs snapshot_freq, because training.save_freq = 0 writes the last step only",
        ),
    ],
}
BROKEN = [case for cases in BROKEN_RULES.values() for case in cases]


@pytest.mark.parametrize(("entries", "changes", "place", "phrase"), BROKEN)
def test_each_rule_for_averages_has_a_message(entries, changes, place, phrase):
    found = problems_of(bank(*entries, **changes))
    assert len(found) == 1, found
    assert found[0].startswith(f"input.json: training.averaging{place}"), found[0]
    assert phrase in found[0]


@pytest.mark.parametrize(
    ("entries", "changes"),
    [
        ([SLOW, POWER], {}),
        ([{**SLOW, "name": "ema"}], {}),
        ([{**SLOW, "start_step": 0, "start_epoch": 1}], {}),
        ([{"name": "a", "decay": 0}, {"name": "b", "half_life": 0.5}], {}),
        ([{**POWER, "snapshots": True, "snapshot_freq": 10}], {"training__save_freq": 0}),
        ([{**SLOW, "lcurve": True, "full_validation": True}], {"validating__full_val_start": 0}),
    ],
)
def test_averages_that_break_no_rule_are_read(entries, changes):
    assert len(bank_of(*entries, **changes)) == len(entries)


def test_a_wrong_entry_does_not_hide_the_mistakes_of_another():
    found = problems_of(bank({"name": "a", "decay": 2, "start_step": 1, "start_epoch": 1}, {"name": "b"}))
    assert [f.split(" ")[1] for f in found] == [
        "training.averaging[0].decay", "training.averaging[0].start_epoch", "training.averaging[1]:",
    ]  # fmt: skip


@pytest.mark.parametrize("start", [0, 0.5, 1, 500])
def test_validation_is_checked_whatever_full_val_start_says(start):
    when = {"validating__full_val_start": start}
    (found,) = problems_of(bank(SLOW, validating__ema_full_validation=True, **when))
    assert found.startswith('input.json: validating.ema_full_validation = true: needs "enable_ema": true in training.')
    entry = {**SLOW, "full_validation": True}
    (found,) = problems_of(bank(entry, training__validation_data=REMOVE, **when))
    assert found.startswith("input.json: training.averaging[0].full_validation = true: needs training.validation_data")


def test_validation_of_the_short_form_needs_the_short_form_whatever_the_bank_holds():
    (found,) = problems_of(bank({**SLOW, "name": "ema"}, validating__ema_full_validation=True))
    assert found == (
        'input.json: validating.ema_full_validation = true: needs "enable_ema": true in training. Add it, or set this '
        'to false, and "full_validation": true in an entry of training.averaging.'
    )


def test_what_ranks_an_average_must_be_in_the_loss():
    (found,) = problems_of(bank({**SLOW, "full_validation": True}, validating__validation_metric="V:MAE"))
    assert found.startswith('input.json: validating.validation_metric = "V:MAE": not in the loss')
    assert bank_of(SLOW, validating__validation_metric="V:MAE")


def test_files_of_averages_do_not_take_the_place_of_others():
    validated = {**SLOW, "full_validation": True, "lcurve": True}
    (found,) = problems_of(bank(validated, training__disp_file="run/val.log", validating__full_val_file="run/val.log"))
    assert found == (
        "input.json: validating.full_val_file: validation of slow would be written to run/val_slow.log, as the "
        "learning curve of slow is. Choose another name."
    )
    assert bank_of({**validated, "lcurve": False}, training__disp_file="val.log", validating__full_val_file="val.log")


# ---- nothing is ignored in silence

WITHOUT_EFFECT = [
    (({**SLOW, "half_life_unit": "epochs"},), {}, '[0].half_life_unit = "epochs": no effect, decay is given'),
    ((SLOW, {**POWER, "snapshot_freq": 5}), {}, "[1].snapshot_freq = 5: no effect, snapshots is false"),
    (
        ({**SLOW, "ckpt_keep": 5},),
        {"training__ckpt_keep_ratio": 0.5},
        "[0].ckpt_keep = 5: no effect, ckpt_keep_ratio says how many checkpoints are kept",
    ),
    (
        ({**SLOW, "full_validation": True},),
        {"validating__full_val_start": 1},
        "[0].full_validation = true: no effect, validating.full_val_start = 1 means never",
    ),
    (({**SLOW, "layout": "full_tensor"},), {}, '[0].layout = "full_tensor": no effect, every process holds all'),
]


@pytest.mark.parametrize(("entries", "changes", "message"), WITHOUT_EFFECT, ids=[m for _, _, m in WITHOUT_EFFECT])
def test_an_option_of_an_entry_without_effect_is_listed(entries, changes, message):
    (found,) = lines_about(ignored_options(config_from_dict(bank(*entries, **changes))))
    assert found.startswith(f"training.averaging{message}")


def test_nothing_is_listed_of_entries_that_waste_nothing():
    half_life = {"name": "a", "half_life": 5, "half_life_unit": "frames", "layout": "local_shard", "ckpt_keep": 3}
    config = config_from_dict(bank(half_life, {**POWER, "snapshots": True, "snapshot_freq": 5}))
    assert ignored_options(config) == []


def test_options_of_validation_count_when_an_average_is_validated():
    def ignored(**of_entry):
        return ignored_options(config_from_dict(bank({**SLOW, **of_entry}, validating__validation_freq=10)))

    assert ignored(full_validation=True) == []
    assert ignored() == [
        "validating.validation_freq = 10: no effect, full_validation and ema_full_validation are false, and no entry "
        "of training.averaging has it"
    ]


# ---- what is likely not meant; the good input has 2000 steps


def warned(*entries, steps_per=None, **changes):
    return lines_about(config_warnings(config_from_dict(bank(*entries, **changes)), steps_per=steps_per))


def test_a_decay_that_looks_back_too_far_is_warned_about_by_its_entry():
    assert warned(SLOW, {"name": "b", "decay": 0.9999}) == [
        "training.averaging[1].decay = 0.9999: the average is over about 10,000 steps, more than a fifth of the run of "
        "2,000, so it may lag behind the live weights. Try 0.995."
    ]
    (short,) = lines_about(config_warnings(config_from_dict(bank(SLOW, training__enable_ema=True))), "ema_decay")
    assert short.startswith("training.ema_decay = 0.999: the average is over about 1,000 steps")


def test_a_half_life_is_measured_in_steps_before_it_is_warned_about():
    long = {"name": "b", "half_life": 300}  # a window of 433 steps
    assert warned(long) == [
        "training.averaging[0].half_life = 300 steps: the average is over about 433 steps, more than a fifth of the "
        "run of 2,000, so it may lag behind the live weights. Try 139."
    ]
    assert warned({"name": "b", "half_life": 139}) == []
    epochs = {"name": "b", "half_life": 3, "half_life_unit": "epochs"}
    assert warned(epochs) == []
    assert warned(epochs, steps_per={"epochs": 90, "frames": 0.5}) == []
    (found,) = warned(epochs, steps_per={"epochs": 100, "frames": 0.5})
    assert "half_life = 3 epochs: the average is over about 433 steps" in found
    assert found.endswith("Try 1.39.")
    (found,) = warned({**epochs, "half_life": 1000, "half_life_unit": "frames"}, steps_per={"frames": 0.5})
    assert "half_life = 1000 frames: the average is over about 722 steps" in found


def test_the_proposed_half_life_is_not_warned_about():
    for unit, steps in (("steps", 1), ("epochs", 40.0), ("frames", 0.25)):
        entry = {"name": "b", "half_life": 1e5, "half_life_unit": unit}
        per = {"epochs": 40.0, "frames": 0.25}
        (found,) = warned(entry, steps_per=per)
        proposed = float(found.rpartition("Try ")[2][:-1])
        assert proposed * steps == pytest.approx(138.6, rel=1e-2)
        assert warned({**entry, "half_life": proposed}, steps_per=per) == []


def test_an_average_that_never_starts_is_warned_about():
    assert warned({**SLOW, "start_step": 1999}) == []
    (found,) = warned({**SLOW, "start_step": 2000})
    assert found == (
        "training.averaging[0].start_step = 2000: the run ends at step 2,000, so that nothing is averaged and slow is "
        "the live weights. Choose an earlier start."
    )
    late = {**SLOW, "start_epoch": 5}
    assert warned(late) == []
    assert warned(late, steps_per={"epochs": 399.0}) == []
    (found,) = warned(late, steps_per={"epochs": 400.0})
    assert found.startswith("training.averaging[0].start_epoch = 5: the run ends at step 2,000")


def test_too_few_snapshots_are_warned_about_with_a_frequency_that_is_enough():
    two = [{**POWER, "snapshots": True, "snapshot_freq": 400}, {"type": "swa", "name": "flat", "snapshots": True}]
    (found,) = warned(*two)
    assert found == (
        "training.averaging[1].snapshots: 2 snapshots in the run of 2,000 steps (save_freq = 1000), too few for "
        '`dp-ema posthoc`. Try "snapshot_freq": 250.'
    )
    two[1]["snapshot_freq"] = 250
    assert warned(*two) == []
    assert warned(*two, training__save_freq=0) == []
    two[1]["start_step"] = 1900
    (found,) = warned(*two)
    assert "averaging[1].snapshots: 1 snapshot in the run of 2,000 steps (snapshot_freq = 250)" in found
    assert found.endswith('Try "snapshot_freq": 12.')


def test_snapshots_with_different_buffers_are_warned_about():
    """They were refused after the run, by `dp-ema posthoc`."""
    stored = {**POWER, "snapshots": True, "snapshot_freq": 100}
    other = {**stored, "name": "p2", "sigma_rel": 0.1}
    (found,) = warned(stored, {**other, "buffers": "average"})
    assert "averages with different buffers (p1 copy, p2 average)" in found
    assert warned(stored, other) == []


def test_snapshots_of_one_length_are_warned_about():
    stored = {**POWER, "snapshots": True, "snapshot_freq": 100}
    (found,) = warned(stored, {**POWER, "name": "p2", "sigma_rel": 0.1})
    assert found.startswith("training.averaging: all snapshots are of averages of one length (p1).")
    assert len(warned(stored, {**stored, "name": "p2"})) == 1
    assert warned(stored, {**stored, "name": "p2", "sigma_rel": 0.1}) == []
    flat = {"type": "swa", "name": "flat", "snapshots": True, "snapshot_freq": 100}
    assert warned(stored, flat) == []
    assert len(warned({"type": "power", "name": "g", "gamma": 0, "snapshots": True, "snapshot_freq": 100}, flat)) == 1


def test_nothing_is_said_about_averages_while_the_length_of_the_run_is_open():
    by_epochs = {"training__numb_steps": REMOVE, "training__numb_epoch": 5}
    late = {"name": "b", "decay": 0.9999, "start_step": 9000}
    config = config_from_dict(bank(late, **by_epochs))
    assert config_warnings(config) == []
    assert len(lines_about(config_warnings(config, num_steps=2000))) == 2


# ---- words


def summary(*entries, steps_per=None, **changes):
    rows = config_summary(config_from_dict(bank(*entries, **changes)), 2000, steps_per)
    return [text for name, text in rows if name == "average"]


def test_the_summary_has_a_line_for_each_average():
    assert summary() == ["none"]
    lines = summary(
        {**SLOW, "warmup": False, "start_step": 50, "update_every": 4, "device": "cpu", "dtype": "float32"},
        {"name": "half", "half_life": 2.5, "half_life_unit": "epochs", "start_epoch": 1.5},
        {**POWER, "snapshots": True},
        {"type": "power", "name": "p0", "gamma": 0, "snapshots": True, "snapshot_freq": 250},
        {"type": "swa", "name": "flat", "layout": "full_tensor", "buffers": "average"},
        training__enable_ema=True,
    )
    assert lines == [
        "ema: EMA over about 1,000 steps, decay 0.999, warm-up",
        "slow: EMA over about 100 steps, decay 0.99, from step 50, every 4 steps, in host memory, float32",
        "half: EMA, half-life 2.5 epochs, warm-up, from epoch 1.5",
        "p1: power over about 5 % of the steps so far, sigma_rel 0.05, snapshots with the checkpoints",
        "p0: power, gamma 0, snapshots every 250 steps",
        "flat: equal weights, whole on every process, with averaged buffers",
    ]


def test_the_summary_gives_lengths_in_steps_once_the_data_are_known():
    half = {"name": "half", "half_life": 2.5, "half_life_unit": "epochs", "start_epoch": 1.5, "warmup": False}
    assert summary(half, steps_per={"frames": 0.5, "epochs": 800.0}) == [
        "half: EMA, half-life 2.5 epochs (2,000 steps), from epoch 1.5 (step 1,200)"
    ]


def test_the_summary_names_the_averages_that_are_validated():
    values = bank({**SLOW, "full_validation": True}, validating__full_validation=True)
    line = dict(config_summary(config_from_dict(values)))["validation"]
    assert line.endswith("all data every 5,000 steps and after the last (live and slow weights, best by E:MAE)")


def test_the_manual_reports_of_averages_and_their_options():
    text = manual("training.averaging")
    assert "list of sections; type is ema or power or swa or schedule_free (ema if not given); default []" in text
    for name in ("name", "start_epoch", "[ema].half_life", "[power].sigma_rel", "snapshots"):
        path = f"training.averaging{name}" if name.startswith("[") else f"training.averaging.{name}"
        assert f"\n{path}\n" in text
    assert "true or false; default false; of power, swa" in text
    for topic in ("training.averaging.decay", "training.averaging[ema].decay", "training.averaging[2].decay"):
        assert manual(topic).startswith("training.averaging[ema].decay\n    a number >= 0 and < 1 or null; default")
    assert "training.averaging[ema].half_life" in manual("half_life")
    assert manual("training.averaging[swa]").startswith("training.averaging[swa]\n    Stochastic weight averaging")
