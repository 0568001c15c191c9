"""The manual and the JSON Schema follow from the declarations."""

import json
import re
from pathlib import Path

import pytest
import yaml
from config_inputs import spoiled

from deepmd_ema.config.fields import input_options, options
from deepmd_ema.config.manual import json_schema, manual
from deepmd_ema.config.schema.run import MultiTaskRun, SingleTaskRun
from deepmd_ema.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def sections(kind):
    yield kind
    for o in options(kind):
        for s in o.sections:
            yield from sections(s)


def fits(value, schema):
    """Whether a value fits a JSON Schema of the keywords that ours has (draft 2020-12)."""
    known = {
        "type",
        "enum",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "items",
        "anyOf",
        "oneOf",
        "allOf",
        "description",
        "default",
        "title",
        "$schema",
        "$id",
        "if",
        "then",
        "const",
    }
    assert set(schema) <= known, schema
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_of(value, kind) for kind in kinds):
        return False
    if "if" in schema and fits(value, schema["if"]) and not fits(value, schema["then"]):
        return False
    return (
        ("const" not in schema or value == schema["const"])
        and ("enum" not in schema or value in schema["enum"])
        and all(fits(value, s) for s in schema.get("allOf", []))
        and ("anyOf" not in schema or any(fits(value, s) for s in schema["anyOf"]))
        and ("oneOf" not in schema or sum(fits(value, s) for s in schema["oneOf"]) == 1)
        and (
            not isinstance(value, list)
            or all(fits(v, schema.get("items", {})) for v in value)
        )
        and (not isinstance(value, dict) or keys_fit(value, schema))
    )


def is_of(value, kind):
    if kind in ("number", "integer"):
        return isinstance(
            value, int if kind == "integer" else (int, float)
        ) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def keys_fit(value, schema):
    if any(key not in value for key in schema.get("required", [])):
        return False
    for key, item in value.items():
        found = (
            [schema["properties"][key]] if key in schema.get("properties", {}) else []
        )
        found += [
            s
            for p, s in schema.get("patternProperties", {}).items()
            if re.search(p, key)
        ]
        other = schema.get("additionalProperties", True)
        if not found and other is False:
            return False
        if not all(
            fits(item, s) for s in (found or [other if isinstance(other, dict) else {}])
        ):
            return False
    return True


def test_every_option_has_a_manual_text():
    names = {line.rpartition(".")[2] for line in manual().splitlines()}
    for section in {*sections(SingleTaskRun), *sections(MultiTaskRun)}:
        assert section.__doc__
        for option in input_options(section):
            assert option.doc.strip().endswith("."), option.name
            assert option.name in names or section is SingleTaskRun, option.name


def test_the_manual_names_aliases_units_and_defaults():
    first, *middle, last = manual("model.descriptor.rcut").splitlines()
    assert (first, last) == ("model.descriptor.rcut", "    Cutoff radius.")
    assert " ".join(line.strip() for line in middle) == (
        "a number > 0 and at most 100; angstrom; default 6.0; "
        "of se_e2_a, se_e2_r, se_atten, se_atten_v2, se_e3, se_e3_tebd, dpa4, dpa4c"
    )
    assert "also spelled stop_batch, num_step" in manual("training.numb_steps")
    assert "learning_rate[exp].decay_steps" in manual("learning_rate.decay_steps")
    assert max(map(len, manual().splitlines())) <= 120


@pytest.mark.parametrize(
    ("topic", "suggested"),
    [
        ("train.ema", "training.enable_ema, training.ema_decay, training.ema_warmup"),
        ("trainin.ema_decay", "training.ema_decay."),
        ("rcut_smooth", "model.descriptor.rcut_smth"),
    ],
)
def test_a_topic_that_is_nearly_right_gets_the_whole_path(topic, suggested):
    with pytest.raises(
        ConfigError, match=re.escape(f"doc {topic}: no such option. Try {suggested}")
    ):
        manual(topic)


def test_an_option_is_found_by_its_name_or_alias_alone():
    assert manual("ema_decay").startswith("training.ema_decay\n")
    words = manual("ema").splitlines()
    assert {
        "training.enable_ema",
        "training.ema_decay",
        "validating.ema_full_validation",
    } <= set(words)
    assert manual("stop_batch").startswith("training.numb_steps\n")


@pytest.mark.parametrize(
    "path",
    sorted(CONFIGS.glob("*.*ml")) + sorted(CONFIGS.glob("*.json")),
    ids=lambda p: p.name,
)
def test_ready_inputs_fit_the_schema(path):
    text = path.read_text()
    values = (
        json.loads(text)
        if path.suffix == ".json"
        else yaml.safe_load(re.sub(r"\b1e-", "1.0e-", text))
    )
    assert fits(values, json_schema())


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"_note": 3, "training._note": {"a": 1}, "$schema": "dp-ema.json"}, True),
        ({"training.validation_data": None}, True),
        ({"model.preset_out_bias": {"energy": [None, 1.0]}}, True),
        ({"learning_rate.type": "cosine", "learning_rate.decay_steps": 5}, False),
        ({"model.descriptor.rcutt": 4}, False),
        ({"training.enable_ema": "true"}, False),
        ({"optimizer": {"type": "Lion"}}, False),
        (
            {
                "training.averaging": [
                    {"name": "a", "decay": 0.9},
                    {"type": "swa", "name": "b", "_why": 1},
                ]
            },
            True,
        ),
        ({"training.averaging": {"name": "a", "decay": 0.9}}, False),
        ({"training.averaging": [{"decay": 0.9}]}, False),
        ({"training.change_bias_after_training": True}, True),
    ],
)
def test_the_schema_judges_as_the_checks_do(changes, good):
    assert fits(spoiled(changes), json_schema()) is good
