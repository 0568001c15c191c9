"""What a run is told about its input: options without effect, what is likely not meant, and a short summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.average_notices import average_words, averages_unused, bank_warnings
from deepmd_ema.config.fields import plain
from deepmd_ema.config.messages import dotted, path_of, show
from deepmd_ema.config.schema.optim import ExpScheduleConfig, LKFConfig, WsdScheduleConfig

if TYPE_CHECKING:
    from deepmd_ema.config.schema.optim import EnerLossConfig
    from deepmd_ema.config.schema.run import RunConfig

Unused = Iterator[tuple[str, str]]
"""Dotted path of an option and the reason why it does nothing."""

_FULL_VALIDATION = (
    "validation_freq", "save_best", "save_best_dir", "max_best_ckpt", "validation_metric", "full_val_file",
    "full_val_start",
)  # fmt: skip
_TERMS = {"e": "energy", "f": "force", "v": "virial", "ae": "atomic energy", "pf": "weighted force"}


def ignored_options(config: RunConfig) -> list[str]:
    """Return the options that the input gives and that have no effect in this run, each with the reason."""
    found = list(config.unused)
    for of_section in _UNUSED:
        for path, why in of_section(config):
            if path_of(path) in config.source.given:
                spelled = dotted(config.source.path(path))
                found.append(f"{spelled} = {show(plain(_value_at(config, path)))}: no effect, {why}")
    return found


def config_warnings(
    config: RunConfig, num_steps: int | None = None, steps_per: Mapping[str, float] | None = None
) -> list[str]:
    """Return what is allowed but likely not meant.

    Args:
        config: of the run.
        num_steps: length of the run, for one that counts epochs.
        steps_per: steps of one of ``frames`` and ``epochs``, for averages that count in them; without it nothing is
            said about these.
    """
    steps = config.training.numb_steps or num_steps
    found = [text for check in _WARNINGS for text in check(config, steps)]
    return found + list(bank_warnings(config, steps, {"steps": 1.0, **(steps_per or {})}))


def config_summary(
    config: RunConfig, num_steps: int = 0, steps_per: Mapping[str, float] | None = None
) -> list[tuple[str, str]]:
    """Return names and texts of what the input asks for: rows for ``dp-ema check``, ``show`` and the start of a run.

    Args:
        config: of the run.
        num_steps: length of the run, once the data are known.
        steps_per: steps of one of ``frames`` and ``epochs``, then as well.
    """
    training, rows = config.training, []
    for task in config.tasks.values():
        of = f"{task.name}: " if task.name else ""
        rows += [(name, f"{of}{text}") for name, text in [*task.model.summary(), ("loss", _loss_words(task.loss))]]
    length = f"{training.numb_steps} steps" if training.numb_steps else f"{training.numb_epoch:g} epochs"
    if steps_per is not None:
        batches = steps_per["epochs"]
        length = f"{num_steps:,} steps = {num_steps / batches:.1f} epochs of {batches:,.0f} batches"
    batch = ", ".join(show(task.training_data.batch_size) for task in config.tasks.values())
    return [
        *rows,
        ("learning rate", _schedule_words(config)),
        ("optimizer", config.optimizer.type + _decay_words(getattr(config.optimizer, "weight_decay", 0.0))),
        ("run", f"{length}, batch_size {batch}, seed {'random' if training.seed is None else training.seed}"),
        *(("average", words) for words in average_words(config, steps_per or {})),
        ("validation", _validation_words(config)),
    ]


# ---- options without effect


def _of_tasks(config: RunConfig) -> Unused:
    for task in config.tasks.values():
        yield "model.data_bias_nsample", "the bias is fitted on data_stat_nbatch batches"
        yield "model.fitting_net.layer_name", "layers are not shared by name"
        yield from ((f"loss.{name}", why) for name, why in _of_loss(task.loss))
        for name in ("training_data", "validation_data"):
            data = getattr(task, name)
            if data is not None and data.sys_probs is not None:
                yield f"training.{name}.auto_prob", "sys_probs is given"


def _of_loss(loss: EnerLossConfig) -> Unused:
    if loss.loss_func == "mae":
        yield "use_huber", "loss_func is mae"
    if not loss.use_huber or loss.loss_func == "mae":
        yield "huber_delta", "the loss is not Huber's"
    if not (loss.start_pref_pf or loss.limit_pref_pf):
        yield "use_default_pf", "the weights start_pref_pf and limit_pref_pf are 0"
    if loss.use_huber or loss.loss_func == "mae":
        yield "intensive_ener_virial", "absolute and Huber errors are per atom anyway"


def _of_learning_rate(config: RunConfig) -> Unused:
    lr = config.learning_rate
    yield "learning_rate.scale_by_worker", "the learning rate is taken as it is"
    if lr.warmup_steps == 0 and not lr.warmup_ratio:
        yield "learning_rate.warmup_start_factor", "there is no warm-up"
    if isinstance(config.optimizer, LKFConfig):
        yield "learning_rate.start_lr", "LKF has no learning rate"


def _of_optimizer(config: RunConfig) -> Unused:
    if getattr(config.optimizer, "lr_adjust", 0) > 0:
        yield "optimizer.lr_adjust_coeff", "lr_adjust is above 0"
    yield "optimizer.flash_muon", "it names a kernel of DeePMD-kit for the same numbers"


def _of_training(config: RunConfig) -> Unused:
    training = config.training
    if training.ckpt_keep_ratio is not None:
        yield "training.max_ckpt_keep", "ckpt_keep_ratio says how many checkpoints are kept"
    if not training.tensorboard:
        yield "training.tensorboard_log_dir", "training.tensorboard is false"
        yield "training.tensorboard_freq", "training.tensorboard is false"
    if not training.time_training:
        yield "training.time_training", "times are always shown"
    if not training.disp_training:
        yield "training.disp_file", "disp_training is false"
    if training.stat_file is None:
        yield "training.stat_file_mode", "there is no stat_file"


def _of_validating(config: RunConfig) -> Unused:
    v = config.validating
    if not config.fully_validated:
        none = ", and no entry of training.averaging has it" if config.training.averaging else ""
        for name in _FULL_VALIDATION:
            yield f"validating.{name}", f"full_validation and ema_full_validation are false{none}"
    elif v.full_val_start == 1:
        for name in ("full_validation", *_FULL_VALIDATION[:-1]):
            yield f"validating.{name}", "full_val_start = 1 means never"
    elif not v.save_best:
        yield "validating.save_best_dir", "save_best is false"
        yield "validating.max_best_ckpt", "save_best is false"


def _value_at(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path_of(path):
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value


_UNUSED: tuple[Callable[[RunConfig], Unused], ...] = (
    _of_tasks,
    _of_learning_rate,
    _of_optimizer,
    averages_unused,
    _of_training,
    _of_validating,
)


# ---- allowed, but likely not meant


def _decay_steps_against_run(config: RunConfig, num_steps: int | None) -> Iterator[str]:
    lr = config.learning_rate
    if not isinstance(lr, ExpScheduleConfig) or num_steps is None or lr.decay_rate is not None:
        return
    steps = num_steps - lr.num_warmup_steps(num_steps)
    if lr.decay_steps >= steps:
        used = 100 if steps // 10 > 100 else steps // 100 + 1
        yield (
            f"learning_rate.decay_steps = {lr.decay_steps}: not less than the {steps} steps of the decay; "
            f"{used} is used instead, as DeePMD-kit does."
        )


def _of_the_model(config: RunConfig, num_steps: int | None) -> Iterator[str]:
    yield from config.model.warnings()


def _validates_on_training_data(config: RunConfig, num_steps: int | None) -> Iterator[str]:
    data = config.training.validation_data
    both = set(config.training.training_data.systems) & set(data.systems) if data is not None else set()
    if both:
        yield f"training.validation_data.systems: {', '.join(sorted(both))} is training data too; it validates nothing."


_WARNINGS: tuple[Callable[[RunConfig, int | None], Iterator[str]], ...] = (
    _decay_steps_against_run,
    _of_the_model,
    _validates_on_training_data,
)


# ---- words of the summary


def _schedule_words(config: RunConfig) -> str:
    lr = config.learning_rate
    words = f"{lr.type}, {lr.start_lr:g} to {lr.end_lr:g}"
    if isinstance(lr, ExpScheduleConfig):
        rate = "" if lr.decay_rate is None else f" by {lr.decay_rate:g}"
        words += f", every {'step' if lr.smooth else f'{lr.decay_steps} steps'}{rate}"
    if isinstance(lr, WsdScheduleConfig):
        words += f", {lr.decay_type} over the last {100 * lr.decay_phase_ratio:g} %"
    if lr.warmup_steps or lr.warmup_ratio:
        warmup = f"{lr.warmup_steps} steps" if lr.warmup_steps else f"{100 * (lr.warmup_ratio or 0):g} %"
        words += f", warm-up {warmup}"
    return words


def _decay_words(weight_decay: float) -> str:
    return f", weight decay {weight_decay:g}" if weight_decay else ""


def _loss_words(loss: EnerLossConfig) -> str:
    kind = "huber" if loss.use_huber else loss.loss_func
    terms = []
    for key, name in _TERMS.items():
        start, limit = getattr(loss, f"start_pref_{key}"), getattr(loss, f"limit_pref_{key}")
        if start or limit:
            terms.append(f"{name} {start:g} to {limit:g}")
    return f"{kind}: {', '.join(terms)}"


def _validation_words(config: RunConfig) -> str:
    t, v = config.training, config.validating
    if t.validation_data is None:
        return "none (training.validation_data is missing)"
    which = config.fully_validated
    shown = f"{t.validation_data.numb_btch} batch{'es' * (t.validation_data.numb_btch > 1)} every {t.disp_freq} steps"
    if not which or v.full_val_start == 1:
        return shown
    *others, last = which
    weights = f"{', '.join(others)} and {last}" if others else last
    return f"{shown}; all data every {v.validation_freq} steps ({weights} weights, best by {v.validation_metric})"
