"""Converts older and abbreviated inputs to the current schema.

Keys of older versions of DeePMD-kit are moved to their place, what has no effect is left out, and the short form of an
average becomes an entry of ``training.averaging``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepmd_ema.config.compositions import spell_out_bridging
from deepmd_ema.config.fields import Option, input_options, is_comment, options
from deepmd_ema.config.messages import Place, Problem, dotted, show
from deepmd_ema.config.schema.averaging import EmaShorthand, EmaValidationShorthand, ScheduleFreeAverageConfig
from deepmd_ema.config.schema.model import Link
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig
from deepmd_ema.config.schema.run import MultiTaskRun, RunConfig, SingleTaskRun
from deepmd_ema.config.tasks import expand_tasks, has_tasks
from deepmd_ema.config.unsupported import is_no_op, unavailable_key

# keys of `training` that later became keys of another section, some by another name
_TO_LEARNING_RATE = ("warmup_steps", "warmup_ratio", "warmup_start_factor")
_TO_OPTIMIZER = (
    "opt_type", "adam_beta1", "adam_beta2", "weight_decay", "kf_blocksize", "kf_start_pref_e", "kf_limit_pref_e",
    "kf_start_pref_f", "kf_limit_pref_f", "momentum", "muon_momentum", "lr_adjust", "lr_adjust_coeff",
)  # fmt: skip
_RENAMED = {"opt_type": "type", "muon_momentum": "momentum"}
# switches that DeePMD-kit's backend pt has in each model, and one in `training` for the whole run here
_OF_MODELS = {"use_compile": "enable_compile", "enable_tf32": "enable_tf32"}
# keys of `training` in version 1 that now stand in `training.training_data`
_TO_TRAINING_DATA = ("systems", "batch_size", "auto_prob", "auto_prob_style", "sys_probs", "sys_weights")


@dataclass
class Upgraded:
    """An input in the sections of the current schema.

    Attributes:
        values: a copy of the input under canonical keys, without comments and without options that have no effect.
        section: class of the whole input: of one task or of several.
        lines: lines of the keys, moved ones included.
        given: canonical paths of the options that the input names.
        source_paths: canonical path -> the path as the input spells it.
        notes: what was changed, one sentence each.
        unused: options that were left out because they do nothing here, with the reason.
        problems: what could not be changed.
        moved: current place of a key -> its path in the input.
        links: parts of models from ``model.shared_dict``.
    """

    values: Any
    lines: dict[Place, int]
    section: type[RunConfig] = SingleTaskRun
    given: set[Place] = field(default_factory=set)
    source_paths: dict[Place, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    moved: dict[Place, Place] = field(default_factory=dict)
    links: tuple[Link, ...] = ()


def upgrade(values: Any, lines: Mapping[Place, int]) -> Upgraded:
    """Return the input in today's sections; the one that was given is left alone."""
    upgraded = Upgraded(_copied(dict(values)) if isinstance(values, Mapping) else values, dict(lines))
    training = upgraded.values.get("training") if isinstance(upgraded.values, dict) else None
    if isinstance(training, dict):
        _move_old_keys(upgraded, training)
    spell_out_bridging(upgraded)
    if isinstance(upgraded.values, dict):
        _move_switches(upgraded, training if isinstance(training, dict) else None)
    if has_tasks(upgraded.values):
        upgraded.section, upgraded.links = MultiTaskRun, expand_tasks(upgraded)
    upgraded.values = _own_options(upgraded, upgraded.section, upgraded.values, (), ())
    return upgraded


def _copied(values: Any) -> Any:
    """Return a copy whose sections are changed one by one, also those that are one object, of an anchor in YAML."""
    if isinstance(values, dict):
        return {key: _copied(value) for key, value in values.items()}
    return [_copied(value) for value in values] if isinstance(values, list) else copy.deepcopy(values)


def _move_old_keys(upgraded: Upgraded, training: dict[str, Any]) -> None:
    moves: list[tuple[Place, str]] = [(("learning_rate",), key) for key in _TO_LEARNING_RATE]
    moves += [(("optimizer",), key) for key in _TO_OPTIMIZER]
    if "training_data" not in training and "data_dict" not in training:
        moves += [(("training", "training_data"), key) for key in _TO_TRAINING_DATA]
    for section, key in moves:
        if key in training:
            _move(upgraded, training, key, (*section, _RENAMED.get(key, key)))
    _drop(upgraded, ("training", "numb_test"), "validation is set by validation_data.numb_btch now")
    tasks = training.get("data_dict")
    of_tasks = [("training", "data_dict", str(name)) for name in tasks] if isinstance(tasks, dict) else []
    for folder in (("training",), *of_tasks):
        for section in ((), ("training_data",), ("validation_data",)):
            _drop(upgraded, (*folder, *section, "set_prefix"), "sets are always found as set.*")


