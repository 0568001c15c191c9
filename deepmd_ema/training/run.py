"""A training run from its request to its last checkpoint."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deepmd_ema.config import RunConfig, as_launched, config_warnings, ignored_options, launch_problems, saved_config
from deepmd_ema.config.outputs import RECORD
from deepmd_ema.distributed.launch import Launch, find_launch
from deepmd_ema.distributed.world import open_world
from deepmd_ema.errors import ConfigError
from deepmd_ema.interop.pretrained import local_file
from deepmd_ema.report.log import set_up_logging
from deepmd_ema.report.loggers import loggers_of
from deepmd_ema.report.record import RunRecord, keeping_warnings
from deepmd_ema.report.table import render
from deepmd_ema.training.averages import Hook
from deepmd_ema.training.outputs import check_outputs, lock_outputs, write_config
from deepmd_ema.training.prepare import prepare
from deepmd_ema.training.request import TrainRequest
from deepmd_ema.training.restart import check_resumable, warn_of_other_input
from deepmd_ema.training.summary import TrainedRun, describe_device, end_table, start_table, trained_run
from deepmd_ema.training.trainer import Callback, Trainer
from deepmd_ema.training.weights import Start, load_start

__all__ = ["Callback", "TrainRequest", "TrainedRun", "run_training", "train"]

logger = logging.getLogger(__name__)


def run_training(
    request: TrainRequest | str | Mapping[str, Any] | None = None,
    *,
    should_update: Mapping[str, Hook] | None = None,
    callback: Callback | None = None,
    launch: Launch | None = None,
    **options: Any,
) -> TrainedRun:
    """Train from scratch, from the weights of a file, or on from a checkpoint.

    ``run_training("input.json", restart="model.ckpt.pt")`` is short for
    ``run_training(TrainRequest("input.json", restart="model.ckpt.pt"))``.

    Args:
        request: the request, its input file, or the values of one; None: see :attr:`TrainRequest.input_file`.
        should_update: by name of an average, a function of (step, epoch) that says whether the average is updated with
            the weights of that step; for rules that no option has. It must depend on nothing else, or a restart is not
            exact.
        callback: watches the run.
        launch: rank of this process and number of ranks; read from the environment if None.
        options: the other attributes of the request, if an input is given.

    Returns:
        The files of the run and its last errors.

    Raises:
        UserError: for every mistake in the input, the data or the files.
    """
    began = time.monotonic()
    if not isinstance(request, TrainRequest):
        request = TrainRequest(request, **options)
    elif options:
        raise TypeError(f"run_training: {', '.join(options)} belongs into the request")
    launch = find_launch() if launch is None else launch
    with keeping_warnings() as warnings, open_world(request.device, launch) as world, ExitStack() as held:
        with world.all_ranks_ok(world.long_timeout_group):
            if request.finetune is not None and world.local_rank == 0:
                local_file(request.finetune)  # one process of each machine downloads
        with world.all_ranks_ok():
            if request.finetune is not None and (source := local_file(request.finetune)) != request.finetune:
                request = replace(request, finetune=source)
            start = load_start(request, (world.rank, world.size))
            config = read_config(request, start, launch, world.size)

        def take_outputs() -> int:
            loggers_of(config)
            check_outputs(config, request)
            held.enter_context(lock_outputs(config))
            return secrets.randbelow(2**31) if config.training.seed is None else config.training.seed

        seed = world.broadcast_from_rank0(take_outputs)
        config = replace(config, training=replace(config.training, seed=seed))
        # the config of a checkpoint has every default: what has no effect was listed when it was an input
        unused = () if request.takes_saved_config else ignored_options(config)
        for line in (*config.notes, *unused):
            logger.warning("%s", line)
        for name, task in config.tasks.items() if request.restart is None and request.finetune is None else ():
            head, place = task.model.finetune_head, task.place("model")
            if head and (name or request.init_model is None):
                also = " or --init-model" * (not name)
                logger.warning('%s.finetune_head = "%s": no effect without --finetune%s', place, head, also)
            if task.model.finetune_bias == "keep":
                logger.warning('%s.finetune_bias = "keep": no effect without --finetune', place)
        prepared = prepare(config, start, world, request.skip_neighbor_stat)
        world.broadcast_from_rank0(partial(write_config, prepared.config, request.output, is_new=start.step == 0))
        written, device = Path(RECORD) if world.is_main else None, describe_device(world.device)
        record = RunRecord(written, warnings, device, world.size, began, continues=start.step > 0)
        with record.ending():
            with world.all_ranks_ok():
                deadline, file = began + request.max_time, request.file or request.output
                trainer = Trainer(prepared, start, world, should_update, file, callback, record, deadline)
            remarks = config_warnings(prepared.config, trainer.num_steps, prepared.length.steps_per)
            for line in render(start_table(trainer)):
                logger.info("%s", line)
            for line in (*(line for of in prepared.length.tasks.values() for line in of.warnings), *remarks):
                logger.warning("%s", line)
            trainer.run()
            seconds = time.monotonic() - began
            table, trained = end_table(trainer, trainer.step - start.step, seconds), trained_run(trainer, seconds)
            del trainer  # before the process group is destroyed
        logger.info("%s", "\n".join(render(table, "  ")))
        return trained


def train(request: TrainRequest | str | Mapping[str, Any] | None = None, **options: Any) -> TrainedRun:
    """Train as the command line does, with its messages on stderr; for scripts and notebooks.

    ``train("input.json")``, ``train({"model": ...})`` or ``train(restart="model.ckpt.pt")``. The arguments are those of
    :func:`run_training`. Where the program has handlers of log messages, these get the messages.

    Raises:
        UserError: for every mistake in the input, the data or the files.
        Interrupted: after Ctrl-C, or when a notebook interrupts the cell, with the current step saved.
    """
    log = logging.getLogger("deepmd_ema")
    if not log.hasHandlers():
        set_up_logging()
    elif log.level == logging.NOTSET:  # the level of the program, often WARNING, would hide the errors of each row
        log.setLevel(logging.INFO)
    return run_training(request, **options)


def read_config(request: TrainRequest, start: Start, launch: Launch, num_ranks: int) -> RunConfig:
    """Return the checked config, with what it leaves open as it is in the start file."""
    if request.takes_saved_config:  # its notes are logged when it is compared with the checkpoint
        given = replace(saved_config(start.config, str(start.path), whole=True), notes=())
    else:
        given = (request.input.with_model(start.model_section) if request.use_pretrain_script else request.input).config
    if problems := launch_problems(given, num_ranks):
        raise ConfigError(problems)
    restart = request.restart if request.takes_saved_config else None
    config = start.adopt_from_checkpoint(as_launched(given, launch.launched, restart))
    if start.payload is not None:
        check_resumable(start, config, request.allow_config_change)
        if request.takes_saved_config:
            warn_of_other_input(start, config)
    return config
