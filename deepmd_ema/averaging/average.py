"""One average of all its tensors, with its counters on the host or on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_ema.averaging.counter import Counter
from deepmd_ema.averaging.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepmd_ema.averaging.profile import Profile
    from deepmd_ema.averaging.shards import Shard


class Average:
    """One average: its tensors and how many updates are behind it.

    As long as ``start_step`` is ahead, the average is the live weights, and its number of updates is -1. An average
    that is kept away from the weights counts on the host.

    Args:
        profile: how it is averaged.
        shards: averaged tensors.

    Attributes:
        storage: the tensors.
    """

    def __init__(self, profile: Profile, shards: Sequence[Shard]) -> None:
        self.profile = profile
        self.storage = Storage(shards, profile)
        self._counter = Counter(profile)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the averaged tensors; all others of the model are live."""
        return tuple(name for shard in self.storage.shards for name in shard.names)

    @property
    def started(self) -> bool:
        """Whether it has begun to differ from the live weights: ``start_step`` is behind."""
        return self._counter.updates >= 0 or self.counts()[0] >= 0

    def update(self, step: int, ok: Tensor | None) -> None:
        """Take the live weights after ``step`` in; ``ok`` (not on the host) decides later whether anything changes."""
        storage = self.storage
        if storage.staging is not None:
            self.flush()
            storage.staging.start(step, ok)
        elif ok is None and not self._counter.is_on_device:
            share = self._counter.count(step)
            for buffer in storage.buffers:
                buffer.lerp(buffer.live(), share)
        elif storage.buffers:
            good, share_on_device = self._counter.count_if(step, ok, storage.buffers[0].source.device)
            for buffer in storage.buffers:
                buffer.lerp_if(good, buffer.live(), share_on_device)

    def flush(self) -> None:
        """Take in the weights that are on their way; waits for them."""
        arrived = self.storage.staging.finish() if self.storage.staging is not None else None
        if arrived is not None:
            step, weights = arrived
            share = self._counter.count(step)
            for buffer, live in zip(self.storage.buffers, weights):
                buffer.lerp(live, share)

    def seed(self, step: int) -> None:
        """Start from the live weights, which have ``step`` steps behind them."""
        self.set_counts(0 if step >= self.profile.start_step else -1, float(step))
        for i in range(len(self.storage.shards)):
            self.storage.seed(i)

    def counts(self) -> tuple[int, float]:
        """Return the number of updates (-1 before the start) and the mean step; may wait for the device."""
        self.flush()
        return self._counter.read()

    def mean_age(self, steps: int) -> float:
        """Return how many steps lie, on average, between the weights in it and step ``steps``."""
        updates, mean_step = self.counts()
        return steps - mean_step if updates >= 0 else 0.0

    def set_counts(self, updates: int, mean_step: float) -> None:
        """Set the counters, on the host; weights that are on their way are dropped."""
        if self.storage.staging is not None:
            self.storage.staging.forget()
        self._counter.set(updates, mean_step)

    def carry_over(self, previous: Average) -> None:
        """Continue ``previous``, of the same profile and other shards; what it did not average starts live."""
        self.set_counts(*previous.counts())
        index = {name: k for k, shard in enumerate(previous.storage.shards) for name in shard.names}
        for i, shard in enumerate(self.storage.shards):
            k = next((index[name] for name in shard.names if name in index), None)
            if k is None:
                self.storage.seed(i)
            elif shard.is_sharded == previous.storage.shards[k].is_sharded:
                self.storage.tensors[i].copy_(previous.storage.tensors[k])
            else:
                self.storage.set(i, previous.storage.averaged(k))