def _own_options(upgraded: Upgraded, section: type, raw: Any, path: Place, spelled: Place) -> Any:
    """Return a section under canonical keys, without comments and options of DeePMD-kit that ask for nothing.

    Args:
        upgraded: takes notes of what the input names, and where.
        section: its class.
        raw: what the input has for it, right or wrong.
        path: of the section.
        spelled: the same, as the input spells it.
    """
    if not isinstance(raw, dict):
        return raw
    by_key = {key: option for option in input_options(section) for key in option.keys}
    kept: dict[Any, Any] = {}
    for key, value in raw.items():
        option = by_key.get(key)
        if option is None:
            peer = unavailable_key(path, key)
            if peer is not None and is_no_op(peer, value):
                if peer.no_op_values is None and value:
                    upgraded.notes.append(f"{dotted((*path, key))} has no effect and was left out: it only informs.")
            elif not is_comment(key):
                kept[key] = value
            continue
        here = (*path, option.name)
        there = upgraded.moved.get((*path, key), (*spelled, key))
        if here in upgraded.given:
            first = upgraded.source_paths[here][-1]
            upgraded.problems.append(Problem(there, f": the same option as {first}. Remove one of the two."))
            continue
        upgraded.given.add(here)
        upgraded.source_paths[here] = there
        kept[option.name] = _inner(upgraded, option, value, here, there) if option.sections else value
    return kept


def _inner(upgraded: Upgraded, option: Option, value: Any, path: Place, spelled: Place) -> Any:
    """Return the section, or the sections, of an option as :func:`_own_options` does."""

    def entry(value: Any, name: str | int) -> Any:
        return section(value, (*path, name), upgraded.moved.get((*path, name), (*spelled, name)))

    def section(value: Any, path: Place, spelled: Place) -> Any:
        return _own_options(upgraded, option.section_of(value) or option.sections[0], value, path, spelled)

    if option.many and isinstance(value, list):
        return [entry(v, n) for n, v in enumerate(value)]
    if option.named and isinstance(value, dict):
        return {name: entry(v, name) for name, v in value.items() if not is_comment(name)}
    return value if option.many or option.named else section(value, path, spelled)


# ---- the short form of an average

EMA = "ema"  # name of the average of the short form
_SWITCH: Place = ("training", "enable_ema")
_SHORT_FORM: dict[Place, str] = {  # option of the short form -> option of the entry
    ("training", "ema_decay"): "decay",
    ("training", "ema_warmup"): "warmup",
    ("training", "ema_ckpt_keep"): "ckpt_keep",
    ("validating", "ema_full_validation"): "full_validation",
}
_BANK: Place = ("training", "averaging")


def expand_short_form(upgraded: Upgraded, values: dict[str, Any]) -> None:
    """Put the average of ``enable_ema`` into the list ``training.averaging``, first.

    Args:
        upgraded: takes the paths of its options, what has no effect, and what is wrong.
        values: of a whole input under canonical keys, some perhaps ``INVALID``; changed.
    """
    defaults = {o.name: o.default for s in (EmaShorthand, EmaValidationShorthand) for o in options(s)}
    on, entry = _take(values, _SWITCH, False), {"type": "ema", "name": EMA}
    for path, name in _SHORT_FORM.items():
        entry[name] = _take(values, path, defaults[str(path[-1])])
        if on is False and name != "full_validation" and path in upgraded.given:
            upgraded.unused.append(f"{dotted(path)} = {show(entry[name])}: no effect, {dotted(_SWITCH)} is false")
    entries = values["training"].get("averaging", []) if isinstance(values.get("training"), dict) else None
    if not isinstance(entries, list):
        return
    same = [n for n, e in enumerate(entries) if isinstance(e, dict) and str(e.get("name")).lower() == EMA]
    validated = entry["full_validation"] is True
    if validated and on is False:
        instead = ', and "full_validation": true in an entry of training.averaging' * bool(entries)
        text = f' = true: needs "enable_ema": true in training. Add it, or set this to false{instead}.'
        upgraded.problems.append(Problem(("validating", "ema_full_validation"), text))
    if same and on is True:
        name = entries[same[0]]["name"]
        case = "" if name == EMA else " but for upper and lower case, and so have its files"
        text = f" = {show(name)}: training.enable_ema already tracks one of that name{case}. "
        text += "Choose another name, or remove enable_ema."
        upgraded.problems.append(Problem((*_BANK, same[0], "name"), text))
    # where only its validation is requested the input is refused; with the entry, the rules find its other mistakes
    if not same and (on is True or validated):
        values["training"]["averaging"] = [entry, *entries]
        _move_paths_of_entries(upgraded, len(entries))


