"""Averages of tensors of one kind in one flat buffer, and the way of the live weights into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepmd_ema.averaging.profile import Profile
    from deepmd_ema.averaging.slots import Slot

_ALIGN = 64  # elements between the starts of two tensors in a flat buffer, so that vector loads stay aligned


class Group:
    """The averages of all tensors of one device and precision, one after the other in a flat buffer.

    Attributes:
        flat: the averages.
        views: one view of ``flat`` per tensor.
        live: gives the live tensors that belong to ``views``: what this process holds, or whole when gathered.
    """

    def __init__(self, slots: Sequence[Slot], home: torch.device, dtype: torch.dtype, gathered: bool) -> None:
        shapes = [slot.shape if gathered else tuple(slot.live.shape) for slot in slots]
        tensors = [slot.live for slot in slots]
        self.flat = _flat(shapes, dtype, home)
        self.views = _views(self.flat, shapes)
        self.shapes, self.source = shapes, tensors[0]
        self.live: Callable[[], list[Tensor]]
        self.live = (lambda: [slot.whole(slot.live) for slot in slots]) if gathered else (lambda: tensors)

    def take(self, live: list[Tensor], share: float) -> None:
        """Move the averages towards ``live`` by ``share`` of the distance."""
        if self.source.dtype == self.flat.dtype:
            torch._foreach_lerp_(self.views, live, share)
        elif self.flat.device.type == "cpu":  # one tensor at a time in the wider precision stays in the cache
            for mine, tensor in zip(self.views, live):
                mine.lerp_(tensor.to(self.flat.dtype), share)
        else:
            torch._foreach_lerp_(self.views, [tensor.to(self.flat.dtype) for tensor in live], share)

    def take_if(self, good: Tensor, live: list[Tensor], share: Tensor) -> None:
        """Do :meth:`take` if ``good`` is 1, and nothing if it is 0; the device decides."""
        copy = torch.zeros_like(self.flat)
        torch._foreach_copy_(_views(copy, self.shapes), live)
        # not share 0 alone: 0 * nan would poison the average
        torch.where(good.to(copy.device) > 0, copy, self.flat, out=copy)
        self.flat.lerp_(copy, (share * good).to(self.flat))


class Staging:
    """Host memory through which the weights of a device reach averages that are kept on the host.

    The copy is asked for after a step, and is there when the next update begins or something reads the average: nobody
    waits for it. Whether the step was good is known to the device only, and travels with the copy.

    Args:
        groups: averages on the host.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        pin = torch.cuda.is_available()
        self._flats = [_flat(g.shapes, g.source.dtype, torch.device("cpu"), pin) for g in groups]
        self._views = [_views(flat, g.shapes) for flat, g in zip(self._flats, groups)]
        self._good = torch.empty((), pin_memory=pin)
        self._step: int | None = None
        self._events: list[torch.cuda.Event] = []

    @property
    def num_bytes(self) -> int:
        """Host memory of the copies."""
        return sum(flat.nbytes for flat in self._flats)

    def start(self, step: int, ok: Tensor | None) -> None:
        """Ask for a copy of the live weights after ``step``, and of ``ok``."""
        if ok is None:
            self._good.fill_(1)
        else:
            self._good.copy_(ok.detach(), non_blocking=True)
        sources = {g.source.device for g in self._groups} | ({ok.device} if ok is not None else set())
        for group, views in zip(self._groups, self._views):
            torch._foreach_copy_(views, group.live(), non_blocking=True)
        self._events = [torch.cuda.current_stream(d).record_event() for d in sources if d.type == "cuda"]
        self._step = step

    def finish(self) -> tuple[int, list[list[Tensor]]] | None:
        """Return the step of the copy and the weights of each group; None if there is no copy of a good step."""
        step, self._step = self._step, None
        if step is None:
            return None
        for event in self._events:
            event.synchronize()
        return (step, self._views) if bool(self._good > 0) else None

    def forget(self) -> None:
        """Drop a copy that was not taken in."""
        self._step = None


def make_groups(slots: Sequence[Slot], profile: Profile) -> tuple[list[Group], list[Tensor]]:
    """Return flat buffers for the averages of ``slots``, and their views in the order of ``slots``."""
    members: dict[Any, list[int]] = {}
    for i, slot in enumerate(slots):
        home = torch.device("cpu") if profile.device == "cpu" else slot.live.device
        dtype = torch.promote_types(slot.live.dtype, torch.promote_types(torch.float32, getattr(torch, profile.dtype)))
        gathered = profile.layout == "full_tensor" and slot.is_sharded
        members.setdefault((slot.live.device, slot.live.dtype, home, dtype, gathered), []).append(i)
    groups: list[Group] = []
    tensors: dict[int, Tensor] = {}
    for (_, _, home, dtype, gathered), chosen in members.items():
        groups.append(Group([slots[i] for i in chosen], home, dtype, gathered))
        tensors |= dict(zip(chosen, groups[-1].views))
    return groups, [tensors[i] for i in range(len(slots))]


def make_staging(groups: Sequence[Group]) -> Staging | None:
    """Return what brings the live weights to ``groups``, or None if they are on the same devices."""
    return Staging(groups) if any(g.source.device != g.flat.device for g in groups) else None


def _flat(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, pin: bool = False) -> Tensor:
    return torch.zeros(sum(map(_room, shapes)), dtype=dtype, device=device, pin_memory=pin)


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    views, start = [], 0
    for shape in shapes:
        views.append(flat[start : start + _numel(shape)].view(shape))
        start += _room(shape)
    return views


def _room(shape: tuple[int, ...]) -> int:
    return -(-_numel(shape) // _ALIGN) * _ALIGN


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
