"""Turns a config into the parts of a run. Everything that depends on the config is decided here, once."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deepmd_ema.averaging import AverageBank, note_unused
from deepmd_ema.config import config_warnings, ignored_options, launch_problems, load_config
from deepmd_ema.dist.launch import find_launch
from deepmd_ema.dist.world import World, open_world
from deepmd_ema.errors import ConfigError
from deepmd_ema.loss import build_loss
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.train import banner, parts
from deepmd_ema.train.averages import Hook, tracked_averages
from deepmd_ema.train.bias import refit
from deepmd_ema.train.parallel import parallelize
from deepmd_ema.train.places import check_places, write_config
from deepmd_ema.train.prepare import prepare
from deepmd_ema.train.resume import Origin, adopt_model, check_continuity, find_origin, run_id
from deepmd_ema.train.task import TaskMixture
from deepmd_ema.train.trainer import Trainer

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig
    from deepmd_ema.train.prepare import Prepared

logger = logging.getLogger(__name__)


def run_training(
    input_file: str,
    restart: str | None = None,
    init_model: str | None = None,
    output: str = "out.json",
    device: str | None = None,
    skip_neighbor_stat: bool = False,
    allow_config_change: bool = False,
    should_update: Mapping[str, Hook] | None = None,
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
        should_update: by name of an average, a function of (step, epoch) that says whether the average takes in the
            weights of that step; for what no option says. It must depend on nothing else, or a restart is not exact.

    Raises:
        UserError: for everything that the user can mend.
    """
    launch = find_launch()
    with open_world(device, launch) as world:
        with world.all_ranks_ok():
            config = load_config(input_file)
            if problems := launch_problems(config, world.size, launch.launched):
                raise ConfigError(problems)
            origin = find_origin(restart, init_model)
            config = adopt_model(config, origin)
            if origin.kind == "restart":
                check_continuity(config, origin, allow_config_change)
        seed = world.broadcast_from_rank0(partial(_seed, config, output))
        config = replace(config, training=replace(config.training, seed=seed))
        for line in (*config.notes, *ignored_options(config)):
            logger.warning("%s", line)
        prepared = prepare(config, origin, world, skip_neighbor_stat)
        world.broadcast_from_rank0(partial(write_config, output, prepared.config))
        with world.all_ranks_ok():
            trainer = assemble(prepared, origin, world, should_update)
        trainer.input_file = input_file
        trainer.run()
        logger.info("trained model: %s", trainer.saver.live.link)
        del trainer  # it must be gone when the ranks part


def _seed(config: RunConfig, output: str) -> int:
    """Return the seed of the run, once it is known that it can write."""
    check_places(config, output)
    return secrets.randbelow(2**31) if config.training.seed is None else config.training.seed


def assemble(
    prepared: Prepared,
    origin: Origin,
    world: World,
    should_update: Mapping[str, Hook] | None = None,
) -> Trainer:
    """Return the trainer of a run, standing where ``origin`` says."""
    config, stage = prepared.config, prepared.config.training.zero_stage
    model = prepared.model.to(world.device)
    wrapped = parallelize(model, world, stage)
    sampler = parts.make_sampler(prepared.train, config.training.training_data, prepared.seed, "frames", world)
    num_steps = config.training.numb_steps or sampler.steps_for_epochs(config.training.numb_epoch or 0)
    loss = build_loss(config.loss, config.learning_rate.start_lr, world)
    schedule = build_schedule(config.learning_rate, num_steps)
    tracked = tracked_averages(config, sampler, should_update)
    bank = AverageBank(model, [t.profile for t in tracked]) if tracked else None
    start = origin.payload["step"] if origin.kind == "restart" else 0
    plan = parts.Plan(prepared, num_steps, start, tracked, bank, run_id(config, origin), world)
    validator = parts.make_validator(plan)
    trainer = Trainer(
        tasks=TaskMixture([parts.make_task(plan, wrapped, loss, sampler)], seed=prepared.seed),
        take_step=parts.make_step(plan, schedule),
        bank=bank,
        validator=validator,
        saver=parts.make_saver(plan, validator),
        display=parts.make_display(plan, loss, sampler.frames_per_step),
        device=world.device,
        num_steps=num_steps,
        steps_per_epoch=sampler.batches_per_epoch,
        world=world,
        refit=partial(refit, prepared, bank) if config.training.change_bias_after_training else None,
    )
    for line in banner.start_lines(plan, sampler):
        logger.info("%s", line)
    steps_per = {"frames": 1 / sampler.frames_per_step, "epochs": float(sampler.batches_per_epoch)}
    for warning in (*sampler.warnings, *config_warnings(config, num_steps, steps_per)):
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
