"""``training.averaging``: a list of averages, each chosen by its type and checked as strictly as
the rest.
"""

import json

import pytest
from config_inputs import (
    REMOVE,
    assert_refused,
    assert_refused_by_dargs,
    spoiled,
    write,
)

from deepmd_ema.config import (
    config_from_dict,
    config_summary,
    config_warnings,
    load_config,
    to_dict,
)
from deepmd_ema.config.schema.averaging import EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.errors import ConfigError

SLOW = {"name": "slow", "decay": 0.99}
POWER = {"type": "power", "name": "p1", "sigma_rel": 0.05}
FLAT = {"type": "swa", "name": "flat"}


def bank(*entries, **changes):
    """Return a good input with these averages; ``changes`` are of other options,
    ``training__numb_steps=5``.
    """
    return spoiled(
        {"training.averaging": list(entries)}
        | {k.replace("__", "."): v for k, v in changes.items()}
    )


def bank_of(*entries, **changes):
    return config_from_dict(bank(*entries, **changes)).training.averaging


# ---- what is read


def test_an_average_has_these_defaults():
    (average,) = bank_of(SLOW)
    assert average == EmaProfile(
        name="slow",
        decay=0.99,
        half_life=None,
        half_life_unit="steps",
        warmup=True,
        start_step=0,
        start_epoch=None,
        update_every=1,
        device="live",
        dtype="float64",
        layout="local_shard",
        buffers="copy",
        full_validation=False,
        lcurve=False,
        ckpt_keep=None,
    )
    assert bank_of(POWER) == [
        PowerProfile(
            name="p1", sigma_rel=0.05, gamma=None, snapshots=False, snapshot_freq=None
        )
    ]
    assert bank_of({"name": "flat", "type": "swa", "start_step": 5}) == [
        SwaProfile(name="flat", start_step=5, snapshots=False, snapshot_freq=None)
    ]


def test_the_short_form_is_an_entry_named_ema_before_the_others():
    config = config_from_dict(
        bank(POWER, {"type": "swa", "name": "flat"}, training__enable_ema=True)
    )
    assert config.training.averaging == [
        EmaProfile(name="ema", decay=0.999),
        *bank_of(POWER),
        *bank_of(FLAT),
    ]
    changes = {
        "ema_decay": 0.9,
        "ema_warmup": False,
        "ema_ckpt_keep": 3,
        "enable_ema": True,
    }
    (average,) = config_from_dict(
        spoiled(
            {f"training.{k}": v for k, v in changes.items()}
            | {"validating.ema_full_validation": True}
        )
    ).training.averaging
    assert average == EmaProfile(
        name="ema", decay=0.9, warmup=False, ckpt_keep=3, full_validation=True
    )


def test_the_normalized_config_has_the_short_form_as_an_entry_and_is_read_back_the_same():
    config = config_from_dict(
        bank(SLOW, training__enable_ema=True, validating__ema_full_validation=True)
    )
    written = json.loads(json.dumps(to_dict(config)))
    assert [entry["name"] for entry in written["training"]["averaging"]] == [
        "ema",
        "slow",
    ]
    assert not {"enable_ema", "ema_decay", "ema_full_validation"} & {
        *written["training"],
        *written["validating"],
    }
    assert config_from_dict(written) == config


def test_messages_name_entries_and_options_of_the_short_form_as_the_input_has_them(
    tmp_path,
):
    values = bank(
        {**SLOW, "lcurve": True},
        SLOW,
        training__enable_ema=True,
        training__disp_training=False,
        training__validation_data=REMOVE,
        validating__ema_full_validation=True,
    )
    path = write(tmp_path, values)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = path.read_text().splitlines()
    found = [p.removeprefix(f"{path}:").split(": ", 1) for p in caught.value.problems]
    assert [text.split(" ")[0] for _, text in found] == [
        "training.averaging[0].lcurve",
        "training.averaging[1].name",
        "validating.ema_full_validation",
    ]
    for line, text in found:
        assert text.split(" ")[0].rpartition(".")[2] in lines[int(line) - 1]
    assert "training.averaging[0] has this name" in found[1][1]


# ---- mistakes of an entry: entry -> where the one message is, what it holds

