"""A whole run as one frozen object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from deepmd_ema.config.fields import option, plain, section
from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.messages import Names, Source, Values
from deepmd_ema.config.schema.model import MODELS, Link, ModelConfig
from deepmd_ema.config.schema.optim import (
    AdamConfig,
    EnerLossConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.config.schema.training import (
    MultiTaskTrainingConfig,
    TaskDataConfig,
    TestDataConfig,
    TrainingConfig,
    TrainingOptions,
    ValidatingConfig,
    ValidationDataConfig,
)
from deepmd_ema.errors import ConfigError
from deepmd_ema.utils import LIVE


@dataclass(frozen=True)
class TaskConfig:
    """One task of a run: a model with its loss and its data.

    Attributes:
        name: name of the task; empty in a single-task input.
        model: its section ``model``.
        loss: its section ``loss``.
        data: its training and validation data, and the cache of their statistics.
        test: data that are evaluated after the last step.
    """

    name: str
    model: ModelConfig
    loss: LossConfig
    data: TaskDataConfig
    test: TestDataConfig | None = None

    @property
    def labels(self) -> Names:
        """Labels that the loss compares with."""
        return self.loss.labels(self.model.fitting_net.labels)

    def metric(self, metric: Metric) -> Metric:
        """Return ``metric``, or the same kind of error of another quantity.

        Where the model does not predict the quantity, the first one in the loss takes its place.
        """
        predicted = self.model.fitting_net.metrics
        if metric.quantity in predicted:
            return metric
        in_loss = (
            error.metric
            for name in self.labels
            for error in LABELS[name].errors
            if error.metric
        )
        return Metric(f"{next(in_loss, predicted[0])}:{metric.error}")

    @property
    def is_validated(self) -> bool:
        """Whether it has validation frames, of their own or split off."""
        return (
            self.data.validation_data is not None
            or self.data.validation_fraction is not None
        )

    @property
    def displayed_data(self) -> ValidationDataConfig | None:
        """Sampling of validation frames for the learning curve.

        Frames that are split off from the training data are drawn as those.
        """
        if self.data.validation_fraction is None:
            return self.data.validation_data
        size = self.data.training_data.batch_size
        auto = ValidationDataConfig(systems=self.data.training_data.systems)
        # a list has a number for each training system, and not every one has split-off frames
        return auto if isinstance(size, list) else replace(auto, batch_size=size)

    def place(self, section: str) -> str:
        """Return the dotted path of a section of the task.

        Args:
            section: ``model``, ``loss``, ``training`` (its data) or ``validating.test_data``.
        """
        if not self.name:
            return section
        sections = {"model": "model.model_dict", "training": "training.data_dict"}
        return f"{sections.get(section, f'{section}_dict')}.{self.name}"


@section
class RunConfig:
    """Sections that inputs of one and of several tasks share.

    Attributes:
        first_options: sections that are listed first.
        source: the file, and the place of each option in it; not compared.
        notes: options of an older input that were read differently, for the log; not compared.
        unused: options of a short form that have no effect in this run, for the log; not compared.
        links: parts of models that are in ``model.shared_dict``; only with several tasks.
    """

    first_options: ClassVar[Names] = (
        "model",
        "learning_rate",
        "optimizer",
        "loss",
        "loss_dict",
    )

    model: Any = option(doc="The model that is trained.")
    learning_rate: ScheduleConfig = option(
        default_type="exp", doc="How the learning rate goes down."
    )
    optimizer: OptimizerConfig = option(
        AdamConfig(), "How parameters follow gradients.", default_type="Adam"
    )
    training: TrainingOptions = option(
        doc="How long, on which data, and what is written when."
    )
    validating: ValidatingConfig = option(
        ValidatingConfig(), "Full validation and the best weights."
    )
    # Not compared: equal runs from two files are equal. Without metadata these are no options.
    source: Source = field(default_factory=Source, compare=False, repr=False)
    notes: Names = field(default=(), compare=False, repr=False)
    unused: Names = field(default=(), compare=False, repr=False)
    links: tuple[Link, ...] = ()

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The tasks of the run by name; the only task of a single-task input is called ``""``."""
        raise NotImplementedError

    def task(self, name: str | None) -> TaskConfig:
        """Return the task of a name, as :func:`choose_head` does.

        Raises:
            ConfigError: if there is no such task, or there are several.
        """
        tasks = self.tasks
        aliases = {task.name: task.model.model_branch_alias for task in tasks.values()}
        return tasks[choose_head(aliases, name, self.source.name)]

    def of_task(self, task: TaskConfig) -> SingleTaskRun:
        """Return the input of one task that trains the model of that task as the run does."""
        # without links and shares of steps: a model alone shares nothing, and has all the steps
        data = {f.name: getattr(task.data, f.name) for f in fields(TaskDataConfig)}
        length = {
            f.name: getattr(self.training, f.name) for f in fields(TrainingOptions)
        }
        return SingleTaskRun(
            model=task.model,
            loss=task.loss,
            training=TrainingConfig(**data, **length),
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            validating=replace(self.validating, test_data=task.test, test_data_dict={}),
            source=self.source,
        )

    def sharing_with(self, task: str) -> list[str]:
        """Return ``task`` and the tasks with which it shares a part of the descriptor.

        They may share it directly, or each with a third one.
        """
        together = {task}
        keys = {link.key for link in self.links if link.part.startswith("descriptor")}
        groups = [{link.task for link in self.links if link.key == key} for key in keys]
        # a chain of shared parts has at most as many links as there are groups
        for _ in groups:
            together = together.union(*(group for group in groups if group & together))
        return [name for name in self.tasks if name in together]

    @property
    def task_weights(self) -> Mapping[str, float]:
        """Relative frequency of each task in training, by its name; empty if it is not given."""
        return getattr(self.training, "model_prob", {})

    @property
    def task_epochs(self) -> Mapping[str, float]:
        """Number of epochs of each task, by its name; empty if it is not given."""
        return getattr(self.training, "num_epoch_dict", {})

    def with_models(self, models: Mapping[str, ModelConfig]) -> RunConfig:
        """Return the run with other sections ``model`` of some tasks, by name of the task."""
        # links remain: models that share a part must be replaced alike
        if "" in self.tasks:
            return replace(self, model=models.get("", self.model))
        section = replace(self.model, model_dict={**self.model.model_dict, **models})
        return replace(self, model=section)

    def deciding_metrics(self, task: TaskConfig) -> dict[str, Metric]:
        """Return the errors of a task that rank weights or end a validated run, by option."""
        validating, early_stop = self.validating, self.validating.early_stop
        chosen = {}
        if validating.save_best:
            chosen["validation_metric"] = validating.validation_metric
        if early_stop is not None:
            chosen["early_stop"] = early_stop.metric or validating.validation_metric
        return {
            f"validating.{name}": task.metric(metric) for name, metric in chosen.items()
        }

    @property
    def has_validation_data(self) -> bool:
        """Whether any task has validation frames."""
        return any(task.is_validated for task in self.tasks.values())

    @property
    def fully_validated(self) -> list[str]:
        """Names of the weights that are validated on all validation data, ``live`` first."""
        live = [LIVE] if self.validating.full_validation else []
        averages = self.training.averaging
        return live + [average.name for average in averages if average.full_validation]


