"""One average of all its tensors: memory, counters, state, and exchange with live weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.averaging.storage import (
    Binding,
    Buffer,
    Shard,
    Staging,
    lerp,
    needs_staging,
)
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
    precision, or gathered, does not fit into the live tensor: there the live weights are copied to
    the device of the average. Every rank must call :meth:`swap_in` and :meth:`swap_out` when
    weights are sharded.

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
        self.profile = profile
        self.shards = shards
        self.updates = 0
        self._mean_step = 0.0
        self.on_device: Tensor | None = None
        self._gathered = [
            profile.layout == "full_tensor" and shard.is_sharded for shard in shards
        ]
        # One buffer for each device and precision of weights and averages, because the fused
        # operations of torch take lists of one device and one type. Gathered tensors have buffers
        # of their own: their live values come from a collective.
        members: dict[Any, list[int]] = {}
        for i, shard in enumerate(shards):
            live = shard.local
            home = torch.device("cpu") if profile.device == "cpu" else live.device
            # At least float32, and never narrower than the weights: in bfloat16 a share of 0.001
            # of the distance is less than half a unit in the last place, so the average would
            # never move.
            dtype = torch.promote_types(
                live.dtype,
                torch.promote_types(torch.float32, getattr(torch, profile.dtype)),
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
        # number of shards, from the first, whose average is in the weights; swap_out() undoes these
        # also after a failure of swap_in()
        self._done = 0
        # live weights that do not fit into their average, by index of the shard
        self._aside: dict[int, Tensor] = {}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the averaged tensors; all others of the model are live."""
        # a tensor that several modules share has several names and one average
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
        """Count an update with the weights of ``step``, on the host; return its ``1 - d``."""
        # the update at the start takes the live weights as they are, and counts from -1 to 0
        decay = host_decay(self.profile, self.updates) if self.updates >= 0 else 0.0
        self._mean_step = decay * self._mean_step + (1.0 - decay) * step
        self.updates += 1
        return 1.0 - decay

    def counts(self) -> tuple[int, float]:
        """Return the number of updates (-1 before the start) and the mean step of the weights.

        Waits for the device if they are counted there.
        """
        # an update whose copy of the weights is still under way is counted when it is done
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
        # -1 until start_step: the average is then the live weights, and is not read from memory
        self.set_counts(0 if step >= self.profile.start_step else -1, float(step))
        for i in range(len(self.shards)):
            self.set_tensor(i, None)

    def set_tensor(self, i: int, full: Tensor | StoredTensor | None) -> None:
        """Set tensor ``i``, to the live value if ``full`` is None.

        A collective when it is sharded.
        """
        shard, gathered = self.shards[i], self._gathered[i]
        if full is None:
            self.tensors[i].copy_(
                shard.full_tensor(shard.local) if gathered else shard.local
            )
        else:
            self.tensors[i].copy_(whole(full) if gathered else shard.local_shard(full))

    def as_tensor(self, i: int) -> Tensor:
        """Return tensor ``i``, wherever it is now, sharded as its parameter unless gathered."""
        if self._gathered[i]:
            return self.tensors[
                i
            ]  # only a copy of it is in the weights during an exchange
        # If both changed places the average is in the live tensor. If the live weights were put
        # aside, `tensors` still has it, in its own precision.
        in_weights = i < self._done and i not in self._aside
        return self.shards[i].as_tensor(
            self.shards[i].local if in_weights else self.tensors[i]
        )

    def live(self, i: int) -> Tensor:
        """Return the live weights of shard ``i``, wherever they are, sharded as the parameter."""
        shard = self.shards[i]
        return shard.as_tensor(
            self._aside.get(i, self.tensors[i]) if i < self._done else shard.local
        )

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the average into the weights; after a failure :meth:`swap_out` restores them."""
        if not self.started:
            return  # it still is the live weights
        self.flush()
        for i, (shard, average) in enumerate(zip(self.shards, self.tensors)):
            # A float64 average of float32 weights would be rounded if it were stored in the live
            # tensor, and would not continue bitwise: there only a copy of it goes into the weights.
            if average.dtype == shard.local.dtype and not self._gathered[i]:
                _swap(shard.local, average)
            else:
                self._aside[i] = shard.local.detach().to(average.device, copy=True)
                shard.local.copy_(
                    shard.local_shard(average) if self._gathered[i] else average
                )
            # only now: swap_out() must not undo an exchange that was not completed
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
        """Continue ``previous``, of the same profile and other shards.

        Tensors that it did not average start from their live values.
        """
        self.set_counts(*previous.counts())
        # by name, as parameters may be other objects now; any of the names of a shared tensor
        index = {
            name: k for k, shard in enumerate(previous.shards) for name in shard.names
        }
        for i, shard in enumerate(self.shards):
            k = next((index[name] for name in shard.names if name in index), None)
            if k is not None and shard.is_sharded == previous.shards[k].is_sharded:
                # both are the same part of the tensor: no communication
                self.tensors[i].copy_(previous.tensors[k])
            else:
                # sharded since, or no longer: a collective
                self.set_tensor(
                    i, None if k is None else full_tensor(previous.as_tensor(k))
                )

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
        # A changed setting is used from now on, with a warning: the weights so far keep their
        # shares. Settings of another type do not compare, so there only the type is named.
        settings = profile.settings()
        saved_settings = {
            "type": "ema",
            **saved,
        }  # files of 0.1.0 have no other type, and no key
        for key in (
            settings if settings["type"] == saved_settings["type"] else ("type",)
        ):
            if saved_settings.get(key, settings[key]) != settings[key]:
                what = "was of type" if key == "type" else f"{key} was"
                text = "average %s: %s %s in the checkpoint and is %s from now on"
                logger.warning(
                    text, profile.name, what, saved_settings[key], settings[key]
                )
        # Parameters that are frozen now, and buffers that are not averaged any more: the file has
        # their averages, which this run does not use.
        dropped = {*binding.frozen, *binding.floating_buffers} - set(self.tensor_names)
        weights = {
            name: tensor
            for name, tensor in saved["weights"].items()
            if name not in dropped
        }
        # The file must have every averaged tensor, except parameters that were frozen, buffers that
        # were not averaged, and tensors of tasks that the run of the file did not have.
        unaveraged = {
            *state["frozen"],
            *(
                binding.floating_buffers
                if saved.get("buffers", "copy") == "copy"
                else ()
            ),
        }
        current_tasks = set(tasks)
        saved_tasks = set(state["tasks"])
        # prefixes of names; a single task has the name "" and no prefix
        new_tasks = tuple(f"{task}." for task in current_tasks - saved_tasks if task)
        old_tasks = tuple(f"{task}." for task in saved_tasks - current_tasks if task)
        # Names of each shard that the file has. One is enough: all names of a shard have one
        # average, and in the run of the file fewer of them may have shared memory.
        sources = [
            [name for name in shard.names if name in weights] for shard in self.shards
        ]
        expected: dict[str, tuple[int, ...]] = {}
        for shard, names in zip(self.shards, sources):
            is_new = any(
                name in unaveraged or name.startswith(new_tasks) for name in shard.names
            )
            if names or not is_new:
                expected |= dict.fromkeys(names or shard.names[:1], shard.shape)
        task_weights = {
            name: tensor
            for name, tensor in weights.items()
            if not name.startswith(old_tasks)
        }
        check_weights(
            expected, task_weights, f"average {profile.name!r} of the checkpoint"
        )
        for i, names in enumerate(sources):
            self.set_tensor(i, weights[names[0]] if names else None)
        if seeded := [
            shard.names[0] for shard, names in zip(self.shards, sources) if not names
        ]:
            text = (
                "average %s: %s was not averaged before and starts from its live value"
            )
            logger.info(text, profile.name, ", ".join(seeded))
        # Files of 0.1.0 have the mean age only. It is 0 before the start, where the mean step does
        # not matter: the update at the start has the decay 0.
        mean_step = float(saved.get("mean_step", state["steps"] - saved["mean_age"]))
        updates = int(saved["updates"])
        # updates stand for steps, of which each was of `update_every`: an average of equal weights
        # would count the steps so far too little or too much
        every = saved_settings.get("update_every", profile.update_every)
        if updates > 0 and every != profile.update_every:
            updates = round(updates * every / profile.update_every)
        if state["steps"] < profile.start_step:
            self.seed(int(state["steps"]))  # it starts later than in the file
        else:
            self.set_counts(updates, mean_step)


def host_decay(profile: Profile, updates: int) -> float:
    """Return the decay of the update that follows after ``updates`` updates."""
    # the formula of another package may use functions of tensors, and no numbers
    done = (
        torch.tensor(updates, dtype=torch.float64)
        if profile.counts_on_tensors
        else updates
    )
    return float(profile.decay_of_update(done))


def count_on_device(
    averages: Sequence[Average],
    counts: Tensor,
    due: Sequence[Average],
    step: int | Tensor,
    good: Tensor | None,
) -> list[Tensor]:
    """Do :meth:`Average.count` on the device for the averages that are due.

    Args:
        averages: all that count on the device.
        counts: their updates and mean steps, (averages, 2) float64, changed in place.
        due: some of them, in their order.
        step: that the weights are of; a scalar on the device if the host shall give no number.
        good: bool scalar; where it is False nothing is counted. None: always True.

    Returns:
        The share of the weights for each average that is due, 0 where nothing is counted.
    """
    # an average that was counted on the host until now continues on the device
    for average, row in zip(averages, counts):
        if average.on_device is None:
            numbers = torch.tensor(average.counts(), dtype=torch.float64)
            row.copy_(on_device(numbers, row.device))
            average.on_device = (
                row  # a view: it stays right when `counts` is changed in place
            )
    # Neighboring rows together. A slice is a view, through which `counts` is changed in place, as a
    # captured CUDA graph needs it; a selection by indices would be a copy.
    due_rows = [i for i, average in enumerate(averages) if average in due]
    starts = [i for i in due_rows if i - 1 not in due_rows]
    ends = [i + 1 for i in due_rows if i + 1 not in due_rows]
    shares: list[Tensor] = []
    for rows in map(slice, starts, ends):
        profiles = [average.profile for average in averages[rows]]
        updates, mean_step = counts[rows].unbind(1)  # (averages of this slice,) each
        # Numbers of updates are -1 before the start only: without a start no kernels are spent on
        # that. The update at the start has the decay 0, as in Average.count().
        start_late = any(profile.start_step > 0 for profile in profiles)
        done = (updates.clamp(min=0) if start_late else updates).unbind()  # scalars
        formulas = [
            profile.decay_of_update(number) for profile, number in zip(profiles, done)
        ]
        # a constant decay is a number of Python
        decays = [
            d if isinstance(d, Tensor) else torch.full_like(number, d)
            for d, number in zip(formulas, done)
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
            # the device selects, so that the host does not wait for `good`
            torch.where(good, moved, mean_step, out=mean_step)
            updates.add_(good)
            share = share * good
        shares += share.unbind()
    return shares


def _swap(first: Tensor, second: Tensor) -> None:
    # by values: optimizer, compiled code and captured graphs refer to this memory
    copy = first.detach().clone()
    first.copy_(second)
    second.copy_(copy)
