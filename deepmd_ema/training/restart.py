"""A restart: the exact continuation of a run, perhaps with other tasks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.config import RunConfig, as_launched, read_input, saved_config, saved_models, to_dict
from deepmd_ema.config.differences import differences_of, shortened, without_tasks
from deepmd_ema.config.messages import of_one_task
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig, LKFConfig
from deepmd_ema.dist.dtensor import local_shard, shard_like
from deepmd_ema.errors import ConfigError, UserError, command, first_few
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.tensors import StoredTensor, check_weights, whole
from deepmd_ema.training.from_weights import FromWeights
from deepmd_ema.training.start import digest

logger = logging.getLogger(__name__)

# a restart that differs in one of these is another run, not the continuation of this one
_OF_THE_START = (".finetune_head", ".finetune_bias")  # are of the start of a run, not of its continuation
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
    "training.accumulate",
)
# often changed on purpose, to train longer; the learning rate may follow it, so it is reported
LENGTH = ("training.numb_steps", "training.numb_epoch")
_OF_ALL_TASKS = {  # optimizers whose state does not fit to other tasks, and why
    LKFConfig.type: "its covariances are of blocks of the weights of all tasks",
    AdamWScheduleFreeConfig.type: "its averaged point is over the steps of all tasks",
}
_ADVICE = (
    "     A restart continues the same run. Put this back, or say --allow-config-change if the change is meant,\n"
    "     or start anew from the weights with --init-model."
)


class Restart(FromWeights):
    """The continuation of a run, bitwise what it would have been without a break."""

    continues = True
    validates_before = False  # it was done, and is in the checkpoint

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return int(self.payload["step"])

    @property
    def interpolation(self) -> Mapping[str, Any] | None:
        """State of the interpolated networks of the run that is continued; None in a file of a version without them."""
        found: Mapping[str, Any] | None = self.payload.get("interpolation", self.payload.get("splines"))
        return found

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with what the input leaves open as in the file: ``sel`` and the seed."""
        config = super().adopt_from_checkpoint(config)
        if config.training.seed is not None:
            return config
        return replace(config, training=replace(config.training, seed=self.payload["config"]["training"]["seed"]))

    def whole_config(self) -> RunConfig:
        """Return the config of the checkpoint, with which a run continues that is given no input."""
        config = saved_config(self.payload["config"], str(self.path), whole=True)
        return replace(config, notes=())  # they are logged when it is compared with the checkpoint

    def warn_of_other_input(self, file: str, config: RunConfig) -> None:
        """Warn if the input in the folder, which is not used, differs from the config of the checkpoint.

        Args:
            file: the input.
            config: of the run, from the checkpoint.
        """
        try:
            # zero_stage of the checkpoint may be that of a process without a launcher
            one, other = (as_launched(each, launched=False) for each in (config, read_input(file).config))
            found = differences_of(to_dict(one), to_dict(self.adopt_from_checkpoint(other)))
            texts = [f"{path} = {shortened(new)} (checkpoint: {shortened(old)})" for path, old, new in found]
        except UserError as error:
            texts = [error.problems[0]]
        if texts:
            logger.warning(
                "%s is not read, the config of %s counts. The former differs: %s. `%s` takes "
                "it instead.", file, self.path, first_few(texts).rstrip("."),
                command("dp-ema", "train", "--restart", self.path, file),
            )  # fmt: skip

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint."""
        if ("" in self._saved) != ("" in config.tasks):
            raise ConfigError(
                f"{self.path}: of a run of {_describe_tasks(self._saved)}, and the input has "
                f"{_describe_tasks(config.tasks)}: no restart. Start anew from its weights with --finetune, "
                f"{'and --model-branch' if '' in config.tasks else 'and finetune_head for each task'}."
            )
        before, now = self.payload["config"], to_dict(config)
        if before != now:
            # both in today's form: the checkpoint may be of an older version, with options under other names
            before = self._upgraded()
        came, went = sorted(config.tasks.keys() - self._saved.keys()), sorted(self._saved.keys() - config.tasks.keys())
        found = without_tasks(differences_of(before, now), [*came, *went])
        differences = [d for d in found if not d[0].endswith(_OF_THE_START)]
        for path, old, new in differences:
            if path in LENGTH:
                logger.warning(
                    "%s was %s, is now %s: a decaying learning rate continues along its new curve", path, old, new
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
        if kind in _OF_ALL_TASKS and (came or went):
            text = f'optimizer.type = "{kind}": {_OF_ALL_TASKS[kind]}, and these are others now. '
            raise ConfigError(text + "Start anew from the weights with --finetune.")
        for line in lines:
            logger.warning("the restart continues with a change. %s", line)

    def _upgraded(self) -> dict[str, Any]:
        """Return the config of the checkpoint in today's form, and log what it has that was removed since."""
        saved = saved_config(self.payload["config"], str(self.path))
        for note in saved.notes:
            logger.info("%s", note)
        return to_dict(saved)

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether there are new tasks."""
        return bool(config.tasks.keys() - self._saved.keys())

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

    def state(self, models: ModelSet, streams: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of the run that is continued, with that of new tasks."""
        logger.info(
            "restart after step %d of %s: weights, optimizer, averages, order of frames, learning rate and logs are "
            "continued", self.step, self.path,
        )  # fmt: skip
        if self._saved.keys() == models.by_task.keys():
            return self.payload
        return _state_of_tasks(models, self.payload, streams, str(self.path))

    def _weights(self) -> Mapping[str, Tensor]:
        raw: Mapping[str, Tensor] = whole(self.payload["model"])  # whatever was made of them after training
        return raw


def _state_of_tasks(
    models: ModelSet, payload: Mapping[str, Any], streams: Mapping[str, Any], source: str
) -> dict[str, Any]:
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
    # no rank requests the first moments from the others of new tasks: the optimizer, which was just built, has them
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


def _describe_tasks(tasks: Collection[str]) -> str:
    return "one task" if "" in tasks else f"several tasks ({', '.join(sorted(tasks))})"