@section
class SingleTaskRun(RunConfig):
    """All sections of an input of one task."""

    model: ModelConfig = option(
        registry=MODELS, default_type="standard", doc="The model that is trained."
    )
    loss: LossConfig = option(
        EnerLossConfig(), "The loss that is minimized.", default_type="ener"
    )
    training: TrainingConfig = option(
        doc="How long, on which data, and what is written when."
    )

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The only task, called ``""``."""
        return {
            "": TaskConfig(
                "", self.model, self.loss, self.training, self.validating.test_data
            )
        }


@section
class SharedParts:
    """Parts of models by name, for inputs only: in a config they are where models name them."""

    shared_dict: Values = option(
        {},
        "Sections `descriptor` and `fitting_net` and lists `type_map`, by names of your choice. A "
        "model of "
        "`model_dict` that has such a name instead of the part shares it with the others: "
        '`"descriptor": "dpa"` all of it, `"descriptor": "dpa:1"` the embedding of elements only.',
    )


@section
class ModelsConfig:
    """The models of several tasks. Other keys here hold for all of them."""

    shorthand = SharedParts

    model_dict: dict[str, ModelConfig] = option(
        registry=MODELS, default_type="standard", doc="Model of each task, by its name."
    )


@section
class MultiTaskRun(RunConfig):
    """All sections of an input of several tasks."""

    model: ModelsConfig = option(doc="The model that is trained.")
    loss_dict: dict[str, LossConfig] = option(
        {},
        "What is minimized, by task; a task that is not there has all defaults.",
        default_type="ener",
    )
    training: MultiTaskTrainingConfig = option(
        doc="How long, on which data, and what is written when."
    )

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The tasks in the order of ``model_dict``, without those that have no data."""
        data = self.training.data_dict
        test = self.validating.test_data_dict
        tasks = {}
        for name, model in self.model.model_dict.items():
            if (
                name in data
            ):  # a rule refuses a task without data; other rules still look at tasks
                loss = self.loss_dict.get(name, EnerLossConfig())
                tasks[name] = TaskConfig(name, model, loss, data[name], test.get(name))
        return tasks


def to_dict(config: RunConfig | ModelConfig) -> Values:
    """Return the normalized config as plain JSON, as in the file ``out.json``.

    Keys are canonical, and every default is filled in.
    """
    result: Values = plain(config)
    if isinstance(config, RunConfig) and config.links:
        # shared parts go back to shared_dict: equal parts in two models would be read as two parts
        shared = result["model"]["shared_dict"] = {}
        for link in config.links:
            *outer, last = link.place
            section = result["model"]["model_dict"][link.task]
            for key in outer:
                section = section[key]
            shared[link.key], section[last] = section[last], link.text
    return result


def choose_head(
    names: Mapping[str, Sequence[str]],
    head: str | None,
    source: str,
    option: str = "--head",
) -> str:
    """Return the model with a name or alias, in upper or lower case.

    Args:
        names: aliases by name; the name of a model that needs none is empty.
        head: the requested name; None where there is one model only.
        source: the file, for messages.
        option: option that chooses a model, for messages.

    Raises:
        ConfigError: if there is no such model, or there are several and ``head`` is None.
    """
    if head is None and len(names) == 1:
        return next(iter(names))
    # the only model of a file may have the name ""
    if not any(names):
        raise ConfigError(
            f"{source}: holds one model without a name, so there is no head {head!r}. Leave it out."
        )
    by_lower = {
        alias.lower(): name for name, aliases in names.items() for alias in aliases
    }
    by_lower |= {name.lower(): name for name in names}  # a name counts before an alias
    if head is None or head.lower() not in by_lower:
        wanted = "several models; which?" if head is None else f"no head {head!r}."
        raise ConfigError(
            f"{source}: {wanted} It has {', '.join(names)}: choose one with {option}."
        )
    return by_lower[head.lower()]
