"""Turns a config into the parts of a run. Everything that depends on the config is decided here, once."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank, AverageProfile, note_unused
from deepmd_ema.config import config_warnings, ignored_options, load_config, to_dict
from deepmd_ema.data.loader import Loader, sequential_batches
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.loss import build_loss
from deepmd_ema.optim.build import build_optimizer
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.report import IntervalTimes, LcurveFile, Progress, ValidationLog, open_board
from deepmd_ema.runtime import atomic_write, keep_freed_memory, make_runtime, seed_for
from deepmd_ema.train import banner
from deepmd_ema.train.display import Display
from deepmd_ema.train.parallel import refuse_several_processes
from deepmd_ema.train.prepare import prepare
from deepmd_ema.train.resume import Origin, adopt_model, check_continuity, find_origin
from deepmd_ema.train.saver import Payloads, Saver
from deepmd_ema.train.step import GradientStep
from deepmd_ema.train.task import Task, TaskMixture
from deepmd_ema.train.trainer import Trainer
from deepmd_ema.train.validate import LIVE, FullValidation, Validated

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.npy import System
    from deepmd_ema.loss import EnerLoss
    from deepmd_ema.runtime import Runtime
    from deepmd_ema.train.prepare import Prepared

logger = logging.getLogger(__name__)

EMA = "ema"  # name of the average of the short form, training.enable_ema


def run_training(
    input_file: str,
    restart: str | None = None,
    init_model: str | None = None,
    output: str = "out.json",
    device: str | None = None,
    skip_neighbor_stat: bool = False,
    allow_config_change: bool = False,
) -> None:
    """Train as ``input_file`` says, from scratch, from the weights of a file, or on from a checkpoint.

    Args:
        input_file: JSON or YAML.
        restart: checkpoint to continue exactly.
        init_model: file whose weights, live or averaged, a new run starts from.
        output: where the normalized config is written.
        device: ``cpu``, ``cuda``, ``cuda:1``; chosen by itself when not given.
        skip_neighbor_stat: refuse ``sel: auto``; the data are checked as ever.
        allow_config_change: let a restart go on although the config changed.

    Raises:
        UserError: for everything that the user can mend.
    """
    config = load_config(input_file)
    runtime = make_runtime(device)
    if runtime.device.type == "cpu":
        keep_freed_memory()
    refuse_several_processes(runtime, config.training.zero_stage)
    origin = find_origin(restart, init_model)
    config = adopt_model(config, origin)
    if config.training.seed is None:
        config = replace(config, training=replace(config.training, seed=secrets.randbelow(2**31)))
    if origin.kind == "restart":
        check_continuity(config, origin, allow_config_change)
    _check_places(config, output)
    for line in (*config.notes, *ignored_options(config)):
        logger.warning("%s", line)
    prepared = prepare(config, origin, skip_neighbor_stat)
    _write_config(output, prepared.config)
    trainer = assemble(prepared, origin, runtime)
    trainer.input_file = input_file
    trainer.run()
    logger.info("trained model: %s", trainer.saver.live.link)


def assemble(prepared: Prepared, origin: Origin, runtime: Runtime) -> Trainer:
    """Return the trainer of a run, standing where ``origin`` says."""
    config = prepared.config
    training = config.training
    model = prepared.model.to(runtime.device)
    sampler = _sampler(prepared.train, training.training_data, prepared.seed, "frames", runtime)
    num_steps = training.numb_steps or sampler.steps_for_epochs(training.numb_epoch or 0)
    loss = build_loss(config.loss, config.learning_rate.start_lr)
    task = _make_task(prepared, loss, sampler, runtime)
    optimizer = build_optimizer(config.optimizer, dict(model.named_parameters()), runtime.device)
    take_step = GradientStep(
        model, optimizer, build_schedule(config.learning_rate, num_steps), training.gradient_max_norm or None
    )
    profiles = _profiles(config)
    bank = AverageBank(model, profiles) if profiles else None
    start = origin.payload["step"] if origin.kind == "restart" else 0
    validator = _make_validator(prepared, bank, runtime, num_steps)
    trainer = Trainer(
        tasks=TaskMixture([task], seed=prepared.seed),
        take_step=take_step,
        bank=bank,
        validator=validator,
        saver=_make_saver(prepared, bank, validator, num_steps, start),
        display=_make_display(config, loss, runtime, num_steps, start),
        device=runtime.device,
        num_steps=num_steps,
    )
    for line in banner.start_lines(config, runtime, model, prepared.train, sampler, num_steps, profiles):
        logger.info("%s", line)
    for warning in (*sampler.warnings, *config_warnings(config, num_steps)):
        logger.warning("%s", warning)
    if origin.kind == "restart":
        _continue(trainer, origin)
    model.train()
    return trainer


def _continue(trainer: Trainer, origin: Origin) -> None:
    state, step = origin.payload, origin.payload["step"]
    if trainer.bank is not None:
        trainer.bank.load_state_dict(state.get("averages"), step)
    elif "averages" in state:
        note_unused(state["averages"])
    trainer.load_state_dict(step, state)
    logger.info(
        "restart after step %d of %s: weights, optimizer, averages, order of frames, learning rate and logs go on",
        step, origin.path,
    )  # fmt: skip
    if step >= trainer.num_steps:
        logger.warning(
            "step %d is the last of %d already: nothing is left to train. Raise training.numb_steps to go on.",
            step, trainer.num_steps,
        )  # fmt: skip


def _check_places(config: RunConfig, output: str) -> None:
    """Make the folders that the run writes to; a place where it could not write is told now, not after an hour."""
    training, validating = config.training, config.validating
    files = {
        "--output": output,
        "training.disp_file": training.disp_file,
        "training.save_ckpt": f"{training.save_ckpt}.pt",
        "validating.full_val_file": validating.full_val_file,
        "name of the newest file": checkpoint.POINTER,
    }
    folders = {option: Path(name).parent for option, name in files.items()}
    more = {"training.save_dir": training.save_dir, "validating.save_best_dir": validating.save_best_dir}
    if training.stat_file is not None and training.stat_file_mode != "read":
        more["training.stat_file"] = str(Path(training.stat_file).parent)
    if training.tensorboard:
        more["training.tensorboard_log_dir"] = training.tensorboard_log_dir
    folders |= {option: Path(folder) for option, folder in more.items() if folder is not None}
    problems = [
        f"{option}: {name} is a folder, and the run writes a file of that name. Move it away, or choose another name."
        for option, name in files.items()
        if Path(name).is_dir()
    ]
    checked: set[Path] = set()
    for option, folder in folders.items():
        problems += _unwritable(folder, option) if folder not in checked else []
        checked.add(folder)
    if problems:
        raise CheckpointError(problems)


def _unwritable(folder: Path, option: str) -> list[str]:
    try:
        checkpoint.ensure_writable(folder, option)
    except CheckpointError as error:
        return error.problems
    return []


def _write_config(output: str, config: RunConfig) -> None:
    try:
        with atomic_write(output) as part:
            part.write_text(json.dumps(to_dict(config), indent=4) + "\n")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}). Make room, or choose another -o.") from error


def _sampler(systems: Sequence[System], data: Any, seed: int, stream: str, runtime: Runtime) -> Sampler:
    return Sampler(
        [system.num_frames for system in systems],
        [system.natoms for system in systems],
        batch_size=data.batch_size,
        auto_prob=data.auto_prob,
        sys_probs=data.sys_probs,
        seed=seed_for(stream, seed),
        rank=runtime.rank,
        world_size=runtime.world_size,
    )


def _make_task(prepared: Prepared, loss: EnerLoss, sampler: Sampler, runtime: Runtime) -> Task:
    model, training = prepared.model, prepared.config.training
    pin = runtime.device.type == "cuda"
    frames = Loader(prepared.train, sampler, model.layout, cache=prepared.cache, pin=pin)
    if training.validation_data is None or not training.disp_training:
        return Task("", model, loss, frames)
    order = _sampler(prepared.valid, training.validation_data, prepared.seed, "display frames", runtime)
    shown = Loader(prepared.valid, order, model.layout, cache=prepared.cache, pin=pin)
    return Task("", model, loss, frames, shown, training.validation_data.numb_btch)


def _profiles(config: RunConfig) -> list[AverageProfile]:
    if not config.training.enable_ema:
        return []
    return [AverageProfile(EMA, config.training.ema_decay, config.training.ema_warmup)]


def _make_validator(
    prepared: Prepared, bank: AverageBank | None, runtime: Runtime, num_steps: int
) -> FullValidation | None:
    config, validating = prepared.config, prepared.config.validating
    wanted = [LIVE] * validating.full_validation + [EMA] * validating.ema_full_validation
    if not wanted:
        return None
    folder = validating.save_best_dir or Path(config.training.save_ckpt).parent
    rows = []
    for weights in wanted:
        suffix = "" if weights == LIVE else f"_{weights}"
        file = Path(validating.full_val_file)
        file = file.with_name(f"{file.stem}{suffix}{file.suffix}")
        log = ValidationLog(file, num_steps, validating.validation_metric)
        best = None
        if validating.save_best:
            best = checkpoint.BestFiles(
                f"best{suffix}", Path(folder), validating.max_best_ckpt, validating.validation_metric
            )
        rows.append(Validated(weights, log, best))
    batches = partial(sequential_batches, prepared.valid, prepared.model.layout, prepared.cache)
    return FullValidation(
        prepared.model, bank, rows, batches, runtime.device, validating.validation_metric,
        start=_validation_start(validating.full_val_start, num_steps), every=validating.validation_freq,
    )  # fmt: skip


def _validation_start(start: float, num_steps: int) -> int | None:
    """Return the first validated step: a fraction of the run below 1, never at 1, a step above it."""
    if start == 1:
        return None
    return int(start * num_steps) if start < 1 else int(start)


def _make_saver(
    prepared: Prepared, bank: AverageBank | None, validator: FullValidation | None, num_steps: int, start: int
) -> Saver:
    training = prepared.config.training
    payloads = Payloads(prepared.model, bank, to_dict(prepared.config), prepared.min_nbor_dist)

    def family(suffix: str, max_keep: int) -> checkpoint.Family:
        keep = checkpoint.keep_count(max_keep, training.ckpt_keep_ratio, num_steps, training.save_freq)
        return checkpoint.Family(training.save_ckpt, suffix, training.save_dir, keep, start=start)

    averages: Mapping[str, checkpoint.Family] = {}
    if bank is not None:
        kept = training.max_ckpt_keep if training.ema_ckpt_keep is None else training.ema_ckpt_keep
        averages = {name: family(f"_{name}", kept) for name in bank.names}
    bests = [row.best for row in validator.rows if row.best is not None] if validator is not None else []
    return Saver(payloads, family("", training.max_ckpt_keep), averages, bests, training.save_freq)


def _make_display(config: RunConfig, loss: EnerLoss, runtime: Runtime, num_steps: int, start: int) -> Display:
    training = config.training
    lcurve = None
    if training.disp_training:
        lcurve = LcurveFile(training.disp_file, loss.display_names, validation=training.validation_data is not None)
    return Display(
        progress=Progress(num_steps),
        lcurve=lcurve,
        times=IntervalTimes(),
        every=training.disp_freq,
        device=runtime.device,
        average=training.disp_avg,
        board=open_board(training.tensorboard_log_dir, start) if training.tensorboard else None,
        board_every=training.tensorboard_freq,
    )
