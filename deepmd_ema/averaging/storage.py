"""The memory of one average: flat buffers, and staging memory for averages that are on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.averaging.binding import Shard
from deepmd_ema.averaging.profile import Profile

_ALIGN = 64  # elements between the starts of two tensors in a flat buffer, so that vector loads stay aligned


class Storage:
    """The tensors of one average, one per shard, in flat buffers by device and precision.

    With the layout ``full_tensor`` a sharded tensor is kept whole on every rank, and each read of its live value is a
    collective.

    Args:
        shards: averaged tensors.
        profile: where they are kept, how wide, and in which layout.

    Attributes:
        tensors: the averages in the order of ``shards``, views of the buffers.
        buffers: flat buffers.
        staging: staging memory, or None if the averages are on the device of the weights.
    """

    def __init__(self, shards: Sequence[Shard], profile: Profile) -> None:
        self.shards = shards
        self._gathered = [profile.layout == "full_tensor" and shard.is_sharded for shard in shards]
        members: dict[Any, list[int]] = {}
        for i, shard in enumerate(shards):
            live = shard.local
            home = torch.device("cpu") if profile.device == "cpu" else live.device
            dtype = torch.promote_types(live.dtype, torch.promote_types(torch.float32, getattr(torch, profile.dtype)))
            members.setdefault((live.device, live.dtype, home, dtype, self._gathered[i]), []).append(i)
        self.buffers = [
            Buffer([shards[i] for i in chosen], home, dtype, gathered)
            for (_, _, home, dtype, gathered), chosen in members.items()
        ]
        views = {i: view for b, chosen in zip(self.buffers, members.values()) for i, view in zip(chosen, b.views)}
        self.tensors = [views[i] for i in range(len(shards))]
        self.staging = Staging(self.buffers) if needs_staging(self.buffers) else None

    @property
    def num_bytes(self) -> int:
        """Memory on this process, with staging."""
        on_their_way = self.staging.flats if self.staging is not None else []
        return sum(flat.nbytes for flat in [*(b.flat for b in self.buffers), *on_their_way])

    def seed(self, i: int) -> None:
        """Set tensor ``i`` to the live value."""
        shard = self.shards[i]
        self.tensors[i].copy_(shard.full_tensor(shard.local) if self._gathered[i] else shard.local)

    def set(self, i: int, full: Tensor) -> None:
        """Set tensor ``i``. A collective when it is sharded."""
        self.tensors[i].copy_(full if self._gathered[i] else self.shards[i].local_shard(full))

    def averaged(self, i: int) -> Tensor:
        """Return tensor ``i``, whole. A collective when it is sharded."""
        return self.tensors[i] if self._gathered[i] else self.shards[i].full_tensor(self.tensors[i])

    def local_shard(self, i: int) -> Tensor:
        """Return what belongs into the live shard ``i``. A collective when it is gathered."""
        return self.shards[i].local_shard(self.tensors[i]) if self._gathered[i] else self.tensors[i]


class Buffer:
    """The averages of all tensors of one device and precision, one after the other in flat memory.

    Attributes:
        flat: the averages.
        views: one view of ``flat`` per tensor.
        source: one of the live tensors.
    """

    def __init__(self, shards: Sequence[Shard], home: torch.device, dtype: torch.dtype, gathered: bool) -> None:
        self.shapes = [shard.shape if gathered else tuple(shard.local.shape) for shard in shards]
        self.flat = _flat(self.shapes, dtype, home)
        self.views = _views(self.flat, self.shapes)
        self._shards, self._gathered = shards, gathered
        self._local = [shard.local for shard in shards]
        self.source = self._local[0]
        self._one_dtype = self.source.dtype == dtype

    def live(self) -> list[Tensor]:
        """Return the live tensors that belong to ``views``. A collective when gathered."""
        return [shard.full_tensor(shard.local) for shard in self._shards] if self._gathered else self._local

    def lerp(self, live: list[Tensor], share: float) -> None:
        """Move the averages towards ``live`` by ``share`` of the distance."""
        if self._one_dtype:
            torch._foreach_lerp_(self.views, live, share)
        elif self.flat.device.type == "cpu":  # one tensor at a time in the wider precision stays in the cache
            for mine, tensor in zip(self.views, live):
                mine.lerp_(tensor.to(self.flat.dtype), share)
        else:
            torch._foreach_lerp_(self.views, [tensor.to(self.flat.dtype) for tensor in live], share)

    def lerp_if(self, good: Tensor, live: list[Tensor], share: Tensor) -> None:
        """Do :meth:`lerp` if ``good`` is 1, and nothing if it is 0; the device decides."""
        copy = torch.zeros_like(self.flat)
        torch._foreach_copy_(_views(copy, self.shapes), live)
        # not share 0 alone: 0 * nan would poison the average
        torch.where(good.to(copy.device) > 0, copy, self.flat, out=copy)
        self.flat.lerp_(copy, (share * good).to(self.flat))


class Staging:
    """Host memory through which the weights of a device reach averages that are kept on the host.

    A copy is enqueued after a step and waited for when the next update begins or the average is read, so training does
    not wait for it. Whether the step was good, which only the device knows, is copied with the weights.

    Args:
        buffers: averages on the host.

    Attributes:
        flats: memory of the copies, one for each of ``buffers``.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        pin = torch.cuda.is_available()  # a copy to pageable memory would wait for the device
        self.flats = [_flat(b.shapes, b.source.dtype, torch.device("cpu"), pin) for b in buffers]
        self._views = [_views(flat, b.shapes) for flat, b in zip(self.flats, buffers)]
        self._good = torch.empty((), pin_memory=pin)
        self._step: int | None = None
        self._events: list[torch.cuda.Event] = []

    def start(self, step: int, ok: Tensor | None) -> None:
        """Enqueue a copy of the live weights after ``step``, and of ``ok``."""
        if ok is None:
            self._good.fill_(1)
        else:
            self._good.copy_(ok.detach(), non_blocking=True)
        sources = {b.source.device for b in self._buffers} | ({ok.device} if ok is not None else set())
        for buffer, views in zip(self._buffers, self._views):
            torch._foreach_copy_(views, buffer.live(), non_blocking=True)
        self._events = [torch.cuda.current_stream(d).record_event() for d in sources if d.type == "cuda"]
        self._step = step

    def finish(self) -> tuple[int, list[list[Tensor]]] | None:
        """Return the step of the copy and the weights of each buffer; None if there is no copy of a good step."""
        step, self._step = self._step, None
        if step is None:
            return None
        for event in self._events:
            event.synchronize()
        return (step, self._views) if bool(self._good > 0) else None

    def forget(self) -> None:
        """Drop the copy that was enqueued."""
        self._step = None


def needs_staging(buffers: Sequence[Buffer]) -> bool:
    """Whether some averages are on another device than their weights."""
    return any(b.source.device != b.flat.device for b in buffers)


def _flat(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, pin: bool = False) -> Tensor:
    return torch.zeros(sum(map(_stride, shapes)), dtype=dtype, device=device, pin_memory=pin)


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = flat.split([_stride(shape) for shape in shapes])
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes)]


def _stride(shape: tuple[int, ...]) -> int:
    """Return the elements from the start of a tensor of ``shape`` to that of the next one."""
    return -(-math.prod(shape) // _ALIGN) * _ALIGN