WRONG = [
    (
        {"decay": 0.9},
        ".name ... required, but missing ... at most 40 letters, digits, _ and -",
    ),
    ({**SLOW, "nmae": 1}, ".nmae ... unknown key. Did you mean name?"),
    (
        {"name": "a", "sigma_rel": 0.1},
        ".sigma_rel ... It belongs to type power, and this one is of type ema.",
    ),
    (
        {"name": "a", "ema_decay": 0.9},
        ".ema_decay ... It belongs to training.ema_decay. Or did you mean decay?",
    ),
    (
        {**SLOW, "type": "edm"},
        '.type = "edm" ... unknown ... Known: ema, power, swa, schedule_free.',
    ),
    ({"name": "", "decay": 0.99}, '.name = "" ... a name of at most 40 letters'),
    (
        {"name": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "decay": 0.99},
        ".name ... at most 40",
    ),
    (
        {"name": "posthoc", "decay": 0.99},
        '.name = "posthoc" ... and not live or posthoc',
    ),
    ({**SLOW, "update_every": 0}, ".update_every = 0 ... a whole number > 0"),
    ({**SLOW, "dtype": "float16"}, '.dtype = "float16" ... Known: float32, float64'),
    (
        {**SLOW, "layout": "rank_range"},
        '.layout = "rank_range" ... was removed ... Use local_shard',
    ),
    ({**SLOW, "ckpt_keep": 0}, ".ckpt_keep = 0 ... a whole number > 0"),
    ({"type": "power", "name": "a", "gamma": -1}, ".gamma = -1 ... a number >= 0"),
    (
        {"type": "power", "name": "a", "sigma_rel": 0.289},
        ".sigma_rel = 0.289 ... gamma is 0 there, equal weights",
    ),
    ("ema", ' = "ema": expected a section {...}'),
]


@pytest.mark.parametrize(("entry", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_mistake_in_an_entry_gets_one_message_with_its_place(entry, text):
    values = bank({"type": "swa", "name": "first"}, entry)
    assert_refused(values, f"training.averaging[1]{text}")
    assert_refused_by_dargs(values)


# ---- rules: name of a rule -> entries and other changes that break it, where the message is, what
# it says

FREE = {"optimizer": {"type": "AdamWScheduleFree"}}
BROKEN = [
    (
        [SLOW, SLOW],
        {},
        '[1].name = "slow" ... training.averaging[0] has this name. Choose another.',
    ),
    (
        [SLOW, {"name": "Slow", "decay": 0.99}],
        {},
        '[1].name = "Slow" ... but for upper and lower case, and so have its',
    ),
    (
        [{"name": "ema", "decay": 0.99}],
        {"training.enable_ema": True},
        '[0].name = "ema" ... training.enable_ema already tracks one of that name. Choose another '
        "name, or remove",
    ),
    (
        [{"name": "a", "decay": 0.9, "half_life": 10}],
        {},
        "[0].half_life = 10 ... decay = 0.9 is given too. Remove one of the two.",
    ),
    (
        [SLOW, {"name": "a"}],
        {},
        '[1]: decay or half_life is required for type ema ... Add one, e.g. "decay": 0.999',
    ),
    (
        [{**POWER, "gamma": 5}],
        {},
        "[0].sigma_rel = 0.05 ... gamma = 5 is given too. Remove one of the two.",
    ),
    (
        [{"type": "power", "name": "a"}],
        {},
        '[0]: gamma or sigma_rel is required ... e.g. "sigma_rel": 0.05',
    ),
    (
        [{"name": "x", "type": "schedule_free"}],
        {},
        '[0].type = "schedule_free" ... optimizer.type is Adam, and only AdamWScheduleFree has '
        "this average. Change",
    ),
    (
        [{"name": "x", "type": "schedule_free", "start_step": 5}],
        {"optimizer": FREE["optimizer"]},
        "[0].start_step = 5 ... updated in every step. Remove it.",
    ),
    (
        [{**SLOW, "start_step": 5, "start_epoch": 1.5}],
        {},
        "[0].start_epoch = 1.5 ... start_step = 5 is given too. Remove one of the two.",
    ),
    (
        [SLOW, {**POWER, "full_validation": True}],
        {"training.validation_data": REMOVE},
        "[1].full_validation = true ... needs training.validation_data (or validation_fraction). "
        "Add it, or set",
    ),
    (
        [{**SLOW, "lcurve": True}],
        {"training.disp_training": False},
        "[0].lcurve = true ... needs training.disp_training, which is false",
    ),
    (
        [{**POWER, "snapshots": True}],
        {"training.save_freq": 0},
        "[0].snapshots = true ... needs snapshot_freq, because training.save_freq = 0 writes the "
        "last step only",
    ),
]


@pytest.mark.parametrize(
    ("entries", "changes", "text"), BROKEN, ids=[text for *_, text in BROKEN]
)
def test_each_rule_for_averages_has_a_message(entries, changes, text):
    assert_refused(
        spoiled({"training.averaging": entries, **changes}), f"training.averaging{text}"
    )


# ---- what is likely not meant; the good input has 2000 steps


def warned(*entries, steps_per=None, **changes):
    found = config_warnings(
        config_from_dict(bank(*entries, **changes)), steps_per=steps_per
    )
    return [line for line in found if "averaging" in line]


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9, 10, 20])
def test_no_average_of_a_single_step_is_proposed(num_steps):
    def about(decay):
        average = {"name": "b", "decay": decay}
        found = warned(
            average, steps_per={"steps": 1.0}, training__numb_steps=num_steps
        )
        return [line for line in found if "may lag" in line]

    (line,) = about(0.99)
    better = float(line.rpartition("Try ")[2].rstrip("."))
    assert better >= 0.5
    assert about(better) == []


