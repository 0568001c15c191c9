"""Averages under the names of a checkpoint: whole tensors, read at any moment, saved, and put back."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from deepmd_ema.tensors import check_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from deepmd_ema.averaging.average import Average
    from deepmd_ema.averaging.binding import Binding
    from deepmd_ema.averaging.exchange import Exchange
    from deepmd_ema.averaging.profile import Profile
    from deepmd_ema.averaging.shards import Shard

logger = logging.getLogger(__name__)


def full_tensors(
    average: Average | None, exchange: Exchange | None, shards: Sequence[Shard], keep: bool
) -> dict[str, Tensor]:
    """Return the tensors of ``shards`` under ``average``, or live where it has none or has not started; all whole.

    Gathered tensors go to host memory, so that the whole model is never on a device that holds a part of it; nothing
    stays where ``keep`` is off.
    """
    # by first name: the shard as it is held there, and what reads it; later entries take the place of earlier ones
    reads: dict[str, tuple[Shard, Callable[[], Tensor]]] = {
        shard.names[0]: (shard, partial(shard.full_tensor, shard.local)) for shard in shards
    }
    if exchange is not None:
        own = exchange.average.storage.shards
        reads |= {shard.names[0]: (shard, partial(exchange.live, i)) for i, shard in enumerate(own)}
    if average is not None and average.started:
        average.flush()
        place = exchange if exchange is not None and exchange.average is average else average.storage
        own = average.storage.shards
        reads |= {shard.names[0]: (shard, partial(place.averaged, i)) for i, shard in enumerate(own)}
    found: dict[str, Tensor] = {}
    for wanted in shards:
        shard, read = reads[wanted.names[0]]
        tensor = read()
        if keep:
            found |= dict.fromkeys(wanted.names, tensor.cpu() if shard.is_sharded else tensor)
    return found


def load_average(average: Average, state: Mapping[str, Any], tasks: Iterable[str], binding: Binding) -> None:
    """Continue ``average`` as ``state`` has it. Every rank must call this when weights are sharded.

    Raises:
        CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
    """
    saved = state["profiles"][average.profile.name]
    _warn_changes(average.profile, saved)
    dropped = {*binding.frozen, *binding.floating_buffers} - set(average.tensor_names)
    found = {name: tensor for name, tensor in saved["weights"].items() if name not in dropped}
    seeded = _seeded(average, state, found, set(tasks), binding)
    if seeded:
        text = "average %s: %s was not averaged before and starts from its live value"
        logger.info(text, average.profile.name, ", ".join(seeded))
    for i, shard in enumerate(average.storage.shards):
        known = next((name for name in shard.names if name in found), None)
        if known is None:
            average.storage.seed(i)
        else:
            average.storage.set(i, found[known])
    # files of 0.1.0 have the mean age only
    mean_step = saved.get("mean_step", state["steps"] - saved["mean_age"])
    average.set_counts(saved["updates"], mean_step)


def _warn_changes(profile: Profile, saved: Mapping[str, Any]) -> None:
    before_type = saved.get("type", "ema")  # files of 0.1.0 know no other
    if before_type != profile.type:
        text = "average %s: was of type %s in the checkpoint and is %s from now on"
        logger.warning(text, profile.name, before_type, profile.type)
        return
    for key, now in profile.settings().items():
        before = saved.get(key, now)
        if now != before:
            text = "average %s: %s was %s in the checkpoint and is %s from now on"
            logger.warning(text, profile.name, key, before, now)


def _seeded(
    average: Average, state: Mapping[str, Any], found: Mapping[str, Tensor], tasks: set[str], binding: Binding
) -> list[str]:
    """Return the tensors that have a good reason to be missing in ``found``; check that all others are there.

    Raises:
        CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
    """
    name = average.profile.name
    new_tasks, old_tasks = tasks - set(state["tasks"]), set(state["tasks"]) - tasks
    frozen = set(state["frozen"])
    if state["profiles"][name].get("buffers", "copy") == "copy":
        frozen |= set(binding.floating_buffers)
    expected: dict[str, tuple[int, ...]] = {}
    seeded = []
    for shard in average.storage.shards:
        if any(n in found for n in shard.names):
            expected |= {n: shard.shape for n in shard.names if n in found}
        elif any(n in frozen or _of_task(n, new_tasks) for n in shard.names):
            seeded.append(shard.names[0])
        else:
            expected[shard.names[0]] = shard.shape
    kept = {n: t for n, t in found.items() if not _of_task(n, old_tasks)}
    check_weights(expected, kept, f"average {name!r} of the checkpoint")
    return seeded


def _of_task(name: str, tasks: set[str]) -> bool:
    return any(task and name.startswith(f"{task}.") for task in tasks)
