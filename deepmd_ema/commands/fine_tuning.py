"""Parts of an input that fine-tunes a model: section ``model``, tasks for old and new data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.config.new_elements import continue_lists

ALL, FITTING = "all", "fitting"
TRAINED = {ALL: "all weights", FITTING: "its fitting network alone"}
FRACTION = 0.1  # of the frames, for validation
_REPLAYED = 0.3  # share of the steps that old data have
# sections that tasks share, and their keys in ``shared_dict``
_NAMED = {"type_map": "elements", "descriptor": "descriptor", "fitting_net": "fitting"}
# options of ``model`` and of ``training`` that each task has
_START_OPTIONS = ("finetune_head", "finetune_bias")
_DATA_OPTIONS = ("training_data", "validation_data", "validation_fraction")


def model_section(
    config: ModelConfig, type_map: Sequence[str], head: str | None, trained: str
) -> dict[str, Any]:
    """Return the section ``model`` that fine-tunes the model of a file.

    Args:
        config: of this model.
        type_map: its elements, then new ones.
        head: which model of the file it is, if the file holds several.
        trained: the part that is trained, a key of ``TRAINED``.
    """
    descriptor = _changed(config.descriptor)
    fitting = _changed(config.fitting_net)
    parts = {"type_map": type_map, "descriptor": descriptor, "fitting_net": fitting}
    # what was trained in the run of the file does not decide what is trained now
    fitting.pop("trainable", None)
    for part in descriptor.get("list", [descriptor]):
        part.pop("trainable", None)
        part |= {"trainable": False} if trained != ALL else {}
    excluded = (*parts, *_START_OPTIONS, "type")
    rest = {
        name: value for name, value in _changed(config).items() if name not in excluded
    }
    continue_lists(config, len(type_map), descriptor, fitting, rest)
    return {**parts, **rest, "finetune_head": head or "Default"}


def with_replay(
    values: Mapping[str, Any], systems: Sequence[str], is_split: bool
) -> dict[str, Any]:
    """Return an input of fine-tuning with the tasks ``new`` and ``old``, which have one model.

    Args:
        values: the input of one task.
        systems: the old data.
        is_split: whether validation frames are split off from them.
    """
    model = dict(values["model"])
    training = dict(values["training"])
    shared = {key: model.pop(name) for name, key in _NAMED.items()}
    task = _NAMED | {name: model.pop(name) for name in _START_OPTIONS if name in model}
    # old data are those of the file: its output bias fits them
    old_task = {**task, "finetune_bias": "keep"} if "finetune_bias" in task else task
    new = {name: training.pop(name) for name in _DATA_OPTIONS if name in training}
    old_data: dict[str, Any] = {
        "training_data": {**new["training_data"], "systems": list(systems)}
    }
    old_data |= {"validation_fraction": FRACTION} if is_split else {}
    result = {
        "model": {
            "shared_dict": shared,
            "model_dict": {"new": task, "old": dict(old_task)},
            **model,
        },
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
        f.name: plain(
            f.default_factory() if f.default_factory is not MISSING else f.default
        )
        for f in fields(section)
    }
    return {
        name: value
        for name, value in plain(section).items()
        if name not in defaults or value != defaults[name]
    }
