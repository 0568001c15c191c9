"""One average of all its tensors, with its counters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from deepmd_ema.averaging.binding import Binding, Shard
from deepmd_ema.averaging.counter import Counter
from deepmd_ema.averaging.storage import Buffer, Storage, lerp
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.tensors import check_weights

logger = logging.getLogger(__name__)


class Average:
    """One average: its tensors, the number of its updates and the mean step of its weights.

    Before ``start_step`` the average is the live weights, and its number of updates is -1. An average on another device
    than the weights counts on the host.

    Args:
        profile: how it is averaged.
        shards: averaged tensors.

    Attributes:
        storage: the tensors.
        counter: the two numbers.
    """

    def __init__(self, profile: Profile, shards: Sequence[Shard]) -> None:
        self.profile = profile
        self.storage = Storage(shards, profile)
        self.counter = Counter(profile)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the averaged tensors; all others of the model are live."""
        return tuple(name for shard in self.storage.shards for name in shard.names)

    @property
    def started(self) -> bool:
        """Whether ``start_step`` is reached; before it the average is the live weights."""
        return self.counter.updates >= 0 or self.counts()[0] >= 0

    def update(self, step: int) -> list[tuple[Buffer, float]]:
        """Count an update with the live weights after ``step``, on the host.

        Returns:
            Buffers and shares that are left to :func:`deepmd_ema.averaging.storage.lerp`, for all averages at once.
        """
        share = self.counter.count(step)
        return [(buffer, share) for buffer in self.storage.buffers]

    def enqueue(self, step: int, ok: Tensor | None) -> None:
        """Enqueue a copy of the live weights after ``step``, with which it is updated later; it has staging memory."""
        assert self.storage.staging is not None
        self.flush()
        self.storage.staging.start(step, ok)

    def flush(self) -> None:
        """Wait for a copy of the weights that was enqueued, and update with it."""
        arrived = self.storage.staging.finish() if self.storage.staging is not None else None
        if arrived is not None:
            step, weights = arrived
            share = self.counter.count(step)
            for buffer, live in zip(self.storage.buffers, weights):
                lerp([(buffer, share)], live)

    def seed(self, step: int) -> None:
        """Start from the live weights, which are those after ``step`` steps."""
        self.set_counts(0 if step >= self.profile.start_step else -1, float(step))
        for i in range(len(self.storage.shards)):
            self.storage.seed(i)

    def counts(self) -> tuple[int, float]:
        """Return the number of updates (-1 before the start) and the mean step; may wait for the device."""
        self.flush()
        return self.counter.read()

    def mean_age(self, steps: int) -> float:
        """Return the mean number of steps between the weights in it and step ``steps``."""
        updates, mean_step = self.counts()
        return steps - mean_step if updates >= 0 else 0.0

    def set_counts(self, updates: int, mean_step: float) -> None:
        """Set the counters, on the host, and drop a copy of the weights that was enqueued."""
        if self.storage.staging is not None:
            self.storage.staging.forget()
        self.counter.set(updates, mean_step)

    def carry_over(self, previous: Average) -> None:
        """Continue ``previous``, of the same profile and other shards; what it did not average starts live."""
        self.set_counts(*previous.counts())
        index = {name: k for k, shard in enumerate(previous.storage.shards) for name in shard.names}
        for i, shard in enumerate(self.storage.shards):
            k = next((index[name] for name in shard.names if name in index), None)
            if k is None:
                self.storage.seed(i)
            elif shard.is_sharded == previous.storage.shards[k].is_sharded:
                # the same part of the tensor: no communication
                self.storage.tensors[i].copy_(previous.storage.tensors[k])
            else:
                self.storage.set(i, previous.storage.averaged(k))

    def load(self, state: Mapping[str, Any], saved: Mapping[str, Any], tasks: Iterable[str], binding: Binding) -> None:
        """Continue ``saved``, an average in ``state`` of a bank. Every rank must call this when weights are sharded.

        Raises:
            CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
        """
        _warn_changes(self.profile, saved)
        # they were averaged in the run of the checkpoint, and are live from now on
        dropped = {*binding.frozen, *binding.floating_buffers} - set(self.tensor_names)
        found = {name: tensor for name, tensor in saved["weights"].items() if name not in dropped}
        copied_buffers = binding.floating_buffers if saved.get("buffers", "copy") == "copy" else []
        _check_tensors(self, state, found, {*state["frozen"], *copied_buffers}, set(tasks))
        seeded = []
        for i, shard in enumerate(self.storage.shards):
            known = next((name for name in shard.names if name in found), None)
            if known is None:
                self.storage.seed(i)
                seeded.append(shard.names[0])
            else:
                self.storage.set(i, found[known])
        if seeded:
            text = "average %s: %s was not averaged before and starts from its live value"
            logger.info(text, self.profile.name, ", ".join(seeded))
        # files of 0.1.0 have the mean age only
        self.set_counts(saved["updates"], saved.get("mean_step", state["steps"] - saved["mean_age"]))


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


def _check_tensors(
    average: Average, state: Mapping[str, Any], found: Mapping[str, Tensor], new: set[str], tasks: set[str]
) -> None:
    """Check that ``found`` has every averaged tensor, but those named in ``new`` and those of new tasks."""
    new_tasks, old_tasks = tasks - set(state["tasks"]), set(state["tasks"]) - tasks
    expected: dict[str, tuple[int, ...]] = {}
    for shard in average.storage.shards:
        known = [n for n in shard.names if n in found]
        if known or not any(n in new or _of_task(n, new_tasks) for n in shard.names):
            expected |= dict.fromkeys(known or shard.names[:1], shard.shape)
    kept = {n: t for n, t in found.items() if not _of_task(n, old_tasks)}
    check_weights(expected, kept, f"average {average.profile.name!r} of the checkpoint")


def _of_task(name: str, tasks: set[str]) -> bool:
    return any(task and name.startswith(f"{task}.") for task in tasks)
