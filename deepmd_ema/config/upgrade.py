"""Inputs of older DeePMD-kit versions: moved keys are put in their place, dead ones are dropped with a note."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepmd_ema.config.messages import Path, Problem, dotted

# keys of `training` that later became keys of another section (new name where it changed)
_TO_LEARNING_RATE = ("warmup_steps", "warmup_ratio", "warmup_start_factor")
_TO_OPTIMIZER = {
    "opt_type": "type",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "weight_decay": "weight_decay",
    "kf_blocksize": "kf_blocksize",
    "kf_start_pref_e": "kf_start_pref_e",
    "kf_limit_pref_e": "kf_limit_pref_e",
    "kf_start_pref_f": "kf_start_pref_f",
    "kf_limit_pref_f": "kf_limit_pref_f",
    "momentum": "momentum",
    "muon_momentum": "momentum",
    "lr_adjust": "lr_adjust",
    "lr_adjust_coeff": "lr_adjust_coeff",
}
# keys of `training` in version 1 that now stand in `training.training_data`
_TO_TRAINING_DATA = ("systems", "batch_size", "auto_prob", "auto_prob_style", "sys_probs", "sys_weights")


@dataclass
class Modern:
    """An input in today's sections.

    Attributes:
        values: a copy of the input, changed.
        lines: lines of the keys, moved ones included.
        notes: what was changed, one sentence each.
        problems: what could not be.
    """

    values: Any
    lines: dict[Path, int]
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def modernize(values: Any, lines: Mapping[Path, int]) -> Modern:
    """Return the input in today's sections; the one that was given is left alone."""
    modern = Modern(copy.deepcopy(dict(values)) if isinstance(values, Mapping) else values, dict(lines))
    training = modern.values.get("training") if isinstance(modern.values, dict) else None
    if not isinstance(training, dict):
        return modern
    for key in _TO_LEARNING_RATE:
        _move(modern, ("training", key), ("learning_rate", key))
    for key, name in _TO_OPTIMIZER.items():
        _move(modern, ("training", key), ("optimizer", name))
    if "training_data" not in training and "data_dict" not in training:
        for key in _TO_TRAINING_DATA:
            _move(modern, ("training", key), ("training", "training_data", key))
    _drop(modern, ("training", "numb_test"), "validation is set by validation_data.numb_btch now")
    for folder in (("training",), ("training", "training_data"), ("training", "validation_data")):
        _drop(modern, (*folder, "set_prefix"), "sets are always found as set.*")
    return modern


def _move(modern: Modern, old: Path, new: Path) -> None:
    source = _section(modern.values, old[:-1])
    if source is None or old[-1] not in source:
        return
    target = _section(modern.values, new[:-1], make=True)
    if target is None:
        return
    value = source.pop(old[-1])
    if old[-1] == "opt_type" and isinstance(value, str):
        value = {"adam": "Adam", "adamw": "AdamW"}.get(value.lower(), value)
    name = str(new[-1])
    if name in target:
        modern.problems.append(
            Problem(old, f": the old place of {dotted(new)}, which is given too. Remove {dotted(old)}.")
        )
        return
    target[name] = value
    for path, line in list(modern.lines.items()):
        if path[: len(old)] == old:
            modern.lines[(*new, *path[len(old) :])] = line
    modern.notes.append(f"{dotted(old)} was moved to {dotted(new)}, its place today.")


def _drop(modern: Modern, path: Path, why: str) -> None:
    section = _section(modern.values, path[:-1])
    if section is not None and path[-1] in section:
        del section[path[-1]]
        modern.notes.append(f"{dotted(path)} has no effect and was left out: {why}.")


def _section(values: Any, path: Path, *, make: bool = False) -> dict[str, Any] | None:
    """Return the dictionary at ``path``, made when asked for, or None where something else stands."""
    for key in path:
        if make and isinstance(values, dict) and key not in values:
            values[key] = {}
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None
