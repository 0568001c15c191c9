"""Rules between options: each one function, all in one registry, and each judges only what is right in itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepmd_ema.config.messages import NOT_AVAILABLE, Path, Problem, path_of, show
from deepmd_ema.config.optim import LKF
from deepmd_ema.config.outputs import Outputs
from deepmd_ema.config.run import RunConfig
from deepmd_ema.dist.launch import Launch, find_launch

if TYPE_CHECKING:
    from deepmd_ema.config.walk import Walk

Found = Iterator[tuple[str, str]]
"""Dotted path that a message begins with, and the rest of the message."""


@dataclass(frozen=True)
class Rule:
    """A rule and the options that it looks at; it is silent when one of them is wrong in itself."""

    check: Callable[[RunConfig], Found]
    looks_at: tuple[str, ...]


RULES: list[Rule] = []


def rule(*looks_at: str) -> Callable[[Callable[[RunConfig], Found]], Callable[[RunConfig], Found]]:
    """Enter a function into the registry; ``looks_at`` are the dotted paths of the options that it reads."""

    def register(check: Callable[[RunConfig], Found]) -> Callable[[RunConfig], Found]:
        RULES.append(Rule(check, looks_at))
        return check

    return register


def rule_problems(config: RunConfig, walk: Walk) -> list[Problem]:
    """Return what the rules find; a rule that looks at a broken option is left out."""
    found = []
    for r in RULES:
        if not any(is_broken(path_of(path), walk.broken) for path in r.looks_at):
            judged = [(path, text) for path, text in r.check(config) if not is_broken(path_of(path), walk.broken)]
            found += [_problem(path, text, walk) for path, text in judged]
    return found


def launch_problems(config: RunConfig, environ: Mapping[str, str], walk: Walk) -> list[Problem]:
    """Return what speaks against the ranks that this process was launched with."""
    found = _launch(config, find_launch(environ))
    return [_problem(path, text, walk) for path, text in found if not is_broken(path_of(path), walk.broken)]


def _launch(config: RunConfig, launch: Launch) -> Found:
    stage = config.training.zero_stage
    if isinstance(config.optimizer, LKF):
        if launch.size > 1:
            yield (
                "optimizer.type",
                f' = "LKF": trains in one process only, and {launch.size} were launched. Start it without a launcher, '
                "or choose Adam, AdamW, AdaMuon or HybridMuon.",
            )
    elif stage > 0 and not launch.launched:
        yield (
            "training.zero_stage",
            f" = {stage}: needs several ranks, and this process is alone. Set it to 0, or launch with: "
            "torchrun --nproc_per_node=2 -m deepmd_ema train input.json",
        )


def is_broken(path: Path, broken: set[Path]) -> bool:
    """Whether the option, a section around it or something in it is broken."""
    return any(path[: len(b)] == b or b[: len(path)] == path for b in broken)


def _problem(path: str, text: str, walk: Walk) -> Problem:
    here = path_of(path)
    return Problem(walk.spelled.get(here, here), text)


# ---- model


@rule("model.type_map")
def model_fits_together(config: RunConfig) -> Found:
    """Elements, excluded types and preset biases fit together."""
    yield from _inside("model", config.model.problems())


@rule("model.descriptor", "model.type_map")
def descriptor_fits_together(config: RunConfig) -> Found:
    """The options of the descriptor fit together and to the elements."""
    yield from _inside("model.descriptor", config.model.descriptor.problems(config.model.type_map))


@rule("model.fitting_net", "model.type_map")
def fitting_net_fits_together(config: RunConfig) -> Found:
    """The options of the fitting network fit together and to the elements."""
    yield from _inside("model.fitting_net", config.model.fitting_net.problems(config.model.type_map))


def _inside(section: str, found: Found) -> Found:
    return ((f"{section}.{option}", text) for option, text in found)


# ---- learning_rate


@rule("learning_rate.stop_lr", "learning_rate.stop_lr_ratio")
def one_end_of_learning_rate(config: RunConfig) -> Found:
    """``stop_lr`` and ``stop_lr_ratio`` exclude each other."""
    lr = config.learning_rate
    if lr.stop_lr is not None and lr.stop_lr_ratio is not None:
        yield "learning_rate.stop_lr_ratio", f" = {lr.stop_lr_ratio:g}: stop_lr is given too. Remove one of the two."


@rule("learning_rate.start_lr", "learning_rate.stop_lr")
def learning_rate_goes_down(config: RunConfig) -> Found:
    """``stop_lr`` is not above ``start_lr``."""
    lr = config.learning_rate
    if lr.stop_lr is not None and lr.stop_lr > lr.start_lr:
        yield "learning_rate.stop_lr", f" = {lr.stop_lr:g}: expected at most start_lr = {lr.start_lr:g}."


@rule("learning_rate.stop_lr", "learning_rate.stop_lr_ratio", "learning_rate.decay_type")
def inverse_decay_ends_above_zero(config: RunConfig) -> Found:
    """The inverse linear decay of wsd, which divides by the last rate, does not end at 0."""
    lr = config.learning_rate
    if lr.type == "wsd" and lr.stop_lr == 0 and getattr(lr, "decay_type", "") == "inverse_linear":
        yield "learning_rate.stop_lr", " = 0: expected > 0 for decay_type inverse_linear. Or use decay_type linear."


@rule("learning_rate.warmup_steps", "learning_rate.warmup_ratio")
def one_length_of_warmup(config: RunConfig) -> Found:
    """``warmup_steps`` and ``warmup_ratio`` exclude each other."""
    lr = config.learning_rate
    if lr.warmup_steps > 0 and lr.warmup_ratio is not None:
        yield "learning_rate.warmup_ratio", f" = {lr.warmup_ratio:g}: warmup_steps is given too. Remove one of the two."


@rule("learning_rate.warmup_steps", "training.numb_steps")
def warmup_ends_in_the_run(config: RunConfig) -> Found:
    """The warm-up is shorter than the run."""
    steps, warmup = config.training.numb_steps, config.learning_rate.warmup_steps
    if steps is not None and warmup >= steps:
        yield "learning_rate.warmup_steps", f" = {warmup}: expected less than training.numb_steps = {steps}."


# ---- optimizer


@rule("optimizer", "training.zero_stage")
def lkf_shares_nothing_out(config: RunConfig) -> Found:
    """LKF trains in one process: a block of its covariance has weights of several layers."""
    stage = config.training.zero_stage
    if isinstance(config.optimizer, LKF) and stage > 0:
        yield (
            "training.zero_stage",
            f" = {stage}: LKF trains in one process only. Use 0, or choose Adam, AdamW, AdaMuon or HybridMuon.",
        )


@rule("optimizer", "training.gradient_max_norm")
def lkf_does_not_clip(config: RunConfig) -> Found:
    """The length of an update of LKF is the filter's, not the gradient's."""
    norm = config.training.gradient_max_norm
    if isinstance(config.optimizer, LKF) and norm:
        yield "training.gradient_max_norm", f" = {norm:g}: not possible with optimizer.type LKF. Remove one of the two."


@rule("optimizer", "loss")
def lkf_fits_energies_and_forces(config: RunConfig) -> Found:
    """Of the loss LKF takes only whether energies and forces are fitted; it knows no other term and no other error."""
    if not isinstance(config.optimizer, LKF):
        return
    loss = config.loss
    for name in (f"{when}_pref_{term}" for term in ("v", "ae", "pf") for when in ("start", "limit")):
        if getattr(loss, name):
            yield f"loss.{name}", f" = {getattr(loss, name):g}: LKF fits energies and forces only. Set it to 0."
    for name, plain in LKF_LOSS.items():
        value = getattr(loss, name)
        if value != plain:
            yield f"loss.{name}", f" = {show(value)}: LKF does not know it. Set it to {show(plain)}."


LKF_LOSS = {"loss_func": "mse", "use_huber": False, "f_use_norm": False, "relative_f": None,
            "intensive_ener_virial": False}  # fmt: skip


# ---- loss


@rule("loss.f_use_norm", "loss.use_huber", "loss.loss_func")
def force_norm_needs_mae_or_huber(config: RunConfig) -> Found:
    """``f_use_norm`` works with absolute or Huber errors only."""
    loss = config.loss
    if loss.f_use_norm and not (loss.use_huber or loss.loss_func == "mae"):
        yield "loss.f_use_norm", ' = true: needs "loss_func": "mae" or "use_huber": true. Add one, or remove it.'


@rule("loss.use_huber", "loss.loss_func", "loss.relative_f", "loss.start_pref_pf", "loss.limit_pref_pf")
def huber_has_no_weighted_forces(config: RunConfig) -> Found:
    """The Huber loss has no per-atom weights and no relative forces."""
    loss = config.loss
    huber = loss.use_huber and loss.loss_func == "mse"
    if huber and loss.relative_f is not None:
        yield "loss.relative_f", f" = {loss.relative_f:g}: not possible with use_huber. Remove one of the two."
    if huber and (loss.start_pref_pf or loss.limit_pref_pf):
        yield "loss.start_pref_pf", f" = {loss.start_pref_pf:g}: not possible with use_huber. Remove one of the two."


@rule("loss")
def something_is_minimized(config: RunConfig) -> Found:
    """At least one weight of the loss is not zero."""
    loss = config.loss
    terms = ("e", "f", "v", "ae", "pf")
    if not any(getattr(loss, f"start_pref_{t}") or getattr(loss, f"limit_pref_{t}") for t in terms):
        yield "loss", ": every weight is 0, so nothing would be trained. Set start_pref_e, start_pref_f, ..."


# ---- training


@rule("training.numb_steps", "training.numb_epoch")
def one_length_of_run(config: RunConfig) -> Found:
    """Exactly one of ``numb_steps`` and ``numb_epoch`` is given."""
    t = config.training
    if t.numb_steps is not None and t.numb_epoch is not None:
        yield "training.numb_epoch", f" = {t.numb_epoch:g}: numb_steps = {t.numb_steps} is given too. Remove one."
    if t.numb_steps is None and t.numb_epoch is None:
        yield "training", ': numb_steps or numb_epoch is required. Add one, e.g. "numb_steps": 100000.'


@rule("training.stat_file", "training.stat_file_mode")
def reading_statistics_needs_a_file(config: RunConfig) -> Found:
    """``stat_file_mode`` read needs a ``stat_file``."""
    t = config.training
    if t.stat_file_mode == "read" and t.stat_file is None:
        yield "training.stat_file_mode", ' = "read": needs training.stat_file. Add it, or remove stat_file_mode.'


@rule("training.training_data.systems")
def training_systems_are_folders(config: RunConfig) -> Found:
    """Training systems are of a format that is read."""
    yield from _no_lmdb("training.training_data.systems", config.training.training_data.systems)


@rule("training.validation_data.systems")
def validation_systems_are_folders(config: RunConfig) -> Found:
    """Validation systems are of a format that is read."""
    if config.training.validation_data is not None:
        yield from _no_lmdb("training.validation_data.systems", config.training.validation_data.systems)


def _no_lmdb(path: str, systems: Sequence[str]) -> Found:
    bad = [s for s in systems if s.rstrip("/").endswith(".lmdb")]
    if bad:
        yield path, f": {show(bad[0])}: LMDB data are {NOT_AVAILABLE}. Use deepmd/npy folders or HDF5."


# ---- validating


@rule("training.validation_data", "validating.full_validation", "validating.ema_full_validation")
def full_validation_needs_data(config: RunConfig) -> Found:
    """Full validation, of live or averaged weights, needs ``validation_data``."""
    v = config.validating
    if config.training.validation_data is None:
        for name in ("full_validation", "ema_full_validation"):
            if getattr(v, name):
                yield f"validating.{name}", " = true: needs training.validation_data. Add it, or set this to false."


@rule("training.enable_ema", "validating.ema_full_validation")
def ema_validation_needs_ema(config: RunConfig) -> Found:
    """``ema_full_validation`` needs ``enable_ema``, whatever ``full_val_start`` says."""
    if config.validating.ema_full_validation and not config.training.enable_ema:
        instead = ', and "full_validation": true in an entry of training.averaging' * bool(config.training.averaging)
        yield (
            "validating.ema_full_validation",
            f' = true: needs "enable_ema": true in training. Add it, or set this to false{instead}.',
        )


@rule(
    "loss", "training.averaging", "validating.validation_metric", "validating.full_validation",
    "validating.ema_full_validation",
)  # fmt: skip
def metric_is_trained(config: RunConfig) -> Found:
    """What ranks the weights has weights in the loss, at the start and at the end."""
    v = config.validating
    letter = {"E": "e", "F": "f", "V": "v", "S": "v"}[v.validation_metric[0]]
    start, limit = (getattr(config.loss, f"{when}_pref_{letter}") for when in ("start", "limit"))
    if config.fully_validated and not (start and limit):
        yield (
            "validating.validation_metric",
            f" = {show(v.validation_metric)}: not in the loss, whose start_pref_{letter} = {start:g} and "
            f"limit_pref_{letter} = {limit:g} must both be > 0. Set them, or choose another metric.",
        )


@rule("training.disp_training", "training.disp_file", "training.averaging", "validating")
def rows_have_files_of_their_own(config: RunConfig) -> Found:
    """No two of learning curves and logs of full validation are written to one file."""
    for output, first in Outputs(config).shared_rows():
        yield (
            output.option,
            f": {output.content} would be written to {os.path.normpath(output.path)}, as {first.content} is. "
            "Choose another name.",
        )
