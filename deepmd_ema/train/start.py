"""How a run starts: anew, from the weights of a file, or as the exact continuation of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from deepmd_ema import __version__, checkpoint
from deepmd_ema.config import RunConfig, config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.infer.load import FROZEN_SUFFIXES, LoadedModel, load_model
from deepmd_ema.model.model_set import ModelSet, nested
from deepmd_ema.tensors import check_weights

if TYPE_CHECKING:
    from deepmd_ema.train.trainer import Trainer


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


class Start:
    """A new run: weights come from the seed, statistics from the data.

    Subclasses start from a file. All differences between the ways to start are methods here.

    Attributes:
        has_weights: whether weights and statistics come from a file.
    """

    has_weights: ClassVar[bool] = False

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return 0

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with what it leaves open as it is in the file.

        Raises:
            CheckpointError: if the file holds a model of other elements.
        """
        return config

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint that is continued.

        Raises:
            ConfigError: if an option differs that the continuation depends on, unless ``allow_change``.
        """

    def run_id(self, config: RunConfig) -> str:
        """Return what tells this trajectory of weights from others: the same config and start always give the same."""
        return _digest(to_dict(config), "")

    def min_nbor_dist(self, task: str, in_data: float | None) -> float | None:
        """Return the nearest pair that the model records, angstrom: that in the data, or that of the file."""
        return in_data

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``.

        Raises:
            CheckpointError: naming every missing, extra or reshaped tensor.
        """

    def resume(self, trainer: Trainer) -> None:
        """Load the state of the continued run into ``trainer``; nothing for a new run."""


@dataclass(frozen=True)
class FromWeights(Start):
    """A new run whose weights, live or averaged, are those of a file.

    Attributes:
        path: the file.
        payload: its content.
    """

    has_weights = True

    path: Path
    payload: Mapping[str, Any]

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` as in the file where the input leaves it open."""
        models, section = {}, self.payload["config"]["model"]
        for name, saved in nested(section.get("model_dict", section), tuple(config.tasks)).items():
            model = config.tasks[name].model
            if list(saved["type_map"]) != list(model.type_map):
                raise CheckpointError(
                    f"{self.path}: a model of type_map {saved['type_map']}, but model.type_map is {model.type_map}. "
                    "Use the type_map of the file."
                )
            if model.descriptor.neighbors is None:
                written = model_config_from_dict(saved, str(self.path)).descriptor
                models[name] = replace(model, descriptor=model.descriptor.with_neighbors_of(written))
        return config.with_models(models) if models else config

    def run_id(self, config: RunConfig) -> str:
        """Return what tells this trajectory of weights from others."""
        return _digest(to_dict(config), str(self.path))

    def min_nbor_dist(self, task: str, in_data: float | None = None) -> float | None:
        """Return the nearest pair that the file records, angstrom."""
        found: float | None = nested(self.payload.get("min_nbor_dist"), (task,)).get(task)
        return found

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``."""
        found = self._weights()
        expected = {name: tuple(tensor.shape) for name, tensor in models.state_dict().items()}
        check_weights(expected, found, self.path)
        models.load_state_dict(found)
        step = "step not known" if self.payload["step"] is None else f"step {self.payload['step']}"
        logger.info("weights of %s (%s, %s)", self.path, self.payload["weights"] or "live or averaged", step)

    def _weights(self) -> Mapping[str, Tensor]:
        return checkpoint.weights_in(self.payload, self.path)[0]


class Restart(FromWeights):
    """The continuation of a run, bitwise what it would have been without a break."""

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return int(self.payload["step"])

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` and the seed as in the file where the input leaves them open."""
        config = super().adopt_from_checkpoint(config)
        if config.training.seed is None:
            seed = self.payload["config"]["training"]["seed"]
            config = replace(config, training=replace(config.training, seed=seed))
        return config

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint."""
        before, now = self.payload["config"], to_dict(config)
        if before != now:
            # both in today's form: the checkpoint may be of an older version, with options under other names
            before = to_dict(config_from_dict(before, str(self.path)))
        differences = list(_differences(before, now))
        for path, old, new in differences:
            if path in LENGTH:
                logger.warning(
                    "%s was %s, is now %s: a decaying learning rate goes on along its new curve", path, old, new
                )
        changed = [d for d in differences if any(d[0] == key or d[0].startswith(f"{key}.") for key in CONTINUITY)]
        if not changed:
            return
        lines = [f"{path}: {old!r} in the checkpoint, {new!r} in the input" for path, old, new in changed]
        if not allow_change:
            *others, last = [f"{line}." for line in lines]
            raise ConfigError([*others, f"{last}\n{_ADVICE}"])
        kind = before["optimizer"]["type"]
        if config.optimizer.type != kind:
            raise ConfigError(
                f'optimizer.type = "{config.optimizer.type}": the checkpoint holds the moments of {kind}. Set it to '
                f'"{kind}", or start anew from the weights with --init-model.'
            )
        for line in lines:
            logger.warning("the restart goes on with a change. %s", line)

    def run_id(self, config: RunConfig) -> str:
        """Return that of the run that is continued."""
        # files of 0.1.0 have none
        return self.payload.get("run") or _digest(self.payload["config"], "")

    def resume(self, trainer: Trainer) -> None:
        """Continue optimizer, averages, streams and logs after the step of the checkpoint."""
        trainer.load_state_dict(self.step, self.payload)
        logger.info(
            "restart after step %d of %s: weights, optimizer, averages, order of frames, learning rate and logs go on",
            self.step, self.path,
        )  # fmt: skip
        if self.step >= trainer.num_steps:
            logger.warning(
                "step %d is the last of %d already: nothing is left to train. Raise training.numb_steps to go on.",
                self.step, trainer.num_steps,
            )  # fmt: skip

    def _weights(self) -> Mapping[str, Tensor]:
        raw: Mapping[str, Tensor] = self.payload["model"]  # whatever was made of them after training
        return raw


def find_start(restart: str | None, init_model: str | None) -> Start:
    """Load the file that a run starts from, if any.

    Raises:
        CheckpointError: if it is missing, damaged, or of the wrong kind (an average cannot be restarted from).
    """
    if restart is not None:
        if _is_frozen(restart):
            raise CheckpointError(
                f"--restart {restart}: a frozen model holds weights only, not the state of a run. Use a training "
                f"checkpoint (model.ckpt-*.pt), or start anew from these weights with --init-model {restart}."
            )
        path = checkpoint.resolve(restart)
        payload = checkpoint.load(path)
        checkpoint.require_training(payload, path)
        return Restart(path, payload)
    if init_model is not None:
        return FromWeights(*_payload_of(init_model))
    return Start()


def _payload_of(file: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the path of a model file of any kind, and its content as that of a checkpoint."""
    if not _is_frozen(file):
        path = checkpoint.resolve(file)
        with suppress(checkpoint.DeepmdCheckpointError):  # read below
            return path, checkpoint.load(path)
    loaded = load_model(file)
    return loaded.info.path, _as_payload(loaded)


def _is_frozen(path: str) -> bool:
    return Path(path).suffix.lower() in FROZEN_SUFFIXES


def _as_payload(loaded: LoadedModel) -> dict[str, Any]:
    """Return the content of the file of weights that holds a frozen model."""
    info, config = loaded.info, {"model": to_dict(loaded.config)}
    head = checkpoint.payload_head("weights", info.weights, info.step, config, info.min_nbor_dist)
    return {**head, "model": dict(loaded.model.state_dict())}


def _digest(config: Mapping[str, Any], start: str) -> str:
    text = json.dumps([__version__, config, start], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(set(old) | set(new)):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
