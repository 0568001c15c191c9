"""Loads the file that a run starts from, and chooses the models in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from deepmd_ema import checkpoint
from deepmd_ema.config import choose_head
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import FROZEN_SUFFIXES, ModelFile, load_models, models_of_deepmd
from deepmd_ema.interop.pretrained import check_digest
from deepmd_ema.model.model_set import ModelSet, unnested
from deepmd_ema.training.fine_tuning import FineTune, Pretrained
from deepmd_ema.training.from_weights import FromWeights
from deepmd_ema.training.request import TrainRequest
from deepmd_ema.training.restart import Restart
from deepmd_ema.training.start import Start

logger = logging.getLogger(__name__)

RANDOM = "RANDOM"  # as a head: a fresh fitting network
ONLY = "Default"  # DeePMD-kit's name for the model of a file that has one
_CHOOSES = "--model-branch or finetune_head"
_Chosen: TypeAlias = tuple[str, bool, bool]
"""For a task: the model of a file, whether its fitting network is fresh, whether its bias is kept."""


def load_start(request: TrainRequest, share: tuple[int, int] = (0, 1)) -> Start:
    """Load the file that a run starts from, if any.

    Args:
        request: with the file, and which of its models each task starts from.
        share: rank of this process and number of ranks, which check the shards of a sharded checkpoint together.

    Raises:
        CheckpointError: if it is missing, damaged, or of the wrong kind (an average cannot be restarted from).
        UserError: if a head is given for a file without heads.
    """
    heads = request.heads()
    if request.restart is not None:
        return load_restart(request.restart, share)
    if request.finetune is not None:
        return load_pretrained(request.finetune, heads)
    if request.init_model is not None:
        return load_weights(request.init_model, heads.get(""))
    return Start()


def load_restart(file: str, share: tuple[int, int] = (0, 1)) -> Restart:
    """Load the checkpoint that a run continues, see :func:`load_start`."""
    if _is_frozen(file):
        raise CheckpointError(
            f"--restart {file}: a frozen model holds weights only, not the state of a run. Use a training checkpoint "
            f"(model.ckpt-*.pt), or start anew from these weights with --init-model {file}."
        )
    path = checkpoint.resolve(file)
    payload = checkpoint.load_shards(path, share)
    checkpoint.require_training(payload, path)
    return Restart(path, payload)


def load_weights(file: str, head: str | None = None) -> FromWeights:
    """Load the weights that a run starts from; ``head`` is the model of a file with several that a task starts from."""
    if head is not None:
        return _from_models(load_models(file, choose=lambda known: [_named(known, head, file)]), alone=True)
    if _is_frozen(file):
        return _from_models(load_models(file), alone=False)
    path = checkpoint.resolve(file)
    try:
        return FromWeights(path, checkpoint.load(path))
    except checkpoint.DeepmdCheckpointError as error:
        return _from_models(models_of_deepmd(path, error.content), alone=False)


def load_pretrained(file: str, heads: Mapping[str, str | None] | None = None) -> FineTune:
    """Load the models that are fine-tuned; ``heads`` names the model that each task starts from.

    ``RANDOM`` as a head is a fresh fitting network.
    """
    if name := check_digest(Path(file)):
        logger.info("%s: the published model %s, sha256 verified", file, name)
    chosen: dict[str, _Chosen] = {}

    def choose(known: Mapping[str, Sequence[str]]) -> set[str]:
        chosen.update(_choose(known, {"": None} if heads is None else heads, file))
        return {name for name, *_ in chosen.values()}

    loaded = load_models(file, choose=choose).models
    return FineTune({task: Pretrained(loaded[name], *how) for task, (name, *how) in chosen.items()})


def _choose(known: Mapping[str, Sequence[str]], heads: Mapping[str, str | None], file: str) -> dict[str, _Chosen]:
    first = next(iter(known))  # whose descriptor goes with a fresh fitting network
    chosen: dict[str, _Chosen] = {}
    for task, head in heads.items():
        if head is not None and head.upper() == RANDOM:
            chosen[task] = first, True, False
        elif head is not None:
            chosen[task] = _named(known, head, file), False, False
        elif task in known:  # the only model for the only task; or the model of a task for the task of its name
            chosen[task] = task, False, bool(task)
        else:
            chosen[task] = first, True, False
            has, missing = "one model" if "" in known else ", ".join(known), "no --model-branch chooses one"
            if task:
                names = ONLY if "" in known else "a name"
                missing = (
                    f"no model.model_dict.{task}.finetune_head chooses one "
                    f'({names}; "{RANDOM}" says that this is meant)'
                )
            of_task = f" of task {task}" * bool(task)
            logger.warning("%s holds %s: %s, so the fitting network%s starts anew", file, has, missing, of_task)
    return chosen


def _named(known: Mapping[str, Sequence[str]], head: str, file: str) -> str:
    """Return the name of the model of a file that a head means."""
    return "" if set(known) == {""} and head == ONLY else choose_head(known, head, file, _CHOOSES)


def _is_frozen(path: str) -> bool:
    return Path(path).suffix.lower() in FROZEN_SUFFIXES


def _from_models(found: ModelFile, alone: bool) -> FromWeights:
    """Return the start from the weights of models, with the content that a file of weights of this program has.

    Args:
        found: the models in it.
        alone: whether the one model in it starts an input of one task, whatever its name is.
    """
    models = {"": next(iter(found.models.values()))} if alone else found.models
    infos = {name: loaded.info for name, loaded in models.items()}
    info = next(iter(infos.values()))
    config = {"model": info.config["model"]} if alone else found.config
    distances = unnested({name: each.min_nbor_dist for name, each in infos.items()})
    head = checkpoint.payload_head("weights", info.weights, info.step, config, distances)
    weights = ModelSet({name: loaded.model for name, loaded in models.items()}).state_dict()
    return FromWeights(info.path, {**head, "model": weights})
