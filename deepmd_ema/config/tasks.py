"""Inputs of several tasks: parts of models that stand in ``model.shared_dict`` are put where models name them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import INVALID, is_comment
from deepmd_ema.config.messages import Place, Problem, close_names, path_of, show
from deepmd_ema.config.schema.model import Link

if TYPE_CHECKING:
    from deepmd_ema.config.upgrade import Upgraded

PARTS = ("type_map", "descriptor", "fitting_net")
_SHARED: Place = ("model", "shared_dict")


def has_tasks(values: Any) -> bool:
    """Whether an input is one of several tasks."""
    if not isinstance(values, Mapping):
        return False
    model, training = (values.get(name) for name in ("model", "training"))
    in_sections = ((model, "model_dict"), (training, "data_dict"))
    return "loss_dict" in values or any(isinstance(section, Mapping) and key in section for section, key in in_sections)


def expand_tasks(upgraded: Upgraded) -> tuple[Link, ...]:
    """Give each model of ``model_dict`` the parts that it names and the keys that hold for all, in place.

    Args:
        upgraded: an input of several tasks; takes where each part comes from, and what is wrong.

    Returns:
        The parts of ``model.shared_dict``.
    """
    model = upgraded.values.get("model")
    models = model.get("model_dict") if isinstance(model, dict) else None
    if not isinstance(models, dict):
        return ()
    shared = model.pop("shared_dict", None) or {}
    if not isinstance(shared, dict):
        text = f' = {show(shared)}: expected parts of models by name, e.g. {{"dpa": {{"type": "dpa1", ...}}}}.'
        upgraded.problems.append(Problem(_SHARED, text))
        shared = None
    for_all = {key: model.pop(key) for key in list(model) if key != "model_dict"}
    of_tasks = [section for task, section in models.items() if isinstance(section, dict) and not is_comment(task)]
    for key in for_all:
        if of_tasks and not is_comment(key) and all(key in section for section in of_tasks):
            text = f"model.{key} = {show(for_all[key])}: no effect, every model of model.model_dict has its own"
            upgraded.unused.append(text)
    links: list[Link] = []
    for task, section in models.items():
        if isinstance(section, dict) and not is_comment(task):
            place: Place = ("model", "model_dict", task)
            for key in for_all.keys() - section.keys():
                section[key] = copy.deepcopy(for_all[key])
                upgraded.moved.update({(*place, key): ("model", key)})
            links += _replace_names(upgraded, task, section, shared)
    unused = [key for key in shared or () if not is_comment(key) and key not in {link.key for link in links}]
    text = ": no model of model.model_dict names it. Name it there instead of the part, or remove it."
    # a misspelled name may have meant it
    upgraded.problems += [Problem((*_SHARED, key), text) for key in unused if not upgraded.problems]
    upgraded.source_paths |= upgraded.moved
    return tuple(links)


def _replace_names(
    upgraded: Upgraded, task: str, section: dict[str, Any], shared: Mapping[str, Any] | None
) -> Iterator[Link]:
    """Put parts in the places of their names in the model of a task, and yield where."""
    parts = section.get("descriptor")
    parts = parts.get("list") if isinstance(parts, dict) else None
    named: list[tuple[Any, Any, str]] = [(section, part, part) for part in PARTS]
    named += [(parts, n, f"descriptor.list[{n}]") for n in range(len(parts))] if isinstance(parts, list) else []
    for owner, key, part in named:
        text = owner.get(key) if isinstance(owner, dict) else owner[key]
        if not isinstance(text, str):
            continue
        place = ("model", "model_dict", task, *path_of(part))
        if shared is None:  # the missing parts are already reported
            owner[key] = INVALID
            continue
        name, colon, level = text.partition(":")
        if name not in shared:
            known = [key for key in shared if not is_comment(key)]
            there = f"There: {', '.join(known)}." if known else "It is empty or missing."
            if close := close_names(name, known):
                there = f"Did you mean {' or '.join(close)}?"
            problem = f" = {show(text)}: not in model.shared_dict. {there}"
        elif level not in (("0", "1") if part.startswith("descriptor") else ("0",)) and colon:
            levels = " or 1 (the embedding of elements only)" if part.startswith("descriptor") else ""
            problem = f" = {show(text)}: expected {name}, with level 0 (all of it){levels} after a colon."
        else:
            owner[key] = copy.deepcopy(shared[name])
            upgraded.moved[place] = (*_SHARED, name)
            yield Link(task, part, name, int(level or 0))
            continue
        upgraded.problems.append(Problem(place, problem))
        owner[key] = INVALID
