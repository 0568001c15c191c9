"""Inputs of several tasks: shared parts, shares, messages with the place that the input has."""

import copy
import json

import pytest
from config_inputs import GOOD, write
from helpers import changed
from test_config_errors import problems_of

from deepmd_ema.config import config_from_dict, config_summary, config_warnings, ignored_options, load_config, to_dict

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
                "water": {"training_data": {"systems": ["water"]}, "validation_data": {"systems": ["more_water"]}},
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
        ("water", "type_map", "elements", 0), ("water", "descriptor", "dpa", 0),
        ("ice", "type_map", "elements", 0), ("ice", "descriptor", "dpa", 0),
    ]  # fmt: skip
    assert config.sharing_with("ice") == ["water", "ice"]


def test_models_that_are_one_object_share_the_parts_that_they_name():
    one = model()  # as of an anchor in YAML
    given = tasks(model__model_dict={"water": one, "ice": one})
    assert config_from_dict(given).links == config_from_dict(tasks()).links
    assert one == model()


def test_the_normalized_input_shares_the_same_parts():
    parts = [DPA, "dpa:1"]
    values = tasks(model__model_dict__ice__descriptor={"type": "hybrid", "list": parts})
    config = config_from_dict(values)
    written = json.loads(json.dumps(to_dict(config)))
    assert written["model"]["model_dict"]["water"]["descriptor"] == "dpa"
    assert written["model"]["model_dict"]["ice"]["descriptor"]["list"][1] == "dpa:1"
    assert written["model"]["shared_dict"]["elements"] == ["O", "H"]
    assert config_from_dict(written) == config


def test_keys_beside_model_dict_hold_for_all_tasks_that_do_not_have_them():
    values = tasks(model__data_stat_nbatch=3, model__model_dict__ice__data_stat_nbatch=5)
    numbers = {name: task.model.data_stat_nbatch for name, task in config_from_dict(values).tasks.items()}
    assert numbers == {"water": 3, "ice": 5}


def test_an_option_for_all_tasks_without_effect_is_reported_once():
    found = ignored_options(config_from_dict(tasks(model__data_bias_nsample=5)))
    assert found == ["model.data_bias_nsample = 5: no effect, the bias is fitted on data_stat_nbatch batches"]


def test_an_option_for_all_tasks_that_each_has_itself_is_without_effect():
    found = ignored_options(config_from_dict(tasks(model__type_map=["H"])))
    assert found == ['model.type_map = ["H"]: no effect, every model of model.model_dict has its own']


