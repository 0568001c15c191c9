"""Older and abbreviated inputs in the sections of today.

Keys of older versions of DeePMD-kit are moved to their place, parts of ``model.shared_dict`` are
put where models name them, other forms of a model ``dpa4`` become one, and the short form of an
average an entry of ``training.averaging``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from deepmd_ema.config.fields import options, type_names
from deepmd_ema.config.messages import (
    INVALID,
    Place,
    Reading,
    Values,
    close_names,
    dotted,
    is_comment,
    path_of,
    section_at,
    show,
)
from deepmd_ema.config.schema.averaging import EmaShorthand, ScheduleFreeProfile
from deepmd_ema.config.schema.bridging import method_name
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import FITTINGS, Link, NetworkConfig
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig

_RENAMED = {"opt_type": "type", "muon_momentum": "momentum"}
# keys of `training` of older versions -> their place today; those of version 1, of data, in an
# input of one task
_PLACES_TODAY: dict[str, Place] = {
    **{
        key: ("learning_rate", key)
        for key in ("warmup_steps", "warmup_ratio", "warmup_start_factor")
    },
    **{
        key: ("optimizer", _RENAMED.get(key, key))
        for key in (
            "opt_type",
            "adam_beta1",
            "adam_beta2",
            "weight_decay",
            "kf_blocksize",
            "kf_start_pref_e",
            "kf_limit_pref_e",
            "kf_start_pref_f",
            "kf_limit_pref_f",
            "momentum",
            "muon_momentum",
            "lr_adjust",
            "lr_adjust_coeff",
        )
    },
    **{
        key: ("training", "training_data", key)
        for key in (
            "systems",
            "batch_size",
            "auto_prob",
            "auto_prob_style",
            "sys_probs",
            "sys_weights",
        )
    },
}
# switches that DeePMD-kit's backend pt has in each model, and one in `training` for the whole run
# here
_OF_MODELS = {"use_compile": "enable_compile", "enable_tf32": "enable_tf32"}


def upgrade(name: str, values: Any, lines: Mapping[Place, int]) -> tuple[Reading, tuple[Link, ...]]:
    """Return an input in today's sections, and the parts that its models share; what was given is
    left alone.
    """
    reading = Reading(name, None, dict(lines))
    reading.values = _copied(values, (), reading)
    if not isinstance(values, Mapping):
        return reading, ()
    _move_old_keys(reading)
    _spell_out_bridging(reading)
    _move_switches(reading)
    links: tuple[Link, ...] = ()
    if has_tasks(values):
        reading.has_tasks = True
        links = _expand_tasks(reading)
    _add_averages(reading)
    reading.paths |= reading.moved
    return reading, links


def has_tasks(values: Any) -> bool:
    """Whether an input is one of several tasks."""
    sections = (((), "loss_dict"), (("model",), "model_dict"), (("training",), "data_dict"))
    return any(key in section_at(values, *path) for path, key in sections)


def _copied(values: Any, place: Place, reading: Reading) -> Any:
    """Return a copy without comments; sections of it that are one object, by an anchor in YAML, are
    two.
    """
    if isinstance(values, list):
        return [_copied(value, (*place, number), reading) for number, value in enumerate(values)]
    if not isinstance(values, Mapping):
        return copy.deepcopy(values)
    section = {}
    for key, value in values.items():
        if not isinstance(key, str):
            reading.refuse((*place, str(key)), ": a key must be a text. Put it in quotes.")
        elif not is_comment(key):
            section[key] = _copied(value, (*place, key), reading)
    return section


# ---- keys of older versions


def _move_old_keys(reading: Reading) -> None:
    """Move keys of ``training`` to the sections that they have today, and leave out those without
    effect.
    """
    training = section_at(reading.values, "training")
    has_data = "training_data" in training or "data_dict" in training
    for key, new in _PLACES_TODAY.items():
        if key not in training or (new[0] == "training" and has_data):
            continue
        section = reading.values
        for part in new[:-1]:  # sections that are missing are made
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue
        value, old = training.pop(key), ("training", key)
        if new[-1] in section:
            reading.refuse(
                old, f": the old place of {dotted(new)}, which is given too. Remove {dotted(old)}."
            )
            continue
        if key == "opt_type" and isinstance(value, str):
            value = {"adam": "Adam", "adamw": "AdamW"}.get(value.lower(), value)
        section[new[-1]] = value
        reading.lines |= {
            (*new, *path[2:]): line for path, line in reading.lines.items() if path[:2] == old
        }
        reading.notes.append(f"{dotted(old)} was moved to {dotted(new)}, its place today.")
    folders: list[Place] = [
        (),
        *(("data_dict", task) for task in section_at(training, "data_dict")),
    ]
    dropped: list[tuple[Place, str, str]] = [
        ((), "numb_test", "validation is set by validation_data.numb_btch now")
    ]
    dropped += [
        ((*folder, *inner), "set_prefix", "sets are always found as set.*")
        for folder in folders
        for inner in ((), ("training_data",), ("validation_data",))
    ]
    for place, key, why in dropped:
        if section_at(training, *place).pop(key, dropped) is not dropped:
            reading.notes.append(
                f"{dotted(('training', *place, key))} has no effect and was left out: {why}."
            )


def _move_switches(reading: Reading) -> None:
    """Move switches of models that hold for the whole run here to ``training``; a model without a
    run has none.
    """
    training = reading.values.get("training")
    tasks = section_at(reading.values, "model", "model_dict")
    places: list[Place] = [("model",), *(("model", "model_dict", task) for task in tasks)]
    for key, name in _OF_MODELS.items():
        new: Place = ("training", name)
        first = new
        for place in places:
            section = section_at(reading.values, *place)
            if key not in section:
                continue
            value, old = section.pop(key), reading.moved.pop((*place, key), (*place, key))
            if value is None or not isinstance(training, dict):
                continue
            if name not in training:
                training[name], first = value, old
                reading.moved[new] = old
                reading.notes.append(
                    f"{dotted(old)} was moved to {dotted(new)}: it holds for the whole run."
                )
            elif training[name] != value:
                reading.refuse(
                    old,
                    f" = {show(value)}: {dotted(first)} = {show(training[name])}, and a "
                    "run has one of them. Give both the same value, or remove one.",
                )


# ---- averages

_BANK: Place = ("training", "averaging")
_SHORT_FORM: dict[str, Place] = {  # option of the entry named `ema` -> that of the short form
    "decay": ("training", "ema_decay"),
    "warmup": ("training", "ema_warmup"),
    "ckpt_keep": ("training", "ema_ckpt_keep"),
    "full_validation": ("validating", "ema_full_validation"),
}


def _add_averages(reading: Reading) -> None:
    """Put the average of ``enable_ema`` first into the list ``training.averaging``, and that of an
    optimizer last.
    """
    training, validating = (
        section_at(reading.values, "training"),
        section_at(reading.values, "validating"),
    )
    entries = training.get("averaging", [])
    if not isinstance(entries, list):
        return
    is_on, is_validated = (
        training.get("enable_ema", False),
        validating.get("ema_full_validation") is True,
    )
    is_section = isinstance(reading.values.get("training"), dict)
    if "enable_ema" not in training and (
        not is_section or close_names("enable_ema", [*map(str, training)])
    ):
        is_on = None  # there is no such section, or the key is misspelled
    entry = {"type": "ema", "name": "ema", "decay": EmaShorthand.ema_decay}
    for name, (place, key) in _SHORT_FORM.items():
        section = section_at(reading.values, place)
        if key in section:
            entry[name] = section[key]
            if is_on is False and name != "full_validation":
                reading.unused.append(
                    f"{place}.{key} = {show(entry[name])}: no effect, training.enable_ema is false"
                )
    if is_validated and is_on is False:
        instead = (
            ', and "full_validation": true in an entry of training.averaging' if entries else ""
        )
        reading.refuse(
            _SHORT_FORM["full_validation"],
            ' = true: needs "enable_ema": true in training. Add it, or set this to '
            f"false{instead}.",
        )
    same = [
        n
        for n, e in enumerate(entries)
        if isinstance(e, dict) and str(e.get("name")).lower() == entry["name"]
    ]
    if same and is_on is True:
        name = entries[same[0]]["name"]
        case = (
            "" if name == entry["name"] else " but for upper and lower case, and so have its files"
        )
        reading.refuse(
            (*_BANK, same[0], "name"),
            f" = {show(name)}: training.enable_ema already tracks one of that "
            f"name{case}. Choose another name, or remove enable_ema.",
        )
    # where only its validation is requested the input is refused; with the entry, the rules find
    # its other mistakes
    if not same and (is_on is True or is_validated):
        reading.moved |= {(*_BANK, n + 1): (*_BANK, n) for n in range(len(entries))}
        reading.moved |= {(*_BANK, 0, name): old for name, old in _SHORT_FORM.items()}
        reading.moved |= {(*_BANK, 0): ("training", "enable_ema")}
        training["averaging"] = entries = [entry, *entries]
    point = ScheduleFreeProfile.type
    is_missing = all(isinstance(e, dict) and e.get("type") != point for e in entries)
    is_schedule_free = (
        section_at(reading.values, "optimizer").get("type") == AdamWScheduleFreeConfig.type
    )
    if is_schedule_free and is_missing and is_section:
        is_live_validated = validating.get("full_validation") is True
        training["averaging"] = [
            *entries,
            {"type": point, "name": point, "full_validation": is_live_validated},
        ]


# ---- several tasks

PARTS = ("type_map", "descriptor", "fitting_net")
_SHARED: Place = ("model", "shared_dict")


def _expand_tasks(reading: Reading) -> tuple[Link, ...]:
    """Give each model of ``model_dict`` the parts that it names and the keys that hold for all;
    return the parts.
    """
    model = section_at(reading.values, "model")
    models = model.get("model_dict")
    if not isinstance(models, dict):
        return ()
    shared = model.pop("shared_dict", None) or {}
    if not isinstance(shared, dict):
        shared = reading.refuse(
            _SHARED,
            f' = {show(shared)}: expected parts of models by name, e.g. {{"dpa": {{"type": '
            f'"dpa1", ...}}}}.',
        )
    for_all = {key: model.pop(key) for key in list(model) if key != "model_dict"}
    of_tasks = {t: section for t, section in models.items() if isinstance(section, dict)}
    for key, value in for_all.items():
        if of_tasks and all(key in section for section in of_tasks.values()):
            reading.unused.append(
                f"model.{key} = {show(value)}: no effect, every model of model.model_dict has its "
                "own"
            )
    links: list[Link] = []
    for task, section in of_tasks.items():
        for key in for_all.keys() - section.keys():
            section[key] = copy.deepcopy(for_all[key])
            reading.moved["model", "model_dict", task, key] = ("model", key)
        links += _replace_names(reading, task, section, shared)
    # a misspelled name may have meant a part that no model names
    for key in shared if not reading.mistakes else ():
        if all(key != link.key for link in links):
            reading.refuse(
                (*_SHARED, key),
                ": no model of model.model_dict names it. Name it there instead of the part, or "
                "remove it.",
            )
    return tuple(links)


def _replace_names(reading: Reading, task: str, section: Values, shared: Any) -> Iterator[Link]:
    """Put parts in the places of their names in the model of a task, and yield where."""
    parts = section_at(section, "descriptor").get("list")
    named: list[tuple[Any, Any, str]] = [(section, part, part) for part in PARTS if part in section]
    named += (
        [(parts, n, f"descriptor.list[{n}]") for n in range(len(parts))]
        if isinstance(parts, list)
        else []
    )
    for owner, key, part in named:
        text = owner[key]
        if not isinstance(text, str):
            continue
        place = ("model", "model_dict", task, *path_of(part))
        name, colon, level = text.partition(":")
        levels = ("0", "1") if part.startswith("descriptor") else ("0",)
        owner[key] = INVALID
        if shared is INVALID:  # the missing parts are already reported
            continue
        if name not in shared:
            names = list(shared)
            advice = f"There: {', '.join(names)}." if names else "It is empty or missing."
            if close := close_names(name, names):
                advice = f"Did you mean {' or '.join(close)}?"
            reading.refuse(place, f" = {show(text)}: not in model.shared_dict. {advice}")
        elif colon and level not in levels:
            one = " or 1 (the embedding of elements only)" if "1" in levels else ""
            reading.refuse(
                place,
                f" = {show(text)}: expected {name}, with level 0 (all of it){one} after a colon.",
            )
        else:
            owner[key] = copy.deepcopy(shared[name])
            reading.moved[place] = (*_SHARED, name)
            yield Link(task, part, name, int(level or 0))


# ---- a model dpa4 as a sum of models, [learned model, inner_potential] of type linear_ener, and as
# a standard model

INNER = "inner_potential"
# options of the part -> those of the model
_OF_INNER = {
    "mode": "bridging_method",
    "r_inner": "bridging_r_inner",
    "r_outer": "bridging_r_outer",
}
_OF_TABLE = ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax")
_OF_WHOLE = ("type_map", "atom_exclude_types", "pair_exclude_types")


def _spell_out_bridging(reading: Reading) -> None:
    """Turn sums with an ``inner_potential`` and ``standard`` models of the same parts into models
    of type ``dpa4``.
    """
    model = section_at(reading.values, "model")
    tasks, dpa4 = model.get("model_dict"), type_names(DESCRIPTORS["dpa4"].section)
    places: list[Place] = [("model",)]
    if isinstance(tasks, dict):
        places = [("model", "model_dict", task) for task in tasks]
    for place in places:
        section = section_at(reading.values, *place)
        kind, parts = section.get("type", "standard"), section.get("models")
        parts = (
            [part if isinstance(part, dict) else {} for part in parts]
            if isinstance(parts, list)
            else []
        )
        if kind == "linear_ener" and any(part.get("type") == INNER for part in parts):
            _merge_parts(reading, section, parts, place)
            reading.notes.append(
                f"{dotted(place)} is a sum with {INNER}, which is the model dpa4 with bridging."
            )
        elif (
            kind == "standard"
            and section_at(section, "descriptor").get("type") in dpa4
            and not section.get("use_srtab")
        ):
            is_bridged = (
                isinstance(method := section.get("bridging_method"), str)
                and method_name(method) is not None
            )
            names = type_names(FITTINGS["dpa4_ener"].section)
            if is_bridged or section_at(section, "fitting_net").get("type") in names:
                section["type"] = "dpa4"
                for name in _OF_TABLE:
                    section.pop(name, None)


def _merge_parts(reading: Reading, section: Values, parts: list[Values], place: Place) -> None:
    """Turn a section of type ``linear_ener`` with an ``inner_potential`` into one of type
    ``dpa4``.
    """
    skipped = (
        "type",
        "models",
        "weights",
        *(() if section.get("shared_dict") else ("shared_dict",)),
    )
    weights, whole = (
        section.get("weights"),
        {key: value for key, value in section.items() if key not in skipped},
    )
    section.clear()
    section.update({"type": "dpa4", **whole, "bridging_method": "zbl"})
    inner = [k for k, part in enumerate(parts) if part.get("type") == INNER]
    learned = [k for k, part in enumerate(parts) if isinstance(part.get("descriptor"), dict)]
    if weights != "sum":
        reading.refuse((*place, "weights"), f' = {show(weights)}: expected "sum" beside {INNER}.')
    if len(parts) != 2 or len(inner) != 1 or len(learned) != 1:
        reading.refuse((*place, "models"), f": expected a model with a descriptor and one {INNER}.")
        return
    part, here = parts[learned[0]], (*place, "models", learned[0])
    kind = part["descriptor"].get("type", "dpa4")
    if kind not in type_names(DESCRIPTORS["dpa4"].section):
        reading.refuse(
            (*here, "descriptor", "type"),
            f" = {show(kind)}: {INNER} is for dpa4, as in DeePMD-kit. Use dpa4.",
        )
    defaults = {o.name: o.default for o in options(NetworkConfig)}
    for key, value in part.items():
        default = defaults.get(key)
        if key == "type":
            continue
        if key not in whole or (whole[key] == default != value and key not in _OF_WHOLE):
            section[key] = value
            reading.moved |= {(*place, key): (*here, key)}
        elif value not in (whole[key], None, default, []):
            reading.refuse(
                (*here, key),
                f" = {show(value)}: {dotted((*place, key))} = {show(whole[key])}. Give one of the "
                "two.",
            )
    here = (*place, "models", inner[0])
    for key, value in parts[inner[0]].items():
        if key in _OF_INNER:
            section[_OF_INNER[key]] = value
            reading.moved |= {(*place, _OF_INNER[key]): (*here, key)}
        elif key != "type":
            reading.refuse((*here, key), f": unknown key. Known: type, {', '.join(_OF_INNER)}.")
