"""Where a run starts: anew, from the weights of a file, or exactly where a checkpoint stands."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema import __version__, checkpoint
from deepmd_ema.config import config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.tensors import check_weights

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig

logger = logging.getLogger(__name__)

# a restart that differs in one of these is another run, not the continuation of this one
CONTINUITY = (
    "model",
    "learning_rate",
    "optimizer",
    "loss",
    "training.training_data",
    "training.seed",
    "training.gradient_max_norm",
)
# often changed on purpose, to train longer; the learning rate may follow it, so it is said
LENGTH = ("training.numb_steps", "training.numb_epoch")
_ADVICE = (
    "     A restart continues the same run. Put this back, or say --allow-config-change if the change is meant,\n"
    "     or start anew from the weights with --init-model."
)


@dataclass(frozen=True)
class Origin:
    """What a run starts from.

    Attributes:
        kind: ``new``, ``init-model`` or ``restart``.
        path: the file, or None.
        payload: its content, or an empty dictionary.
    """

    kind: str
    path: Path | None
    payload: Mapping[str, Any]

    @property
    def min_nbor_dist(self) -> float | None:
        """Nearest pair that the file knows of, angstrom."""
        return self.payload.get("min_nbor_dist")


def find_origin(restart: str | None, init_model: str | None) -> Origin:
    """Load the file that a run starts from, if any.

    Raises:
        CheckpointError: if it is missing, damaged, or of the wrong kind (an average cannot be restarted from).
    """
    if restart is not None:
        path = checkpoint.resolve(restart)
        payload = checkpoint.load(path)
        checkpoint.require_training(payload, path)
        return Origin("restart", path, payload)
    if init_model is not None:
        path = checkpoint.resolve(init_model)
        return Origin("init-model", path, checkpoint.load(path))
    return Origin("new", None, {})


def adopt_model(config: RunConfig, origin: Origin) -> RunConfig:
    """Return ``config`` with ``sel``, and at a restart the seed, as in the file where the input leaves them open.

    Raises:
        CheckpointError: if the file holds a model of other elements.
    """
    if origin.path is None:
        return config
    saved = origin.payload["config"]["model"]
    if list(saved["type_map"]) != list(config.model.type_map):
        raise CheckpointError(
            f"{origin.path}: a model of type_map {saved['type_map']}, but model.type_map is "
            f"{config.model.type_map}. Use the type_map of the file."
        )
    if origin.kind == "restart" and config.training.seed is None:
        seed = origin.payload["config"]["training"]["seed"]
        config = replace(config, training=replace(config.training, seed=seed))
    if config.model.descriptor.neighbors is not None:
        return config
    section = model_config_from_dict(saved, str(origin.path)).descriptor
    descriptor = config.model.descriptor.with_neighbors_of(section)
    return replace(config, model=replace(config.model, descriptor=descriptor))


def check_continuity(config: RunConfig, origin: Origin, allow_change: bool) -> None:
    """Compare the config of a restart with that of the checkpoint.

    Raises:
        ConfigError: if an option differs that decides how the run goes on, unless ``allow_change``.
    """
    # both in the form of today: the checkpoint may be of an older version, with options under other names
    now, before = to_dict(config), to_dict(config_from_dict(origin.payload["config"], str(origin.path)))
    differences = list(_differences(before, now))
    for path, old, new in differences:
        if path in LENGTH:
            logger.warning("%s was %s, is now %s: a decaying learning rate goes on along its new curve", path, old, new)
    changed = [d for d in differences if any(d[0] == key or d[0].startswith(f"{key}.") for key in CONTINUITY)]
    if not changed:
        return
    lines = [f"{path}: {old!r} in the checkpoint, {new!r} in the input" for path, old, new in changed]
    if allow_change:
        _refuse_another_optimizer(config, before)
        for line in lines:
            logger.warning("the restart goes on with a change. %s", line)
        return
    *others, last = [f"{line}." for line in lines]
    raise ConfigError([*others, f"{last}\n{_ADVICE}"])


def _refuse_another_optimizer(config: RunConfig, before: Mapping[str, Any]) -> None:
    kind = before["optimizer"]["type"]
    if config.optimizer.type != kind:
        raise ConfigError(
            f'optimizer.type = "{config.optimizer.type}": the checkpoint holds the moments of {kind}. Set it to '
            f'"{kind}", or start anew from the weights with --init-model.'
        )


def run_id(config: RunConfig, origin: Origin) -> str:
    """Return what tells this trajectory of weights from others: the same config and start always give the same one.

    A restart goes on with that of its checkpoint.
    """
    if origin.kind == "restart":
        # files of 0.1.0 have none
        return origin.payload.get("run") or _digest(origin.payload["config"], "")
    return _digest(to_dict(config), str(origin.path or ""))


def _digest(config: Mapping[str, Any], start: str) -> str:
    text = json.dumps([__version__, config, start], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_weights(model: Any, origin: Origin) -> None:
    """Put the weights of the file into ``model``.

    Raises:
        CheckpointError: naming every missing, extra or reshaped tensor.
    """
    assert origin.path is not None
    if origin.kind == "restart":
        found = origin.payload["model"]  # raw, whatever was made of them after training
    else:
        found, _ = checkpoint.weights_in(origin.payload, origin.path)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_weights(expected, found, origin.path)
    model.load_state_dict(found)
    logger.info("weights of %s (%s, step %s)", origin.path, origin.payload["weights"], origin.payload["step"])


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(set(old) | set(new)):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
