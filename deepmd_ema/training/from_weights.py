"""A new run that starts from the weights of a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.config import ModelConfig, RunConfig, saved_models, to_dict
from deepmd_ema.config.differences import differences_of, shortened
from deepmd_ema.config.fields import plain
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.model.model_set import ModelSet, nested
from deepmd_ema.tensors import check_weights, prefix_of
from deepmd_ema.training.start import Start, digest

logger = logging.getLogger(__name__)

_SHORT_RANGE = ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax")
_OF_THE_RUN = ("trainable", "seed", "interpolate")  # options of a descriptor that do not change its features


@dataclass(frozen=True)
class FromWeights(Start):
    """A new run whose weights, live or averaged, are those of a file.

    Attributes:
        path: the file.
        payload: its content.
    """

    continues: ClassVar[bool] = False  # the run of the file: then its options and tasks are compared later, all of them
    validates_before: ClassVar[bool] = True
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
        if not self.continues:
            self._check_tasks(config)
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
            if not self.continues:
                report_differences(saved[name], model, task.place("model"))
        return config.with_models(models) if models else config

    def _check_tasks(self, config: RunConfig) -> None:
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

    def run_id(self, config: RunConfig) -> str:
        """Return the identifier of this trajectory of weights."""
        return digest(to_dict(config), str(self.path))

    def min_nbor_dist(self, task: str, in_data: float | None = None) -> float | None:
        """Return the nearest pair that the file records, angstrom."""
        found: float | None = nested(self.payload.get("min_nbor_dist"), (task,)).get(task)
        return found

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``, also into what new tasks share with those of the file.

        Raises:
            CheckpointError: naming every missing, extra or reshaped tensor.
        """
        # a restart may have new tasks, and the file some that the run has no longer
        known = ModelSet({task: model for task, model in models.by_task.items() if task in self._saved})
        prefixes = tuple(map(prefix_of, known.by_task))
        found = {name: tensor for name, tensor in self._weights().items() if name.startswith(prefixes)}
        check_weights({name: tuple(tensor.shape) for name, tensor in known.state_dict().items()}, found, self.path)
        known.load_state_dict(found)
        new = [model.fitting for task, model in models.by_task.items() if task not in self._saved]
        taken = {model.fitting.case for model in known.by_task.values()}
        for fitting, case in zip(new, (n for n in range(len(models.by_task) + len(taken)) if n not in taken)):
            fitting.set_case(case)  # a task that stays has the case of before, whatever the names of new ones are
        step = "step not known" if self.payload["step"] is None else f"step {self.payload['step']}"
        logger.info("weights of %s (%s, %s)", self.path, self.payload["weights"] or "live or averaged", step)

    @cached_property
    def _saved(self) -> dict[str, ModelConfig]:
        return saved_models(self.payload["config"], str(self.path)).configs

    def _weights(self) -> Mapping[str, Tensor]:
        return checkpoint.weights_in(self.payload, self.path)[0]


def report_differences(saved: ModelConfig, model: ModelConfig, place: str) -> None:
    """Warn of options of a model that are not those of its file: weights may fit and mean another thing.

    Args:
        saved: section ``model`` of the file.
        model: that of the input.
        place: of the latter in the input.
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
