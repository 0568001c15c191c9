"""Findings about an input of several tasks: names, sections, shares and shared parts."""

from __future__ import annotations

import os
import re
from typing import Any

from deepmd_ema.config.messages import show
from deepmd_ema.config.schema.model import Link
from deepmd_ema.config.schema.profile import REMOVE_ONE
from deepmd_ema.config.schema.run import MultiTaskRun, RunConfig
from deepmd_ema.findings import Findings, error, unused, warning


def findings_of_tasks(run: RunConfig) -> Findings:
    """Yield the findings about the tasks of a run, at canonical places."""
    if not isinstance(run, MultiTaskRun):
        yield unused(
            "model.model_branch_alias",
            "there is one task, so no head is chosen by a name",
        )
        return
    for rule in (
        _names_of_tasks,
        _sections_of_tasks,
        _shares,
        _shared_parts,
        _case_embedding,
    ):
        yield from rule(run)


def _names_of_tasks(run: MultiTaskRun) -> Findings:
    """Yield errors of names that are not plain or not distinct, aliases included.

    They are parts of names of files, tensors and columns.
    """
    models = run.model.model_dict
    # reversed, so that of two names that differ in case only the second is refused
    names = {name.lower(): name for name in reversed(models)}
    taken: dict[str, str] = dict(names)
    for name, model in models.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w+-]*", name, re.ASCII):
            yield error(
                "model.model_dict",
                f": {show(name)} is no name of a task. Expected letters, digits, _, + "
                "and -, beginning with a letter or a digit.",
            )
        elif name.upper() == "RANDOM":
            yield error(
                f"model.model_dict.{name}",
                ": --model-branch RANDOM means a fresh network. Choose another name.",
            )
        if (other := names[name.lower()]) != name:
            yield error(
                f"model.model_dict.{name}",
                f": task {other} has this name but for upper and lower case, which "
                "--head does not distinguish. Choose another.",
            )
        for alias in model.model_branch_alias:
            if (other := taken.setdefault(alias.lower(), name)) != name:
                yield error(
                    f"model.model_dict.{name}.model_branch_alias",
                    f" = {show(model.model_branch_alias)}: {alias} means task {other} already. "
                    "Choose another.",
                )


def _sections_of_tasks(run: MultiTaskRun) -> Findings:
    """Yield errors of tasks without a model or data, and of other sections without a task."""
    tasks = run.model.model_dict
    training = run.training
    if not tasks:
        yield error(
            "model.model_dict",
            ": there is no task. Add the model of each, by its name.",
        )
        return
    for place, section, needs_all in (
        ("training.data_dict", training.data_dict, True),
        ("loss_dict", run.loss_dict, False),
        ("validating.test_data_dict", run.validating.test_data_dict, False),
        ("training.model_prob", training.model_prob, bool(training.model_prob)),
        (
            "training.num_epoch_dict",
            training.num_epoch_dict,
            bool(training.num_epoch_dict),
        ),
    ):
        for name in section:
            if name not in tasks:
                yield error(
                    f"{place}.{name}",
                    f": no task of model.model_dict. There: {', '.join(tasks)}.",
                )
        for name in tasks if needs_all else ():
            if name not in section:
                yield error(
                    place, f": task {name} of model.model_dict is missing. Add it."
                )


def _shares(run: MultiTaskRun) -> Findings:
    """Yield findings about the shares of tasks in training, and about a ``stat_file`` of two."""
    if run.task_weights and run.task_epochs:
        yield error(
            "training.model_prob",
            f": num_epoch_dict is given too, from which shares follow. {REMOVE_ONE}",
        )
    for option, numbers in (
        ("model_prob", run.task_weights),
        ("num_epoch_dict", run.task_epochs),
    ):
        for name in (name for name, number in numbers.items() if not number):
            yield warning(
                f"training.{option}.{name}",
                " = 0: no step trains this task, only what it shares with others is trained.",
            )
    first: dict[str, str] = {}
    for task in run.tasks.values():
        if task.data.stat_file is not None:
            file = os.path.realpath(task.data.stat_file)
            if (other := first.setdefault(file, task.name)) != task.name:
                yield error(
                    f"{task.place('training')}.stat_file",
                    f" = {show(task.data.stat_file)}: task {other} has it too. Name a file for "
                    "each task.",
                )


def _shared_parts(run: MultiTaskRun) -> Findings:
    """Yield errors of shared parts: other elements, or no embedding of elements to share."""
    first: dict[str, Link] = {}
    for link in run.links:
        place = f"model.model_dict.{link.task}"
        model = run.model.model_dict[link.task]
        # the first task with the part builds it: others take its rows of elements as they are
        other = run.model.model_dict[first.setdefault(link.key, link).task]
        if link.part != "type_map" and model.type_map != other.type_map:
            yield error(
                f"{place}.type_map",
                f" = {show(model.type_map)}: task {first[link.key].task}, with which it "
                f"shares {link.key}, has {show(other.type_map)}. Give both the same "
                "elements.",
            )
        part: Any = model.descriptor
        for key in link.place[1:]:  # a part of a hybrid
            part = part.list[key] if isinstance(key, int) else part
        if link.level and not part.has_type_embedding:
            yield error(
                place,
                f": {link.part} = {show(link.text)}: {part.type} has no embedding of "
                "elements to share. Use level 0, or none.",
            )


def _case_embedding(run: MultiTaskRun) -> Findings:
    """Yield findings about ``dim_case_embd``: one number for all tasks, with room for each."""
    sizes = {
        name: model.fitting_net.dim_case_embd
        for name, model in run.model.model_dict.items()
    }
    largest = max(sizes.values(), default=0)
    # the vector of a task has a 1 at its own place, so that each task needs one
    expected = max(largest, len(sizes))
    for name, size in sizes.items():
        if largest and size != expected:
            yield error(
                f"model.model_dict.{name}.fitting_net.dim_case_embd",
                f" = {size}: expected {expected} in every task, at least the number of "
                f"tasks ({len(sizes)}).",
            )
    # Tasks that share a fitting network differ in the energies of the elements only. Two methods
    # differ by more than a constant per element.
    links = [link for link in run.links if link.part == "fitting_net"]
    for key in dict.fromkeys(link.key for link in links):
        names = [link.task for link in links if link.key == key]
        models = [run.tasks[name].model for name in names if name in run.tasks]
        # finetune_bias other than auto shows that the user has thought of the methods of the labels
        is_chosen = any(model.finetune_bias != "auto" for model in models)
        if (
            len(models) > 1
            and not models[0].fitting_net.dim_case_embd
            and not is_chosen
        ):
            yield warning(
                f"model.shared_dict.{key}",
                f": the tasks {', '.join(names)} share this network and differ only in "
                "the energies of the elements. For labels of different methods give it "
                f'"dim_case_embd": {len(run.tasks)}.',
            )