def add_averaged_point(values: dict[str, Any]) -> None:
    """Put the averaged point of the optimizer AdamWScheduleFree last into ``training.averaging``, if it is not there.

    It is validated where the live weights are.

    Args:
        values: of a whole input under canonical keys, some perhaps ``INVALID``; changed.
    """
    optimizer, training, validating = (values.get(name, {}) for name in ("optimizer", "training", "validating"))
    if not isinstance(training, dict) or not isinstance(optimizer, dict):
        return
    entries, kind = training.get("averaging", []), ScheduleFreeAverageConfig.type
    is_missing = isinstance(entries, list) and all(isinstance(e, dict) and e.get("type") != kind for e in entries)
    if optimizer.get("type") == AdamWScheduleFreeConfig.type and is_missing:
        validated = isinstance(validating, dict) and validating.get("full_validation") is True
        training["averaging"] = [*entries, {"type": kind, "name": kind, "full_validation": validated}]


def _take(values: dict[str, Any], path: Place, default: Any) -> Any:
    section = values.get(str(path[0]))
    return section.pop(path[1], default) if isinstance(section, dict) else default


def _move_paths_of_entries(upgraded: Upgraded, number: int) -> None:
    """Let paths of entries, which now stand one place later, lead to those that the input has."""

    def moved(path: Place) -> Place:
        is_inside = path[: len(_BANK)] == _BANK and len(path) > len(_BANK)
        return (*_BANK, int(path[len(_BANK)]) + 1, *path[len(_BANK) + 1 :]) if is_inside else path

    short = {(*_BANK, 0, name): path for path, name in _SHORT_FORM.items()}
    entries = {(*_BANK, n + 1): (*_BANK, n) for n in range(number)}
    inside = {moved(path): there for path, there in upgraded.source_paths.items()}
    upgraded.source_paths = {(*_BANK, 0): _SWITCH, **short, **entries, **inside}
    of_short_form = {path for path, there in short.items() if there in upgraded.given}
    upgraded.given = of_short_form | {moved(path) for path in upgraded.given}


# ---- keys of older versions


def _move(upgraded: Upgraded, training: dict[str, Any], key: str, new: Place) -> None:
    target = upgraded.values
    for part in new[:-1]:  # sections that are missing are made
        target = target.setdefault(part, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        return
    old, value = ("training", key), training.pop(key)
    if key == "opt_type" and isinstance(value, str):
        value = {"adam": "Adam", "adamw": "AdamW"}.get(value.lower(), value)
    if new[-1] in target:
        text = f": the old place of {dotted(new)}, which is given too. Remove {dotted(old)}."
        upgraded.problems.append(Problem(old, text))
        return
    target[str(new[-1])] = value
    upgraded.lines |= {(*new, *path[2:]): line for path, line in upgraded.lines.items() if path[:2] == old}
    upgraded.notes.append(f"{dotted(old)} was moved to {dotted(new)}, its place today.")


def _move_switches(upgraded: Upgraded, training: dict[str, Any] | None) -> None:
    """Move switches of models that hold for the whole run here to ``training``; a model without a run has none."""
    model = upgraded.values.get("model")
    tasks = model.get("model_dict") if isinstance(model, dict) else None
    owners: dict[Place, Any] = {("model",): model}
    owners |= {("model", "model_dict", task): own for task, own in tasks.items()} if isinstance(tasks, dict) else {}
    for key, name in _OF_MODELS.items():
        new: Place = ("training", name)
        first = new
        for place in (place for place, own in owners.items() if isinstance(own, dict) and key in own):
            value, old = owners[place].pop(key), upgraded.moved.pop((*place, key), (*place, key))
            if value is None or training is None:
                continue
            if name not in training:
                training[name], first = value, old
                upgraded.moved[new] = old
                upgraded.notes.append(f"{dotted(old)} was moved to {dotted(new)}: it holds for the whole run.")
            elif training[name] != value:
                text = f" = {show(value)}: {dotted(first)} = {show(training[name])}, and a run has one of them."
                upgraded.problems.append(Problem(old, f"{text} Give both the same value, or remove one."))


def _drop(upgraded: Upgraded, path: Place, why: str) -> None:
    section: Any = upgraded.values
    for key in path[:-1]:
        section = section.get(key) if isinstance(section, dict) else None
    if isinstance(section, dict) and path[-1] in section:
        del section[path[-1]]
        upgraded.notes.append(f"{dotted(path)} has no effect and was left out: {why}.")
