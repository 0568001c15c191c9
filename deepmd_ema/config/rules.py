"""Rules between options. Each is a function of one section, one task, or the run, and yields what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.messages import Problem, Source, dotted, render, show
from deepmd_ema.config.outputs import Output, Outputs
from deepmd_ema.config.schema.model import Link
from deepmd_ema.config.schema.optim import EnerLossConfig, LKFConfig
from deepmd_ema.config.schema.profile import NEEDS_DATA, Profile
from deepmd_ema.config.schema.run import MultiTaskRun
from deepmd_ema.config.sections import InvalidOptionError
from deepmd_ema.errors import command

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.config.schema.run import RunConfig, TaskConfig
    from deepmd_ema.config.schema.training import TrainingOptions

Violations = Iterator[tuple[str, str]]
"""Dotted path of an option, as seen from what the rule is about, and the rest of the message."""


@dataclass(frozen=True)
class AverageEntry:
    """One entry of ``training.averaging``, its place in the list, from 0, and the run around it."""

    average: Profile
    number: int
    run: RunConfig


# subject of a rule -> every such object of a run, with its dotted path; of a run of several
# tasks each task has its own
SUBJECTS: dict[str, Callable[[RunConfig], Iterable[tuple[str, Any]]]] = {
    "model": lambda run: [(task.place("model"), task.model) for task in run.tasks.values()],
    "loss": lambda run: [(task.place("loss"), task.loss) for task in run.tasks.values()],
    "task": lambda run: [(task.place("training"), task) for task in run.tasks.values()],
    "learning_rate": lambda run: [("learning_rate", run.learning_rate)],
    "training": lambda run: [("training", run.training)],
    "average": lambda run: [
        (f"training.averaging[{n}]", AverageEntry(average, n, run)) for n, average in enumerate(run.training.averaging)
    ],
    "run": lambda run: [("", run)],
    "run of several tasks": lambda run: [("", run)] if isinstance(run, MultiTaskRun) else [],
    "run of LKF": lambda run: [("", run)] if isinstance(run.optimizer, LKFConfig) else [],
}

RULES: dict[str, list[Callable[[Any], Violations]]] = {about: [] for about in SUBJECTS}


def rule(about: str) -> Callable[[Callable[[Any], Violations]], Callable[[Any], Violations]]:
    """Enter a function into the registry; ``about`` says what it is called with: a key of ``SUBJECTS``."""

    def register(check: Callable[[Any], Violations]) -> Callable[[Any], Violations]:
        RULES[about].append(check)
        return check

    return register


def rule_problems(run: RunConfig) -> list[Problem]:
    """Return the violations of the rules in a run; a rule is skipped if it reads an option that is wrong in itself."""
    found = []
    for about, subjects in SUBJECTS.items():
        with suppress(InvalidOptionError):
            for path, subject in subjects(run):
                found += _violations(about, path, subject, run.source)
    return found


def model_problems(model: ModelConfig) -> list[Problem]:
    """Return the violations of the rules in a section ``model`` without a run."""
    return _violations("model", "model", model, Source())


def launch_problems(run: RunConfig, world_size: int) -> list[str]:
    """Return the messages of what cannot be trained by the processes that were started.

    This is about a start, not about an input, so loading an input does not ask.

    Args:
        run: the run.
        world_size: number of processes.
    """
    if not isinstance(run.optimizer, LKFConfig) or world_size == 1:
        return []
    text = (
        f' = "LKF": trains in one process only, and {world_size} were launched. Start it without a launcher, '
        "or choose Adam, AdamW, AdaMuon or HybridMuon."
    )
    return [*render([Problem(run.source.path("optimizer.type"), text)], run.source)]


def as_launched(run: RunConfig, launched: bool, restart: str | None = None) -> RunConfig:
    """Return the run as a process trains it: at ``zero_stage`` 0, with a note, if no launcher has started it.

    Args:
        run: the run.
        launched: whether a launcher has started this process.
        restart: the checkpoint, if the config is that in it.
    """
    stage = run.training.zero_stage
    if launched or not stage:
        return run
    words = ("--restart", restart) if restart else (run.source.name,)
    note = (
        f"training.zero_stage = {stage}: no launcher has started this process, which trains with 0. "
        f"Launch with: export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 {command('dp-ema', 'train', *words)}"
    )
    return replace(run, training=replace(run.training, zero_stage=0), notes=(*run.notes, note))


def _violations(about: str, path: str, subject: Any, source: Source) -> list[Problem]:
    found = []
    for check in RULES[about]:
        with suppress(InvalidOptionError):
            for name, text in check(subject):
                found.append(Problem(source.path(".".join(filter(None, (path, name)))), text))
    return found


# ---- model


@rule("model")
def model_fits_together(model: ModelConfig) -> Violations:
    """Elements, excluded types and preset biases fit together."""
    yield from model.problems()


@rule("model")
def descriptor_fits_together(model: ModelConfig) -> Violations:
    """The options of the descriptor, or of those of all parts, fit together and to the elements."""
    yield from model.problems_of_descriptor()


@rule("model")
def fitting_net_fits_together(model: ModelConfig) -> Violations:
    """The options of the fitting network, or of those of all parts, fit together and to the elements."""
    yield from model.problems_of_fitting()


# ---- learning_rate


@rule("learning_rate")
def one_end_of_learning_rate(lr: Any) -> Violations:
    """``stop_lr`` and ``stop_lr_ratio`` exclude each other."""
    if lr.stop_lr is not None and lr.stop_lr_ratio is not None:
        yield "stop_lr_ratio", f" = {lr.stop_lr_ratio:g}: stop_lr is given too. Remove one of the two."


@rule("learning_rate")
def learning_rate_goes_down(lr: Any) -> Violations:
    """``stop_lr`` is not above ``start_lr``."""
    if lr.stop_lr is not None and lr.stop_lr > lr.start_lr:
        yield "stop_lr", f" = {lr.stop_lr:g}: expected at most start_lr = {lr.start_lr:g}."


@rule("learning_rate")
def inverse_decay_ends_above_zero(lr: Any) -> Violations:
    """The inverse linear decay, which divides by the last rate, does not end at 0."""
    is_used = getattr(lr, "decay_type", "") == "inverse_linear" and lr.decay_phase_ratio > 0
    if is_used and lr.stop_lr == 0:
        yield "stop_lr", " = 0: expected > 0 for decay_type inverse_linear. Or use decay_type linear."


@rule("learning_rate")
def one_length_of_warmup(lr: Any) -> Violations:
    """``warmup_steps`` and ``warmup_ratio`` exclude each other."""
    if lr.warmup_steps > 0 and lr.warmup_ratio is not None:
        yield "warmup_ratio", f" = {lr.warmup_ratio:g}: warmup_steps is given too. Remove one of the two."


@rule("run")
def warmup_ends_in_the_run(run: RunConfig) -> Violations:
    """The warm-up is shorter than the run."""
    steps, warmup = run.training.numb_steps, run.learning_rate.warmup_steps
    if steps and warmup >= steps:
        yield "learning_rate.warmup_steps", f" = {warmup}: expected less than training.numb_steps = {steps}."


# ---- optimizer


@rule("run of LKF")
def lkf_shares_nothing_out(run: RunConfig) -> Violations:
    """LKF trains in one process: a block of its covariance has weights of several layers."""
    if (stage := run.training.zero_stage) > 0:
        text = f" = {stage}: LKF trains in one process only. Use 0, or choose Adam, AdamW, AdaMuon or HybridMuon."
        yield "training.zero_stage", text


@rule("run of LKF")
def lkf_does_not_clip(run: RunConfig) -> Violations:
    """The length of an update of LKF is the filter's, not the gradient's."""
    if norm := run.training.gradient_max_norm:
        yield "training.gradient_max_norm", f" = {norm:g}: not possible with optimizer.type LKF. Remove one of the two."


@rule("run of LKF")
def lkf_takes_one_batch(run: RunConfig) -> Violations:
    """An update of LKF takes in the measurements of one batch; there is no gradient to add up."""
    if (number := run.training.accumulate) > 1:
        yield "training.accumulate", f" = {number}: LKF updates weights with each batch. Use 1, or another optimizer."


@rule("run of LKF")
def lkf_fits_energies_and_forces(run: RunConfig) -> Violations:
    """Of the loss LKF takes only whether energies and forces are fitted; it knows no other term and no other error."""
    for path, loss in SUBJECTS["loss"](run):
        for name in (f"{when}_pref_{term}" for term in ("v", "ae", "pf", "h") for when in ("start", "limit")):
            if getattr(loss, name):
                yield f"{path}.{name}", f" = {getattr(loss, name):g}: LKF fits energies and forces only. Set it to 0."
        for name in ("loss_func", "use_huber", "f_use_norm", "relative_f", "intensive_ener_virial"):
            value, default = getattr(loss, name), getattr(EnerLossConfig, name)
            if value != default:
                yield f"{path}.{name}", f" = {show(value)}: LKF does not know it. Set it to {show(default)}."


# ---- loss


@rule("loss")
def force_norm_needs_mae_or_huber(loss: EnerLossConfig) -> Violations:
    """``f_use_norm`` works with absolute or Huber errors only."""
    if loss.f_use_norm and loss.error == "mse":
        yield "f_use_norm", ' = true: needs "loss_func": "mae" or "use_huber": true. Add one, or remove it.'


@rule("loss")
def huber_has_no_weighted_forces(loss: EnerLossConfig) -> Violations:
    """The Huber loss has no per-atom weights and no relative forces."""
    huber = loss.error == "huber"
    if huber and loss.relative_f is not None:
        yield "relative_f", f" = {loss.relative_f:g}: not possible with use_huber. Remove one of the two."
    if huber and (loss.start_pref_pf or loss.limit_pref_pf):
        yield "start_pref_pf", f" = {loss.start_pref_pf:g}: not possible with use_huber. Remove one of the two."


@rule("loss")
def huber_has_no_hessian(loss: EnerLossConfig) -> Violations:
    """The Huber loss has no term of second derivatives."""
    for name in ("start_pref_h", "limit_pref_h"):
        if loss.error == "huber" and getattr(loss, name):
            yield name, f" = {getattr(loss, name):g}: not possible with use_huber. Remove one of the two."


@rule("loss")
def something_is_minimized(loss: EnerLossConfig) -> Violations:
    """At least one weight of the loss is not zero."""
    if not loss.weights:
        yield "", ": every weight is 0, so nothing would be trained. Set start_pref_e, start_pref_f, ..."


@rule("run")
def hessian_needs_whole_parameters(run: RunConfig) -> Violations:
    """A Hessian is made by a backward pass within the forward one, after which sharded parameters are given up."""
    stage = run.training.zero_stage
    if stage > 1 and any("h" in task.loss.weights for task in run.tasks.values()):
        why = "second derivatives need all parameters on every rank"
        text = f" = {stage}: {why}. Use 0 or 1, or remove loss.start_pref_h and loss.limit_pref_h."
        yield "training.zero_stage", text


# ---- training


@rule("run")
def graphs_of_the_compiler_do_not_accumulate(run: RunConfig) -> Violations:
    """CUDA graphs that torch.compile makes overwrite the gradients of the batch before (pytorch issue 169545)."""
    training = run.training
    if training.accumulate > 1 and training.enable_compile and training.compile_options.makes_cuda_graphs:
        text = f" = {training.accumulate}: not possible with CUDA graphs of torch.compile, which overwrite gradients."
        yield "training.accumulate", f"{text} Use 1, or backend inductor and mode default in training.compile_options."


@rule("training")
def one_length_of_run(training: TrainingOptions) -> Violations:
    """Exactly one of ``numb_steps`` and ``numb_epoch`` is given, or, with several tasks, ``num_epoch_dict``."""
    if getattr(training, "num_epoch_dict", None):
        for name in ("numb_steps", "numb_epoch"):
            if getattr(training, name) is not None:
                yield name, f" = {getattr(training, name):g}: num_epoch_dict is given too. Remove one of the two."
        return
    steps, epochs = training.numb_steps, training.numb_epoch
    if steps is not None and epochs is not None:
        yield "numb_epoch", f" = {epochs:g}: numb_steps = {steps} is given too. Remove one."
    if steps is None and epochs is None:
        yield "", ': numb_steps or numb_epoch is required. Add one, e.g. "numb_steps": 100000.'


@rule("task")
def reading_statistics_needs_a_file(task: TaskConfig) -> Violations:
    """``stat_file_mode`` read needs a ``stat_file``."""
    if task.data.stat_file_mode == "read" and task.data.stat_file is None:
        yield "stat_file_mode", ' = "read": needs stat_file beside it. Add it, or remove stat_file_mode.'


@rule("task")
def validation_frames_have_one_origin(task: TaskConfig) -> Violations:
    """``validation_fraction`` and ``validation_data`` exclude each other."""
    fraction = task.data.validation_fraction
    if fraction is not None and task.validation_data is not None:
        yield "validation_fraction", f" = {fraction:g}: validation_data is given too. Remove one of the two."


@rule("average")
def average_fits_to_the_run(entry: AverageEntry) -> Violations:
    """The options of an average fit together, and to those of the run."""
    yield from entry.average.problems(entry.run)


@rule("average")
def names_of_averages_are_unique(entry: AverageEntry) -> Violations:
    """No two averages have one name; upper and lower case are one on some disks."""
    name, averages = entry.average.name, entry.run.training.averaging
    same = next((n for n in range(entry.number) if averages[n].name.lower() == name.lower()), None)
    if same is not None:
        case = "" if averages[same].name == name else " but for upper and lower case, and so have its files"
        first = dotted(entry.run.source.path(f"training.averaging[{same}]"))
        yield "name", f" = {show(name)}: {first} has this name{case}. Choose another."


# ---- validating


@rule("run")
def full_validation_needs_data(run: RunConfig) -> Violations:
    """Full validation of the live weights needs ``validation_data``."""
    if run.validating.full_validation and not run.has_validation_data:
        yield "validating.full_validation", NEEDS_DATA


@rule("run")
def metric_is_trained(run: RunConfig) -> Violations:
    """The metrics that rank weights and end a run have weights in the loss of every task, at the start and the end."""
    metrics, early_stop = {"validation_metric": run.validating.validation_metric}, run.validating.early_stop
    if early_stop is not None and early_stop.metric is not None:
        metrics["early_stop.metric"] = early_stop.metric
    for name, metric in metrics.items() if run.fully_validated else ():
        letter = {"E": "e", "F": "f", "V": "v", "S": "v"}[metric.quantity]
        for task in run.tasks.values():
            start, limit = (getattr(task.loss, f"{when}_pref_{letter}") for when in ("start", "limit"))
            if not (start and limit):
                both = f"start_pref_{letter} = {start:g} and limit_pref_{letter} = {limit:g} must both be > 0"
                text = f" = {show(metric)}: not in the loss, whose {both}. Set them, or choose another metric."
                yield f"validating.{name}", text


@rule("run")
def early_stop_watches_validated_weights(run: RunConfig) -> Violations:
    """The weights that end a run have full validation."""
    early_stop, there = run.validating.early_stop, run.fully_validated
    if early_stop is not None and early_stop.weights is not None and there and early_stop.weights not in there:
        text = f" = {show(early_stop.weights)}: these weights have no full validation. With it: {', '.join(there)}."
        yield "validating.early_stop.weights", text


@rule("run")
def files_have_names_of_their_own(run: RunConfig) -> Violations:
    """No two of learning curves, logs of full validation and links to weights have one name."""
    files: dict[str, Output] = {}
    for output in Outputs(run):
        file = os.path.normpath(output.path)
        first = output if output.is_folder else files.setdefault(file, output)
        if first is not output and (output.has_rows or first.option != output.option):
            text = f": {output.content} would be written to {file}, as {first.content} is. Choose another name."
            yield output.option, text


# ---- several tasks


@rule("run of several tasks")
def names_of_tasks_are_plain(run: MultiTaskRun) -> Violations:
    """Names of tasks stand in names of files, tensors and columns."""
    for name in run.model.model_dict:
        if not re.fullmatch(r"[A-Za-z0-9][\w+-]*", name, re.ASCII):
            wants = "letters, digits, _, + and -, beginning with a letter or a digit"
            yield "model.model_dict", f": {show(name)} is no name of a task. Expected {wants}."
        elif name.upper() == "RANDOM":
            yield f"model.model_dict.{name}", ": --model-branch RANDOM means a fresh network. Choose another name."


@rule("run of several tasks")
def heads_are_distinct(run: MultiTaskRun) -> Violations:
    """No name or alias of a model is that of another, in capitals or not, as ``--head`` reads them."""
    names = {name.lower(): name for name in reversed(run.model.model_dict)}
    taken: dict[str, str] = dict(names)
    for name, model in run.model.model_dict.items():
        if (other := names[name.lower()]) != name:
            text = f": task {other} has this name but for upper and lower case, which --head does not distinguish."
            yield f"model.model_dict.{name}", f"{text} Choose another."
        for alias in model.model_branch_alias:
            if (other := taken.setdefault(alias.lower(), name)) != name:
                text = f" = {show(model.model_branch_alias)}: {alias} means task {other} already. Choose another."
                yield f"model.model_dict.{name}.model_branch_alias", text


@rule("run of several tasks")
def sections_name_the_tasks(run: MultiTaskRun) -> Violations:
    """Every task has a model and data; losses and shares are those of tasks."""
    tasks = run.model.model_dict
    sections: dict[str, tuple[Mapping[str, Any], bool]] = {
        "training.data_dict": (run.training.data_dict, True),
        "loss_dict": (run.loss_dict, False),
        "training.model_prob": (run.training.model_prob, bool(run.training.model_prob)),
        "training.num_epoch_dict": (run.training.num_epoch_dict, bool(run.training.num_epoch_dict)),
    }
    if not tasks:
        yield "model.model_dict", ": there is no task. Add the model of each, by its name."
        return
    for place, (section, needs_all) in sections.items():
        for name in section:
            if name not in tasks:
                yield f"{place}.{name}", f": no task of model.model_dict. There: {', '.join(tasks)}."
        for name in tasks if needs_all else ():
            if name not in section:
                yield place, f": task {name} of model.model_dict is missing. Add it."


@rule("run of several tasks")
def shares_follow_from_epochs(run: MultiTaskRun) -> Violations:
    """``model_prob`` and ``num_epoch_dict`` exclude each other."""
    if run.training.model_prob and run.training.num_epoch_dict:
        yield "training.model_prob", ": num_epoch_dict is given too, from which shares follow. Remove one of the two."


@rule("run of several tasks")
def caches_of_statistics_differ(run: MultiTaskRun) -> Violations:
    """No two tasks have one ``stat_file``."""
    first: dict[str, str] = {}
    for task in run.tasks.values():
        if task.data.stat_file is not None:
            file = os.path.normpath(task.data.stat_file)
            if (other := first.setdefault(file, task.name)) != task.name:
                text = f" = {show(task.data.stat_file)}: task {other} has it too. Name a file for each task."
                yield f"{task.place('training')}.stat_file", text


@rule("run of several tasks")
def shared_parts_fit(run: MultiTaskRun) -> Violations:
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


@rule("run of several tasks")
def case_embedding_is_one_number(run: MultiTaskRun) -> Violations:
    """``dim_case_embd`` is one number for all tasks, with room for each."""
    sizes = {name: model.fitting_net.dim_case_embd for name, model in run.model.model_dict.items()}
    most, tasks = max(sizes.values(), default=0), len(sizes)
    for name, size in sizes.items():
        if most and size != max(most, tasks):
            text = f" = {size}: expected {max(most, tasks)} in every task, at least the number of tasks ({tasks})."
            yield f"model.model_dict.{name}.fitting_net.dim_case_embd", text
