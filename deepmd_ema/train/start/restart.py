"""How a run starts: anew, from the weights of a file, or as the exact continuation of a run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.config import ModelConfig, RunConfig, model_configs, saved_config, to_dict
from deepmd_ema.config.differences import differences_of, shortened, without_tasks
from deepmd_ema.config.fields import plain
from deepmd_ema.config.messages import of_one_task
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.dist.dtensor import local_shard, shard_like
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.model.model_set import ModelSet, nested
from deepmd_ema.tensors import StoredTensor, check_weights, whole
from deepmd_ema.train.start import changed_tasks
from deepmd_ema.version import __version__

logger = logging.getLogger(__name__)

# a restart that differs in one of these is another run, not the continuation of this one
_OF_THE_START = ".finetune_head"  # says what a run began with, not how it goes on
CONTINUITY = (
    "model",
    "learning_rate",
    "optimizer",
    "loss",
    "training.training_data",
    "training.validation_fraction",
    "training.model_prob",
    "training.num_epoch_dict",
    "training.seed",
    "training.gradient_max_norm",
)
# often changed on purpose, to train longer; the learning rate may follow it, so it is said
LENGTH = ("training.numb_steps", "training.numb_epoch")
_SHORT_RANGE = ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax")
_OF_THE_RUN = ("trainable", "seed", "embedding_eval")  # options of a descriptor that say nothing of its features
_ADVICE = (
    "     A restart continues the same run. Put this back, or say --allow-config-change if the change is meant,\n"
    "     or start anew from the weights with --init-model."
)


class Resumable(Protocol):
    """A trainer that can continue a run.

    Attributes:
        tasks: what is trained, with the streams of frames.
        num_steps: last step of the run.
    """

    tasks: Any
    num_steps: int

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        """Load the state after ``step``."""


class Start:
    """A new run: weights come from the seed, statistics from the data.

    Subclasses start from a file. All differences between the ways to start are methods here.
    """

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return 0

    @property
    def splines(self) -> Mapping[str, Any] | None:
        """State of the splines of the run that is continued, or None."""
        return None

    def model_section(self, given: Any) -> Any:
        """Return the section ``model`` of the file, in place of that of the input.

        Args:
            given: the section in the input, right or wrong.

        Raises:
            ConfigError: if the run does not start from a file.
        """
        raise ConfigError(
            "--use-pretrain-script: takes the section `model` from a file, and none is given. Name it with --finetune, "
            "--init-model or --restart, or leave the option out."
        )

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with what it leaves open as it is in the file.

        Raises:
            CheckpointError: if the file holds a model of other elements.
        """
        return config

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether means, spreads and biases of the data are needed, because the file does not have all of them."""
        return True

    def fits_bias(self, task: str) -> bool:
        """Whether the output bias of a task is moved to the data before the first step."""
        return False

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint that is continued.

        Raises:
            ConfigError: if an option differs that the continuation depends on, unless ``allow_change``.
        """

    def run_id(self, config: RunConfig) -> str:
        """Return what tells this trajectory of weights from others: the same config and start always give the same."""
        return digest(to_dict(config), "")

    def min_nbor_dist(self, task: str, in_data: float | None) -> float | None:
        """Return the nearest pair that the model records, angstrom: that in the data, or that of the file."""
        return in_data

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``.

        Raises:
            CheckpointError: naming every missing, extra or reshaped tensor.
        """

    def loads_after_sharding(self, config: RunConfig) -> bool:
        """Whether each rank reads its shards of the weights when the models are sharded, in place of all weights."""
        return False

    def load_shards(self, models: ModelSet) -> None:
        """Put this rank's shards of the weights of the file into ``models``, which are sharded."""

    def resume(self, trainer: Resumable) -> None:
        """Load the state of the continued run into ``trainer``; nothing for a new run."""


