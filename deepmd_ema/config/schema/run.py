"""A whole run as one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from deepmd_ema.config.fields import option, plain
from deepmd_ema.config.messages import Source
from deepmd_ema.config.schema.linear import LinearConfig
from deepmd_ema.config.schema.model import ModelConfig, StandardConfig
from deepmd_ema.config.schema.optim import AdamConfig, EnerLossConfig, OptimizerConfig, ScheduleConfig
from deepmd_ema.config.schema.training import TrainingConfig, TrainingDataConfig, ValidatingConfig, ValidationDataConfig
from deepmd_ema.weights import LIVE


@dataclass(frozen=True)
class TaskConfig:
    """What one task of a run trains: a model with its loss and its data.

    Attributes:
        name: of the task; empty in a single-task input.
        model: its section ``model``.
        loss: its section ``loss``.
        training_data: frames it is trained on.
        validation_data: frames it is validated on, or None.
    """

    name: str
    model: ModelConfig
    loss: EnerLossConfig
    training_data: TrainingDataConfig
    validation_data: ValidationDataConfig | None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections of an input file.

    Attributes:
        source: the file, and where in it each option stands; not compared.
        notes: what was accepted from an older input and taken differently, for the log; not compared.
        unused: options that stand for others and have no effect in this run, for the log; not compared.
    """

    model: StandardConfig | LinearConfig = option(default_type="standard", doc="What is trained.")
    learning_rate: ScheduleConfig = option(default_type="exp", doc="How the learning rate goes down.")
    optimizer: OptimizerConfig = option(AdamConfig(), default_type="Adam", doc="How parameters follow gradients.")
    loss: EnerLossConfig = option(EnerLossConfig(), default_type="ener", doc="What is minimized.")
    training: TrainingConfig = option(doc="How long, on which data, and what is written when.")
    validating: ValidatingConfig = option(ValidatingConfig(), doc="Full validation and the best weights.")
    source: Source = field(default_factory=Source, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unused: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The tasks of the run by name; the only task of a single-task input is called ``""``."""
        t = self.training
        return {"": TaskConfig("", self.model, self.loss, t.training_data, t.validation_data)}

    def with_models(self, models: Mapping[str, ModelConfig]) -> RunConfig:
        """Return the run with the sections ``model`` of some tasks, by name of the task, replaced."""
        return replace(self, model=cast("StandardConfig | LinearConfig", models.get("", self.model)))

    @property
    def fully_validated(self) -> list[str]:
        """Names of the weights that are validated on all validation data: ``live``, then those of averages."""
        live = [LIVE] if self.validating.full_validation else []
        return live + [average.name for average in self.training.averaging if average.full_validation]


def to_dict(config: RunConfig | ModelConfig) -> dict[str, Any]:
    """Return the normalized config as plain JSON: canonical keys, every default filled in (the file ``out.json``)."""
    result: dict[str, Any] = plain(config)
    return result
