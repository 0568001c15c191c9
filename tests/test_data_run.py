"""The data of a run as its config names them."""

import pytest
from helpers import tiny_input

from deepmd_ema.config import config_from_dict
from deepmd_ema.data.run import check_task, length_lines, open_run
from deepmd_ema.errors import DataError


def checked(config):
    """Return the only task, its data and what the checks find."""
    data = open_run(config)
    [task] = config.tasks.values()
    return task, data, check_task(task, data[""])


def test_problems_of_training_and_validation_data_come_together(tmp_path):
    config = config_from_dict(tiny_input([tmp_path / "nowhere"], [tmp_path / "gone"]))
    with pytest.raises(DataError) as error:
        open_run(config)
    assert "training.training_data.systems[0]" in str(error.value)
    assert "nowhere" in str(error.value)
    assert "training.validation_data.systems[0]" in str(error.value)
    assert "gone" in str(error.value)


def test_without_validation_data_there_are_no_validation_systems(water_like):
    train, valid = open_run(config_from_dict(tiny_input([water_like])))[""]
    assert [system.num_frames for system in train] == [16]
    assert valid == []


def test_the_length_of_a_run_is_told_in_steps_and_epochs(water_like):
    config = config_from_dict(tiny_input([water_like], num_steps=None, training__numb_epoch=3))
    _, data, report = checked(config)
    lines = length_lines(config, data, {"": report})[""]
    assert "24 steps = 3.0 epochs of 8 batches" in lines[0]
    assert "GB" in lines[1]


def test_tasks_are_told_apart_and_each_has_its_share_of_the_length(water_like, open_like):
    one = tiny_input([water_like])
    third = {"type_map": ["O", "H", "Xe"], "descriptor": {**one["model"]["descriptor"], "sel": [24, 24, 4]}}
    values = {
        "model": {"model_dict": {"a": one["model"], "b": {**one["model"], **third}}},
        "learning_rate": one["learning_rate"],
        "training": {
            "data_dict": {
                "a": {"training_data": {"systems": [str(water_like)], "batch_size": 2}},
                "b": {"training_data": {"systems": [str(open_like)], "batch_size": 1}},
            },
            "num_epoch_dict": {"a": 3, "b": 1},
        },
    }
    config = config_from_dict(values)
    data = open_run(config)
    reports = {name: check_task(task, data[name]) for name, task in config.tasks.items()}
    assert not reports["a"].warnings
    text = "task b: type_map has Xe, but no training frame does: their networks stay untrained, but for"
    assert reports["b"].warnings[0].startswith(text)
    lengths = length_lines(config, data, reports)
    steps = 3 * 8 + data["b"].train[0].num_frames
    share = 100 * 24 / steps
    assert lengths["a"][0] == f"Length: {share:.3g} % of {steps} steps = 3.0 epochs of 8 batches"
    assert f"{100 - share:.3g} % of {steps} steps = 1.0 epochs" in lengths["b"][0]


def test_a_bound_for_the_nearest_pair_is_that_of_the_input(water_like):
    config = config_from_dict(tiny_input([water_like], training__training_data__min_pair_dist=2.0))
    assert checked(config)[2].problems


def test_options_that_do_not_fit_the_systems_are_problems_by_their_path(water_like):
    options = {"training__training_data__batch_size": [1, 2], "training__validation_data__sys_probs": [0.5, 0.5]}
    config = config_from_dict(tiny_input([water_like], [water_like], **options))
    _, data, report = checked(config)
    assert [problem.split(":")[0] for problem in report.problems] == [
        "training.training_data.batch_size",
        "training.validation_data.sys_probs",
    ]
    assert length_lines(config, data, {"": report}) == {"": []}
