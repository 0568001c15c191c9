"""One average of all its tensors, with its counters on the host or on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.averaging.counter import Counter
from deepmd_ema.averaging.group import make_groups, make_staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepmd_ema.averaging.profile import Profile
    from deepmd_ema.averaging.slots import Slot


class Average:
    """One average: flat buffers, one view per slot, and its counters.

    As long as ``start_step`` is ahead, the average is the live weights, and its number of updates is -1. An average
    that is kept away from the weights counts on the host.

    Args:
        profile: how it is averaged.
        slots: averaged tensors.
    """

    def __init__(self, profile: Profile, slots: Sequence[Slot]) -> None:
        self.profile = profile
        self.slots = slots
        self.groups, self.tensors = make_groups(slots, profile)
        self._staging = make_staging(self.groups)
        self._exchanged = 0
        self._held: dict[int, Tensor] = {}
        self._counter = Counter(profile)

    @property
    def num_bytes(self) -> int:
        """Memory on this process, with that of copies on their way."""
        return sum(g.flat.nbytes for g in self.groups) + (self._staging.num_bytes if self._staging is not None else 0)

    def seed(self, step: int) -> None:
        """Start from the live weights, which have ``step`` steps behind them."""
        self.set_counts(0 if step >= self.profile.start_step else -1, float(step))
        for i in range(len(self.slots)):
            self.seed_tensor(i)

    def seed_tensor(self, i: int) -> None:
        """Start slot ``i`` from its live value."""
        slot, mine = self.slots[i], self.tensors[i]
        mine.copy_(slot.whole(slot.live) if self._is_gathered(i) else slot.live)

    def set_tensor(self, i: int, whole: Tensor) -> None:
        """Set the average of slot ``i``. Every rank must call this when weights are sharded."""
        self.tensors[i].copy_(whole if self._is_gathered(i) else self.slots[i].part(whole))

    def update(self, step: int, ok: Tensor | None) -> None:
        """Take the live weights after ``step`` in; ``ok`` (not on the host) decides later whether anything changes."""
        if self._staging is not None:
            self.flush()
            self._staging.start(step, ok)
        elif ok is None and not self._counter.is_on_device:
            share = self._counter.count(step)
            for group in self.groups:
                group.take(group.live(), share)
        elif self.groups:
            good, share_on_device = self._counter.count_if(step, ok, self.groups[0].source.device)
            for group in self.groups:
                group.take_if(good, group.live(), share_on_device)

    def flush(self) -> None:
        """Take in the weights that are on their way; waits for them."""
        arrived = self._staging.finish() if self._staging is not None else None
        if arrived is None:
            return
        step, weights = arrived
        share = self._counter.count(step)
        for group, live in zip(self.groups, weights):
            group.take(live, share)

    def counts(self) -> tuple[int, float]:
        """Return the number of updates (-1 before the start) and the mean step; may wait for the device."""
        self.flush()
        return self._counter.read()

    def set_counts(self, updates: int, mean_step: float) -> None:
        """Set the counters, on the host; weights that are on their way are dropped."""
        if self._staging is not None:
            self._staging.forget()
        self._counter.set(updates, mean_step)

    @property
    def started(self) -> bool:
        """Whether it has begun to differ from the live weights: ``start_step`` is behind."""
        return self._counter.updates >= 0 or self.counts()[0] >= 0

    @torch.no_grad()
    def swap_in(self) -> None:
        """Exchange with the live weights; if it fails on the way, :meth:`swap_out` undoes what was done."""
        if not self.started:
            return  # it still is the live weights
        self.flush()
        for i, (slot, mine) in enumerate(zip(self.slots, self.tensors)):
            gathered = self._is_gathered(i)
            average = slot.part(mine) if gathered else mine
            if mine.dtype == slot.live.dtype and not gathered:
                held = slot.live.detach().clone()
                slot.live.copy_(average)
                mine.copy_(held)
            else:  # the average does not fit into the live tensor, so it stays where it is
                self._held[i] = slot.live.detach().to(mine.device, copy=True)
                slot.live.copy_(average)
            slot.publish()
            self._exchanged += 1

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the live weights back."""
        while self._exchanged:
            i = self._exchanged - 1
            live, mine = self.slots[i].live, self.tensors[i]
            if i in self._held:
                live.copy_(self._held.pop(i))
            else:
                held = live.detach().clone()
                live.copy_(mine)
                mine.copy_(held)
            self.slots[i].publish()
            self._exchanged = i

    def raw(self, i: int) -> Tensor:
        """Return the live value of slot ``i``, wherever it stands now; whole, so every rank must call this."""
        part = self._held.get(i, self.tensors[i]) if i < self._exchanged else self.slots[i].live
        return self.slots[i].whole(part)

    def averaged(self, i: int) -> Tensor:
        """Return the average of slot ``i``, wherever it stands now; whole, so every rank must call this."""
        self.flush()
        if self._is_gathered(i):
            return self.tensors[i]
        in_live = i < self._exchanged and i not in self._held
        return self.slots[i].whole(self.slots[i].live if in_live else self.tensors[i])

    def _is_gathered(self, i: int) -> bool:
        return self.profile.layout == "full_tensor" and self.slots[i].is_sharded
