"""The input of fine-tuning: the model of a file in that for new data, and old data as a second task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeAlias

from deepmd_ema.config.fields import plain
from deepmd_ema.infer.load import LoadedModel

_NEW, _OLD = "new", "old"
_REPLAYED = 0.3  # of the steps
_ONLY = "Default"  # head of the model of a file that holds one
_SLOWER = 0.1  # of the rate of a model that starts from its seed
_OF_START = ("finetune_head", "finetune_bias")
_NAMED = {"type_map": "elements", "descriptor": "descriptor", "fitting_net": "fitting"}  # parts that tasks share
_OF_TASK = ("training_data", "validation_data", "validation_fraction")

Explained: TypeAlias = tuple[dict[str, Any], dict[str, str]]
"""Values of an input, and reasons by dotted path."""


def fine_tuned(values: Mapping[str, Any], why: Mapping[str, str], source: LoadedModel, head: str | None) -> Explained:
    """Return an input with the model of a file in place of its own, and a lower learning rate.

    Args:
        values: input for the new data.
        why: its reasons.
        source: model of the file.
        head: its name in the file, if that holds several.
    """
    config, rate = source.config, values["learning_rate"]
    parts = {"type_map": values["model"]["type_map"], "descriptor": _given(config.descriptor)}
    parts |= {"fitting_net": _given(config.fitting_net)}
    others = {n: v for n, v in _given(config).items() if n not in (*parts, *_OF_START, "type")}
    model = {**parts, **others, "finetune_head": head or _ONLY, "finetune_bias": "keep"}
    slower = {name: float(f"{rate[name] * _SLOWER:.6g}") for name in ("start_lr", "stop_lr")}
    reasons = {name: text for name, text in why.items() if not name.startswith("model.")} | {
        "model.type_map": "elements of the file, then new ones",
        "model.descriptor": f"that of {source.info.path}",
        "model.finetune_bias": 'energies of the elements as in the file, for labels of the same method; else "fit"',
        "learning_rate.start_lr": "a tenth of that of a new model",
    }
    return {**values, "model": model, "learning_rate": {**rate, **slower}}, reasons


def with_replay(
    values: Mapping[str, Any], why: Mapping[str, str], systems: Sequence[str], fraction: float | None
) -> Explained:
    """Return an input of fine-tuning with the tasks ``new`` and ``old``, which have one model.

    Args:
        values: input of fine-tuning for the new data.
        why: its reasons.
        systems: old data.
        fraction: share of these that is split off for validation; None: none.
    """
    model, training = dict(values["model"]), dict(values["training"])
    shared = {key: model.pop(name) for name, key in _NAMED.items()}
    task = _NAMED | {name: model.pop(name) for name in _OF_START}
    new = {name: training.pop(name) for name in _OF_TASK if name in training}
    old: dict[str, Any] = {"training_data": {**new["training_data"], "systems": list(systems)}}
    old |= {} if fraction is None else {"validation_fraction": fraction}
    rest = {name: value for name, value in values.items() if name not in ("model", "loss", "training")}
    moved = {f"model.{name}": f"model.shared_dict.{key}" for name, key in _NAMED.items()}
    moved |= {f"model.{name}": f"model.model_dict.{_NEW}.{name}" for name in _OF_START}
    moved |= {"loss": f"loss_dict.{_NEW}"}
    moved |= {f"training.{name}": f"training.data_dict.{_NEW}.{name}" for name in _OF_TASK}
    reasons = {_moved(name, moved): text for name, text in why.items()} | {
        "model.model_dict": "one model in two tasks, which differ in their data",
        f"training.data_dict.{_OLD}": "data that the model was trained on, or frames labelled by it",
        "training.model_prob": "share of the steps; more of old: it forgets less, and learns less",
    }
    result = {
        "model": {"shared_dict": shared, "model_dict": {_NEW: task, _OLD: dict(task)}, **model},
        **{name: rest[name] for name in ("optimizer", "learning_rate")},
        "loss_dict": {_NEW: values["loss"], _OLD: dict(values["loss"])},
        "training": {
            "data_dict": {_NEW: new, _OLD: old},
            "model_prob": {_NEW: 1 - _REPLAYED, _OLD: _REPLAYED},
            **training,
        },
    }
    return {**result, **{name: value for name, value in rest.items() if name not in result}}, reasons


def _given(section: Any) -> dict[str, Any]:
    """Return the options of a section that have no default or another value."""
    found = plain(section)
    defaults = {
        f.name: plain(f.default_factory() if f.default_factory is not MISSING else f.default) for f in fields(section)
    }
    return {name: value for name, value in found.items() if name not in defaults or value != defaults[name]}


def _moved(name: str, places: Mapping[str, str]) -> str:
    """Return the place of an option after sections were moved."""
    for before, after in places.items():
        if name == before or name.startswith(f"{before}."):
            return after + name.removeprefix(before)
    return name
