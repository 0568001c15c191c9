"""Models that differ in the output layer, drawn from what the training frames of a run leave open."""

from __future__ import annotations

import copy
from dataclasses import replace

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.names import SUFFIXES
from deepmd_ema.config import saved_config
from deepmd_ema.config.paths import with_absolute_paths
from deepmd_ema.config.rules import why_task_not_solvable
from deepmd_ema.data.run import open_split
from deepmd_ema.dist.device import select_device
from deepmd_ema.errors import UserError
from deepmd_ema.infer.load import LoadedModel
from deepmd_ema.infer.solve import MAX_FRAMES, chosen_frames, loss_weights, sample_last_layers

OPTION = "--sample-layer"


def with_sampled_layers(loaded: LoadedModel, number: int, seed: int, device: str | None = None) -> list[LoadedModel]:
    """Return copies of a model of a run with output layers from their posterior, given the training frames of the run.

    Args:
        loaded: from a checkpoint of any kind.
        number: how many.
        seed: of the samples.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.

    Raises:
        UserError: if the file does not name training frames, they cannot be read or are too few, or energies are not
            linear in an output layer.
    """
    path = loaded.info.path
    if path.suffix not in SUFFIXES or loaded.info.kind == "deepmd":
        raise UserError(
            f"{OPTION}: {path} is not a checkpoint of dp-ema, which names its training frames. Give the folder of a "
            "run or one of its .pt files."
        )
    payload = checkpoint.load(path)
    config = saved_config(with_absolute_paths(payload["config"], path.parent), source=str(path))
    task = config.task(loaded.info.head or None)
    if reasons := list(why_task_not_solvable(task)):
        raise UserError([f"{OPTION}: {reason} Leave it out." for reason in reasons])
    train = open_split(config)[task.name].train
    prefactors = loss_weights(task.loss, config.learning_rate, checkpoint.planned_steps(payload), payload["step"])
    frames = chosen_frames(task, train, config.training.seed or 0, MAX_FRAMES)
    model = loaded.model.to(select_device(device))
    drawn = sample_last_layers(model, train, frames, prefactors, task.loss.intensive_ener_virial, number, seed)
    copies = []
    for tensors in drawn:
        one = copy.deepcopy(model)
        one.load_state_dict(tensors, strict=False)
        copies.append(replace(loaded, model=one))
    return copies
