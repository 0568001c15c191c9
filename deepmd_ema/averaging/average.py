"""One average of all its tensors: its memory, its counters, its state, and its exchange with the
live weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.averaging.storage import Binding, Buffer, Shard, Staging, lerp, needs_staging
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.distributed.tensors import (
    StoredTensor,
    check_weights,
    full_tensor,
    on_device,
    whole,
)

logger = logging.getLogger(__name__)


class Average:
    """One average: its tensors, the number of its updates and the mean step of its weights.

    Before ``start_step`` the average is the live weights, and its number of updates is -1. Both
    numbers are on the host until the first step of which only the device knows whether it was good,
    then on the device. An average on another device than the weights counts on the host. With the
    layout ``full_tensor`` a sharded tensor is kept whole on every rank, and each read of its live
    value is a collective.

    It can take the place of the live weights, shard by shard, in place. Where both have one
    precision they change places, which takes memory for one tensor. An average in another
    precision, or gathered, does not fit into the live
    tensor: there the live weights are copied to the device of the average. Every rank must call
    :meth:`swap_in` and :meth:`swap_out` when weights are sharded.

    Args:
        profile: how it is averaged.
        shards: averaged tensors.

    Attributes:
        tensors: the averages in the order of ``shards``, views of the buffers.
        buffers: flat buffers by device and precision.
        staging: staging memory, or None if the averages are on the device of the weights.
        updates: number of updates; out of date while ``on_device`` is not None.
        on_device: both numbers on the device, (2,), where reading waits for it; None while they are
            on the host.
    """

    def __init__(self, profile: Profile, shards: Sequence[Shard]) -> None:
        self.profile, self.shards = profile, shards
        self.updates, self._mean_step = 0, 0.0
        self.on_device: Tensor | None = None
        self._gathered = [profile.layout == "full_tensor" and shard.is_sharded for shard in shards]
        members: dict[Any, list[int]] = {}
        for i, shard in enumerate(shards):
            live = shard.local
            home = torch.device("cpu") if profile.device == "cpu" else live.device
            dtype = torch.promote_types(
                live.dtype, torch.promote_types(torch.float32, getattr(torch, profile.dtype))
            )
            members.setdefault(
                (live.device, live.dtype, home, dtype, self._gathered[i]), []
            ).append(i)
        self.buffers = [
            Buffer([shards[i] for i in chosen], home, dtype, gathered)
            for (_, _, home, dtype, gathered), chosen in members.items()
        ]
        views = {
            i: view
            for b, chosen in zip(self.buffers, members.values())
            for i, view in zip(chosen, b.views)
        }
        self.tensors = [views[i] for i in range(len(shards))]
        self.staging = Staging(self.buffers) if needs_staging(self.buffers) else None
        self._done = (
            0  # shards whose average is in the weights; swap_out() undoes these after a failure
        )
        self._aside: dict[int, Tensor] = {}  # live weights that did not fit into an average

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the averaged tensors; all others of the model are live."""
        return tuple(name for shard in self.shards for name in shard.names)

    @property
    def num_bytes(self) -> int:
        """Memory on this process, with staging."""
        flats = [
            *(b.flat for b in self.buffers),
            *(self.staging.flats if self.staging is not None else ()),
        ]
        return sum(flat.nbytes for flat in flats)

    @property
    def started(self) -> bool:
        """Whether ``start_step`` is reached; before it the average is the live weights."""
        return self.updates >= 0 or self.counts()[0] >= 0

    def count(self, step: int) -> float:
        """Count an update with the weights of ``step``, on the host; return the share that they
        get, ``1 - d``.
        """
        decay = host_decay(self.profile, self.updates) if self.updates >= 0 else 0.0
        self._mean_step = decay * self._mean_step + (1.0 - decay) * step
        self.updates += 1
        return 1.0 - decay

    def counts(self) -> tuple[int, float]:
        """Return the number of updates (-1 before the start) and the mean step; may wait for the
        device.
        """
        self.flush()
        if self.on_device is not None:
            updates, self._mean_step = self.on_device.tolist()
            self.updates = int(updates)
        return self.updates, self._mean_step

    def set_counts(self, updates: int, mean_step: float) -> None:
        """Set the counters, on the host, and drop a copy of the weights that was enqueued."""
        if self.staging is not None:
            self.staging.step = None
        self.updates = updates
        self._mean_step = mean_step
        self.on_device = None

    def flush(self) -> None:
        """Wait for a copy of the weights that was enqueued, and update with it."""
        arrived = self.staging.finish() if self.staging is not None else None
        if arrived is not None:
            step, weights = arrived
            share = self.count(step)
            for buffer, live in zip(self.buffers, weights):
                lerp([(buffer, share)], live)

    def seed(self, step: int) -> None:
        """Start from the live weights, which are those after ``step`` steps."""
        self.set_counts(0 if step >= self.profile.start_step else -1, float(step))
        for i in range(len(self.shards)):
            self.set_tensor(i, None)

    def set_tensor(self, i: int, full: Tensor | StoredTensor | None) -> None:
        """Set tensor ``i``, to the live value if ``full`` is None.

        A collective when it is sharded.
        """
        shard, gathered = self.shards[i], self._gathered[i]
        if full is None:
            self.tensors[i].copy_(shard.full_tensor(shard.local) if gathered else shard.local)
        else:
            self.tensors[i].copy_(whole(full) if gathered else shard.local_shard(full))

    def as_tensor(self, i: int) -> Tensor:
        """Return tensor ``i``, wherever it is now, sharded as its parameter is if it is not kept
        whole.
        """
        if self._gathered[i]:
            return self.tensors[i]
        in_weights = i < self._done and i not in self._aside
        return self.shards[i].as_tensor(self.shards[i].local if in_weights else self.tensors[i])

    def live(self, i: int) -> Tensor:
        """Return the raw weights of shard ``i``, wherever they are now, sharded as the parameter
        is.
        """
        shard = self.shards[i]
        return shard.as_tensor(
            self._aside.get(i, self.tensors[i]) if i < self._done else shard.local
        )

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the average into the weights; after a failure :meth:`swap_out` undoes what was
        done.
        """
        if not self.started:
            return  # it still is the live weights
        self.flush()
        for i, (shard, mine) in enumerate(zip(self.shards, self.tensors)):
            if (
                mine.dtype == shard.local.dtype and not self._gathered[i]
            ):  # else rounding would lose the average
                _swap(shard.local, mine)
            else:
                self._aside[i] = shard.local.detach().to(mine.device, copy=True)
                shard.local.copy_(shard.local_shard(mine) if self._gathered[i] else mine)
            self._done += 1

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the live weights back."""
        while self._done:
            i = self._done - 1
            if i in self._aside:
                self.shards[i].local.copy_(self._aside.pop(i))
            else:
                _swap(self.shards[i].local, self.tensors[i])
            self._done = i

    def carry_over(self, previous: Average) -> None:
        """Continue ``previous``, of the same profile and other shards; what it did not average
        starts live.
        """
        self.set_counts(*previous.counts())
        index = {name: k for k, shard in enumerate(previous.shards) for name in shard.names}
        for i, shard in enumerate(self.shards):
            k = next((index[name] for name in shard.names if name in index), None)
            if k is not None and shard.is_sharded == previous.shards[k].is_sharded:
                self.tensors[i].copy_(
                    previous.tensors[k]
                )  # the same part of the tensor: no communication
            else:
                self.set_tensor(i, None if k is None else full_tensor(previous.as_tensor(k)))

    def load(
        self,
        state: Mapping[str, Any],
        saved: Mapping[str, Any],
        tasks: Iterable[str],
        binding: Binding,
    ) -> None:
        """Continue ``saved``, an average in ``state`` of a bank.

        Every rank must call this when weights are sharded.

        Raises:
            CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
        """
        profile = self.profile
        now, before = (
            profile.settings(),
            {"type": "ema", **saved},
        )  # files of 0.1.0 have no other type
        for key in now if now["type"] == before["type"] else ("type",):
            if before.get(key, now[key]) != now[key]:
                what = "was of type" if key == "type" else f"{key} was"
                text = "average %s: %s %s in the checkpoint and is %s from now on"
                logger.warning(text, profile.name, what, before[key], now[key])
        # they were averaged in the run of the checkpoint, and are live from now on
        dropped = {*binding.frozen, *binding.floating_buffers} - set(self.tensor_names)
        weights = {name: tensor for name, tensor in saved["weights"].items() if name not in dropped}
        # every averaged tensor must be there, but those that were frozen or live, and those of new
        # tasks
        new = {
            *state["frozen"],
            *(binding.floating_buffers if saved.get("buffers", "copy") == "copy" else ()),
        }
        new_tasks, old_tasks = (
            tuple(f"{task}." for task in set(some) - set(others) if task)
            for some, others in ((tasks, state["tasks"]), (state["tasks"], tasks))
        )
        sources = [[name for name in shard.names if name in weights] for shard in self.shards]
        expected: dict[str, tuple[int, ...]] = {}
        for shard, names in zip(self.shards, sources):
            if names or not any(name in new or name.startswith(new_tasks) for name in shard.names):
                expected |= dict.fromkeys(names or shard.names[:1], shard.shape)
        of_tasks = {
            name: tensor for name, tensor in weights.items() if not name.startswith(old_tasks)
        }
        check_weights(expected, of_tasks, f"average {profile.name!r} of the checkpoint")
        for i, names in enumerate(sources):
            self.set_tensor(i, weights[names[0]] if names else None)
        if seeded := [shard.names[0] for shard, names in zip(self.shards, sources) if not names]:
            text = "average %s: %s was not averaged before and starts from its live value"
            logger.info(text, profile.name, ", ".join(seeded))
        # files of 0.1.0 have the mean age only
        mean_step = float(saved.get("mean_step", state["steps"] - saved["mean_age"]))
        self.set_counts(int(saved["updates"]), mean_step)


