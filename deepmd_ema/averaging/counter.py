"""How many updates are behind an average and which steps they came from, counted on the host or on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepmd_ema.averaging.profile import Profile


class Counter:
    """The number of updates (-1 as long as the start is ahead) and the mean step of the weights in an average.

    They live on the host until a step's fate is known to the device only; from then on they live there.

    Args:
        profile: what gives the decay of an update.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.set(0, 0.0)

    @property
    def is_on_device(self) -> bool:
        """Whether reading has to wait for the device."""
        return self._on_device is not None

    def set(self, updates: int, mean_step: float) -> None:
        """Set both, on the host."""
        self.updates, self._mean_step = updates, mean_step
        self._on_device: Tensor | None = None

    def read(self) -> tuple[int, float]:
        """Return both; may wait for the device."""
        if self._on_device is not None:
            updates, self._mean_step = self._on_device.tolist()
            self.updates = int(updates)
        return self.updates, self._mean_step

    def count(self, step: int) -> float:
        """Count an update with the weights of ``step``; return the share that they get, ``1 - d``."""
        decay = self._profile.decay_at(self.updates) if self.updates >= 0 else 0.0
        share = 1.0 - decay
        self._mean_step = decay * self._mean_step + share * step
        self.updates += 1
        return share

    def count_if(self, step: int, ok: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Do :meth:`count` on ``device``, if ``ok`` is above 0 or None; return 1 or 0 for whether, and the share."""
        counts = self._on_device
        if counts is None:
            counts = torch.tensor([self.updates, self._mean_step], dtype=torch.float64, device=device)
        updates, mean_step = counts.unbind()
        good = torch.ones_like(updates) if ok is None else (ok.detach() > 0).to(counts)
        decay = torch.where(updates < 0, 0.0, self._profile.decay_after(updates.clamp(min=0)))
        share = 1 - decay
        counted = torch.stack([updates + 1, decay * mean_step + share * step])
        self._on_device = torch.where(good > 0, counted, counts)
        return good, share
