"""Inputs of several tasks: shared parts, shares, messages with the place that the input has."""

import copy
import json
import os

import pytest
from config_inputs import GOOD, assert_refused, problems_of, write
from helpers import changed

from deepmd_ema.config import (
    config_from_dict,
    config_summary,
    config_warnings,
    load_config,
    to_dict,
)

DPA = {"type": "se_atten", "sel": 40, "attn_layer": 0}
NET = {"neuron": [8, 8]}


def model(**changes):
    return {"type_map": "elements", "descriptor": "dpa", "fitting_net": NET, **changes}


def tasks(**changes):
    """Return an input of two tasks with sections, or keys of them after ``__``, replaced."""
    values = {
        "model": {
            "shared_dict": {"elements": ["O", "H"], "dpa": DPA},
            "model_dict": {"water": model(), "ice": model()},
        },
        "learning_rate": GOOD["learning_rate"],
        "loss_dict": {"water": {"start_pref_e": 0.02}, "ice": {"start_pref_e": 0.2}},
        "training": {
            "data_dict": {
                "water": {
                    "training_data": {"systems": ["water"]},
                    "validation_data": {"systems": ["more_water"]},
                },
                "ice": {"training_data": {"systems": ["ice"]}},
            },
            "numb_steps": 100,
        },
    }
    return changed(copy.deepcopy(values), copy.deepcopy(changes))


def test_tasks_have_the_parts_that_they_name():
    config = config_from_dict(tasks())
    assert list(config.tasks) == ["water", "ice"]
    water, ice = config.tasks.values()
    assert water.model == ice.model
    assert water.model.descriptor.type == "se_atten"
    assert water.model.type_map == ["O", "H"]
    assert (water.loss.start_pref_e, ice.loss.start_pref_e) == (0.02, 0.2)
    assert water.data.validation_data.systems == ["more_water"]
    assert ice.data.validation_data is None
    assert [(link.task, link.part, link.key, link.level) for link in config.links] == [
        ("water", "type_map", "elements", 0),
        ("water", "descriptor", "dpa", 0),
        ("ice", "type_map", "elements", 0),
        ("ice", "descriptor", "dpa", 0),
    ]
    assert config.sharing_with("ice") == ["water", "ice"]


def test_the_normalized_input_shares_the_same_parts():
    parts = [DPA, "dpa:1"]
    values = tasks(model__model_dict__ice__descriptor={"type": "hybrid", "list": parts})
    config = config_from_dict(values)
    written = json.loads(json.dumps(to_dict(config)))
    assert written["model"]["model_dict"]["water"]["descriptor"] == "dpa"
    assert written["model"]["model_dict"]["ice"]["descriptor"]["list"][1] == "dpa:1"
    assert written["model"]["shared_dict"]["elements"] == ["O", "H"]
    assert config_from_dict(written) == config


def test_what_tasks_have_alike_is_reported_once_and_what_they_share_is_reported():
    values = tasks(
        model__model_dict__ice__fitting_net={"neuron": [4]},
        model__model_dict__ice__descriptor="dpa:1",
    )
    rows = [
        row
        for row in config_summary(config_from_dict(values))
        if row[0] in ("elements", "fitting", "shared")
    ]
    assert rows == [
        ("elements", "water, ice: O H"),
        ("fitting", "water: ener, neuron 8-8, float64"),
        ("fitting", "ice: ener, neuron 4, float64"),
        ("shared", "elements: type_map of water and ice"),
        (
            "shared",
            "dpa: descriptor of water, embedding of elements of the descriptor of ice",
        ),
    ]


def warnings_of(**changes):
    rate = {**GOOD["learning_rate"], "decay_steps": 5}
    return config_warnings(config_from_dict(tasks(**changes, learning_rate=rate)))


def test_a_task_without_steps_is_warned_about():
    assert warnings_of() == []
    (found,) = warnings_of(training__model_prob={"water": 1, "ice": 0})
    assert found.startswith("training.model_prob.ice = 0: no step trains this task")


def test_tasks_that_share_a_fitting_net_and_are_not_distinguished_are_warned_about():
    shared = {"elements": ["O", "H"], "dpa": DPA, "net": NET}
    both = {name: model(fitting_net="net") for name in ("water", "ice")}
    (found,) = warnings_of(model__shared_dict=shared, model__model_dict=both)
    assert found.startswith(
        "model.shared_dict.net: the tasks water, ice share this network"
    )
    assert '"dim_case_embd": 2' in found
    shared["net"] = {**NET, "dim_case_embd": 2}
    assert warnings_of(model__shared_dict=shared, model__model_dict=both) == []


def test_an_input_without_any_task_has_one_message():
    found = problems_of(tasks(model__model_dict={}, model__shared_dict={}))
    assert found == [
        "input.json: model.model_dict: there is no task. Add the model of each, by its name."
    ]


