"""A restart: the exact continuation of a run, perhaps with other tasks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepmd_ema import checkpoint
from deepmd_ema.config import (
    RunConfig,
    as_launched,
    read_input,
    saved_config,
    saved_models,
    to_dict,
)
from deepmd_ema.config.messages import differences_of, of_one_task, show, without_tasks
from deepmd_ema.config.outputs import outside_paths
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig, LKFConfig
from deepmd_ema.data.run import COMPARED_BYTES
from deepmd_ema.distributed.tensors import (
    StoredTensor,
    check_weights,
    local_shard,
    shard_like,
)
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError, ConfigError, UserError
from deepmd_ema.files import path_digest
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.text import command, first_few
from deepmd_ema.training.request import DEFAULT_INPUT
from deepmd_ema.training.weights import Start

logger = logging.getLogger(__name__)

# options that act at the start of a run, not in its continuation
_OF_THE_START = (".finetune_head", ".finetune_bias")
# a restart that differs in one of these is another run, not the continuation of this one
CONTINUITY = (
    "model",
    "learning_rate",
    "optimizer",
    "loss",
    "training.training_data",
    "training.validation_fraction",
    "training.model_prob",
    "training.num_epoch_dict",
    "training.seed",
    "training.gradient_max_norm",
    "training.accumulate",
)
# options with paths, which may differ between machines: the data are compared themselves
_OF_A_MACHINE = (".systems", ".stat_file")
# often changed on purpose, to train longer; the learning rate may follow it, so it is reported
LENGTH = ("training.numb_steps", "training.numb_epoch")
_OF_ALL_TASKS = {  # optimizers whose state does not fit to other tasks, and why
    LKFConfig.type: "its covariances are of blocks of the weights of all tasks",
    AdamWScheduleFreeConfig.type: "its averaged point is over the steps of all tasks",
}
_ADVICE = (
    "     A restart continues the same run. Put this back, or say --allow-config-change if the "
    "change is meant,\n"
    "     or start anew from the weights with --init-model."
)


def check_resumable(start: Start, config: RunConfig, allow_change: bool) -> Start:
    """Compare the config of a run with that of the checkpoint that it continues.

    Returns:
        The start, with the tasks whose training data have other paths: :func:`check_content`
        compares their content.

    Args:
        start: the checkpoint.
        config: of the run.
        allow_change: whether options may differ that the continuation depends on.

    Raises:
        ConfigError: if they do and may not, or the state of the optimizer does not fit.
    """
    # the only task has the empty name, tasks of several have others: weights would find no place
    if ("" in start.saved) != ("" in config.tasks):
        raise ConfigError(
            f"{start.path}: of a run of {_describe_tasks(start.saved)}, and the input has "
            f"{_describe_tasks(config.tasks)}: no restart. Start anew from its weights with "
            "--finetune, "
            f"{'and --model-branch' if '' in config.tasks else 'and finetune_head for each task'}."
        )

    # both in today's form: a checkpoint of an older version has options under other names
    before, now = start.config, to_dict(config)
    if before != now:
        saved = saved_config(start.config, str(start.path))
        for note in saved.notes:  # options of the checkpoint that were removed since
            logger.info("%s", note)
        before = to_dict(saved)

    # tasks that came or went are reported as such, not option by option
    came = sorted(config.tasks.keys() - start.saved.keys())
    went = sorted(start.saved.keys() - config.tasks.keys())
    in_both = without_tasks(differences_of(before, now), [*came, *went])
    differences = [d for d in in_both if not d[0].endswith(_OF_THE_START)]
    for path, old, new in differences:
        if path in LENGTH:
            logger.warning(
                "%s was %s, is now %s: a decaying learning rate continues along its new curve",
                path,
                old,
                new,
            )

    # options on which the continuation depends; those of a task are looked up as in an input of one
    # task
    sections = tuple(f"{section}." for section in CONTINUITY)
    by_path = {
        path: f"{path}: {show(old, 200)} in the checkpoint, {show(new, 200)} in the input"
        for path, old, new in differences
        if f"{of_one_task(path)}.".startswith(sections)
    }
    # Training data under other paths may be the same frames. That is decided by their content,
    # once the data are opened (:func:`check_content`).
    moved: dict[str, str] = {}
    for name, task in config.tasks.items():
        path = f"{task.place('training')}.training_data.systems"
        # checkpoints of earlier versions do not say what the content was
        if (
            path in by_path
            and not allow_change
            and start.payload["streams"].get(name, {}).get("content")
        ):
            moved[name] = by_path.pop(path)
    lines = [*by_path.values()]
    lines += [
        f"task {name}: new, it starts from the seed and the statistics of its data"
        for name in came
    ]
    lines += [f"task {name}: in the checkpoint only, and left behind" for name in went]
    if not lines:
        return replace(start, moved=moved)
    if not allow_change:
        *first_lines, last = [f"{line}." for line in lines]
        raise ConfigError([*first_lines, f"{last}\n{_ADVICE}"])

    # changes that no option allows: the state of the optimizer would not fit
    kind = before["optimizer"]["type"]
    if config.optimizer.type != kind:
        raise ConfigError(
            f'optimizer.type = "{config.optimizer.type}": the checkpoint holds the moments of '
            f'{kind}. Set it to "{kind}", or start anew from the weights with --init-model.'
        )
    if kind in _OF_ALL_TASKS and (came or went):
        text = f'optimizer.type = "{kind}": {_OF_ALL_TASKS[kind]}, and these are others now. '
        raise ConfigError(text + "Start anew from the weights with --finetune.")
    if frozen := [line for path, line in by_path.items() if ".trainable" in path]:
        raise ConfigError(
            f"{frozen[0]}: the checkpoint holds the state of the optimizer for the parameters "
            "that were trained. Put this back, or start anew from the weights with --init-model."
        )
    for line in lines:
        logger.warning("the restart continues with a change. %s", line)
    return start


def check_content(start: Start, contents: Mapping[str, str]) -> None:
    """Compare training data with those of the checkpoint: under other paths they must be the same.

    Under the same paths a warning says that they have changed since.

    Args:
        start: the checkpoint.
        contents: digests of the training data by task.

    Raises:
        ConfigError: if they are others.
    """
    if not start.payload:
        return
    with checkpoint.reading(start.path, "streams"):
        streams = {
            task: stream.get("content")
            for task, stream in start.payload["streams"].items()
        }
    for task, content in contents.items():
        # checkpoints of earlier versions do not say what the content was, and new tasks have none
        before = streams.get(task) or content
        moved = start.moved.get(task)
        if moved is None:
            if content and content != before:  # empty: it could not be read again
                text = (
                    "the training data%s have changed since %s was written: the restart continues "
                    "with other frames"
                )
                logger.warning(text, f" of task {task}" if task else "", start.path)
        elif content != before:
            raise ConfigError(f"{moved}. Their content is another, too.\n{_ADVICE}")
        else:
            logger.info(
                "%s: the same files under other paths, which is no change", moved
            )


def outside_outputs(config: RunConfig) -> list[str]:
    """Return the options of a run with paths outside of the working folder, to which it writes."""
    values = to_dict(config)
    written = {name: values[name] for name in ("training", "validating")}
    return [
        f"{option} = {show(path)}"
        for option, path in outside_paths(written, Path.cwd())
    ]


def refuse_outside_outputs(start: Start, config: RunConfig) -> None:
    """Check that a run with the config of its checkpoint writes to the working folder only.

    The checkpoint may be of somebody else.

    Raises:
        CheckpointError: if it writes elsewhere.
    """
    if outside := outside_outputs(config):
        raise CheckpointError(
            f"{start.path}: its config writes outside of this folder: {first_few(outside)}. If "
            "that is meant, give an input that says so: "
            f"`{command('dp-ema', 'train', '--restart', start.path, DEFAULT_INPUT)}`."
        )


def check_same_start(start: Start, config: RunConfig, world: World) -> None:
    """Check that all ranks have read the same input and the same start file.

    Must be called by every rank.

    Args:
        start: the file that the run starts from, if there is one.
        config: of the run.
        world: the processes of the run.

    Raises:
        ConfigError: on a rank that has read another one than rank 0.
    """
    if world.size == 1:
        return
    host = socket.gethostname()
    advice = (
        "All ranks must read the same: use a folder that they share, or copy it to each machine "
        "again."
    )
    # a digest of the start file, of a large one of parts of it: ranks on other machines may have an
    # older copy under the same path
    content = ""
    with world.all_ranks_ok():
        if start.config:
            content = f"sha256 {path_digest(start.path, COMPARED_BYTES)[:16]}"
        if start.payload:
            content = f"step {start.step}, {content}"
    read = content, to_dict(config)
    content_of_main, values_of_main = world.broadcast_from_rank0(lambda: read)
    with world.all_ranks_ok():
        if content != content_of_main:
            raise ConfigError(
                f"rank {world.rank} on {host} starts from another {start.path} than rank 0: "
                f"{content} here, {content_of_main} on rank 0. {advice}"
            )
        for path, value_of_main, value in differences_of(values_of_main, read[1]):
            if not path.endswith(_OF_A_MACHINE):
                raise ConfigError(
                    f"rank {world.rank} on {host} has another input than rank 0: {path} = "
                    f"{show(value, 200)} here, {show(value_of_main, 200)} on rank 0. {advice}"
                )


def warn_of_other_input(start: Start, config: RunConfig) -> None:
    """Warn if the input in this folder, which is not used, differs from the checkpoint's config.

    Args:
        start: the checkpoint.
        config: of the run, from the checkpoint.
    """
    if not Path(DEFAULT_INPUT).is_file():
        return
    try:
        # both as without a launcher: the checkpoint of such a run has zero_stage 0, whatever its
        # input says
        saved = as_launched(config, launched=False)
        other = as_launched(read_input(DEFAULT_INPUT).config, launched=False)
        differences = differences_of(
            to_dict(saved), to_dict(start.adopt_from_checkpoint(other))
        )
        texts = [
            f"{path} = {show(new, 200)} (checkpoint: {show(old, 200)})"
            for path, old, new in differences
        ]
    except UserError as error:  # the input is not used, so its mistakes end nothing
        texts = [error.problems[0]]
    if texts:
        logger.warning(
            "%s is not read, the config of %s counts. The former differs: %s. `%s` takes "
            "it instead.",
            DEFAULT_INPUT,
            start.path,
            first_few(texts).rstrip("."),
            command("dp-ema", "train", "--restart", start.path, DEFAULT_INPUT),
        )


def reads_shards(start: Start, config: RunConfig) -> bool:
    """Whether each rank reads its shards only, once the models are sharded.

    No step before then needs the weights.
    """
    if not start.payload or config.training.zero_stage <= 1:
        return False
    # compilation compares numbers of the models with their weights, and other tasks need all of
    # the checkpoint: both are before the models are sharded
    is_unchanged = (
        to_dict(config)["model"] == start.config["model"]
        and not config.training.enable_compile
    )
    return is_unchanged and any(
        isinstance(tensor, StoredTensor) for tensor in start.payload["model"].values()
    )


def read_shards(start: Start, models: ModelSet) -> None:
    """Put this rank's shards of the weights of the checkpoint into the sharded ``models``."""
    tensors, stored = models.state_dict(), start.payload["model"]
    check_weights(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        stored,
        start.path,
    )
    with torch.no_grad():
        for name, tensor in tensors.items():
            local_shard(tensor).copy_(shard_like(stored[name], tensor))
    logger.info(
        "weights of %s (%s, step %d), by shards",
        start.path,
        start.payload["weights"],
        start.step,
    )


