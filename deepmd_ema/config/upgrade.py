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
# keys of `training` of older versions -> their place today. Options of data are there in inputs of
# version 1, which have one task.
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
# switches that DeePMD-kit's backend pt has in each model -> their names here in `training`, where
# they hold for the whole run
_OF_MODELS = {"use_compile": "enable_compile", "enable_tf32": "enable_tf32"}


def upgrade(
    name: str, values: Any, lines: Mapping[Place, int]
) -> tuple[Reading, tuple[Link, ...]]:
    """Return an input in today's sections, and the parts that its models share.

    Args:
        name: name of the file, for messages.
        values: its values, which are not changed.
        lines: lines of its keys.
    """
    reading = Reading(name, None, dict(lines))
    reading.values = _copied(values, (), reading)
    if not isinstance(values, Mapping):
        return reading, ()
    # Later steps look for keys where earlier ones have put them: the optimizer of _add_averages may
    # come from `training`, and a sum with an inner potential has its switches in its parts.
    _move_old_keys(reading)
    _spell_out_bridging(reading)
    _move_switches(reading)
    links: tuple[Link, ...] = ()
    if has_tasks(values):
        reading.has_tasks = True
        links = _expand_tasks(reading)
    _add_averages(reading)
    # mistakes are reported at the paths of the file, however often a key was moved
    reading.paths |= reading.moved
    return reading, links


def has_tasks(values: Any) -> bool:
    """Whether an input is one of several tasks."""
    sections = (
        ((), "loss_dict"),
        (("model",), "model_dict"),
        (("training",), "data_dict"),
    )
    return any(key in section_at(values, *path) for path, key in sections)


def _copied(values: Any, place: Place, reading: Reading) -> Any:
    """Return a copy without comments.

    A section that is one object in two places, by an anchor in YAML, becomes two: the steps below
    change sections in place.
    """
    if isinstance(values, list):
        return [
            _copied(value, (*place, number), reading)
            for number, value in enumerate(values)
        ]
    if not isinstance(values, Mapping):
        return copy.deepcopy(values)
    section = {}
    for key, value in values.items():
        if not isinstance(key, str):
            reading.refuse(
                (*place, str(key)), ": a key must be a text. Put it in quotes."
            )
        elif not is_comment(key):
            section[key] = _copied(value, (*place, key), reading)
    return section


# ---- keys of older versions


def _move_old_keys(reading: Reading) -> None:
    """Move keys of ``training`` to their sections of today, and leave out those without effect."""
    training = section_at(reading.values, "training")
    has_data = "training_data" in training or "data_dict" in training
    for key, new in _PLACES_TODAY.items():
        # beside training_data a key such as batch_size is a mistake, which keeps its place
        if key not in training or (new[0] == "training" and has_data):
            continue
        section = reading.values
        for part in new[:-1]:  # missing sections are added
            section = (
                section.setdefault(part, {}) if isinstance(section, dict) else None
            )
        if not isinstance(section, dict):
            continue  # the section is refused as a whole
        value = training.pop(key)
        old = ("training", key)
        if new[-1] in section:
            reading.refuse(
                old,
                f": the old place of {dotted(new)}, which is given too. Remove {dotted(old)}.",
            )
            continue
        # inputs with opt_type have these two in any case; `type` takes one spelling
        if key == "opt_type" and isinstance(value, str):
            value = {"adam": "Adam", "adamw": "AdamW"}.get(value.lower(), value)
        section[new[-1]] = value
        # the key and its items have their lines at the new place too: a message names the new
        # place, at the line of the old one
        reading.lines |= {
            (*new, *path[2:]): line
            for path, line in reading.lines.items()
            if path[:2] == old
        }
        reading.notes.append(
            f"{dotted(old)} was moved to {dotted(new)}, its place today."
        )
    folders: list[Place] = [
        (),
        *(("data_dict", task) for task in section_at(training, "data_dict")),
    ]
    # place in `training`, key and reason
    dropped: list[tuple[Place, str, str]] = [
        ((), "numb_test", "validation is set by validation_data.numb_btch now")
    ]
    dropped += [
        ((*folder, *inner), "set_prefix", "sets are always found as set.*")
        for folder in folders
        for inner in ((), ("training_data",), ("validation_data",))
    ]
    for place, key, why in dropped:
        section = section_at(training, *place)
        if key in section:
            del section[key]
            reading.notes.append(
                f"{dotted(('training', *place, key))} has no effect and was left out: {why}."
            )