@dataclass(frozen=True)
class FromWeights(Start):
    """A new run whose weights, live or averaged, are those of a file.

    Attributes:
        path: the file.
        payload: its content.
    """

    path: Path
    payload: Mapping[str, Any]

    def model_section(self, given: Any) -> Any:
        """Return the section ``model`` of the file, in place of that of the input.

        Raises:
            ConfigError: if it has several models, of another program, which does not say what they share.
        """
        config = self.payload["config"]
        if "model_dict" in config["model"] and "training" not in config:
            raise ConfigError(
                f"--use-pretrain-script: {self.path} has several models and does not say what they share. Write the "
                "section model into the input (`dp-ema show --config` prints the model of each)."
            )
        return config["model"]

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether statistics of the data are needed: all of them are in the file."""
        return False

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` as in the file where the input leaves it open."""
        models, saved = {}, self._saved
        self.check_tasks(config)
        for name, task in config.tasks.items():
            if name not in saved:
                continue
            model, place = task.model, f"{task.place('model')}.type_map"
            if saved[name].type_map != model.type_map:
                raise CheckpointError(
                    f"{self.path}: a model of type_map {saved[name].type_map}, but {place} is {model.type_map}. "
                    "Use the type_map of the file, or --finetune, which takes over the elements that both have."
                )
            if model.descriptor.neighbors is None:
                models[name] = model.with_descriptor(model.descriptor.with_neighbors_of(saved[name].descriptor))
            self.tell_differences(saved[name], model, task.place("model"))
        return config.with_models(models) if models else config

    def check_tasks(self, config: RunConfig) -> None:
        """Check that the file has a model for each task.

        Raises:
            CheckpointError: naming what it has instead.
        """
        if not (missing := [name for name in config.tasks if name not in self._saved]):
            return
        has = f"the models {', '.join(self._saved)}" if "" not in self._saved else "one model without a name"
        if missing == [""]:
            text = f"{has}, and the input has one task. Choose a model with --model-branch."
        else:
            text = (
                f"{has}, and none for {', '.join(missing)} of the input: --init-model needs one for each task. Use "
                "--finetune, which also starts several tasks from one model."
            )
        raise CheckpointError(f"{self.path}: holds {text}")

    def tell_differences(self, saved: ModelConfig, model: ModelConfig, place: str) -> None:
        """Warn of options with which the same weights mean another thing."""
        tell_differences(saved, model, place)

    def run_id(self, config: RunConfig) -> str:
        """Return what tells this trajectory of weights from others."""
        return digest(to_dict(config), str(self.path))

    def min_nbor_dist(self, task: str, in_data: float | None = None) -> float | None:
        """Return the nearest pair that the file records, angstrom."""
        found: float | None = nested(self.payload.get("min_nbor_dist"), (task,)).get(task)
        return found

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``."""
        changed_tasks.load_weights(models, self._weights(), self._tasks_in(models), self.path)
        step = "step not known" if self.payload["step"] is None else f"step {self.payload['step']}"
        logger.info("weights of %s (%s, %s)", self.path, self.payload["weights"] or "live or averaged", step)

    @cached_property
    def _saved(self) -> dict[str, ModelConfig]:
        return model_configs(self.payload["config"], str(self.path))

    def _tasks_in(self, models: ModelSet) -> list[str]:
        """Return the tasks of ``models`` that the file must have."""
        return list(models.by_task)

    def _weights(self) -> Mapping[str, Tensor]:
        return checkpoint.weights_in(self.payload, self.path)[0]


class Restart(FromWeights):
    """The continuation of a run, bitwise what it would have been without a break."""

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return int(self.payload["step"])

    @property
    def splines(self) -> Mapping[str, Any] | None:
        """State of the splines of the run that is continued; None in a file of a version without them."""
        found: Mapping[str, Any] | None = self.payload.get("splines")
        return found

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with what the input leaves open as in the file: ``sel`` and the seed."""
        config = super().adopt_from_checkpoint(config)
        if config.training.seed is not None:
            return config
        return replace(config, training=replace(config.training, seed=self.payload["config"]["training"]["seed"]))

    def check_tasks(self, config: RunConfig) -> None:
        """Check nothing: ``check_resumable`` tells of tasks that come and go."""

    def tell_differences(self, saved: ModelConfig, model: ModelConfig, place: str) -> None:
        """Say nothing: ``check_resumable`` refuses them."""

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint."""
        if ("" in self._tasks) != ("" in config.tasks):
            raise ConfigError(
                f"{self.path}: of a run of {_tasks_in_words(self._tasks)}, and the input has "
                f"{_tasks_in_words(config.tasks)}: no restart. Start anew from its weights with --finetune, "
                f"{'and --model-branch' if '' in config.tasks else 'and finetune_head for each task'}."
            )
        before, now = self.payload["config"], to_dict(config)
        if before != now:
            # both in today's form: the checkpoint may be of an older version, with options under other names
            before = to_dict(saved_config(before, str(self.path)))
        came, went = sorted(config.tasks.keys() - self._tasks), sorted(self._tasks - config.tasks.keys())
        found = without_tasks(differences_of(before, now), [*came, *went])
        differences = [d for d in found if not d[0].endswith(_OF_THE_START)]
        for path, old, new in differences:
            if path in LENGTH:
                logger.warning(
                    "%s was %s, is now %s: a decaying learning rate goes on along its new curve", path, old, new
                )
        changed = [d for d in differences if f"{of_one_task(d[0])}.".startswith(tuple(f"{k}." for k in CONTINUITY))]
        lines = [
            f"{path}: {shortened(old)} in the checkpoint, {shortened(new)} in the input" for path, old, new in changed
        ]
        lines += [f"task {name}: new, it starts from the seed and the statistics of its data" for name in came]
        lines += [f"task {name}: in the checkpoint only, and left behind" for name in went]
        if not lines:
            return
        if not allow_change:
            *others, last = [f"{line}." for line in lines]
            raise ConfigError([*others, f"{last}\n{_ADVICE}"])
        kind = before["optimizer"]["type"]
        if config.optimizer.type != kind:
            raise ConfigError(
                f'optimizer.type = "{config.optimizer.type}": the checkpoint holds the moments of {kind}. Set it to '
                f'"{kind}", or start anew from the weights with --init-model.'
            )
        if kind == LKFConfig.type and (came or went):
            raise ConfigError(
                f'optimizer.type = "{kind}": its covariances are of blocks of the weights of all tasks, and these are '
                "others now. Start anew from the weights with --finetune."
            )
        for line in lines:
            logger.warning("the restart goes on with a change. %s", line)

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether there are new tasks."""
        return bool(config.tasks.keys() - self._tasks)

    def run_id(self, config: RunConfig) -> str:
        """Return that of the run that is continued."""
        # files of 0.1.0 have none
        return self.payload.get("run") or digest(self.payload["config"], "")

    def loads_after_sharding(self, config: RunConfig) -> bool:
        """Whether each rank reads its shards only: no step before needs the weights of a model that is as it was."""
        training = config.training
        is_unchanged = to_dict(config)["model"] == self.payload["config"]["model"] and not training.enable_compile
        is_stored = any(isinstance(tensor, StoredTensor) for tensor in self.payload["model"].values())
        return is_stored and training.shards_weights and is_unchanged

    def load_shards(self, models: ModelSet) -> None:
        """Put this rank's shards of the weights of the file into ``models``, which are sharded."""
        own, found = models.state_dict(), self.payload["model"]
        check_weights({name: tuple(tensor.shape) for name, tensor in own.items()}, found, self.path)
        with torch.no_grad():
            for name, tensor in own.items():
                local_shard(tensor).copy_(shard_like(found[name], tensor))
        logger.info("weights of %s (%s, step %d), by shards", self.path, self.payload["weights"], self.step)

    def resume(self, trainer: Resumable) -> None:
        """Continue optimizer, averages, streams and logs after the step of the checkpoint."""
        state = self.payload
        if self._tasks != {task.name for task in trainer.tasks}:
            models, streams = next(iter(trainer.tasks)).models, trainer.tasks.state_dict()
            state = changed_tasks.state_for(models, state, streams, str(self.path))
        trainer.load_state_dict(self.step, state)
        logger.info(
            "restart after step %d of %s: weights, optimizer, averages, order of frames, learning rate and logs go on",
            self.step, self.path,
        )  # fmt: skip
        if self.step >= trainer.num_steps:
            logger.warning(
                "step %d is the last of %d already: nothing is left to train. Raise training.numb_steps to go on.",
                self.step, trainer.num_steps,
            )  # fmt: skip

    @property
    def _tasks(self) -> set[str]:
        return set(self._saved)

    def _tasks_in(self, models: ModelSet) -> list[str]:
        return [task for task in models.by_task if task in self._tasks]

    def _weights(self) -> Mapping[str, Tensor]:
        raw: Mapping[str, Tensor] = whole(self.payload["model"])  # whatever was made of them after training
        return raw


