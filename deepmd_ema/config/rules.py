"""Findings about the sections of a run: contradictions, options without effect, likely mistakes.

Each option is right by itself here. A generator per section yields findings at canonical places.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from deepmd_ema.config.fields import plain
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.messages import Place, dotted, path_of, show
from deepmd_ema.config.outputs import Output, Outputs, Schedule
from deepmd_ema.config.schema.averaging import EmaProfile
from deepmd_ema.config.schema.optim import (
    AdamWScheduleFreeConfig,
    EnerLossConfig,
    ExpScheduleConfig,
    InvSqrtScheduleConfig,
    LKFConfig,
    LossConfig,
)
from deepmd_ema.config.schema.profile import (
    BY_RATIO,
    NEEDS_DATA,
    NEVER,
    REMOVE_ONE,
    StepsPer,
)
from deepmd_ema.config.schema.run import MultiTaskRun, RunConfig, TaskConfig
from deepmd_ema.config.schema.training import ValidatingConfig
from deepmd_ema.config.task_rules import findings_of_tasks
from deepmd_ema.errors import ConfigError
from deepmd_ema.findings import (
    UNUSED,
    WARNING,
    Findings,
    error,
    inside,
    texts_of,
    unused,
    warning,
)
from deepmd_ema.text import command, counted

# fraction of the run: a longer average still remembers the untrained weights
_MAX_WINDOW = 0.2
# snapshots of one average: from fewer, averages of other lengths cannot be reconstructed well
_MIN_SNAPSHOTS = 4


def findings_of(
    run: RunConfig, num_steps: int | None = None, steps_per: StepsPer | None = None
) -> Findings:
    """Yield the findings of a run, with places as the input spells them.

    Every option is right by itself. Only options that the input gives are reported as without
    effect.

    Args:
        run: the run.
        num_steps: its length, if it is known; without it there are no warnings about lengths.
        steps_per: steps of one of ``frames`` and ``epochs``, for averages that count in them.
    """
    for finding in chain.from_iterable(rule(run) for rule in _RULES):
        place = path_of(finding.place)
        if finding.severity == UNUSED:
            # a rule sees values only, and a default that does nothing is nobody's mistake
            if place not in run.source.given_options:
                continue
            text = f" = {show(plain(_value_at(run, place)))}: no effect, {finding.text}"
            finding = replace(finding, text=text)
        yield run.source.locate(finding)
    if num_steps:
        lengths = _lengths_to_look_at(
            run, num_steps, {"steps": 1.0, **(steps_per or {})}
        )
        yield from map(run.source.locate, lengths)


def ignored_options(run: RunConfig) -> list[str]:
    """Return the options of the input that have no effect in this run, each with the reason."""
    findings = (replace(finding, file="") for finding in findings_of(run))
    # once each: tasks that share a part have the same finding about it
    return list(dict.fromkeys([*run.unused, *texts_of(UNUSED, findings)]))


def config_warnings(
    run: RunConfig, num_steps: int | None = None, steps_per: StepsPer | None = None
) -> list[str]:
    """Return warnings about settings that are allowed but likely mistakes.

    Args:
        run: the run.
        num_steps: its length, where the input gives it in epochs.
        steps_per: as for :func:`findings_of`.
    """
    findings = findings_of(run, run.training.numb_steps or num_steps, steps_per)
    return texts_of(WARNING, (replace(finding, file="") for finding in findings))


def _value_at(run: RunConfig, place: Place) -> Any:
    """Return the value of an option of a run."""
    value: Any = run
    for part in place:
        # a task may have the name of a method of dict
        is_plain = isinstance(value, dict | list)
        value = value[part] if is_plain else getattr(value, str(part))
    return value


def _idle(*rows: tuple[Any, str, str]) -> Findings:
    """Yield that options have no effect.

    Args:
        rows: whether it is so, the names of the options with spaces between them, and why.
    """
    for is_idle, names, why in rows:
        for name in names.split() if is_idle else ():
            yield unused(name, why)


def as_launched(
    run: RunConfig, launched: bool, restart: str | None = None, num_ranks: int = 1
) -> RunConfig:
    """Return the run as a process trains it: at ``zero_stage`` 0 if no launcher has started it.

    A note of the run reports this.

    Args:
        run: the run.
        launched: whether a launcher has started this process.
        restart: the checkpoint, if the config is that in it.
        num_ranks: number of processes that were started.

    Raises:
        ConfigError: if so many processes cannot train it.
    """
    # no rule: it concerns a start, and an input that is loaded for other purposes is right
    if isinstance(run.optimizer, LKFConfig) and num_ranks > 1:
        mistake = error(
            "optimizer.type",
            f' = "LKF": trains in one process only, and {num_ranks} were launched. '
            "Start it without a launcher, or choose another optimizer.",
        )
        raise ConfigError([run.source.locate(mistake)])
    stage = run.training.zero_stage
    if launched or not stage:
        return run
    # The stage needs a process group, and one of a single process would shard nothing. Without
    # PET_NO_PYTHON torchrun would run `python dp-ema`.
    arguments = ("--restart", restart) if restart else (run.source.name,)
    note = (
        f"training.zero_stage = {stage}: no launcher has started this process, which trains with "
        "0. Launch with: export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 "
        f"{command('dp-ema', 'train', *arguments)}"
    )
    return replace(
        run, training=replace(run.training, zero_stage=0), notes=(*run.notes, note)
    )


def _learning_rate(run: RunConfig) -> Findings:
    lr: Any = run.learning_rate
    if lr.stop_lr is not None and lr.stop_lr_ratio is not None:
        yield error(
            "learning_rate.stop_lr_ratio",
            f" = {lr.stop_lr_ratio:g}: stop_lr is given too. {REMOVE_ONE}",
        )
    if lr.warmup_steps > 0 and lr.warmup_ratio is not None:
        yield error(
            "learning_rate.warmup_ratio",
            f" = {lr.warmup_ratio:g}: warmup_steps is given too. {REMOVE_ONE}",
        )
    if lr.stop_lr is not None and lr.stop_lr > lr.start_lr:
        yield error(
            "learning_rate.stop_lr",
            f" = {lr.stop_lr:g}: expected at most start_lr = {lr.start_lr:g}.",
        )
    # the inverse linear decay divides by the last rate
    if (
        lr.stop_lr == 0
        and getattr(lr, "decay_type", "") == "inverse_linear"
        and lr.decay_phase_ratio > 0
    ):
        yield error(
            "learning_rate.stop_lr",
            " = 0: expected > 0 for decay_type inverse_linear. Or use decay_type linear.",
        )
    if (steps := run.training.numb_steps) and lr.warmup_steps >= steps:
        yield error(
            "learning_rate.warmup_steps",
            f" = {lr.warmup_steps}: expected less than training.numb_steps = {steps}.",
        )
    is_constant = (
        lr.end_lr >= lr.start_lr or getattr(lr, "decay_rate", None) == 1
    ) and not isinstance(lr, InvSqrtScheduleConfig)
    # the schedules exp and cosine have no decay_phase_ratio
    falling = (
        "learning_rate.stop_lr learning_rate.stop_lr_ratio learning_rate.decay_type"
    )
    yield from _idle(
        (
            isinstance(run.optimizer, LKFConfig),
            "learning_rate.start_lr",
            "LKF has no learning rate",
        ),
        (
            not (lr.warmup_steps or lr.warmup_ratio),
            "learning_rate.warmup_start_factor",
            "there is no warm-up",
        ),
        (getattr(lr, "decay_phase_ratio", 1) == 0, falling, "decay_phase_ratio is 0"),
        (
            is_constant,
            "learning_rate.decay_steps learning_rate.smooth learning_rate.decay_type "
            "learning_rate.decay_phase_ratio",
            "the rate is constant",
        ),
    )
    if isinstance(run.optimizer, AdamWScheduleFreeConfig) and not is_constant:
        yield warning(
            "learning_rate",
            f": the rate falls ({lr.summary()}). AdamWScheduleFree averages in place of a "
            f'schedule and is made for a constant rate: "stop_lr": {lr.start_lr:g}, with type '
            "exp, cosine or wsd.",
        )
    # weights of the loss follow the rate
    if is_constant and not (lr.warmup_steps or lr.warmup_ratio):
        for task in run.tasks.values():
            yield from inside(task.place("loss"), _unused_limits(task.loss))


def _unused_limits(loss: LossConfig) -> Findings:
    for name in (field.name for field in fields(loss)):
        first = name.replace("limit_pref_", "start_pref_")
        if getattr(loss, first) != getattr(loss, name):
            value = f"{first} = {getattr(loss, first):g}"
            yield unused(name, f"the learning rate is constant, and so is {value}")


def _optimizer(run: RunConfig) -> Findings:
    if isinstance(run.optimizer, LKFConfig):
        yield from _lkf(run)
    is_adjusted = getattr(run.optimizer, "lr_adjust", 0) > 0
    yield from _idle((is_adjusted, "optimizer.lr_adjust_coeff", "lr_adjust is above 0"))


# options of `training`: their largest value, and the reason and remedy for one above it
_MAX_WITH_LKF = {
    # a block of the covariance has weights of several layers, which ranks would hold in parts
    "zero_stage": (
        0,
        "LKF trains in one process only. Use 0, or another optimizer.",
    ),
    # the length of an update is the filter's, not the gradient's
    "gradient_max_norm": (0, f"not possible with optimizer.type LKF. {REMOVE_ONE}"),
    # there is no gradient to add up
    "accumulate": (
        1,
        "LKF updates weights with each batch. Use 1, or another optimizer.",
    ),
}
# terms of the loss that LKF has; weights of all others must be 0
_TERMS_OF_LKF = ("e", "f")
# options of the loss without which LKF works; others than their defaults are refused
_REFUSED_BY_LKF = "loss_func use_huber f_use_norm relative_f intensive_ener_virial"


def _lkf(run: RunConfig) -> Findings:
    """Yield errors of options that LKF does not have.

    It trains in one process, with one batch a step, and weighs energies and forces by its own
    options.
    """
    for name, (most, why) in _MAX_WITH_LKF.items():
        value = getattr(run.training, name)
        if value > most:
            yield error(f"training.{name}", f" = {value:g}: {why}")
    for task in run.tasks.values():
        if not isinstance(task.loss, EnerLossConfig):
            text = (
                f" = {show(task.loss.type)}: LKF fits energies and forces only. Use another "
                "optimizer."
            )
            yield error(f"{task.place('loss')}.type", text)
            continue
        if task.data.training_data.frame_weights:
            yield error(
                f"{task.place('training')}.training_data.frame_weights",
                " = true: LKF does not weigh frames. Set it to false, or choose another optimizer.",
            )
        weights = [
            field.name
            for field in fields(EnerLossConfig)
            if "_pref_" in field.name
            and field.name.partition("_pref_")[2] not in _TERMS_OF_LKF
        ]
        for name in (*weights, *_REFUSED_BY_LKF.split()):
            value = getattr(task.loss, name)
            default = getattr(EnerLossConfig, name)
            text = f" = {show(value)}: LKF does not know it. Set it to {show(default)}."
            if "_pref_" in name:
                text = f" = {value:g}: LKF fits energies and forces only. Set it to 0."
            if value != default:
                yield error(f"{task.place('loss')}.{name}", text)


def _training(run: RunConfig) -> Findings:
    training = run.training
    # exactly one of numb_steps and numb_epoch is given, or, with several tasks, num_epoch_dict
    steps, epochs = training.numb_steps, training.numb_epoch
    if run.task_epochs:
        for name, value in (("numb_steps", steps), ("numb_epoch", epochs)):
            if value is not None:
                yield error(
                    f"training.{name}",
                    f" = {value:g}: num_epoch_dict is given too. {REMOVE_ONE}",
                )
    elif steps is not None and epochs is not None:
        yield error(
            "training.numb_epoch",
            f" = {epochs:g}: numb_steps = {steps} is given too. Remove one.",
        )
    elif steps is None and epochs is None:
        yield error(
            "training",
            ': numb_steps or numb_epoch is required. Add one, e.g. "numb_steps": 100000.',
        )
    yield from _gradients(run)
    compiles = training.enable_compile or run.validating.compiled_infer
    has_modes = compiles and training.compile_options.backend == "inductor"
    # as text, because precisions are options of descriptors, of their parts and of fitting
    # networks, also of types of other distributions
    models = json.dumps([plain(task.model) for task in run.tasks.values()])
    has_float32 = '"precision": "float32"' in models
    has_amp = '"use_amp": ' in models
    has_ratio = training.ckpt_keep_ratio is not None
    yield from _idle(
        (
            not has_float32,
            "training.enable_tf32 validating.tf32_infer",
            "no product is in float32",
        ),
        (not has_amp, "validating.amp_infer", "no descriptor has use_amp"),
        (not compiles, "training.compile_options", "enable_compile is false"),
        (
            not has_modes,
            "training.compile_options.mode",
            "only the backend inductor has modes",
        ),
        (
            not has_modes,
            "training.compile_options.cache_dir",
            "only the backend inductor keeps code",
        ),
        (has_ratio, "training.max_ckpt_keep", BY_RATIO),
        (
            not training.tensorboard,
            "training.tensorboard_log_dir training.tensorboard_freq",
            "training.tensorboard is false",
        ),
        (not training.disp_training, "training.disp_file", "disp_training is false"),
    )


def _gradients(run: RunConfig) -> Findings:
    training = run.training
    # CUDA graphs of torch.compile overwrite the gradients of the batch before, to which those of
    # the next one are added (pytorch issue 169545)
    if (
        training.accumulate > 1
        and training.enable_compile
        and training.compile_options.makes_cuda_graphs
    ):
        yield error(
            "training.accumulate",
            f" = {training.accumulate}: not possible with CUDA graphs of torch.compile, "
            "which overwrite gradients. Use 1, or backend inductor and mode default in "
            "training.compile_options.",
        )
    # A Hessian takes a backward pass within the forward one. FSDP frees the gathered parameters
    # after a backward pass, so that the rest of the forward one would have none.
    if training.zero_stage > 1 and any(
        "h" in task.loss.weights for task in run.tasks.values()
    ):
        yield error(
            "training.zero_stage",
            f" = {training.zero_stage}: second derivatives need all parameters on every "
            "rank. Use 0 or 1, or remove loss.start_pref_h and loss.limit_pref_h.",
        )
    tasks_without_energy = [
        task
        for task in run.tasks.values()
        if ENERGY not in task.model.fitting_net.labels
    ]
    for name, is_compiled in (
        ("training.enable_compile", training.enable_compile),
        ("validating.compiled_infer", run.validating.compiled_infer),
    ):
        if tasks_without_energy and is_compiled:
            kind = tasks_without_energy[0].model.fitting_net.type
            yield error(
                name,
                f" = true: models of fitting_net.type {kind} are not compiled. Set it to false.",
            )
    if (
        len(tasks_without_energy) == len(run.tasks)
        and training.change_bias_after_training
    ):
        yield error(
            "training.change_bias_after_training",
            " = true: no task has energies, whose bias it fits. Set it to false.",
        )
    losses = [task.loss for task in tasks_without_energy]
    has_root = any(getattr(loss, "loss_func", "") == "rmse" for loss in losses)
    if has_root and training.accumulate > 1:
        yield error(
            "training.accumulate",
            f' = {training.accumulate}: loss_func "rmse" is a root of a mean, which '
            "batches cannot add up. Use 1, or mse.",
        )


def _averages(run: RunConfig) -> Findings:
    averages = run.training.averaging
    for number, average in enumerate(averages):
        place = f"training.averaging[{number}]"
        name = average.name
        yield from inside(place, average.findings(run))
        # some file systems do not distinguish upper and lower case, so that one of the averages
        # would overwrite the files of the other
        same = next(
            (n for n in range(number) if averages[n].name.lower() == name.lower()), None
        )
        if same is not None:
            case = ""
            if averages[same].name != name:
                case = " but for upper and lower case, and so have its files"
            first = dotted(run.source.path(f"training.averaging[{same}]"))
            yield error(
                f"{place}.name",
                f" = {show(name)}: {first} has this name{case}. Choose another.",
            )
    # Snapshots that `dp-ema posthoc` cannot combine: an average of another length is a linear
    # combination of snapshots, which of one length alone are too much alike.
    averages = [average for average in averages if average.snapshots]
    if len({average.length for average in averages}) == 1:
        yield warning(
            "training.averaging",
            f": all snapshots are of averages of one length ({averages[0].name}). `dp-ema "
            "posthoc` finds other lengths best from two: add a power average of another "
            "sigma_rel with snapshots.",
        )
    if len({average.buffers for average in averages}) > 1:
        names = ", ".join(f"{average.name} {average.buffers}" for average in averages)
        yield warning(
            "training.averaging",
            f": snapshots are of averages with different buffers ({names}). `dp-ema posthoc` "
            "takes averages of the same tensors only: give them the same.",
        )


def _validating(run: RunConfig) -> Findings:
    validating, validated = run.validating, run.fully_validated
    if validating.full_validation and not run.has_validation_data:
        yield error("validating.full_validation", NEEDS_DATA)
    stop = validating.early_stop
    if (
        stop is not None
        and stop.weights is not None
        and validated
        and stop.weights not in validated
    ):
        yield error(
            "validating.early_stop.weights",
            f" = {show(stop.weights)}: these weights have no full validation. With it: "
            f"{', '.join(validated)}.",
        )
    has_tasks = isinstance(run, MultiTaskRun)
    if has_tasks and validating.test_data:
        yield error(
            "validating.test_data",
            ": this is an input of several tasks. There it is test_data_dict.TASK.",
        )
    if not has_tasks and validating.test_data_dict:
        yield error(
            "validating.test_data_dict",
            ": this is an input of one task. There it is test_data.",
        )
    if validated:
        yield from _metrics(run)
    is_never = validating.full_val_start == 1
    # names of options, as _idle takes them
    best = "save_best_dir max_best_ckpt"
    full = (
        f"validation_freq save_best {best} validation_metric early_stop full_val_file"
    )
    why = "full_validation and ema_full_validation are false"
    if run.training.averaging:
        why += ", and no entry of training.averaging has it"
    idle = _idle(
        (not run.has_validation_data, "compiled_infer", "there are no validation data"),
        (not validated, f"{full} full_val_start", why),
        (validated and is_never, f"full_validation {full}", NEVER),
        (
            validated and not is_never and not validating.save_best,
            best,
            "save_best is false",
        ),
    )
    yield from inside("validating", idle)


def _metrics(run: RunConfig) -> Findings:
    """Yield errors of metrics without a weight in the loss of a task, at the start or the end.

    They rank weights and end a run: an error that is not trained need not fall.
    """
    metrics = {"validation_metric": run.validating.validation_metric}
    early_stop = run.validating.early_stop
    if early_stop is not None and early_stop.metric is not None:
        metrics["early_stop.metric"] = early_stop.metric
    for name, metric in metrics.items():
        # the keys are an ordered set
        letters = {
            letter: None
            for task in run.tasks.values()
            for letter in task.model.fitting_net.metrics
        }
        # The default E:MAE is also that of models without energies, where TaskConfig.metric
        # replaces it; it is not distinguished from an option that is not given.
        is_given = (
            name != "validation_metric" or metric != ValidatingConfig.validation_metric
        )
        if metric.quantity not in letters and is_given:
            yield error(
                f"validating.{name}",
                f" = {show(metric)}: nothing of this is predicted. Choose one of "
                f"{', '.join(letters)}.",
            )
            continue
        for task in run.tasks.values():
            if not isinstance(task.loss, EnerLossConfig):
                continue
            # the stress is trained by the virial
            letter = {"E": "e", "F": "f", "V": "v", "S": "v"}[
                task.metric(metric).quantity
            ]
            start = getattr(task.loss, f"start_pref_{letter}")
            limit = getattr(task.loss, f"limit_pref_{letter}")
            if not (start and limit):
                yield error(
                    f"validating.{name}",
                    f" = {show(metric)}: not in the loss, whose start_pref_{letter} = "
                    f"{start:g} and limit_pref_{letter} = {limit:g} must both be > 0. "
                    "Set them, or choose another metric.",
                )


def _files(run: RunConfig) -> Findings:
    """Yield errors of learning curves, logs of full validation and links to weights of one name."""
    files: dict[str, Output] = {}
    for output in Outputs(run):
        file = os.path.normpath(output.path)
        # Several outputs may share a folder. Links of one option have equal names only where
        # averages or logs have, which is refused already.
        first = output if output.is_folder else files.setdefault(file, output)
        if first is not output and (output.has_rows or first.option != output.option):
            yield error(
                output.option,
                f": {output.content} would be written to {file}, as {first.content} is. Choose "
                "another name.",
            )


def _loss(task: TaskConfig) -> Findings:
    loss = task.loss
    fitting = task.model.fitting_net
    wanted = fitting.loss
    if loss.type != wanted:
        # these two options have no defaults
        more = ', "pref": 1, "pref_atomic": 0' if wanted == "tensor" else ""
        yield error(
            "type",
            f' = {show(loss.type)}: expected "loss": {{"type": "{wanted}"{more}}}, that '
            f"of fitting_net.type {fitting.type}.",
        )
        return
    if not any(map(any, loss.weights.values())):
        names = (
            "start_pref_e, start_pref_f, ..." if wanted == "ener" else "one of them."
        )
        yield error(
            "", f": every weight is 0, so nothing would be trained. Set {names}"
        )
    if not isinstance(loss, EnerLossConfig):
        return
    is_huber = loss.error == "huber"
    if loss.f_use_norm and loss.error == "mse":
        yield error(
            "f_use_norm",
            ' = true: needs "loss_func": "mae" or "use_huber": true. Add one, or remove it.',
        )
    # Huber's loss has no per-atom weights, no relative forces, and no term of second derivatives
    refused = {
        "relative_f": loss.relative_f is not None,
        "start_pref_pf": loss.start_pref_pf or loss.limit_pref_pf,
        "start_pref_h": loss.start_pref_h,
        "limit_pref_h": loss.limit_pref_h,
    }
    for name, is_given in refused.items():
        if is_given and is_huber:
            text = (
                f" = {getattr(loss, name):g}: not possible with use_huber. {REMOVE_ONE}"
            )
            yield error(name, text)
    yield from _idle(
        (loss.loss_func == "mae", "use_huber", "loss_func is mae"),
        (not is_huber, "huber_delta", "the loss is not Huber's"),
        (
            "pf" not in loss.weights,
            "use_default_pf",
            "start_pref_pf and limit_pref_pf are 0",
        ),
        (
            loss.error != "mse",
            "intensive_ener_virial",
            "such errors are per atom anyway",
        ),
    )


def _data(task: TaskConfig) -> Findings:
    data = task.data
    if data.stat_file_mode == "read" and data.stat_file is None:
        yield error(
            "stat_file_mode",
            ' = "read": needs stat_file beside it. Add it, or remove stat_file_mode.',
        )
    if data.validation_fraction is not None and data.validation_data is not None:
        yield error(
            "validation_fraction",
            f" = {data.validation_fraction:g}: validation_data is given too. {REMOVE_ONE}",
        )
    train, valid = data.training_data, data.validation_data
    yield from _idle(
        (train.sys_probs, "training_data.auto_prob", "sys_probs is given"),
        (valid and valid.sys_probs, "validation_data.auto_prob", "sys_probs is given"),
        (data.stat_file is None, "stat_file_mode", "there is no stat_file"),
    )
    # by name only: equal frames in other files are found when the data are read
    both = set(train.systems) & set(valid.systems if valid is not None else ())
    if both:
        names = ", ".join(sorted(both))
        yield warning(
            "validation_data.systems",
            f": {names} is training data too; it validates nothing.",
        )


def _tasks(run: RunConfig) -> Findings:
    for task in run.tasks.values():
        yield from inside(task.place("loss"), _loss(task))
        yield from inside(task.place("training"), _data(task))
        yield from inside(task.place("model"), task.model.findings())


_RULES = (
    _learning_rate,
    _optimizer,
    _training,
    _validating,
    _files,
    findings_of_tasks,
    _averages,
    _tasks,
)

# ---- lengths


def _lengths_to_look_at(
    run: RunConfig, num_steps: int, steps_per: StepsPer
) -> Findings:
    """Yield warnings about lengths that do not fit that of the run."""
    lr = run.learning_rate
    if isinstance(lr, ExpScheduleConfig) and lr.end_lr < lr.start_lr:
        used = lr.used_decay_steps(num_steps)
        length = counted(num_steps - lr.num_warmup_steps(num_steps), "step")
        if used != lr.decay_steps:
            yield warning(
                "learning_rate.decay_steps",
                f" = {lr.decay_steps}: not less than the {length} of the decay; {used} is "
                "used instead, as DeePMD-kit does.",
            )
    schedule = Schedule(run, num_steps)
    # averages: a window of much of the run, a start after it, or few snapshots in it
    for number, average in enumerate(run.training.averaging):
        place = f"training.averaging[{number}]"
        name, value = average.length
        # an average of one step is none: in a run of a few steps two are not too many
        longest = max(2.0, _MAX_WINDOW * num_steps)
        # frames and epochs have no length in steps before the data are read
        unit = "steps" if name == "decay" else getattr(average, "half_life_unit", "")
        if isinstance(average, EmaProfile) and unit in steps_per:
            text = f" = {value:g}"
            # The window is 1 / (1 - d) steps, and the value suggested has half the longest one, or
            # two steps. Of a half-life h in steps d is 2^(-1/h); expm1 keeps 1 - d exact where h is
            # long.
            if name == "decay":
                window = 1 / (1 - value)
                better = 1 - 1 / max(2.0, longest / 2)
            else:
                steps = steps_per[unit]
                window = 1 / -math.expm1(-math.log(2) / (value * steps))
                better = math.log(2) * longest / 2 / steps
                text += f" {unit}"
            if window > longest:
                why = (
                    f"more than a fifth of the run of {num_steps:,}, so it may lag behind the "
                    "live weights"
                )
                text += f": the average is over about {window:,.0f} steps, {why}. Try {better:.3g}."
                yield warning(f"{place}.{name}", text)
        option = "start_step"
        start = float(average.start_step)
        if average.start_epoch is not None:
            option = "start_epoch"
            start = average.start_epoch * steps_per.get("epochs", 0.0)
        due = schedule.snapshots.get(average.name)
        if start >= num_steps:
            yield warning(
                f"{place}.{option}",
                f" = {getattr(average, option):g}: the run ends at step {num_steps:,}, so "
                f"that nothing is averaged and {average.name} is the live weights. Choose "
                "an earlier start.",
            )
        elif (
            due is not None and (files := due.count(math.ceil(start))) < _MIN_SNAPSHOTS
        ):
            often = "save_freq" if average.snapshot_freq is None else "snapshot_freq"
            better = max(1, int(num_steps - start) // (2 * _MIN_SNAPSHOTS))
            yield warning(
                f"{place}.snapshots",
                f": {counted(files, 'snapshot')} in the run of {counted(num_steps, 'step')} "
                f"({often} = {due.steps.step}), too few for `dp-ema posthoc`. "
                f'Try "snapshot_freq": {better}.',
            )