def _move_switches(reading: Reading) -> None:
    """Move switches of models that hold for the whole run here to ``training``.

    They are left out of a model without a run.
    """
    training = reading.values.get("training")
    tasks = section_at(reading.values, "model", "model_dict")
    places: list[Place] = [
        ("model",),
        *(("model", "model_dict", task) for task in tasks),
    ]
    for key, name in _OF_MODELS.items():
        new: Place = ("training", name)
        first = new  # path of the value that holds, for the message about another one
        for place in places:
            section = section_at(reading.values, *place)
            if key not in section:
                continue
            value = section.pop(key)
            # bridging may have moved the key before
            old = reading.moved.pop((*place, key), (*place, key))
            if value is None or not isinstance(training, dict):
                continue
            if name not in training:
                training[name] = value
                first = old
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
# option of the entry named `ema` -> its place in the short form
_SHORT_FORM: dict[str, Place] = {
    "decay": ("training", "ema_decay"),
    "warmup": ("training", "ema_warmup"),
    "ckpt_keep": ("training", "ema_ckpt_keep"),
    "full_validation": ("validating", "ema_full_validation"),
}


def _add_averages(reading: Reading) -> None:
    """Add averages to the list ``training.averaging``.

    The average of ``enable_ema`` comes first, and the averaged point of an optimizer last.
    """
    training = section_at(reading.values, "training")
    validating = section_at(reading.values, "validating")
    entries = training.get("averaging", [])
    if not isinstance(entries, list):
        return  # refused as a whole
    is_validated = validating.get("ema_full_validation") is True
    is_section = isinstance(reading.values.get("training"), dict)
    # None: there is no such section, or the key is misspelled. Nothing is then reported about the
    # other options of the short form, which would follow from the one mistake.
    is_on = training.get("enable_ema", False)
    if "enable_ema" not in training and (
        not is_section or close_names("enable_ema", [*map(str, training)])
    ):
        is_on = None
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
            ', and "full_validation": true in an entry of training.averaging'
            if entries
            else ""
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
        case = ""
        if name != entry["name"]:
            case = " but for upper and lower case, and so have its files"
        reading.refuse(
            (*_BANK, same[0], "name"),
            f" = {show(name)}: training.enable_ema already tracks one of that "
            f"name{case}. Choose another name, or remove enable_ema.",
        )
    # Where only its validation is requested the input is refused above. It gets the entry all the
    # same, so that the rules find its other mistakes.
    if not same and (is_on is True or is_validated):
        # the entries of the input are one place further on, but messages have its own numbers
        reading.moved |= {(*_BANK, n + 1): (*_BANK, n) for n in range(len(entries))}
        reading.moved |= {(*_BANK, 0, name): old for name, old in _SHORT_FORM.items()}
        reading.moved |= {(*_BANK, 0): ("training", "enable_ema")}
        training["averaging"] = entries = [entry, *entries]
    point = ScheduleFreeProfile.type
    is_missing = all(isinstance(e, dict) and e.get("type") != point for e in entries)
    is_schedule_free = (
        section_at(reading.values, "optimizer").get("type")
        == AdamWScheduleFreeConfig.type
    )
    if is_schedule_free and is_missing and is_section:
        # the averaged point is the result of this optimizer: it is validated where the live weights
        # are
        is_live_validated = validating.get("full_validation") is True
        training["averaging"] = [
            *entries,
            {"type": point, "name": point, "full_validation": is_live_validated},
        ]