def state_of_tasks(
    start: Start, models: ModelSet, streams: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the state of the checkpoint as that of a run of the tasks of ``models``.

    Args:
        start: the checkpoint.
        models: those of the restarted run.
        streams: those of the restarted run before anything is loaded, for new tasks.
    """
    payload = start.payload
    if start.saved.keys() == models.by_task.keys():
        return payload

    # A tensor that tasks share is saved under the name that it has in the first of them, which may
    # be another task now. The models of the checkpoint are built for their names alone.
    saved = saved_models(start.config, str(start.path))
    before = build_models(saved.configs, saved.links).first_names()
    old_names: dict[
        str, str
    ] = {}  # name in averages and optimizer of this run -> in the checkpoint
    for name, first in models.first_names().items():
        if name in before:
            old_names.setdefault(first, before[name])
    old_names |= {
        name: name for name, _ in models.named_buffers() if name in payload["model"]
    }

    # Parameters of new tasks have the moments with which the optimizer was just built.
    moments = payload["optimizer"]["state"]
    carried = {name: moments[old] for name, old in old_names.items() if old in moments}
    new = [name for name, _ in models.named_parameters() if name not in carried]
    state = {
        **payload,
        "optimizer": {**payload["optimizer"], "state": carried, "new": new},
    }

    # positions in the frames of each task, those of new tasks at their start; displayed values
    state["streams"] = {
        task: payload["streams"].get(task, stream) for task, stream in streams.items()
    }
    last = payload["display"].get("last", {})
    state["display"] = {
        **payload["display"],
        "last": {t: last[t] for t in models.by_task if t in last},
    }

    # averages of what both runs have; the bank starts those of new tasks from the live weights
    if payload.get("averages"):
        profiles: dict[str, Any] = {}
        for name, profile in payload["averages"]["profiles"].items():
            weights = profile["weights"]
            renamed = {
                new: weights[old] for new, old in old_names.items() if old in weights
            }
            profiles[name] = {**profile, "weights": renamed}
        state["averages"] = {**payload["averages"], "profiles": profiles}
    return state


def _describe_tasks(tasks: Collection[str]) -> str:
    return "one task" if "" in tasks else f"several tasks ({', '.join(sorted(tasks))})"
