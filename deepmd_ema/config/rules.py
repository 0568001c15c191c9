"""Rules between options. Each is a function that yields places and messages of what does not fit together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.messages import Problem, Source, dotted, render, show
from deepmd_ema.config.outputs import Output, Outputs
from deepmd_ema.config.schema.model import Link
from deepmd_ema.config.schema.optim import EnerLossConfig, LKFConfig
from deepmd_ema.config.schema.profile import NEEDS_DATA, REMOVE_ONE
from deepmd_ema.config.schema.run import MultiTaskRun, RunConfig
from deepmd_ema.config.schema.training import ValidatingConfig
from deepmd_ema.config.sections import InvalidOptionError
from deepmd_ema.errors import ConfigError, command
from deepmd_ema.findings import ERROR, Finding

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.config.schema.run import TaskConfig

Violations = Iterator[tuple[str, str]]
"""Dotted path of an option, as seen from the section that the rule is about, and the rest of the message."""


def rule_problems(subject: RunConfig | ModelConfig) -> list[Problem]:
    """Return the violations of the rules in a run, or in a section ``model`` without a run.

    A rule ends where it reads an option that is wrong in itself.
    """
    problems: list[Problem] = []
    source = subject.source if isinstance(subject, RunConfig) else Source()
    rules = _rules(subject) if isinstance(subject, RunConfig) else _model("model", subject)
    with suppress(InvalidOptionError):
        for place, rule in rules:
            with suppress(InvalidOptionError):
                for name, text in rule:
                    problems.append(Problem(source.path(".".join(filter(None, (place, name)))), text))
    return problems


def _rules(run: RunConfig) -> Iterator[tuple[str, Violations]]:
    """Yield the place that each rule is about, and the rule, which has not begun; parts that are wrong come last."""
    for rule in (_learning_rate, _lkf, _gradients, _full_validation, _metrics, _files):
        yield "", rule(run)
    if isinstance(run, MultiTaskRun):
        for of_tasks in (_names_of_tasks, _sections_of_tasks, _shares, _shared_parts, _case_embedding):
            yield "", of_tasks(run)
    yield "", _lengths(run)
    with suppress(InvalidOptionError):
        for number, average in enumerate(run.training.averaging):
            yield f"training.averaging[{number}]", _errors(average.findings(run))
            yield f"training.averaging[{number}]", _name_of_average(run, number)
    for task in run.tasks.values():
        yield task.place("loss"), _loss(task)
        yield task.place("training"), _data(task)
        yield from _model(task.place("model"), task.model)


def _model(place: str, model: ModelConfig) -> Iterator[tuple[str, Violations]]:
    yield place, _errors(model.conflicts())
    for name, part in model.parts():
        yield f"{place}.{name}", _errors(part.findings(model.type_map))


def _errors(findings: Iterable[Finding]) -> Violations:
    return ((finding.place, finding.text) for finding in findings if finding.severity == ERROR)


def as_launched(run: RunConfig, launched: bool, restart: str | None = None, num_ranks: int = 1) -> RunConfig:
    """Return the run as a process trains it: at ``zero_stage`` 0, with a note, if no launcher has started it.

    Args:
        run: the run.
        launched: whether a launcher has started this process.
        restart: the checkpoint, if the config is that in it.
        num_ranks: number of processes that were started.

    Raises:
        ConfigError: if so many processes cannot train it, which concerns a start and not the loading of an input.
    """
    if isinstance(run.optimizer, LKFConfig) and num_ranks > 1:
        why = f"trains in one process only, and {num_ranks} were launched"
        text = f' = "LKF": {why}. Start it without a launcher, or choose Adam, AdamW, AdaMuon or HybridMuon.'
        raise ConfigError(render([Problem(run.source.path("optimizer.type"), text)], run.source))
    stage = run.training.zero_stage
    if launched or not stage:
        return run
    words = ("--restart", restart) if restart else (run.source.name,)
    note = (
        f"training.zero_stage = {stage}: no launcher has started this process, which trains with 0. "
        f"Launch with: export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 {command('dp-ema', 'train', *words)}"
    )
    return replace(run, training=replace(run.training, zero_stage=0), notes=(*run.notes, note))


def _learning_rate(run: RunConfig) -> Violations:
    lr: Any = run.learning_rate
    if lr.stop_lr is not None and lr.stop_lr_ratio is not None:
        yield "learning_rate.stop_lr_ratio", f" = {lr.stop_lr_ratio:g}: stop_lr is given too. {REMOVE_ONE}"
    if lr.warmup_steps > 0 and lr.warmup_ratio is not None:
        yield "learning_rate.warmup_ratio", f" = {lr.warmup_ratio:g}: warmup_steps is given too. {REMOVE_ONE}"
    if lr.stop_lr is not None and lr.stop_lr > lr.start_lr:
        yield "learning_rate.stop_lr", f" = {lr.stop_lr:g}: expected at most start_lr = {lr.start_lr:g}."
    # the inverse linear decay divides by the last rate
    if lr.stop_lr == 0 and getattr(lr, "decay_type", "") == "inverse_linear" and lr.decay_phase_ratio > 0:
        yield "learning_rate.stop_lr", " = 0: expected > 0 for decay_type inverse_linear. Or use decay_type linear."
    if (steps := run.training.numb_steps) and lr.warmup_steps >= steps:
        yield "learning_rate.warmup_steps", f" = {lr.warmup_steps}: expected less than training.numb_steps = {steps}."


def _lkf(run: RunConfig) -> Violations:
    """LKF trains in one process, with one batch, and of the loss takes only whether energies and forces are fitted."""
    if not isinstance(run.optimizer, LKFConfig):
        return
    training = run.training
    if training.zero_stage > 0:  # a block of its covariance has weights of several layers
        why = "LKF trains in one process only. Use 0, or choose Adam, AdamW, AdaMuon or HybridMuon."
        yield "training.zero_stage", f" = {training.zero_stage}: {why}"
    if training.gradient_max_norm:  # the length of an update is the filter's, not the gradient's
        text = f" = {training.gradient_max_norm:g}: not possible with optimizer.type LKF. {REMOVE_ONE}"
        yield "training.gradient_max_norm", text
    if training.accumulate > 1:  # there is no gradient to add up
        text = f" = {training.accumulate}: LKF updates weights with each batch. Use 1, or another optimizer."
        yield "training.accumulate", text
    for task in run.tasks.values():
        if not isinstance(task.loss, EnerLossConfig):
            yield (
                task.place("loss"),
                f".type = {show(task.loss.type)}: LKF fits energies and forces only. Use another optimizer.",
            )
            continue
        if task.data.training_data.frame_weights:
            path = f"{task.place('training')}.training_data.frame_weights"
            yield path, " = true: LKF does not weigh frames. Set it to false, or choose another optimizer."
        path, loss = task.place("loss"), task.loss
        for name in (f"{when}_pref_{term}" for term in ("v", "ae", "pf", "h") for when in ("start", "limit")):
            if getattr(loss, name):
                yield f"{path}.{name}", f" = {getattr(loss, name):g}: LKF fits energies and forces only. Set it to 0."
        for name in ("loss_func", "use_huber", "f_use_norm", "relative_f", "intensive_ener_virial"):
            value, default = getattr(loss, name), getattr(EnerLossConfig, name)
            if value != default:
                yield f"{path}.{name}", f" = {show(value)}: LKF does not know it. Set it to {show(default)}."


def _gradients(run: RunConfig) -> Violations:
    training = run.training
    # CUDA graphs that torch.compile makes overwrite the gradients of the batch before (pytorch issue 169545)
    if training.accumulate > 1 and training.enable_compile and training.compile_options.makes_cuda_graphs:
        text = f" = {training.accumulate}: not possible with CUDA graphs of torch.compile, which overwrite gradients."
        yield "training.accumulate", f"{text} Use 1, or backend inductor and mode default in training.compile_options."
    # a Hessian is made by a backward pass within the forward one, after which sharded parameters are given up
    if training.zero_stage > 1 and any("h" in task.loss.weights for task in run.tasks.values()):
        text = f" = {training.zero_stage}: second derivatives need all parameters on every rank."
        yield "training.zero_stage", f"{text} Use 0 or 1, or remove loss.start_pref_h and loss.limit_pref_h."
    others = [task for task in run.tasks.values() if ENERGY not in task.model.fitting_net.labels]
    compiled = {"training.enable_compile": training.enable_compile}
    compiled["validating.compiled_infer"] = bool(run.validating.compiled_infer)
    for name in (name for name, is_compiled in compiled.items() if others and is_compiled):
        text = f": models of fitting_net.type {others[0].model.fitting_net.type} are not compiled. Set it to false."
        yield name, f" = true{text}"
    if len(others) == len(run.tasks) and training.change_bias_after_training:
        text = " = true: no task has energies, whose bias it fits. Set it to false."
        yield "training.change_bias_after_training", text
    roots = [task for task in others if getattr(task.loss, "loss_func", "") == "rmse"]
    if roots and training.accumulate > 1:
        text = " is a root of a mean, which batches cannot add up. Use 1, or mse."
        yield "training.accumulate", f' = {training.accumulate}: loss_func "rmse"{text}'


def _lengths(run: RunConfig) -> Violations:
    """Exactly one of ``numb_steps`` and ``numb_epoch`` is given, or, with several tasks, ``num_epoch_dict``."""
    steps, epochs = run.training.numb_steps, run.training.numb_epoch
    if run.task_epochs:
        for name, value in (("numb_steps", steps), ("numb_epoch", epochs)):
            if value is not None:
                yield f"training.{name}", f" = {value:g}: num_epoch_dict is given too. {REMOVE_ONE}"
    elif steps is not None and epochs is not None:
        yield "training.numb_epoch", f" = {epochs:g}: numb_steps = {steps} is given too. Remove one."
    elif steps is None and epochs is None:
        yield "training", ': numb_steps or numb_epoch is required. Add one, e.g. "numb_steps": 100000.'


def _name_of_average(run: RunConfig, number: int) -> Violations:
    """No two averages have one name; upper and lower case are one on some disks."""
    name, averages = run.training.averaging[number].name, run.training.averaging
    same = next((n for n in range(number) if averages[n].name.lower() == name.lower()), None)
    if same is not None:
        case = "" if averages[same].name == name else " but for upper and lower case, and so have its files"
        first = dotted(run.source.path(f"training.averaging[{same}]"))
        yield "name", f" = {show(name)}: {first} has this name{case}. Choose another."


def _full_validation(run: RunConfig) -> Violations:
    if run.validating.full_validation and not run.has_validation_data:
        yield "validating.full_validation", NEEDS_DATA
    stop, validated = run.validating.early_stop, run.fully_validated
    if stop is not None and stop.weights is not None and validated and stop.weights not in validated:
        text = f" = {show(stop.weights)}: these weights have no full validation. With it: {', '.join(validated)}."
        yield "validating.early_stop.weights", text
    for name, is_wrong, use in (
        ("test_data", isinstance(run, MultiTaskRun), "several tasks. There it is test_data_dict.TASK"),
        ("test_data_dict", not isinstance(run, MultiTaskRun), "one task. There it is test_data"),
    ):
        if is_wrong and getattr(run.validating, name):
            yield f"validating.{name}", f": this is an input of {use}."


def _metrics(run: RunConfig) -> Violations:
    """Metrics that rank weights and end a run have weights in the loss of every task, at the start and the end."""
    metrics, early_stop = {"validation_metric": run.validating.validation_metric}, run.validating.early_stop
    if early_stop is not None and early_stop.metric is not None:
        metrics["early_stop.metric"] = early_stop.metric
    for name, metric in metrics.items() if run.fully_validated else ():
        known = {letter: None for task in run.tasks.values() for letter in task.model.fitting_net.metrics}
        # its default is not distinguished from an option that is not given
        is_given = name != "validation_metric" or metric != ValidatingConfig.validation_metric
        if metric.quantity not in known and is_given:
            text = f" = {show(metric)}: nothing of this is predicted. Choose one of {', '.join(known)}."
            yield f"validating.{name}", text
            continue
        for task in run.tasks.values():
            if not isinstance(task.loss, EnerLossConfig):
                continue
            letter = {"E": "e", "F": "f", "V": "v", "S": "v"}[task.metric(metric).quantity]
            start, limit = (getattr(task.loss, f"{when}_pref_{letter}") for when in ("start", "limit"))
            if not (start and limit):
                both = f"start_pref_{letter} = {start:g} and limit_pref_{letter} = {limit:g} must both be > 0"
                text = f" = {show(metric)}: not in the loss, whose {both}. Set them, or choose another metric."
                yield f"validating.{name}", text


def _files(run: RunConfig) -> Violations:
    """No two of learning curves, logs of full validation and links to weights have one name."""
    files: dict[str, Output] = {}
    for output in Outputs(run):
        file = os.path.normpath(output.path)
        first = output if output.is_folder else files.setdefault(file, output)
        if first is not output and (output.has_rows or first.option != output.option):
            text = f": {output.content} would be written to {file}, as {first.content} is. Choose another name."
            yield output.option, text


def _loss(task: TaskConfig) -> Violations:
    loss, fitting = task.loss, task.model.fitting_net
    wanted = fitting.loss
    if loss.type != wanted:
        more = ', "pref": 1, "pref_atomic": 0' * (wanted == "tensor")
        text = f'expected "loss": {{"type": "{wanted}"{more}}}, that of fitting_net.type {fitting.type}'
        yield "type", f" = {show(loss.type)}: {text}."
        return
    if not any(map(any, loss.weights.values())):
        names = "start_pref_e, start_pref_f, ..." if wanted == "ener" else "one of them."
        yield "", f": every weight is 0, so nothing would be trained. Set {names}"
    if not isinstance(loss, EnerLossConfig):
        return
    is_huber = loss.error == "huber"
    if loss.f_use_norm and loss.error == "mse":
        yield "f_use_norm", ' = true: needs "loss_func": "mae" or "use_huber": true. Add one, or remove it.'
    # it has no per-atom weights, no relative forces, and no term of second derivatives
    refused = {"relative_f": loss.relative_f is not None, "start_pref_pf": loss.start_pref_pf or loss.limit_pref_pf}
    refused |= {name: getattr(loss, name) for name in ("start_pref_h", "limit_pref_h")}
    for name in (name for name, is_given in refused.items() if is_given and is_huber):
        yield name, f" = {getattr(loss, name):g}: not possible with use_huber. {REMOVE_ONE}"


def _data(task: TaskConfig) -> Violations:
    data = task.data
    if data.stat_file_mode == "read" and data.stat_file is None:
        yield "stat_file_mode", ' = "read": needs stat_file beside it. Add it, or remove stat_file_mode.'
    if data.validation_fraction is not None and data.validation_data is not None:
        yield "validation_fraction", f" = {data.validation_fraction:g}: validation_data is given too. {REMOVE_ONE}"


# ---- several tasks


def _names_of_tasks(run: MultiTaskRun) -> Violations:
    """Names of tasks, which stand in names of files, tensors and columns, are plain and distinct, as are aliases."""
    models = run.model.model_dict
    names = {name.lower(): name for name in reversed(models)}
    taken: dict[str, str] = dict(names)
    for name, model in models.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w+-]*", name, re.ASCII):
            wants = "letters, digits, _, + and -, beginning with a letter or a digit"
            yield "model.model_dict", f": {show(name)} is no name of a task. Expected {wants}."
        elif name.upper() == "RANDOM":
            yield f"model.model_dict.{name}", ": --model-branch RANDOM means a fresh network. Choose another name."
        if (other := names[name.lower()]) != name:
            text = f": task {other} has this name but for upper and lower case, which --head does not distinguish."
            yield f"model.model_dict.{name}", f"{text} Choose another."
        for alias in model.model_branch_alias:
            if (other := taken.setdefault(alias.lower(), name)) != name:
                text = f" = {show(model.model_branch_alias)}: {alias} means task {other} already. Choose another."
                yield f"model.model_dict.{name}.model_branch_alias", text


def _sections_of_tasks(run: MultiTaskRun) -> Violations:
    """Every task has a model and data; losses and shares are those of tasks."""
    tasks, training = run.model.model_dict, run.training
    if not tasks:
        yield "model.model_dict", ": there is no task. Add the model of each, by its name."
        return
    for place, section, needs_all in (
        ("training.data_dict", training.data_dict, True),
        ("loss_dict", run.loss_dict, False),
        ("validating.test_data_dict", run.validating.test_data_dict, False),
        ("training.model_prob", training.model_prob, bool(training.model_prob)),
        ("training.num_epoch_dict", training.num_epoch_dict, bool(training.num_epoch_dict)),
    ):
        for name in section:
            if name not in tasks:
                yield f"{place}.{name}", f": no task of model.model_dict. There: {', '.join(tasks)}."
        for name in tasks if needs_all else ():
            if name not in section:
                yield place, f": task {name} of model.model_dict is missing. Add it."


def _shares(run: MultiTaskRun) -> Violations:
    """``model_prob`` and ``num_epoch_dict`` exclude each other, and no two tasks have one ``stat_file``."""
    if run.task_weights and run.task_epochs:
        yield "training.model_prob", f": num_epoch_dict is given too, from which shares follow. {REMOVE_ONE}"
    first: dict[str, str] = {}
    for task in run.tasks.values():
        if task.data.stat_file is not None:
            file = os.path.normpath(task.data.stat_file)
            if (other := first.setdefault(file, task.name)) != task.name:
                text = f" = {show(task.data.stat_file)}: task {other} has it too. Name a file for each task."
                yield f"{task.place('training')}.stat_file", text


def _shared_parts(run: MultiTaskRun) -> Violations:
    """Models that share a part have the same elements; what says nothing of elements has no embedding to share."""
    first: dict[str, Link] = {}
    for link in run.links:
        place, model = f"model.model_dict.{link.task}", run.model.model_dict[link.task]
        other = run.model.model_dict[first.setdefault(link.key, link).task]
        if link.part != "type_map" and model.type_map != other.type_map:
            text = f" = {show(model.type_map)}: task {first[link.key].task}, with which it shares {link.key}, has "
            yield f"{place}.type_map", f"{text}{show(other.type_map)}. Give both the same elements."
        part: Any = model.descriptor
        for key in link.place[1:]:  # a part of a hybrid
            part = part.list[key] if isinstance(key, int) else part
        if link.level and not part.has_type_embedding:
            text = f": {link.part} = {show(link.text)}: {part.type} has no embedding of elements to share."
            yield place, f"{text} Use level 0, or none."


def _case_embedding(run: MultiTaskRun) -> Violations:
    """``dim_case_embd`` is one number for all tasks, with room for each."""
    sizes = {name: model.fitting_net.dim_case_embd for name, model in run.model.model_dict.items()}
    most, tasks = max(sizes.values(), default=0), len(sizes)
    for name, size in sizes.items():
        if most and size != max(most, tasks):
            text = f" = {size}: expected {max(most, tasks)} in every task, at least the number of tasks ({tasks})."
            yield f"model.model_dict.{name}.fitting_net.dim_case_embd", text