# ---- several tasks

PARTS = ("type_map", "descriptor", "fitting_net")
_SHARED: Place = ("model", "shared_dict")


def _expand_tasks(reading: Reading) -> tuple[Link, ...]:
    """Give each model of ``model_dict`` the parts that it names and the keys that hold for all.

    Returns:
        The parts, one link for each model that names one.
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
    sections = {
        task: section for task, section in models.items() if isinstance(section, dict)
    }
    for key, value in for_all.items():
        if sections and all(key in section for section in sections.values()):
            reading.unused.append(
                f"model.{key} = {show(value)}: no effect, every model of model.model_dict has its "
                "own"
            )
    links: list[Link] = []
    for task, section in sections.items():
        # copies, because later steps change the section of one task in place
        for key in for_all.keys() - section.keys():
            section[key] = copy.deepcopy(for_all[key])
            reading.moved["model", "model_dict", task, key] = ("model", key)
        links += _replace_names(reading, task, section, shared)
    # not beside other mistakes: a misspelled name may have meant a part that no model names
    for key in shared if not reading.mistakes else ():
        if all(key != link.key for link in links):
            reading.refuse(
                (*_SHARED, key),
                ": no model of model.model_dict names it. Name it there instead of the part, or "
                "remove it.",
            )
    return tuple(links)


def _replace_names(
    reading: Reading, task: str, section: Values, shared: Any
) -> Iterator[Link]:
    """Put shared parts in the places of their names in the model of a task, and yield links."""
    parts = section_at(section, "descriptor").get("list")
    # container, key in it, and path of each value that may be a name
    values: list[tuple[Any, Any, str]] = [
        (section, key, key) for key in PARTS if key in section
    ]
    if isinstance(parts, list):
        values += [(parts, n, f"descriptor.list[{n}]") for n in range(len(parts))]
    for container, key, part in values:
        text = container[key]
        if not isinstance(text, str):
            continue
        place = ("model", "model_dict", task, *path_of(part))
        name, *suffix = text.split(":", 1)
        # fitting networks and type maps have no embedding of elements to share alone
        levels = ("0", "1") if part.startswith("descriptor") else ("0",)
        container[key] = INVALID
        if shared is INVALID:  # the missing parts are already reported
            continue
        if name not in shared:
            names = list(shared)
            advice = (
                f"There: {', '.join(names)}." if names else "It is empty or missing."
            )
            if close := close_names(name, names):
                advice = f"Did you mean {' or '.join(close)}?"
            reading.refuse(
                place, f" = {show(text)}: not in model.shared_dict. {advice}"
            )
        elif suffix and suffix[0] not in levels:
            level_1 = " or 1 (the embedding of elements only)" if "1" in levels else ""
            expected = f"{name}, with level 0 (all of it){level_1} after a colon"
            reading.refuse(place, f" = {show(text)}: expected {expected}.")
        else:
            container[key] = copy.deepcopy(shared[name])
            reading.moved[place] = (*_SHARED, name)
            yield Link(task, part, name, int(suffix[0]) if suffix else 0)


# ---- other forms of a model dpa4
#
# DeePMD-kit also writes it as a sum of type linear_ener, [learned model, inner_potential], and as
# a standard model with the descriptor and the fitting network of dpa4.

INNER = "inner_potential"
# options of the part -> options of the model
_OF_INNER = {
    "mode": "bridging_method",
    "r_inner": "bridging_r_inner",
    "r_outer": "bridging_r_outer",
}
# options of standard models that the type dpa4 does not have
_OF_TABLE = ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax")
# options of the sum that hold for its parts, also where they have the default
_OF_WHOLE = ("type_map", "atom_exclude_types", "pair_exclude_types")


def _spell_out_bridging(reading: Reading) -> None:
    """Turn the other forms of a model ``dpa4`` into models of this type."""
    model = section_at(reading.values, "model")
    tasks = model.get("model_dict")
    descriptors = type_names(DESCRIPTORS["dpa4"].section)
    fittings = type_names(FITTINGS["dpa4_ener"].section)
    places: list[Place] = [("model",)]
    if isinstance(tasks, dict):
        places = [("model", "model_dict", task) for task in tasks]
    for place in places:
        section = section_at(reading.values, *place)
        kind = section.get("type", "standard")
        parts = section.get("models")
        if not isinstance(parts, list):
            parts = []
        parts = [part if isinstance(part, dict) else {} for part in parts]
        if kind == "linear_ener" and any(part.get("type") == INNER for part in parts):
            _merge_parts(reading, section, parts, place)
            reading.notes.append(
                f"{dotted(place)} is a sum with {INNER}, which is the model dpa4 with bridging."
            )
        elif (
            kind == "standard"
            and section_at(section, "descriptor").get("type") in descriptors
            and not section.get("use_srtab")
        ):
            # a standard model with another fitting network and no bridging remains one
            method = section.get("bridging_method")
            is_bridged = isinstance(method, str) and method_name(method) is not None
            if is_bridged or section_at(section, "fitting_net").get("type") in fittings:
                section["type"] = "dpa4"
                for name in _OF_TABLE:
                    section.pop(name, None)


def _merge_parts(
    reading: Reading, section: Values, parts: list[Values], place: Place
) -> None:
    """Turn a section of type ``linear_ener`` with an ``inner_potential`` into a ``dpa4``."""
    # an empty shared_dict has no effect; another one is refused as an option of DeePMD-kit
    skipped = {"type", "models", "weights"}
    if not section.get("shared_dict"):
        skipped.add("shared_dict")
    weights = section.get("weights")
    whole = {key: value for key, value in section.items() if key not in skipped}
    section.clear()
    section.update({"type": "dpa4", **whole, "bridging_method": "zbl"})
    inner = [k for k, part in enumerate(parts) if part.get("type") == INNER]
    learned = [
        k for k, part in enumerate(parts) if isinstance(part.get("descriptor"), dict)
    ]
    if weights != "sum":
        reading.refuse(
            (*place, "weights"), f' = {show(weights)}: expected "sum" beside {INNER}.'
        )
    if len(parts) != 2 or len(inner) != 1 or len(learned) != 1:
        reading.refuse(
            (*place, "models"), f": expected a model with a descriptor and one {INNER}."
        )
        return
    part = parts[learned[0]]
    part_place = (*place, "models", learned[0])
    kind = part["descriptor"].get("type", "dpa4")
    if kind not in type_names(DESCRIPTORS["dpa4"].section):
        reading.refuse(
            (*part_place, "descriptor", "type"),
            f" = {show(kind)}: {INNER} is for dpa4, as in DeePMD-kit. Use dpa4.",
        )
    defaults = {o.name: o.default for o in options(NetworkConfig)}
    for key, value in part.items():
        default = defaults.get(key)
        if key == "type":
            continue
        # A config that DeePMD-kit has normalized has every option in the sum and in its parts: of
        # two values the one that is not the default was given.
        if key not in whole or (
            whole[key] == default != value and key not in _OF_WHOLE
        ):
            section[key] = value
            reading.moved |= {(*place, key): (*part_place, key)}
        elif value not in (whole[key], None, default, []):
            reading.refuse(
                (*part_place, key),
                f" = {show(value)}: {dotted((*place, key))} = {show(whole[key])}. Give one of the "
                "two.",
            )
    inner_place = (*place, "models", inner[0])
    for key, value in parts[inner[0]].items():
        if key in _OF_INNER:
            section[_OF_INNER[key]] = value
            reading.moved |= {(*place, _OF_INNER[key]): (*inner_place, key)}
        elif key != "type":
            expected = f"type, {', '.join(_OF_INNER)}"
            reading.refuse((*inner_place, key), f": unknown key. Known: {expected}.")
