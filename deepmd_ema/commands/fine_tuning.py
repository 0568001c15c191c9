"""Parts of an input that fine-tunes a model: its section ``model``, and tasks for old and new
data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain

ALL, FITTING = "all", "fitting"
TRAINED = {ALL: "all weights", FITTING: "its fitting network alone"}
FRACTION = 0.1  # of the frames, for validation
_REPLAYED = 0.3  # share of the steps that old data have
_NAMED = {
    "type_map": "elements",
    "descriptor": "descriptor",
    "fitting_net": "fitting",
}  # parts that tasks share
_OF_START = ("finetune_head", "finetune_bias")
_OF_TASK = ("training_data", "validation_data", "validation_fraction")


def model_section(
    config: ModelConfig, type_map: Sequence[str], head: str | None, trained: str
) -> dict[str, Any]:
    """Return the section ``model`` that fine-tunes the model of a file.

    Args:
        config: of this model.
        type_map: its elements, then new ones.
        head: which model of the file it is, if the file holds several.
        trained: what is trained, a name of ``TRAINED``.
    """
    descriptor, fitting = _changed(config.descriptor), _changed(config.fitting_net)
    parts = {"type_map": type_map, "descriptor": descriptor, "fitting_net": fitting}
    fitting.pop("trainable", None)
    for part in descriptor.get("list", [descriptor]):
        part.pop("trainable", None)
        part |= {"trainable": False} if trained != ALL else {}
    others = {n: v for n, v in _changed(config).items() if n not in (*parts, *_OF_START, "type")}
    return {**parts, **others, "finetune_head": head or "Default"}


def with_replay(
    values: Mapping[str, Any], systems: Sequence[str], is_split: bool
) -> dict[str, Any]:
    """Return an input of fine-tuning with the tasks ``new`` and ``old``, which have one model.

    Args:
        values: the input of one task.
        systems: the old data.
        is_split: whether validation frames are split off from them.
    """
    model, training = dict(values["model"]), dict(values["training"])
    shared = {key: model.pop(name) for name, key in _NAMED.items()}
    task = _NAMED | {name: model.pop(name) for name in _OF_START if name in model}
    kept = {**task, "finetune_bias": "keep"} if "finetune_bias" in task else task
    new = {name: training.pop(name) for name in _OF_TASK if name in training}
    old_data: dict[str, Any] = {"training_data": {**new["training_data"], "systems": list(systems)}}
    old_data |= {"validation_fraction": FRACTION} if is_split else {}
    result = {
        "model": {"shared_dict": shared, "model_dict": {"new": task, "old": dict(kept)}, **model},
        **{name: values[name] for name in ("optimizer", "learning_rate")},
        "loss_dict": {"new": values["loss"], "old": dict(values["loss"])},
        "training": {
            "data_dict": {"new": new, "old": old_data},
            "model_prob": {"new": 1 - _REPLAYED, "old": _REPLAYED},
            **training,
        },
    }
    validating = dict(values.get("validating", {}))
    if "test_data" in validating:
        validating["test_data_dict"] = {"new": validating.pop("test_data")}
    return {**result, "validating": validating} if validating else result


def _changed(section: Any) -> dict[str, Any]:
    """Return the options of a section that have no default or another value."""
    defaults = {
        f.name: plain(f.default_factory() if f.default_factory is not MISSING else f.default)
        for f in fields(section)
    }
    return {
        name: value
        for name, value in plain(section).items()
        if name not in defaults or value != defaults[name]
    }
