"""How a run starts: anew, from the weights of a file, by fine-tuning them, or as the exact continuation of a run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepmd_ema import __version__, checkpoint
from deepmd_ema.config import ModelConfig, RunConfig, config_from_dict, model_configs, to_dict
from deepmd_ema.config.differences import differences_of, shortened, without_tasks
from deepmd_ema.config.fields import plain
from deepmd_ema.config.messages import of_one_task
from deepmd_ema.config.schema.linear import LinearConfig
from deepmd_ema.errors import CheckpointError, ConfigError, UserError
from deepmd_ema.infer.load import FROZEN_SUFFIXES, LoadedModel, heads_in, load_model
from deepmd_ema.model.elements import ElementsError, carried_over
from deepmd_ema.model.model_set import ModelSet, nested
from deepmd_ema.train import changed_tasks

if TYPE_CHECKING:
    from deepmd_ema.train.trainer import Trainer


logger = logging.getLogger(__name__)

# a restart that differs in one of these is another run, not the continuation of this one
_OF_THE_START = "model.finetune_head"  # says what a run began with, not how it goes on
CONTINUITY = (
    "model",
    "learning_rate",
    "optimizer",
    "loss",
    "training.training_data",
    "training.model_prob",
    "training.num_epoch_dict",
    "training.seed",
    "training.gradient_max_norm",
)
# often changed on purpose, to train longer; the learning rate may follow it, so it is said
LENGTH = ("training.numb_steps", "training.numb_epoch")
RANDOM = "RANDOM"  # as a head: a fresh fitting network
_SHORT_RANGE = ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax")
_OF_THE_RUN = ("trainable", "seed")  # options of a descriptor that say nothing of its features
_ADVICE = (
    "     A restart continues the same run. Put this back, or say --allow-config-change if the change is meant,\n"
    "     or start anew from the weights with --init-model."
)


class Start:
    """A new run: weights come from the seed, statistics from the data.

    Subclasses start from a file. All differences between the ways to start are methods here.

    Attributes:
        fits_bias: whether the output bias is moved to the data before the first step.
    """

    fits_bias: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return 0

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

    path: Path
    payload: Mapping[str, Any]

    def model_section(self, given: Any) -> Any:
        """Return the section ``model`` of the file, in place of that of the input."""
        return self.payload["config"]["model"]

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether statistics of the data are needed: all of them are in the file."""
        return False

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` as in the file where the input leaves it open."""
        models, saved = {}, model_configs(self.payload["config"], str(self.path))
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
            self.tell_differences(saved[name], model)
        return config.with_models(models) if models else config

    def tell_differences(self, saved: ModelConfig, model: ModelConfig) -> None:
        """Warn of options with which the same weights mean another thing."""
        _tell_differences(saved, model)

    def run_id(self, config: RunConfig) -> str:
        """Return what tells this trajectory of weights from others."""
        return _digest(to_dict(config), str(self.path))

    def min_nbor_dist(self, task: str, in_data: float | None = None) -> float | None:
        """Return the nearest pair that the file records, angstrom."""
        found: float | None = nested(self.payload.get("min_nbor_dist"), (task,)).get(task)
        return found

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``."""
        changed_tasks.load_weights(models, self._weights(), self._tasks_in(models), self.path)
        step = "step not known" if self.payload["step"] is None else f"step {self.payload['step']}"
        logger.info("weights of %s (%s, %s)", self.path, self.payload["weights"] or "live or averaged", step)

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

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` and the seed as in the file where the input leaves them open."""
        config = super().adopt_from_checkpoint(config)
        if config.training.seed is None:
            seed = self.payload["config"]["training"]["seed"]
            config = replace(config, training=replace(config.training, seed=seed))
        return config

    def tell_differences(self, saved: ModelConfig, model: ModelConfig) -> None:
        """Say nothing: ``check_resumable`` refuses them."""

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint."""
        before, now = self.payload["config"], to_dict(config)
        if before != now:
            # both in today's form: the checkpoint may be of an older version, with options under other names
            before = to_dict(config_from_dict(before, str(self.path)))
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
        for line in lines:
            logger.warning("the restart goes on with a change. %s", line)

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether there are new tasks."""
        return bool(config.tasks.keys() - self._tasks)

    def run_id(self, config: RunConfig) -> str:
        """Return that of the run that is continued."""
        # files of 0.1.0 have none
        return self.payload.get("run") or _digest(self.payload["config"], "")

    def resume(self, trainer: Trainer) -> None:
        """Continue optimizer, averages, streams and logs after the step of the checkpoint."""
        state = self.payload
        if self._tasks != {task.name for task in trainer.tasks}:
            fresh = {"optimizer": trainer.take_step.state_dict(), "streams": trainer.tasks.state_dict()}
            state = changed_tasks.state_for(next(iter(trainer.tasks)).models, state, fresh, str(self.path))
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

    @cached_property
    def _tasks(self) -> set[str]:
        return set(model_configs(self.payload["config"], str(self.path)))

    def _tasks_in(self, models: ModelSet) -> list[str]:
        return [task for task in models.by_task if task in self._tasks]

    def _weights(self) -> Mapping[str, Tensor]:
        raw: Mapping[str, Tensor] = self.payload["model"]  # whatever was made of them after training
        return raw


@dataclass(frozen=True)
class FineTune(Start):
    """A new run on other data: weights of a file, with the elements and the energy of each that the new data need.

    Elements that the file does not have get the parameters of the seed and statistics of the data. The bias is moved by
    a fit of label minus prediction, or, with a fresh fitting network, set by a fit of the labels.

    Attributes:
        loaded: the model of the file.
        fresh_fitting: whether the fitting network starts anew.
    """

    loaded: LoadedModel
    fresh_fitting: bool = False

    @property
    def fits_bias(self) -> bool:  # type: ignore[override]
        """Whether the output bias is moved to the data before the first step."""
        return not self.fresh_fitting

    @property
    def path(self) -> Path:
        """The file."""
        return self.loaded.info.path

    def model_section(self, given: Any) -> Any:
        """Return the section of the input with descriptor and fitting network of the file, trainable as given.

        Raises:
            ConfigError: if options of the file count elements by number, and the elements are others.
        """
        section = to_dict(self.loaded.config)
        if not isinstance(given, Mapping):
            return section
        type_map = given.get("type_map", section["type_map"])
        if isinstance(self.loaded.config, LinearConfig):
            return self._linear_section(given, type_map, section)
        taken = ("descriptor",) if self.fresh_fitting else ("descriptor", "fitting_net")
        by_number = [path for n in taken for path in _given(section[n], ("exclude_types", "atom_ener"), n)]
        if by_number and type_map != section["type_map"]:
            raise ConfigError(
                f"--use-pretrain-script: {', '.join(by_number)} of {self.path} counts elements by number, and type_map "
                "is another here. Write the section model into the input (`dp-ema show --config` prints it)."
            )
        own = {name: given[name] if isinstance(given.get(name), Mapping) else {} for name in taken}
        trained = {name: {"trainable": own[name]["trainable"]} if "trainable" in own[name] else {} for name in taken}
        return {**given, "type_map": type_map, **{name: {**section[name], **trained[name]} for name in taken}}

    def _linear_section(self, given: Mapping[str, Any], type_map: Any, section: Mapping[str, Any]) -> Any:
        """Return the section of the input with the parts of the file and their weights.

        Raises:
            ConfigError: if the elements are others: tables and options of parts count them by number.
        """
        if type_map != section["type_map"]:
            raise ConfigError(
                f"--use-pretrain-script: the parts of {self.path} are for type_map = {section['type_map']}, and it is "
                "another here. Write the section model into the input (`dp-ema show --config` prints it)."
            )
        return {**given, **{name: section[name] for name in ("type", "type_map", "models", "weights")}}

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` as in the file where the input leaves it open and it fits."""
        models, saved = {}, self.loaded.config
        for name, task in config.tasks.items():
            model = task.model
            _tell_differences(saved, model)
            fits = len(saved.descriptor.neighbors or ()) == 1 or model.type_map == saved.type_map
            if model.descriptor.neighbors is None and fits and model.descriptor.type == saved.descriptor.type:
                models[name] = model.with_descriptor(model.descriptor.with_neighbors_of(saved.descriptor))
        return config.with_models(models) if models else config

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether there are new elements, or a fresh fitting network."""
        known = set(self.loaded.config.type_map)
        return self.fresh_fitting or any(set(task.model.type_map) - known for task in config.tasks.values())

    def run_id(self, config: RunConfig) -> str:
        """Return what tells this trajectory of weights from others."""
        return _digest(to_dict(config), f"{self.path} fine-tuned")

    def min_nbor_dist(self, task: str, in_data: float | None = None) -> float | None:
        """Return the nearest pair that the model has seen, angstrom: in the data or in those of the file."""
        return min((d for d in (in_data, self.loaded.info.min_nbor_dist) if d is not None), default=None)

    def load_weights(self, models: ModelSet) -> None:
        """Take over the weights of the file for the elements that it has."""
        old = self.loaded.model
        for model in models.by_task.values():
            try:
                model.load_state_dict(carried_over(old, model, with_fitting=not self.fresh_fitting))
            except ElementsError as error:
                lines = [f"{self.path}: its weights do not fit the model of this input.", *error.problems]
                advice = "Use its sections descriptor and fitting_net (--use-pretrain-script takes them)"
                last = "." if self.fresh_fitting else ", or a fresh fitting network (--model-branch RANDOM)."
                raise CheckpointError("\n  ".join([*lines, advice + last])) from error
            new = [name for name in model.type_map if name not in old.type_map]
            logger.info(
                "fine-tuning %s: %s; %s; fitting network %s", self.path, self.loaded.info.in_words(),
                f"new elements {' '.join(new)}" if new else "no new elements",
                "fresh" if self.fresh_fitting else "of the file",
            )  # fmt: skip


def find_start(
    restart: str | None, init_model: str | None, finetune: str | None = None, head: str | None = None
) -> Start:
    """Load the file that a run starts from, if any.

    Args:
        restart: checkpoint to continue.
        init_model: file whose weights a new run starts from.
        finetune: file whose weights are fine-tuned.
        head: which model of a file with several; ``RANDOM`` is a fresh fitting network, for fine-tuning.

    Raises:
        CheckpointError: if it is missing, damaged, or of the wrong kind (an average cannot be restarted from).
        UserError: if a head is given for what has none.
    """
    if head is not None and (restart is not None or (init_model is None and finetune is None)):
        raise UserError("--model-branch: chooses a model of the file of --finetune or --init-model. Leave it out.")
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
    if finetune is not None:
        return _fine_tune(finetune, head)
    if init_model is not None:
        return FromWeights(*_payload_of(init_model, head))
    return Start()


def _fine_tune(file: str, head: str | None) -> FineTune:
    if head is not None and head.upper() != RANDOM:
        return FineTune(load_model(file, head=head))
    heads = heads_in(file)
    if heads and head is None:
        logger.warning(
            "%s holds %s: no --model-branch chooses one, so the fitting network starts anew", file, ", ".join(heads)
        )
    first = heads[0] if heads else None  # they share the descriptor
    return FineTune(load_model(file, head=first), fresh_fitting=bool(heads) or head is not None)


def _payload_of(file: str, head: str | None) -> tuple[Path, Mapping[str, Any]]:
    """Return the path of a model file of any kind, and its content as that of a checkpoint."""
    if not _is_frozen(file) and head is None:
        path = checkpoint.resolve(file)
        with suppress(checkpoint.DeepmdCheckpointError):  # read below
            return path, checkpoint.load(path)
    loaded = load_model(file, head=head)
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


def _tell_differences(saved: ModelConfig, model: ModelConfig) -> None:
    """Warn of options of a model that are not those of its file: weights may fit and mean another thing."""
    same_elements = model.type_map == saved.type_map
    before, now = to_dict(saved), to_dict(model)
    for path, old, new in differences_of(plain(saved.descriptor), plain(model.descriptor), "model.descriptor"):
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
            logger.warning("model.%s is not that of the file, which acts where atoms come close", name)


def _given(value: Any, names: tuple[str, ...], path: str) -> Iterator[str]:
    """Yield the paths of options with a value in a section and in those inside of it."""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
        if key in names and part:
            yield place
        else:
            yield from _given(part, names, place)