def test_mistakes_in_a_shared_part_are_reported_once_and_where_the_input_has_it(
    tmp_path,
):
    values = tasks(
        model__shared_dict__dpa={**DPA, "rcutt": 5.0, "neuron": "many"},
        model__data_stat_nbatch=-1,
    )
    path = write(tmp_path, values)
    with pytest.raises(Exception, match="rcutt") as caught:
        load_config(path)
    places = [
        line.partition(": ")[2].split(" = ")[0].split(":")[0]
        for line in caught.value.problems
    ]
    assert sorted(places) == [
        "model.data_stat_nbatch",
        "model.shared_dict.dpa.neuron",
        "model.shared_dict.dpa.rcutt",
    ]
    lines = {k + 1: text for k, text in enumerate(path.read_text().splitlines())}
    (line,) = [p for p in caught.value.problems if "rcutt" in p]
    assert '"rcutt"' in lines[int(line.split(":")[1])]


# changes -> the only message
WRONG = [
    (
        {"validating": {"test_data": {"systems": ["x"]}}},
        "validating.test_data: this is an input of several tasks. There it is test_data_dict.TASK",
    ),
    (
        {"validating": {"test_data_dict": {"c": {"systems": ["x"]}}}},
        "validating.test_data_dict.c: no task of model.model_dict. There: water, ice",
    ),
    (
        {"model__model_dict__ice__descriptor": "dpaa"},
        "model.model_dict.ice.descriptor ... Did you mean dpa?",
    ),
    (
        {"model__shared_dict__other": DPA},
        "model.shared_dict.other ... no model of model.model_dict",
    ),
    (
        {"model__model_dict__ice__fitting_net": {"type": "population"}},
        "model.model_dict.ice.fitting_net.type ... not available in dp-ema",
    ),
    ({"loss": {}}, "loss ... There it is loss_dict.TASK."),
    (
        {
            "model__shared_dict__dpa": GOOD["model"]["descriptor"],
            "model__model_dict__ice__descriptor": "dpa:1",
        },
        'model.model_dict.ice: descriptor = "dpa:1": se_e2_a has no embedding',
    ),
    (
        {"training__model_prob": {"water": -1, "ice": 1}},
        "training.model_prob ... numbers >= 0",
    ),
    (
        {"training__num_epoch_dict": {"water": 1, "ice": 1}},
        "training.numb_steps ... num_epoch_dict is given too",
    ),
    (
        {
            "model__model_dict__a b": model(),
            "training__data_dict__a b": {"training_data": {"systems": ["x"]}},
        },
        'model.model_dict ... "a b" is no name of a task',
    ),
    (
        {
            "model__model_dict__Ice": model(),
            "training__data_dict__Ice": {"training_data": {"systems": ["x"]}},
        },
        "model.model_dict.Ice ... task ice has this name but for upper and lower case",
    ),
    (
        {"model__model_dict__ice": model(model_branch_alias=["WATER"])},
        "model.model_dict.ice.model_branch_alias ... WATER means task water already",
    ),
    (
        {
            "model__model_dict__ice": model(model_branch_alias=["h2o"]),
            "model__model_dict__water": model(model_branch_alias=["H2O"]),
        },
        "model.model_dict.ice.model_branch_alias ... h2o means task water already",
    ),
    (
        {"model__model_dict__steam": model()},
        "training.data_dict ... task steam of model.model_dict is missing",
    ),
    (
        {
            "training__num_epoch_dict": {"water": 1, "ice": 1},
            "training__model_prob": {"water": 1, "ice": 1},
            "training__numb_steps": None,
        },
        "training.model_prob ... num_epoch_dict is given too",
    ),
    (
        {
            "training__data_dict__water__stat_file": "s.h5",
            "training__data_dict__ice__stat_file": "./s.h5",
        },
        "training.data_dict.ice.stat_file ... task water has it too",
    ),
    (
        {
            "training__data_dict__water__stat_file": "s.h5",
            "training__data_dict__ice__stat_file": os.path.abspath("s.h5"),
        },
        "training.data_dict.ice.stat_file ... task water has it too",
    ),
    (
        {"model__model_dict__ice__type_map": ["H", "O"]},
        "model.model_dict.ice.type_map ... Give both the same elements",
    ),
    (
        {
            "model__model_dict__ice__fitting_net": {"dim_case_embd": 2},
            "model__model_dict__water__fitting_net": {"dim_case_embd": 3},
        },
        "model.model_dict.ice.fitting_net.dim_case_embd ... expected 3 in every task",
    ),
]


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_mistake_has_one_message_with_its_place(changes, text):
    assert_refused(tasks(**changes), text)


def test_switches_of_models_hold_for_all_tasks():
    of_all = tasks()
    of_all["model"]["use_compile"] = True
    assert config_from_dict(of_all).training.enable_compile
    one = tasks()
    one["model"]["model_dict"]["ice"]["use_compile"] = True
    assert config_from_dict(one).training.enable_compile
    one["model"]["model_dict"]["water"]["use_compile"] = False
    assert problems_of(one) == [
        "input.json: model.model_dict.ice.use_compile = true: model.model_dict.water.use_compile "
        "= false, and a run has one of them. Give both the same value, or remove one."
    ]
