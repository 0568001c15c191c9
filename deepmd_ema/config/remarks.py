"""Remarks on an input: options without effect, settings that are likely mistakes, and a short summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import plain
from deepmd_ema.config.messages import dotted, path_of, show
from deepmd_ema.config.outputs import Schedule
from deepmd_ema.config.schema.averaging import EmaProfile
from deepmd_ema.config.schema.optim import (
    AdamWScheduleFreeConfig,
    EnerLossConfig,
    ExpScheduleConfig,
    InvSqrtScheduleConfig,
    LKFConfig,
)
from deepmd_ema.errors import counted, every_steps, first_few
from deepmd_ema.findings import UNUSED, WARNING, Finding, inside, texts_of

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import Link
    from deepmd_ema.config.schema.run import RunConfig

_MAX_WINDOW = 0.2  # of the run: a longer average still remembers the untrained weights
_MIN_SNAPSHOTS = 4  # of one average; from fewer, averages of other lengths cannot be reconstructed well


def ignored_options(config: RunConfig) -> list[str]:
    """Return the options that the input gives and that have no effect in this run, each with the reason."""
    training, validating, lr, tasks = config.training, config.validating, config.learning_rate, config.tasks.values()
    compiles = training.enable_compile or validating.compiled_infer
    has_modes = compiles and training.compile_options.backend == "inductor"
    models = [plain(task.model) for task in tasks]
    has_float32 = any("float32" in _values_of("precision", model) for model in models)
    has_amp = any(True for model in models for _ in _values_of("use_amp", model))
    has_ratio, by_ratio = training.ckpt_keep_ratio is not None, "ckpt_keep_ratio says how many checkpoints are kept"
    is_never, never = validating.full_val_start == 1, "full_val_start = 1 means never"
    lasts = getattr(lr, "decay_phase_ratio", 1) != 0
    # section, its options, whether they do nothing, and why
    rows: list[tuple[str, str, Any, str]] = []
    for task in tasks:
        rows += _unused(task.place("model"), task.model.findings())
    rows += [
        ("learning_rate", "start_lr", isinstance(config.optimizer, LKFConfig), "LKF has no learning rate"),
        ("model", "model_branch_alias", "" in config.tasks, "there is one task, so no head is chosen by a name"),
        ("optimizer", "lr_adjust_coeff", getattr(config.optimizer, "lr_adjust", 0) > 0, "lr_adjust is above 0"),
        ("training", "mixed_precision", True, "the precision is that of descriptor and fitting_net"),
        ("training", "enable_tf32", not has_float32, "no product is in float32"),
        ("validating", "tf32_infer", not has_float32, "no product is in float32"),
        ("validating", "amp_infer", not has_amp, "no descriptor has use_amp"),
        ("optimizer", "flash_muon", True, "it names a kernel of DeePMD-kit for the same numbers"),
        ("training", "compile_options", not compiles, "enable_compile is false"),
        ("training", "compile_options.mode", not has_modes, "only the backend inductor has modes"),
        ("training", "compile_options.cache_dir", not has_modes, "only the backend inductor keeps code"),
        ("validating", "compiled_infer", not config.has_validation_data, "there are no validation data"),
        ("learning_rate", "scale_by_worker", True, "the learning rate is taken as it is"),
        ("learning_rate", "warmup_start_factor", not (lr.warmup_steps or lr.warmup_ratio), "there is no warm-up"),
        ("learning_rate", "stop_lr stop_lr_ratio decay_type", not lasts, "decay_phase_ratio is 0"),
        ("training", "max_ckpt_keep", has_ratio, by_ratio),
        ("training", "tensorboard_log_dir tensorboard_freq", not training.tensorboard, "training.tensorboard is false"),
        ("training", "time_training", not training.time_training, "times are always shown"),
        ("training", "disp_file", not training.disp_training, "disp_training is false"),
    ]  # fmt: skip
    for number, average in enumerate(training.averaging):
        rows += _unused(f"training.averaging[{number}]", average.findings(config))
    for task in tasks:
        loss, in_loss = task.loss, task.place("loss")
        in_model, in_data = task.place("model"), task.place("training")
        train, valid = task.data.training_data, task.data.validation_data
        rows += [
            (in_model, "data_bias_nsample", True, "the bias is fitted on data_stat_nbatch batches"),
            (in_data, "training_data.auto_prob", train.sys_probs, "sys_probs is given"),
            (in_data, "validation_data.auto_prob", valid and valid.sys_probs, "sys_probs is given"),
            (in_data, "stat_file_mode", task.data.stat_file is None, "there is no stat_file"),
        ]
        if isinstance(loss, EnerLossConfig):
            rows += [
                (in_loss, "use_huber", loss.loss_func == "mae", "loss_func is mae"),
                (in_loss, "huber_delta", loss.error != "huber", "the loss is not Huber's"),
                (in_loss, "use_default_pf", "pf" not in loss.weights, "start_pref_pf and limit_pref_pf are 0"),
                (in_loss, "intensive_ener_virial", loss.error != "mse", "such errors are per atom anyway"),
            ]
    is_validated, of_best = bool(config.fully_validated), "save_best_dir max_best_ckpt"
    names = f"validation_freq save_best {of_best} validation_metric early_stop full_val_file"
    why = "full_validation and ema_full_validation are false"
    why += ", and no entry of training.averaging has it" * bool(training.averaging)
    rows += [
        ("validating", f"{names} full_val_start", not is_validated, why),
        ("validating", f"full_validation {names}", is_validated and is_never, never),
        ("validating", of_best, is_validated and not is_never and not validating.save_best, "save_best is false"),
    ]
    found = list(config.unused)
    idle = [(f"{place}.{name}", why) for place, names, is_idle, why in rows if is_idle for name in names.split()]
    for path, why in idle:
        if path_of(path) in config.source.given:
            value: Any = config
            for part in path_of(path):
                value = getattr(value, part) if isinstance(part, str) and hasattr(value, part) else value[part]
            spelled = dotted(config.source.path(path))
            found.append(f"{spelled} = {show(plain(value))}: no effect, {why}")
    return list(dict.fromkeys(found))  # tasks share parts


def config_warnings(
    config: RunConfig, num_steps: int | None = None, steps_per: Mapping[str, float] | None = None
) -> list[str]:
    """Return warnings about settings that are allowed but likely mistakes.

    Args:
        config: of the run.
        num_steps: length of the run, for one that counts epochs; while it is not known, most warnings are left out.
        steps_per: steps of one of ``frames`` and ``epochs``, for averages that count in them; without it there are no
            warnings about these.
    """
    steps = config.training.numb_steps or num_steps
    found = list(_warnings_of_length(config, steps, {"steps": 1.0, **(steps_per or {})})) if steps else []
    for name, task in config.tasks.items():
        of = f"task {name}: " * bool(name)
        findings = inside("model", task.model.findings())
        found += [f"{of}{text}" for text in texts_of(WARNING, findings)]
        valid = task.data.validation_data
        if both := set(task.data.training_data.systems) & set(valid.systems if valid is not None else ()):
            place = f"{task.place('training')}.validation_data.systems"
            found.append(f"{place}: {', '.join(sorted(both))} is training data too; it validates nothing.")
    lr = config.learning_rate
    falls = isinstance(lr, InvSqrtScheduleConfig) or lr.end_lr < lr.start_lr
    if isinstance(config.optimizer, AdamWScheduleFreeConfig) and falls:
        found.append(
            f"learning_rate: the rate falls ({lr.summary()}). AdamWScheduleFree averages in place of a schedule and is "
            f'made for a constant rate: "stop_lr": {lr.start_lr:g}, with type exp, cosine or wsd.'
        )
    # tasks without steps, and tasks whose models differ in the energies of the elements only
    for option, numbers in (("model_prob", config.task_weights), ("num_epoch_dict", config.task_epochs)):
        why = "no step trains this task, only what it shares with others is trained."
        found += [f"training.{option}.{name} = 0: {why}" for name, number in numbers.items() if not number]
    fittings = [link for link in config.links if link.part == "fitting_net"]
    for key in dict.fromkeys(link.key for link in fittings):
        tasks = [link.task for link in fittings if link.key == key]
        models = [config.tasks[name].model for name in tasks]
        # tasks that keep the energies of a file are declared to have labels of one method
        one_method = all(model.finetune_bias == "keep" for model in models)
        if len(tasks) > 1 and not models[0].fitting_net.dim_case_embd and not one_method:
            text = f"the tasks {', '.join(tasks)} share this network and differ only in the energies of the elements"
            instead = f'For labels of different methods give it "dim_case_embd": {len(config.tasks)}'
            found.append(f"model.shared_dict.{key}: {text}. {instead}.")
    # snapshots that do not combine
    stored = [average for average in config.training.averaging if average.snapshots]
    if len({a.length for a in stored}) == 1:
        found.append(
            f"training.averaging: all snapshots are of averages of one length ({stored[0].name}). `dp-ema posthoc` "
            "finds other lengths best from two: add a power average of another sigma_rel with snapshots."
        )
    if len({a.buffers for a in stored}) > 1:
        names = ", ".join(f"{a.name} {a.buffers}" for a in stored)
        found.append(
            f"training.averaging: snapshots are of averages with different buffers ({names}). `dp-ema posthoc` takes "
            "averages of the same tensors only: give them the same."
        )
    return found


def config_summary(
    config: RunConfig, num_steps: int = 0, steps_per: Mapping[str, float] | None = None
) -> list[tuple[str, str]]:
    """Return names and texts of the main settings: rows for ``dp-ema check``, ``show`` and the start of a run.

    Args:
        config: of the run.
        num_steps: length of the run, once the data are known.
        steps_per: steps of one of ``frames`` and ``epochs``, then as well.
    """
    training = config.training
    rows = {name: [*task.model.summary(), ("loss", task.loss.summary())] for name, task in config.tasks.items()}
    num_steps = training.numb_steps or num_steps
    passes = [f"{task} {epochs:g} epochs" for task, epochs in config.task_epochs.items()]
    length = counted(num_steps, "step") if num_steps else ", ".join(passes) or f"{training.numb_epoch or 0:g} epochs"
    if steps_per and "" in config.tasks:  # several tasks see their data more or less often
        batches = round(steps_per["epochs"] * training.accumulate)
        epochs = num_steps * training.accumulate / batches
        length = f"{counted(num_steps, 'step')} = {epochs:.1f} epochs of {counted(batches, 'batch', 'batches')}"
    averages = [("average", f"{a.name}: {a.summary(steps_per or {})}") for a in training.averaging]
    decay = getattr(config.optimizer, "weight_decay", 0.0)
    number = len(config.optimizer.groups)
    groups = f", {counted(number, 'group')} of parameters" * (number > 0)
    batch = ", ".join(show(task.data.training_data.batch_size) for task in config.tasks.values())
    several = f", {training.accumulate} batches a step" * (training.accumulate > 1)
    seed = "random" if training.seed is None else training.seed
    numbers = [data.numb_btch for task in config.tasks.values() if (data := task.displayed_data) is not None]
    validation = "none (training.validation_data is missing)"
    if numbers:
        validation = f"{counted(sum(numbers), 'batch', 'batches')} {every_steps(training.disp_freq)}"
    if numbers and config.fully_validated and (v := config.validating).full_val_start != 1:
        *others, last = config.fully_validated
        weights = f"{', '.join(others)} and {last}" if others else last
        metrics = dict.fromkeys(task.metric(v.validation_metric) for task in config.tasks.values())
        which = f"{weights} weights, best by {' and '.join(metrics)}"
        if v.early_stop is not None:
            metric, patience = v.early_stop.metric or v.validation_metric, counted(v.early_stop.patience, "validation")
            which += f"; the run ends after {patience} without a lower {metric}"
        validation += f"; all data {every_steps(v.validation_freq)} and after the last ({which})"
    tested = [system for task in config.tasks.values() if task.test is not None for system in task.test.systems]
    return [
        *rows_of_tasks(rows, config.links),
        ("learning rate", config.learning_rate.summary(num_steps)),
        ("optimizer", "".join([config.optimizer.type, f", weight decay {decay:g}" * (decay > 0), groups])),
        ("run", f"{length}, batch_size {batch}{several}, seed {seed}"),
        *(averages or [("average", "none")]),
        ("validation", validation),
        *([("test", f"{first_few(tested)}, after the last step")] if tested else []),
    ]


def rows_of_tasks(rows: Mapping[str, Sequence[tuple[str, str]]], links: Sequence[Link]) -> list[tuple[str, str]]:
    """Return rows of a table with the tasks that each is about, and what they share; with one task as they are.

    Args:
        rows: names and texts by the name of the task, which is empty in a run of one.
        links: what the models share.
    """
    tasks: dict[str, dict[str, list[str]]] = {}  # by name and text
    for task, of_task in rows.items():
        for name, text in of_task:
            tasks.setdefault(name, {}).setdefault(text, []).append(task)
    found = []
    for name, texts in tasks.items():
        found += [(name, f"{', '.join(own)}: {text}" if any(own) else text) for text, own in texts.items()]
    sharing: dict[str, dict[str, list[str]]] = {}  # by key and place
    for link in links:
        place = f"{'embedding of elements of the ' * (link.level == 1)}{link.part}"
        sharing.setdefault(link.key, {}).setdefault(place, []).append(link.task)
    for key, of in sharing.items():
        found.append(("shared", f"{key}: " + ", ".join(f"{place} of {' and '.join(own)}" for place, own in of.items())))
    return found


def _unused(place: str, findings: Iterable[Finding]) -> Iterator[tuple[str, str, bool, str]]:
    """Yield the rows of options without effect."""
    for finding in findings:
        if finding.severity == UNUSED:
            yield place, finding.place, True, finding.text


def _warnings_of_length(config: RunConfig, num_steps: int, steps_per: Mapping[str, float]) -> Iterator[str]:
    lr = config.learning_rate
    if isinstance(lr, ExpScheduleConfig) and (used := lr.used_decay_steps(num_steps)) != lr.decay_steps:
        length = counted(num_steps - lr.num_warmup_steps(num_steps), "step")
        found = f"learning_rate.decay_steps = {lr.decay_steps}: not less than the {length} of the decay"
        yield f"{found}; {used} is used instead, as DeePMD-kit does."
    schedule = Schedule(config, num_steps)
    for number, average in enumerate(config.training.averaging):
        path, (name, value), longest = f"training.averaging[{number}]", average.length, _MAX_WINDOW * num_steps
        # a window of much of the run
        unit = "steps" if name == "decay" else getattr(average, "half_life_unit", "")
        if isinstance(average, EmaProfile) and unit in steps_per:
            found, steps = f"{dotted(config.source.path(f'{path}.{name}'))} = {value:g}", steps_per[unit]
            if name == "decay":
                window, better = 1 / (1 - value), max(0.0, 1 - 1 / max(1.0, longest / 2))
            else:
                window, better = 1 / -math.expm1(-math.log(2) / (value * steps)), math.log(2) * longest / 2 / steps
                found += f" {unit}"
            if window > longest:
                why = f"more than a fifth of the run of {num_steps:,}, so it may lag behind the live weights"
                yield f"{found}: the average is over about {window:,.0f} steps, {why}. Try {better:.3g}."
        path = dotted(config.source.path(path))
        # a start after the run, or few snapshots in it
        late, start = "start_step", float(average.start_step)
        if average.start_epoch is not None:
            late, start = "start_epoch", average.start_epoch * steps_per.get("epochs", 0.0)
        due = schedule.snapshots.get(average.name)
        if start >= num_steps:
            why = f"the run ends at step {num_steps:,}, so that nothing is averaged"
            found = f"{path}.{late} = {getattr(average, late):g}: {why} and {average.name} is the live weights"
            yield f"{found}. Choose an earlier start."
        elif due is not None and (files := due.count(math.ceil(start))) < _MIN_SNAPSHOTS:
            often = "save_freq" if average.snapshot_freq is None else "snapshot_freq"
            better = max(1, int(num_steps - start) // (2 * _MIN_SNAPSHOTS))
            found = f"{counted(files, 'snapshot')} in the run of {counted(num_steps, 'step')}"
            found += f" ({often} = {due.steps.step}), too few for `dp-ema posthoc`"
            yield f'{path}.snapshots: {found}. Try "snapshot_freq": {better}.'


def _values_of(key: str, tree: Any) -> Iterator[Any]:
    """Yield the values of ``key`` anywhere in nested dictionaries and lists."""
    if isinstance(tree, dict):
        yield from (value for name, value in tree.items() if name == key)
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _values_of(key, child)
