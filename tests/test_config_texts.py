"""Text options of several parts are read once, keep their text, and are written as it."""

from __future__ import annotations

import copy
import json
import pickle
from fractions import Fraction

import pytest
from config_inputs import spoiled

from deepmd_ema.config import config_from_dict, to_dict
from deepmd_ema.config.schema.text_options import ActivationName, BatchSizeRule, Metric, SystemProbability
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("auto", "auto", 32),
        ("auto:7", "auto", 7),
        ("max:64", "max", 64),
        ("filter:3", "filter", 3),
        ("mixed:9", "mixed", 9),
    ],
)
def test_a_batch_rule_has_its_kind_and_number(text, kind, number):
    rule = config_from_dict(spoiled({"training.training_data.batch_size": text})).training.training_data.batch_size
    assert isinstance(rule, BatchSizeRule)
    assert (rule, rule.kind, rule.number) == (text, kind, number)


def test_a_probability_has_its_blocks():
    text = "prob_sys_size; 0:2:0.75 ;2:5:2.5e-1"
    rule = config_from_dict(spoiled({"training.training_data.auto_prob": text})).training.training_data.auto_prob
    assert isinstance(rule, SystemProbability)
    assert rule.kind == "prob_sys_size"
    assert rule.blocks == ((0, 2, Fraction(3, 4)), (2, 5, Fraction(1, 4)))
    assert SystemProbability("prob_uniform").blocks == ()
    assert Sampler([4] * 5, [3] * 5, 1, rule).probabilities == Sampler([4] * 5, [3] * 5, 1, text).probabilities


def test_a_metric_has_its_quantity_and_error():
    metric = config_from_dict(spoiled({"validating.validation_metric": "f:rmse"})).validating.validation_metric
    assert (metric, metric.quantity, metric.error) == ("F:RMSE", "F", "RMSE")


@pytest.mark.parametrize(
    ("text", "kind", "bend"), [("silut", "silut", 3.0), ("silut:5.5", "silut", 5.5), ("None", "none", 3.0)]
)
def test_an_activation_function_has_its_name_and_number(text, kind, bend):
    for section in ("descriptor", "fitting_net"):
        model = config_from_dict(spoiled({f"model.{section}.activation_function": text})).model
        found = getattr(model, section).activation_function
        assert (found, found.kind, found.bend) == (text, kind, bend)


def test_texts_with_parts_are_plain_texts_in_files():
    """A checkpoint holds the config and is loaded without classes of ours."""
    texts = {"training.training_data.batch_size": "max:64", "training.training_data.auto_prob": "prob_uniform"}
    written = to_dict(config_from_dict(spoiled(texts | {"validating.validation_metric": "E:MAE"})))
    data = written["training"]["training_data"]
    for value in (data["batch_size"], data["auto_prob"], written["validating"]["validation_metric"]):
        assert type(value) is str
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize(
    "made",
    [BatchSizeRule("max:3"), SystemProbability("prob_sys_size;0:1:1"), Metric("E:MAE"), ActivationName("silut:2")],
)
def test_texts_with_parts_survive_copies_and_the_way_to_other_ranks(made):
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), type(made)(made)):
        assert other == made
        assert vars(other) == vars(made)


@pytest.mark.parametrize(
    ("kind", "text", "phrase"),
    [
        (BatchSizeRule, "auto:0", 'batch_size = "auto:0": expected a whole number > 0, a list of them, or "auto"'),
        (BatchSizeRule, "auto:²", 'batch_size = "auto:²": expected'),
        (BatchSizeRule, "mixed", '"mixed": expected .*"mixed:N" or "mix:N"'),
        (BatchSizeRule, "mix:0", '"mix:0": expected'),
        (SystemProbability, "prob_uniform;0:1:1", '"prob_uniform;0:1:1": expected "prob_uniform", "prob_sys_size"'),
        (SystemProbability, "prob_sys_size;0:1", "expected .*begin:end:weight"),
        (SystemProbability, "prob_sys_size;2:1:1", "expected .*begin:end:weight"),
        (SystemProbability, "prob_sys_size;0:1:0", "expected .*begin:end:weight"),
        (Metric, "E:ME", 'metric = "E:ME": expected E, F, V or S'),
        (ActivationName, "tanj", 'activation_function = "tanj": expected one of tanh, relu'),
    ],
)
def test_a_text_that_cannot_be_read_is_reported(kind, text, phrase):
    with pytest.raises(ConfigError, match=phrase):
        kind(text)