def _tasks_in_words(tasks: Collection[str]) -> str:
    return "one task" if "" in tasks else f"several tasks ({', '.join(sorted(tasks))})"


def digest(config: Mapping[str, Any], start: str) -> str:
    """Return what tells a run from others: the same config and ``start`` always give the same."""
    text = json.dumps([__version__, config, start], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tell_differences(saved: ModelConfig, model: ModelConfig, place: str) -> None:
    """Warn of options of a model that are not those of its file: weights may fit and mean another thing.

    Args:
        saved: section ``model`` of the file.
        model: that of the input.
        place: where the latter stands.
    """
    same_elements = model.type_map == saved.type_map
    before, now = to_dict(saved), to_dict(model)
    for path, old, new in differences_of(plain(saved.descriptor), plain(model.descriptor), f"{place}.descriptor"):
        name = path.rpartition(".")[2]
        # two spellings of one value; None is the default
        is_same = {str(old), str(new)} == {"default", "float64"} or None in (old, new) or old == [new] or new == [old]
        is_of_elements = name in ("sel", "exclude_types") and not same_elements
        if not (name in _OF_THE_RUN or is_of_elements or is_same or new == "auto"):
            logger.warning("%s was %s where the weights were trained, is %s here", path, shortened(old), shortened(new))
    for name in _SHORT_RANGE:
        # a table of other elements has other columns
        one, other = before.get(name), now.get(name)
        if one != other and (same_elements or None in (one, other)):
            logger.warning("%s.%s is not that of the file, which acts where atoms come close", place, name)
