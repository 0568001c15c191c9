"""From the command line and the heads that an input names to the start of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from deepmd_ema import checkpoint
from deepmd_ema.config import choose_head
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import FROZEN_SUFFIXES, ModelFile, load_models
from deepmd_ema.model.model_set import ModelSet, unnested
from deepmd_ema.train.start.fine_tuning import FineTune, Pretrained
from deepmd_ema.train.start.restart import FromWeights, Restart, Start

logger = logging.getLogger(__name__)

RANDOM = "RANDOM"  # as a head: a fresh fitting network
ONLY = "Default"  # DeePMD-kit's name for the model of a file that has one
_CHOOSES = "--model-branch or finetune_head"
_Chosen: TypeAlias = tuple[str, bool, bool]
"""For a task: which model of a file, whether its fitting network is fresh, whether it goes on as it is."""


def find_start(
    restart: str | None,
    init_model: str | None,
    finetune: str | None = None,
    heads: Mapping[str, str | None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> Start:
    """Load the file that a run starts from, if any.

    Args:
        restart: checkpoint to continue.
        init_model: file whose weights a new run starts from.
        finetune: file whose weights are fine-tuned.
        heads: by task, which model of a file with several it starts from; ``RANDOM`` is a fresh fitting network, for
            fine-tuning. One task without a head if not given.
        share: rank of this process and number of ranks, which check the shards of a sharded checkpoint together.

    Raises:
        CheckpointError: if it is missing, damaged, or of the wrong kind (an average cannot be restarted from).
        UserError: if a head is given for what has none.
    """
    heads = {"": None} if heads is None else heads
    if restart is not None:
        if _is_frozen(restart):
            raise CheckpointError(
                f"--restart {restart}: a frozen model holds weights only, not the state of a run. Use a training "
                f"checkpoint (model.ckpt-*.pt), or start anew from these weights with --init-model {restart}."
            )
        path = checkpoint.resolve(restart)
        payload = checkpoint.load_shards(path, share)
        checkpoint.require_training(payload, path)
        return Restart(path, payload)
    if finetune is not None:
        return _fine_tune(finetune, heads)
    if init_model is not None:
        return FromWeights(*_payload_of(init_model, heads.get("")))
    return Start()


def _fine_tune(file: str, heads: Mapping[str, str | None]) -> FineTune:
    chosen: dict[str, _Chosen] = {}

    def choose(known: Mapping[str, Sequence[str]]) -> set[str]:
        chosen.update(_choose(known, heads, file))
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
            _tell_fresh(file, task, known)
    return chosen


def _named(known: Mapping[str, Sequence[str]], head: str, file: str) -> str:
    """Return which model of a file a head is."""
    return "" if set(known) == {""} and head == ONLY else choose_head(known, head, file, _CHOOSES)


def _tell_fresh(file: str, task: str, known: Mapping[str, Sequence[str]]) -> None:
    has = "one model" if "" in known else ", ".join(known)
    missing = "no --model-branch chooses one"
    if task:
        heads = ONLY if "" in known else "a name"
        missing = f'no model.model_dict.{task}.finetune_head chooses one ({heads}; "{RANDOM}" says that this is meant)'
    logger.warning(
        "%s holds %s: %s, so the fitting network%s starts anew", file, has, missing, f" of task {task}" * bool(task)
    )


def _payload_of(file: str, head: str | None) -> tuple[Path, Mapping[str, Any]]:
    """Return the path of a model file of any kind, and its content as that of a checkpoint."""
    if not _is_frozen(file) and head is None:
        path = checkpoint.resolve(file)
        with suppress(checkpoint.DeepmdCheckpointError):  # read below
            return path, checkpoint.load(path)
    if head is None:
        return _as_payload(load_models(file), alone=False)
    return _as_payload(load_models(file, choose=lambda known: [_named(known, head, file)]), alone=True)


def _is_frozen(path: str) -> bool:
    return Path(path).suffix.lower() in FROZEN_SUFFIXES


def _as_payload(found: ModelFile, alone: bool) -> tuple[Path, dict[str, Any]]:
    """Return the path of a model file of another program, and its content as that of a file of weights.

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
    return info.path, {**head, "model": weights}
