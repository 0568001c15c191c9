"""One average of all trained tensors, in flat buffers, with its counters on the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepmd_ema.averaging.profile import AverageProfile
    from deepmd_ema.averaging.slots import Slot

_ALIGN = 64  # elements between the starts of two tensors in a flat buffer, so that vector loads stay aligned


class Average:
    """One average: flat buffers, one view per slot, and its counters.

    The counters are the number of updates (-1 as long as ``start_step`` is ahead and the average still is the live
    weights) and the mean age of the weights in it, in steps. They live on the host until a step's fate is known to the
    device only; then they live there.

    Args:
        profile: how it is averaged.
        slots: trained tensors.
        previous: the same average before the set of tensors changed, or None.
        places: for each slot its place in ``previous``, or None when it is new there.
    """

    def __init__(
        self, profile: AverageProfile, slots: Sequence[Slot], previous: Average | None, places: Sequence[int | None]
    ) -> None:
        self.profile = profile
        self.slots = slots
        self.groups, self.tensors = _allocate(slots)
        self.set_counts(0, 0.0)
        self._exchanged = 0
        self._held: dict[int, Tensor] = {}
        if previous is None:
            self.seed(step=0)
            return
        self.set_counts(*previous.counts())
        for mine, slot, place in zip(self.tensors, slots, places):
            mine.copy_(slot.live if place is None else previous.tensors[place])

    def seed(self, step: int) -> None:
        """Start from the live weights, which have ``step`` steps behind them."""
        for mine, slot in zip(self.tensors, self.slots):
            mine.copy_(slot.live)
        self.set_counts(0 if step >= self.profile.start_step else -1, 0.0)

    @torch.no_grad()
    def update(self, ok: Tensor | None) -> None:
        """Take the live weights in; ``ok`` (not on the host) decides on the device whether anything changes."""
        if ok is None and self._device_counts is None:
            self._update_from_host()
        else:
            self._update_on_device(ok)

    def counts(self) -> tuple[int, float]:
        """Return the number of updates (-1 before the start) and the mean age in steps; may wait for the device."""
        if self._device_counts is not None:
            updates, self._mean_age = self._device_counts.tolist()
            self._updates = int(updates)
        return self._updates, self._mean_age

    def set_counts(self, updates: int, mean_age: float) -> None:
        """Set the counters, on the host."""
        self._updates, self._mean_age = updates, mean_age
        self._device_counts: Tensor | None = None

    @property
    def started(self) -> bool:
        """Whether it has begun to differ from the live weights: ``start_step`` is behind."""
        return self._updates >= 0 or self.counts()[0] >= 0

    @torch.no_grad()
    def swap_in(self) -> None:
        """Exchange with the live weights; if it fails on the way, :meth:`swap_out` undoes what was done."""
        if not self.started:
            return  # it still is the live weights
        for i, (slot, mine) in enumerate(zip(self.slots, self.tensors)):
            held = slot.live.detach().clone()
            slot.live.copy_(mine)
            if mine.dtype == held.dtype:
                mine.copy_(held)
            else:  # the average does not fit into the live tensor, so it stays where it is
                self._held[i] = held
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
            self._exchanged = i

    def raw(self, i: int) -> Tensor:
        """Return the live value of slot ``i``, wherever it stands now; whole, so every rank must call this."""
        part = self._held.get(i, self.tensors[i]) if i < self._exchanged else self.slots[i].live
        return self.slots[i].whole(part)

    def averaged(self, i: int) -> Tensor:
        """Return the average of slot ``i``, wherever it stands now; whole, so every rank must call this."""
        in_live = i < self._exchanged and i not in self._held
        return self.slots[i].whole(self.slots[i].live if in_live else self.tensors[i])

    def _update_from_host(self) -> None:
        decay = self.profile.decay_at(self._updates) if self._updates >= 0 else 0.0
        for group in self.groups:
            torch._foreach_lerp_(group.views, group.widened(), 1.0 - decay)
        self._mean_age = decay * (self._mean_age + self.profile.update_every)
        self._updates += 1

    def _update_on_device(self, ok: Tensor | None) -> None:
        if self._device_counts is None:
            device = self.slots[0].live.device if self.slots else None
            self._device_counts = torch.tensor([self._updates, self._mean_age], dtype=torch.float64, device=device)
        counts = self._device_counts
        good = torch.ones_like(counts[0]) if ok is None else (ok.detach() > 0).to(counts)
        decay = self._decay_after(counts[0])
        for group in self.groups:
            live = group.gather()
            # not weight 0 alone: 0 * nan would poison the average
            torch.where(good.to(live.device) > 0, live, group.flat, out=live)
            group.flat.lerp_(live, ((1 - decay) * good).to(group.flat))
        aged = torch.stack([counts[0] + 1, decay * (counts[1] + self.profile.update_every)])
        self._device_counts = torch.where(good > 0, aged, counts)

    def _decay_after(self, updates: Tensor) -> Tensor:
        """Return the decay that follows after ``updates``, the same numbers as ``AverageProfile.decay_at``."""
        decay = torch.full_like(updates, self.profile.decay)
        if self.profile.warmup:
            decay = torch.minimum(decay, (1 + updates) / (10 + updates))
        if self.profile.update_every != 1:
            decay = decay**self.profile.update_every
        return torch.where(updates < 0, torch.zeros_like(decay), decay)


@dataclass
class Group:
    """The averages of all tensors of one device and precision, one after the other in a flat buffer."""

    flat: Tensor
    views: list[Tensor]
    live: list[Tensor]
    same_precision: bool

    def widened(self) -> list[Tensor]:
        """Return the live tensors in the precision of the averages."""
        if self.same_precision:
            return self.live
        return [t.to(self.flat.dtype) for t in self.live]

    def gather(self) -> Tensor:
        """Return a copy of the live tensors, laid out as ``flat``."""
        copy = torch.zeros_like(self.flat)
        torch._foreach_copy_(_views(copy, self.views), self.live)
        return copy


def _allocate(slots: Sequence[Slot]) -> tuple[list[Group], list[Tensor]]:
    """Return flat buffers for ``slots``, and their views in the order of ``slots``."""
    members: dict[Any, list[int]] = {}
    for i, slot in enumerate(slots):
        members.setdefault((slot.live.device, slot.dtype), []).append(i)
    groups: list[Group] = []
    tensors: dict[int, Tensor] = {}
    for (device, dtype), chosen in members.items():
        live = [slots[i].live for i in chosen]
        flat = torch.zeros(sum(_room(t) for t in live), dtype=dtype, device=device)
        groups.append(Group(flat, _views(flat, live), live, all(t.dtype == dtype for t in live)))
        tensors |= dict(zip(chosen, groups[-1].views))
    return groups, [tensors[i] for i in range(len(slots))]


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += _room(tensor)
    return views


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGN) * _ALIGN