def test_a_half_life_is_measured_in_steps_before_it_is_warned_about():
    long = {"name": "b", "half_life": 300}  # a window of 433 steps
    assert warned(long) == [
        "training.averaging[0].half_life = 300 steps: the average is over about 433 steps, more "
        "than a fifth of the run of 2,000, so it may lag behind the live weights. Try 139."
    ]
    assert warned({"name": "b", "half_life": 139}) == []
    epochs = {"name": "b", "half_life": 3, "half_life_unit": "epochs"}
    assert warned(epochs) == []
    assert warned(epochs, steps_per={"epochs": 90, "frames": 0.5}) == []
    (found,) = warned(epochs, steps_per={"epochs": 100, "frames": 0.5})
    assert "half_life = 3 epochs: the average is over about 433 steps" in found
    assert found.endswith("Try 1.39.")
    (found,) = warned(
        {**epochs, "half_life": 1000, "half_life_unit": "frames"},
        steps_per={"frames": 0.5},
    )
    assert "half_life = 1000 frames: the average is over about 722 steps" in found


def test_an_average_that_never_starts_is_warned_about():
    assert warned({**SLOW, "start_step": 1999}) == []
    (found,) = warned({**SLOW, "start_step": 2000})
    assert found == (
        "training.averaging[0].start_step = 2000: the run ends at step 2,000, so that nothing is "
        "averaged and slow is the live weights. Choose an earlier start."
    )
    late = {**SLOW, "start_epoch": 5}
    assert warned(late) == []
    assert warned(late, steps_per={"epochs": 399.0}) == []
    (found,) = warned(late, steps_per={"epochs": 400.0})
    assert found.startswith(
        "training.averaging[0].start_epoch = 5: the run ends at step 2,000"
    )


def test_too_few_snapshots_are_warned_about_with_a_frequency_that_is_enough():
    two = [
        {**POWER, "snapshots": True, "snapshot_freq": 400},
        {"type": "swa", "name": "flat", "snapshots": True},
    ]
    (found,) = warned(*two)
    assert found == (
        "training.averaging[1].snapshots: 2 snapshots in the run of 2,000 steps (save_freq = "
        "1000), too few for "
        '`dp-ema posthoc`. Try "snapshot_freq": 250.'
    )
    two[1]["snapshot_freq"] = 250
    assert warned(*two) == []
    assert warned(*two, training__save_freq=0) == []
    two[1]["start_step"] = 1900
    (found,) = warned(*two)
    assert (
        "averaging[1].snapshots: 1 snapshot in the run of 2,000 steps (snapshot_freq = 250)"
        in found
    )
    assert found.endswith('Try "snapshot_freq": 12.')


def test_snapshots_with_different_buffers_are_warned_about():
    """They were refused after the run, by `dp-ema posthoc`."""
    stored = {**POWER, "snapshots": True, "snapshot_freq": 100}
    other = {**stored, "name": "p2", "sigma_rel": 0.1}
    (found,) = warned(stored, {**other, "buffers": "average"})
    assert "averages with different buffers (p1 copy, p2 average)" in found
    (found,) = warned(stored, {**POWER, "name": "p2", "sigma_rel": 0.1})
    assert found.startswith(
        "training.averaging: all snapshots are of averages of one length (p1)."
    )
    assert warned(stored, other) == []


# ---- words


def summary(*entries, steps_per=None, **changes):
    rows = config_summary(config_from_dict(bank(*entries, **changes)), 2000, steps_per)
    return [text for name, text in rows if name == "average"]


def test_the_summary_has_a_line_for_each_average():
    assert summary() == ["none"]
    lines = summary(
        {
            **SLOW,
            "warmup": False,
            "start_step": 50,
            "update_every": 4,
            "device": "cpu",
            "dtype": "float32",
        },
        {
            "name": "half",
            "half_life": 2.5,
            "half_life_unit": "epochs",
            "start_epoch": 1.5,
        },
        {**POWER, "snapshots": True},
        {
            "type": "power",
            "name": "p0",
            "gamma": 0,
            "snapshots": True,
            "snapshot_freq": 250,
        },
        {"type": "swa", "name": "flat", "layout": "full_tensor", "buffers": "average"},
        training__enable_ema=True,
    )
    assert lines == [
        "ema: EMA over about 1,000 steps, decay 0.999, warm-up",
        "slow: EMA over about 100 steps, decay 0.99, from step 50, every 4 steps, in host memory, "
        "float32",
        "half: EMA, half-life 2.5 epochs, warm-up, from epoch 1.5",
        "p1: power over about 5 % of the steps so far, sigma_rel 0.05, snapshots with the "
        "checkpoints",
        "p0: power, gamma 0, snapshots every 250 steps",
        "flat: equal weights, whole on every process, with averaged buffers",
    ]
