"""Averages under the names of a checkpoint: whole tensors, read at any moment, saved, and put back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from deepmd_ema.averaging.slots import live_state
from deepmd_ema.dist.dtensor import full_tensor
from deepmd_ema.tensors import check_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from deepmd_ema.averaging.average import Average
    from deepmd_ema.averaging.profile import Profile
    from deepmd_ema.averaging.slots import Binding, Slot

logger = logging.getLogger(__name__)


def model_under(
    average: Average | None,
    active: Average | None,
    modules: Mapping[str, nn.Module],
    binding: Binding,
    keep: bool = True,
) -> dict[str, Tensor]:
    """Return all tensors of the modules under ``average``. Every rank must call this when weights are sharded.

    Args:
        average: whose tensors stand in place of the live ones; None for none.
        active: the average that is swapped in now, or None.
        modules: by task.
        binding: which of their tensors are averaged.
        keep: whether this process wants them; else it only takes part, one tensor at a time, and gets nothing.
    """
    slots = [*binding.slots, *binding.buffers]
    averaged = _values(average, active, slots, keep)
    names = {name for slot in slots for name in slot.names}
    found: dict[str, Tensor] = {}
    for name, value in live_state(modules).items():
        tensor = averaged.get(name) if name in names else full_tensor(value)
        if keep and tensor is not None:
            found[name] = tensor
    return found


def saved_average(average: Average, steps: int, active: Average | None, keep: bool = True) -> dict[str, Any]:
    """Return the settings, counters and tensors of an average that has seen ``steps`` steps; no tensors if not kept."""
    updates, mean_step = average.counts()
    return {
        **average.profile.settings(),
        "updates": updates,
        "mean_age": steps - mean_step if updates >= 0 else 0.0,
        "mean_step": mean_step,
        "weights": _values(average, active, average.slots, keep),
    }


def load_average(average: Average, state: Mapping[str, Any], tasks: Iterable[str], binding: Binding) -> None:
    """Continue ``average`` as ``state`` has it. Every rank must call this when weights are sharded.

    Raises:
        CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
    """
    saved = state["profiles"][average.profile.name]
    _warn_changes(average.profile, saved)
    averaged = {name for slot in average.slots for name in slot.names}
    dropped = {*binding.frozen, *binding.floating_buffers} - averaged
    found = {name: tensor for name, tensor in saved["weights"].items() if name not in dropped}
    seeded = _seeded(average, state, found, set(tasks), binding)
    if seeded:
        logger.info(
            "average %s: %s was not averaged before and starts from its live value",
            average.profile.name, ", ".join(seeded),
        )  # fmt: skip
    for i, slot in enumerate(average.slots):
        known = next((name for name in slot.names if name in found), None)
        if known is None:
            average.seed_tensor(i)
        else:
            average.set_tensor(i, found[known])
    # files of 0.1.0 have the mean age only
    mean_step = saved.get("mean_step", state["steps"] - saved["mean_age"])
    average.set_counts(saved["updates"], mean_step)


def _values(average: Average | None, active: Average | None, slots: Sequence[Slot], keep: bool) -> dict[str, Tensor]:
    """Return the whole tensors of ``slots`` under ``average``, or live where it has none or has not started.

    Gathered tensors go to host memory, so that the whole model is never on a device that holds a part of it; nothing
    stays where ``keep`` is off.
    """
    values: dict[str, Tensor | None] = {}

    def put(slot: Slot, tensor: Tensor) -> None:
        tensor = tensor.cpu() if slot.is_sharded else tensor
        values.update(dict.fromkeys(slot.names, tensor if keep else None))

    if average is not None and average.started:
        for i, slot in enumerate(average.slots):
            put(slot, average.averaged(i))
    if active is not None:
        for i, slot in enumerate(active.slots):
            if slot.names[0] not in values:
                put(slot, active.raw(i))
    for slot in slots:
        if slot.names[0] not in values:
            put(slot, slot.whole(slot.live))
    kept = {name: values[name] for slot in slots for name in slot.names}
    return {name: tensor for name, tensor in kept.items() if tensor is not None}


def _warn_changes(profile: Profile, saved: Mapping[str, Any]) -> None:
    settings = profile.settings()
    before_type = saved.get("type", "ema")  # files of 0.1.0 know no other
    if before_type != profile.type:
        logger.warning(
            "average %s: was of type %s in the checkpoint and is %s from now on",
            profile.name, before_type, profile.type,
        )  # fmt: skip
        return
    for key, now in settings.items():
        before = saved.get(key, now)
        if now != before:
            logger.warning(
                "average %s: %s was %s in the checkpoint and is %s from now on", profile.name, key, before, now
            )


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
    for slot in average.slots:
        if any(n in found for n in slot.names):
            expected |= {n: slot.shape for n in slot.names if n in found}
        elif any(n in frozen or _of_task(n, new_tasks) for n in slot.names):
            seeded.append(slot.names[0])
        else:
            expected[slot.names[0]] = slot.shape
    kept = {n: t for n, t in found.items() if not _of_task(n, old_tasks)}
    check_weights(expected, kept, f"average {name!r} of the checkpoint")
    return seeded


def _of_task(name: str, tasks: set[str]) -> bool:
    return any(task and name.startswith(f"{task}.") for task in tasks)