def test_what_tasks_have_alike_is_reported_once_and_what_they_share_is_reported():
    values = tasks(model__model_dict__ice__fitting_net={"neuron": [4]}, model__model_dict__ice__descriptor="dpa:1")
    rows = [row for row in config_summary(config_from_dict(values)) if row[0] in ("elements", "fitting", "shared")]
    assert rows == [
        ("elements", "water, ice: O H"),
        ("fitting", "water: ener, neuron 8-8, float64"),
        ("fitting", "ice: ener, neuron 4, float64"),
        ("shared", "elements: type_map of water and ice"),
        ("shared", "dpa: descriptor of water, embedding of elements of the descriptor of ice"),
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
    assert found.startswith("model.shared_dict.net: the tasks water, ice share this network")
    assert '"dim_case_embd": 2' in found
    shared["net"] = {**NET, "dim_case_embd": 2}
    assert warnings_of(model__shared_dict=shared, model__model_dict=both) == []


def test_an_input_without_any_task_has_one_message():
    found = problems_of(tasks(model__model_dict={}, model__shared_dict={}))
    assert found == ["input.json: model.model_dict: there is no task. Add the model of each, by its name."]


def test_every_option_of_deepmd_kit_for_data_is_read_in_a_task():
    """All of its training_data_args and validation_data_args, with their aliases."""
    common = {"systems": "water", "rglob_patterns": None, "batch_size": "mix:64", "set_prefix": "set"}
    training = {**common, "auto_prob_style": "prob_sys_size;0:1:1", "sys_weights": None, "min_pair_dist": 0.5}
    validation = {**common, "auto_prob": "prob_uniform", "sys_probs": [1.0], "numb_batch": 2}
    data = tasks()["training"]["data_dict"] | {"water": {"training_data": training, "validation_data": validation}}
    config = config_from_dict(tasks(training__data_dict=data))
    read = config.tasks["water"]
    assert (read.data.training_data.batch_size, read.data.training_data.min_pair_dist) == ("mix:64", 0.5)
    assert (read.data.validation_data.numb_btch, read.data.validation_data.sys_probs) == (2, [1.0])
    places = [f"training.data_dict.water.{part}_data.set_prefix" for part in ("training", "validation")]
    assert [note.split(" has no effect")[0] for note in config.notes] == places


def test_comments_are_no_tasks_and_no_parts():
    values = tasks(model__shared_dict___note="x", model__model_dict___note="x", loss_dict___note="x")
    assert list(config_from_dict(values).tasks) == ["water", "ice"]


def test_the_summary_has_the_epochs_of_each_task():
    config = config_from_dict(tasks(training__numb_steps=None, training__num_epoch_dict={"water": 1, "ice": 2.5}))
    assert dict(config_summary(config))["run"].startswith("water 1 epochs, ice 2.5 epochs, batch_size")


def test_a_task_without_a_loss_has_the_defaults():
    values = tasks()
    del values["loss_dict"]["ice"]
    assert config_from_dict(values).tasks["ice"].loss.start_pref_f == 1000


def test_an_unknown_part_in_a_list_is_one_mistake():
    hybrid = {"type": "hybrid", "list": ["dpa", "dpaa"]}
    (problem,) = problems_of(tasks(model__model_dict__ice__descriptor=hybrid))
    assert 'model.model_dict.ice.descriptor.list[1] = "dpaa": not in model.shared_dict. Did you mean dpa?' in problem


def test_mistakes_in_a_shared_part_are_reported_once_and_where_the_input_has_it(tmp_path):
    values = tasks(model__shared_dict__dpa={**DPA, "rcutt": 5.0, "neuron": "many"}, model__data_stat_nbatch=-1)
    path = write(tmp_path, values)
    with pytest.raises(Exception, match="rcutt") as caught:
        load_config(path)
    places = [line.partition(": ")[2].split(" = ")[0].split(":")[0] for line in caught.value.problems]
    assert sorted(places) == ["model.data_stat_nbatch", "model.shared_dict.dpa.neuron", "model.shared_dict.dpa.rcutt"]
    lines = {k + 1: text for k, text in enumerate(path.read_text().splitlines())}
    for problem in caught.value.problems:
        number = int(problem.split(":")[1])
        assert problem.split(".")[-1].split(" ")[0].strip(":") or lines[number]
    (line,) = [p for p in caught.value.problems if "rcutt" in p]
    assert '"rcutt"' in lines[int(line.split(":")[1])]


# changes -> where the message is, what it says
WRONG = {
    "unknown name": (
        {"model__model_dict__ice__descriptor": "dpaa"},
        "model.model_dict.ice.descriptor",
        "Did you mean dpa?",
    ),
    "level": ({"model__model_dict__ice__descriptor": "dpa:2"}, "model.model_dict.ice.descriptor", "level 0"),
    "level of a fitting": (
        {"model__shared_dict__net": NET, "model__model_dict__ice__fitting_net": "net:1"},
        "model.model_dict.ice.fitting_net",
        "level 0",
    ),
    "unused part": ({"model__shared_dict__other": DPA}, "model.shared_dict.other", "no model of model.model_dict"),
    "no list of parts": ({"model__shared_dict": ["dpa"]}, "model.shared_dict", "expected parts of models by name"),
    "key of one task": ({"model__model_dict__ice__descripto": {}}, "model.model_dict.ice.descripto", "descriptor"),
    "not there yet": (
        {"model__model_dict__ice__fitting_net": {"type": "dos"}},
        "model.model_dict.ice.fitting_net.type",
        "not available in dp-ema",
    ),
    "loss of one task": ({"loss": {}}, "loss", "There it is loss_dict.TASK."),
    "data of one task": (
        {"training__training_data": {"systems": ["x"]}},
        "training.training_data",
        "There it is training.data_dict.TASK.training_data.",
    ),
    "number of model_prob": ({"training__model_prob": {"water": -1, "ice": 1}}, "training.model_prob", "numbers >= 0"),
    "two epochs": (
        {"training__num_epoch_dict": {"water": 1, "ice": 1}},
        "training.numb_steps",
        "num_epoch_dict is given too",
    ),
    "statistics without a file": (
        {"training__data_dict__ice__stat_file_mode": "read"},
        "training.data_dict.ice.stat_file_mode",
        "needs stat_file beside it",
    ),
    # one for each rule about several tasks
    "names_of_tasks_are_plain": (
        {
            "model__model_dict__a b": model(),
            "training__data_dict__a b": {"training_data": {"systems": ["x"]}},
        },
        "model.model_dict",
        '"a b" is no name of a task',
    ),
    "a name that is no name of a file": (
        {"model__model_dict__a/b": model(), "training__data_dict__a/b": {"training_data": {"systems": ["x"]}}},
        "model.model_dict",
        '"a/b" is no name of a task',
    ),
    "heads_are_distinct": (
        {"model__model_dict__Ice": model(), "training__data_dict__Ice": {"training_data": {"systems": ["x"]}}},
        "model.model_dict.Ice",
        "task ice has this name but for upper and lower case",
    ),
    "alias of another task": (
        {"model__model_dict__ice": model(model_branch_alias=["WATER"])},
        "model.model_dict.ice.model_branch_alias",
        "WATER means task water already",
    ),
    "alias of two": (
        {
            "model__model_dict__ice": model(model_branch_alias=["h2o"]),
            "model__model_dict__water": model(model_branch_alias=["H2O"]),
        },
        "model.model_dict.ice.model_branch_alias",
        "h2o means task water already",
    ),
    "sections_name_the_tasks": (
        {"model__model_dict__steam": model()},
        "training.data_dict",
        "task steam of model.model_dict is missing",
    ),
    "shares_follow_from_epochs": (
        {
            "training__num_epoch_dict": {"water": 1, "ice": 1},
            "training__model_prob": {"water": 1, "ice": 1},
            "training__numb_steps": None,
        },
        "training.model_prob",
        "num_epoch_dict is given too",
    ),
    "caches_of_statistics_differ": (
        {"training__data_dict__water__stat_file": "s.h5", "training__data_dict__ice__stat_file": "./s.h5"},
        "training.data_dict.ice.stat_file",
        "task water has it too",
    ),
    "shared_parts_fit": (
        {"model__model_dict__ice__type_map": ["H", "O"]},
        "model.model_dict.ice.type_map",
        "Give both the same elements",
    ),
    "case_embedding_is_one_number": (
        {
            "model__model_dict__ice__fitting_net": {"dim_case_embd": 2},
            "model__model_dict__water__fitting_net": {"dim_case_embd": 3},
        },
        "model.model_dict.ice.fitting_net.dim_case_embd",
        "expected 3 in every task",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_mistake_has_one_message_with_its_place(name):
    changes, place, phrase = WRONG[name]
    (found,) = problems_of(tasks(**changes))
    assert found.startswith(f"input.json: {place}"), found
    assert phrase in found, found


def test_a_descriptor_without_an_embedding_of_elements_has_none_to_share():
    parts = {"elements": ["O", "H"], "dpa": GOOD["model"]["descriptor"]}
    (found,) = problems_of(tasks(model__shared_dict=parts, model__model_dict__ice__descriptor="dpa:1"))
    assert found.startswith('input.json: model.model_dict.ice: descriptor = "dpa:1": se_e2_a has no embedding')


def test_an_input_of_tasks_without_models_says_what_is_missing():
    values = tasks()
    values["model"] = GOOD["model"]
    found = problems_of(values)
    assert any("model.model_dict: required, but missing" in line for line in found), found


def test_switches_of_models_hold_for_all_tasks():
    of_all = tasks()
    of_all["model"]["use_compile"] = True
    assert config_from_dict(of_all).training.enable_compile
    one = tasks()
    one["model"]["model_dict"]["ice"]["use_compile"] = True
    assert config_from_dict(one).training.enable_compile
    one["model"]["model_dict"]["water"]["use_compile"] = False
    assert problems_of(one) == [
        "input.json: model.model_dict.ice.use_compile = true: model.model_dict.water.use_compile = false, and a run "
        "has one of them. Give both the same value, or remove one."
    ]
