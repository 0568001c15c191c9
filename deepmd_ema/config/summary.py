"""A short summary of a run, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deepmd_ema.config.messages import show
from deepmd_ema.config.schema.profile import StepsPer
from deepmd_ema.text import counted, every_steps, first_few

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import Link
    from deepmd_ema.config.schema.run import RunConfig


def config_summary(
    config: RunConfig, num_steps: int = 0, steps_per: StepsPer | None = None
) -> list[tuple[str, str]]:
    """Return names and texts of the main settings.

    They are rows of the tables of ``dp-ema check``, ``show`` and the start of a run.

    Args:
        config: config of the run.
        num_steps: length of the run, once the data are known.
        steps_per: steps of one of ``frames`` and ``epochs``, then as well.
    """
    training = config.training
    rows = {
        name: [*task.model.summary(), ("loss", task.loss.summary())]
        for name, task in config.tasks.items()
    }
    num_steps = training.numb_steps or num_steps
    passes = [
        f"{task} {epochs:g} epochs" for task, epochs in config.task_epochs.items()
    ]
    if num_steps:
        length = counted(num_steps, "step")
    else:
        length = ", ".join(passes) or f"{training.numb_epoch or 0:g} epochs"
    if (
        steps_per and "" in config.tasks
    ):  # several tasks see their data more or less often
        batches = round(steps_per["epochs"] * training.accumulate)
        epochs = num_steps * training.accumulate / batches
        length = (
            f"{counted(num_steps, 'step')} = {epochs:.1f} epochs of "
            f"{counted(batches, 'batch', 'batches')}"
        )
    averages = [
        ("average", f"{a.name}: {a.summary(steps_per or {})}")
        for a in training.averaging
    ]
    optimizer = config.optimizer.type
    decay = getattr(config.optimizer, "weight_decay", 0.0)
    if decay > 0:
        optimizer += f", weight decay {decay:g}"
    number = len(config.optimizer.groups)
    if number > 0:
        optimizer += f", {counted(number, 'group')} of parameters"
    batch = ", ".join(
        show(task.data.training_data.batch_size) for task in config.tasks.values()
    )
    several = (
        f", {training.accumulate} batches a step" if training.accumulate > 1 else ""
    )
    seed = "random" if training.seed is None else training.seed
    # batches that are displayed, of the tasks with validation data
    numbers = [
        data.numb_btch
        for task in config.tasks.values()
        if (data := task.displayed_data) is not None
    ]
    validation = "none (training.validation_data is missing)"
    if numbers:
        validation = (
            f"{counted(sum(numbers), 'batch', 'batches')} "
            f"{every_steps(training.disp_freq)}"
        )
    if (
        numbers
        and config.fully_validated
        and (v := config.validating).full_val_start != 1
    ):
        *names, last = config.fully_validated
        weights = f"{', '.join(names)} and {last}" if names else last
        metrics = dict.fromkeys(
            task.metric(v.validation_metric) for task in config.tasks.values()
        )
        which = f"{weights} weights, best by {' and '.join(metrics)}"
        if v.early_stop is not None:
            metric = v.early_stop.metric or v.validation_metric
            patience = counted(v.early_stop.patience, "validation")
            which += f"; the run ends after {patience} without a lower {metric}"
        validation += (
            f"; all data {every_steps(v.validation_freq)} and after the last ({which})"
        )
    tested = [
        system
        for task in config.tasks.values()
        if task.test is not None
        for system in task.test.systems
    ]
    return [
        *rows_of_tasks(rows, config.links),
        ("learning rate", config.learning_rate.summary(num_steps)),
        ("optimizer", optimizer),
        ("run", f"{length}, batch_size {batch}{several}, seed {seed}"),
        *(averages or [("average", "none")]),
        ("validation", validation),
        *([("test", f"{first_few(tested)}, after the last step")] if tested else []),
    ]


def rows_of_tasks(
    rows: Mapping[str, Sequence[tuple[str, str]]], links: Sequence[Link]
) -> list[tuple[str, str]]:
    """Return rows of a table, each with the tasks that it is about, and rows of shared parts.

    Rows of one task remain as they are.

    Args:
        rows: names and texts by the name of the task, which is empty in a run of one.
        links: parts that the models share.
    """
    tasks: dict[tuple[str, str], list[str]] = {}  # by name and text
    for task, rows_of_task in rows.items():
        for row in rows_of_task:
            tasks.setdefault(row, []).append(task)
    # rows of one name follow each other, at the place of the first: "descriptor" of all tasks, then
    # "fitting" of all tasks
    names = [name for name, _ in tasks]
    table = []
    for (name, text), having in sorted(
        tasks.items(), key=lambda item: names.index(item[0][0])
    ):
        table.append((name, f"{', '.join(having)}: {text}" if any(having) else text))
    sharing: dict[str, dict[str, list[str]]] = {}  # tasks by key and part
    for link in links:
        part = (
            f"embedding of elements of the {link.part}"
            if link.level == 1
            else link.part
        )
        sharing.setdefault(link.key, {}).setdefault(part, []).append(link.task)
    for key, parts in sharing.items():
        texts = [f"{part} of {' and '.join(having)}" for part, having in parts.items()]
        table.append(("shared", f"{key}: {', '.join(texts)}"))
    return table