def host_decay(profile: Profile, updates: int) -> float:
    """Return the decay of the update that follows after ``updates`` updates."""
    done = torch.tensor(updates, dtype=torch.float64) if profile.counts_on_tensors else updates
    return float(profile.decay_of_update(done))


def count_on_device(
    averages: Sequence[Average],
    counts: Tensor,
    due: Sequence[Average],
    step: int | Tensor,
    good: Tensor | None,
) -> list[Tensor]:
    """Do :meth:`Average.count` on the device for the averages that are due, and nothing for the
    others.

    Args:
        averages: all that count on the device.
        counts: their updates and mean steps, (averages, 2) float64, changed in place.
        due: some of them, in their order.
        step: that the weights are of; a scalar on the device if the host shall give no number.
        good: bool scalar; where it is False nothing is counted. None: always True.

    Returns:
        The share of the weights for each average that is due, 0 where nothing is counted.
    """
    for average, place in zip(averages, counts):
        if average.on_device is None:
            numbers = torch.tensor(average.counts(), dtype=torch.float64)
            place.copy_(on_device(numbers, place.device))
            average.on_device = place
    numbers_due = [i for i, average in enumerate(averages) if average in due]
    # neighbors together: rows of the tensor are then a view of it
    starts = [i for i in numbers_due if i - 1 not in numbers_due]
    ends = [i + 1 for i in numbers_due if i + 1 not in numbers_due]
    shares: list[Tensor] = []
    for rows in map(slice, starts, ends):
        profiles = [average.profile for average in averages[rows]]
        updates, mean_step = counts[rows].unbind(1)
        start_late = any(profile.start_step > 0 for profile in profiles)
        done = (updates.clamp(min=0) if start_late else updates).unbind()
        found = [profile.decay_of_update(number) for profile, number in zip(profiles, done)]
        decays = [
            d if isinstance(d, Tensor) else torch.full_like(number, d)
            for d, number in zip(found, done)
        ]
        decay = torch.stack(decays) if len(decays) > 1 else decays[0].unsqueeze(0)
        if start_late:
            decay = torch.where(updates < 0, 0.0, decay)
        share = 1 - decay
        moved = decay * mean_step + share * step
        if good is None:
            mean_step.copy_(moved)
            updates.add_(1)
        else:
            torch.where(good, moved, mean_step, out=mean_step)
            updates.add_(good)
            share = share * good
        shares += share.unbind()
    return shares


def _swap(one: Tensor, other: Tensor) -> None:
    held = one.detach().clone()
    one.copy_(other)
    other.copy_(held)
