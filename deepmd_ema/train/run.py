"""A training run from its input file to its last checkpoint."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from deepmd_ema.config import RunConfig, as_launched, ignored_options, launch_problems, load_config
from deepmd_ema.config.load import heads_of_input
from deepmd_ema.dist.launch import Launch, find_launch
from deepmd_ema.dist.world import World, open_world
from deepmd_ema.errors import ConfigError, UserError
from deepmd_ema.report.table import Table, render
from deepmd_ema.train.assembly.assemble import assemble
from deepmd_ema.train.assembly.summary import end_table
from deepmd_ema.train.loop.averages import Hook
from deepmd_ema.train.loop.trainer import Callback, Trainer
from deepmd_ema.train.start.output_files import check_place, lock_place, write_config
from deepmd_ema.train.start.prepare import prepare
from deepmd_ema.train.start.start_file import find_start

logger = logging.getLogger(__name__)


def run_training(
    input_file: str,
    restart: str | None = None,
    init_model: str | None = None,
    finetune: str | None = None,
    model_branch: str | None = None,
    use_pretrain_script: bool = False,
    output: str = "out.json",
    device: str | None = None,
    skip_neighbor_stat: bool = False,
    allow_config_change: bool = False,
    should_update: Mapping[str, Hook] | None = None,
    callback: Callback | None = None,
    launch: Launch | None = None,
) -> None:
    """Train as ``input_file`` says, from scratch, from the weights of a file, or on from a checkpoint.

    Args:
        input_file: JSON or YAML.
        restart: checkpoint to continue exactly.
        init_model: file whose weights, live or averaged, a new run starts from.
        finetune: file whose weights a new run on other data, perhaps of other elements, starts from.
        model_branch: which model of a file that holds several; ``RANDOM`` is a fresh fitting network for fine-tuning.
        use_pretrain_script: take the section ``model`` from the file.
        output: where the normalized config is written.
        device: ``cpu``, ``cuda``, ``cuda:1``; chosen by itself when not given.
        skip_neighbor_stat: refuse ``sel: auto``; the data are checked all the same.
        allow_config_change: allow a restart with a changed config.
        should_update: by name of an average, a function of (step, epoch) that says whether the average takes in the
            weights of that step; for what no option says. It must depend on nothing else, or a restart is not exact.
        callback: watches the run.
        launch: rank of this process and number of ranks; read from the environment when not given.

    Raises:
        UserError: for every mistake in the input, the data or the files.
    """
    began = time.monotonic()
    launch = find_launch() if launch is None else launch
    with open_world(device, launch) as world, ExitStack() as held:
        with world.all_ranks_ok():
            heads = _heads(model_branch, input_file, (restart, init_model, finetune))
            start = find_start(restart, init_model, finetune, heads, (world.rank, world.size))
            config = load_config(input_file, start.model_section if use_pretrain_script else None)
            if problems := launch_problems(config, world.size):
                raise ConfigError(problems)
            config = as_launched(config, launch.launched)
            config = start.adopt_from_checkpoint(config)
            start.check_resumable(config, allow_config_change)
        seed = world.broadcast_from_rank0(
            partial(_seed, config, output, (input_file, restart, init_model, finetune), init_model or finetune, held)
        )
        config = replace(config, training=replace(config.training, seed=seed))
        for line in (*config.notes, *ignored_options(config)):
            logger.warning("%s", line)
        _tell_idle_heads(config, restart, init_model, finetune)
        prepared = prepare(config, start, world, skip_neighbor_stat)
        world.broadcast_from_rank0(partial(write_config, prepared.config, output, is_new=start.step == 0))
        make = partial(assemble, prepared, start, world, should_update, input_file, callback)
        tell_end = partial(end_table, config=prepared.config, input_file=input_file)
        logger.info("%s", "\n".join(render(_train(make, world, tell_end, began), "  ")))


def _heads(given: str | None, input_file: str, files: Sequence[str | None]) -> dict[str, str | None]:
    """Return by task the head that the command line or the input names.

    Args:
        given: on the command line.
        input_file: of the run.
        files: of --restart, --init-model and --finetune, one of which may be given.

    Raises:
        UserError: if they name two, or there is no model to be chosen.
    """
    restart, *others = files
    if given is not None and (restart is not None or not any(others)):
        raise UserError("--model-branch: chooses a model of the file of --finetune or --init-model. Leave it out.")
    heads = heads_of_input(input_file)
    if given is None:
        return heads
    if set(heads) != {""}:
        raise UserError(
            f"--model-branch {given}: {input_file} has several tasks. Name the model that each starts from, as "
            "finetune_head in its section of model.model_dict."
        )
    head = heads[""]
    if head is not None and given != head:
        raise UserError(
            f'--model-branch {given}: {input_file} has model.finetune_head = "{head}". Expected one head: remove one '
            "of the two."
        )
    return {"": given}


def _tell_idle_heads(config: RunConfig, restart: str | None, init_model: str | None, finetune: str | None) -> None:
    """Warn of heads that have no effect in the way in which the run starts."""
    for name, task in config.tasks.items():
        head, place = task.model.finetune_head, task.place("model")
        if head and restart is None and finetune is None and (name or init_model is None):
            also = " or --init-model" * (not name)
            logger.warning('%s.finetune_head = "%s": no effect without --finetune%s', place, head, also)


def _train(make: Callable[[], Trainer], world: World, tell_end: Callable[..., Table], began: float) -> Table:
    """Train and return what is said at the end."""
    # a function of its own, because the trainer must be gone when the process group is destroyed
    with world.all_ranks_ok():
        trainer = make()
    first = trainer.step
    trainer.run()
    return tell_end(trainer, steps=trainer.step - first, seconds=time.monotonic() - began)


def _seed(config: RunConfig, output: str, inputs: Sequence[str | None], weights: str | None, held: ExitStack) -> int:
    """Return the seed of the run, once its places are checked and held until ``held`` is closed."""
    check_place(config, output, inputs, weights)
    held.enter_context(lock_place(config))
    return secrets.randbelow(2**31) if config.training.seed is None else config.training.seed
