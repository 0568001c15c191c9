"""The number of updates of an average and the mean step of its weights, on the host or on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.tensors import on_device


class Counter:
    """The number of updates (-1 before the start) and the mean step of the weights in an average.

    They are on the host until the first step of which only the device knows whether it was good, then on the device.

    Args:
        profile: what gives the decay of an update.

    Attributes:
        profile: as given.
        updates: number of updates; out of date while ``on_device`` is not None.
        on_device: both numbers on the device, (2,), where reading waits for it; None while they are on the host.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.set(0, 0.0)

    def set(self, updates: int, mean_step: float) -> None:
        """Set both, on the host."""
        self.updates, self._mean_step = updates, mean_step
        self.on_device: Tensor | None = None

    def read(self) -> tuple[int, float]:
        """Return both; may wait for the device."""
        if self.on_device is not None:
            updates, self._mean_step = self.on_device.tolist()
            self.updates = int(updates)
        return self.updates, self._mean_step

    def count(self, step: int) -> float:
        """Count an update with the weights of ``step``; return the share that they get, ``1 - d``."""
        decay = host_decay(self.profile, self.updates) if self.updates >= 0 else 0.0
        share = 1.0 - decay
        self._mean_step = decay * self._mean_step + share * step
        self.updates += 1
        return share

    def move_to(self, place: Tensor) -> None:
        """Continue on a device, in ``place`` (2,) float64."""
        if self.on_device is None:
            numbers = torch.tensor([self.updates, self._mean_step], dtype=torch.float64)
            place.copy_(on_device(numbers, place.device))
            self.on_device = place


class DeviceCounters:
    """Counters of several averages in one tensor on the device, which is changed in place.

    Args:
        counters: one for each average.
        device: of the weights.
    """

    def __init__(self, counters: Sequence[Counter], device: torch.device) -> None:
        self._counters = counters
        self._counts = torch.zeros(len(counters), 2, dtype=torch.float64, device=device)  # updates and mean steps

    def count(self, due: Sequence[Counter], step: int | Tensor, good: Tensor | None) -> list[Tensor]:
        """Do :meth:`Counter.count` for the averages that are due, and nothing for the others.

        Args:
            due: in the order of all.
            step: that the weights are of; a scalar on the device if the host shall give no number.
            good: bool scalar; where it is False nothing is counted. None: always True.

        Returns:
            The share of the weights for each average that is due, 0 where nothing is counted.
        """
        for counter, place in zip(self._counters, self._counts):
            counter.move_to(place)
        numbers = [i for i, counter in enumerate(self._counters) if counter in due]
        # neighbors together: rows of the tensor are then a view of it
        ends = [i for i in numbers if i + 1 not in numbers]
        starts = [i for i in numbers if i - 1 not in numbers]
        return [
            share for rows in zip(starts, ends) for share in self._count_rows(slice(rows[0], rows[1] + 1), step, good)
        ]

    def _count_rows(self, rows: slice, step: int | Tensor, good: Tensor | None) -> Sequence[Tensor]:
        profiles = [counter.profile for counter in self._counters[rows]]
        updates, mean_step = self._counts[rows].unbind(1)
        start_late = any(profile.start_step > 0 for profile in profiles)
        done = (updates.clamp(min=0) if start_late else updates).unbind()
        decays = [device_decay(profile, number) for profile, number in zip(profiles, done)]
        decay = torch.stack(decays) if len(decays) > 1 else decays[0].unsqueeze(0)
        if start_late:
            decay = torch.where(updates < 0, 0.0, decay)
        share = 1 - decay
        moved = decay * mean_step + share * step
        if good is None:
            mean_step.copy_(moved)
            updates.add_(1)
            return share.unbind()
        torch.where(good, moved, mean_step, out=mean_step)
        updates.add_(good)
        return (share * good).unbind()


def host_decay(profile: Profile, updates: int) -> float:
    """Return the decay of the update that follows after ``updates`` updates."""
    done = torch.tensor(updates, dtype=torch.float64) if profile.counts_on_tensors else updates
    return float(profile.decay_of_update(done))


def device_decay(profile: Profile, updates: Tensor) -> Tensor:
    """Return the same for counters in a tensor, one for each of them; nothing waits for the device."""
    decay = profile.decay_of_update(updates)
    return decay.expand_as(updates) if isinstance(decay, Tensor) else torch.full_like(updates, decay)
