"""A restart with other tasks than the checkpoint has: what is kept of those that stay, and what new ones start with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_ema.config import saved_models
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.tensors import check_weights, prefix_of


def load_weights(models: ModelSet, weights: Mapping[str, Tensor], tasks: Sequence[str], path: Path) -> None:
    """Put the weights of some tasks into ``models``, also into what the others share with them.

    Args:
        models: of a run.
        weights: of a file, by the names that it has for them; those of other tasks are not looked at.
        tasks: those whose weights the file must have.
        path: the file, for messages.

    Raises:
        CheckpointError: naming every missing, extra or reshaped tensor.
    """
    known = ModelSet({task: models.by_task[task] for task in tasks})
    found = {n: tensor for n, tensor in weights.items() if n.startswith(tuple(map(prefix_of, tasks)))}
    check_weights({name: tuple(tensor.shape) for name, tensor in known.state_dict().items()}, found, path)
    known.load_state_dict(found)
    new = [model.fitting for task, model in models.by_task.items() if task not in tasks]
    taken = {model.fitting.case for model in known.by_task.values()}
    for fitting, case in zip(new, (n for n in range(len(models.by_task) + len(taken)) if n not in taken)):
        fitting.set_case(case)  # a task that stays has the case of before, whatever the names of new ones are


def state_for(models: ModelSet, payload: Mapping[str, Any], streams: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the state of a checkpoint as that of a run of the tasks of ``models``.

    Args:
        models: those of the restarted run.
        payload: content of the checkpoint.
        streams: those of the restarted run before anything is loaded, for new tasks.
        source: the checkpoint, for messages.
    """
    saved = saved_models(payload["config"], source)
    before = build_models(saved.configs, saved.links).first_names()
    names: dict[str, str] = {}  # what averages and the optimizer call a tensor in this run -> in the checkpoint
    for name, first in models.first_names().items():
        if name in before:
            names.setdefault(first, before[name])
    names |= {name: name for name, _ in models.named_buffers() if name in payload["model"]}
    moments = payload["optimizer"]["state"]
    kept = {name: moments[old] for name, old in names.items() if old in moments}
    # no rank asks the others for the first moments of new tasks: the optimizer, which was just built, has them
    new = [name for name, _ in models.named_parameters() if name not in kept]
    state = {**payload, "optimizer": {**payload["optimizer"], "state": kept, "new": new}}
    state["streams"] = {task: payload["streams"].get(task, own) for task, own in streams.items()}
    last = payload["display"].get("last", {})
    state["display"] = {**payload["display"], "last": {t: last[t] for t in models.by_task if t in last}}
    if payload.get("averages"):
        profiles = {
            name: {**of, "weights": {new: of["weights"][old] for new, old in names.items() if old in of["weights"]}}
            for name, of in payload["averages"]["profiles"].items()
        }
        state["averages"] = {**payload["averages"], "profiles": profiles}
    return state
