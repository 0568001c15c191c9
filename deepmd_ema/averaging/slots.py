"""Averaged tensors by the names that a checkpoint uses, and the part of each that this process holds."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepmd_ema.tensors import prefix_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

_INNER_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_requires_grad = attrgetter("requires_grad")


class Slot:
    """A tensor that is averaged, and all its names.

    Attributes:
        names: at least one.
        parameter: the tensor as the optimizer sees it, or a buffer.
        live: the part of it that this process holds, the same memory; all of it when nothing is sharded.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.names = [name]
        self.parameter = parameter
        self.live = _local(parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether other processes hold other parts of it."""
        return self.live is not self.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.parameter.shape)

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is this process's part. Every rank must call this when sharded."""
        if not self.is_sharded:
            return part.detach()
        from torch.distributed.tensor import DTensor

        like = self.parameter
        assert isinstance(like, DTensor)
        # without shape and stride, parts of different sizes would be put together wrongly
        return DTensor.from_local(
            part.detach(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of ``whole``. Every rank must call this when sharded."""
        if not self.is_sharded:
            return whole
        from torch.distributed.tensor import DTensor, distribute_tensor

        like = self.parameter
        assert isinstance(like, DTensor)
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements).to_local()

    def publish(self) -> None:
        """Let other processes have what was written to ``live``. Every rank must call this when sharded."""


class RangeSlot(Slot):
    """A tensor that every process holds whole, of which each averages a range of elements.

    Args:
        slot: the tensor.
    """

    def __init__(self, slot: Slot) -> None:
        self.names, self.parameter = slot.names, slot.parameter
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._room = -(-slot.parameter.numel() // self._size)
        self.live = self._mine(slot.parameter.detach().view(-1))

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is this process's range. Every rank must call this."""
        if self._size == 1:
            return part.detach().view(self.shape)
        padded = part.new_zeros(self._room)
        padded[: part.numel()] = part
        ranges = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(ranges, padded)
        return torch.cat(ranges)[: self.parameter.numel()].view(self.shape)

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's range of ``whole``."""
        return self._mine(whole.reshape(-1))

    @torch.no_grad()
    def publish(self) -> None:
        """Write the ranges of all processes into the tensor. Every rank must call this."""
        if self._size > 1:
            self.parameter.copy_(self.whole(self.live))

    def _mine(self, flat: Tensor) -> Tensor:
        return flat[self._rank * self._room : (self._rank + 1) * self._room]


class Binding:
    """Which tensors of the modules are averaged, as it stands when this is made.

    Args:
        modules: by task name, as :class:`deepmd_ema.averaging.AverageBank` takes them.
        buffers: whether some average takes buffers in.

    Attributes:
        slots: trained parameters.
        buffers: floating-point buffers of the state dict; none if no average takes them.
        floating_buffers: names of all floating-point buffers of the state dict.
        frozen: names of the parameters that are not trained.
    """

    def __init__(self, modules: Mapping[str, nn.Module], buffers: bool) -> None:
        named = [
            (prefix_of(task) + canonical(name), p)
            for task, module in modules.items()
            for name, p in unwrap(module).named_parameters(remove_duplicate=False)
            if p.is_floating_point()
        ]
        self._trained = [p for _, p in named if p.requires_grad]
        self._frozen = [p for _, p in named if not p.requires_grad]
        self.slots = _find_slots([(name, p) for name, p in named if p.requires_grad], named)
        averaged = {name for slot in self.slots for name in slot.names}
        self.frozen = [name for name, _ in named if name not in averaged]
        places = list(_buffer_places(modules))
        self.floating_buffers = [name for name, _, _, _ in places]
        places = places if buffers else []
        self._places = [(owner, key, buffer) for _, owner, key, buffer in places]
        kept = [(name, buffer) for name, _, _, buffer in places]
        self.buffers = _find_slots(kept, kept)

    def is_stale(self) -> bool:
        """Whether parameters were frozen or released, or buffers replaced, since."""
        if not all(map(_requires_grad, self._trained)) or any(map(_requires_grad, self._frozen)):
            return True
        # a forward may assign a new tensor to a buffer: the old one would be averaged for ever
        return bool(self._places) and any(owner.get(key) is not buffer for owner, key, buffer in self._places)


def live_state(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all tensors of the state dicts, under the names of a checkpoint, as they stand in the modules."""
    return {
        prefix_of(task) + canonical(name): value
        for task, module in modules.items()
        for name, value in unwrap(module).state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers (DDP, torch.compile): those whose only child is ``module`` or ``_orig_mod``."""
    while True:
        children = dict(module.named_children())
        wrapped = children.get("_orig_mod", children.get("module"))
        if wrapped is None or len(children) > 1 or module._parameters or module._buffers:
            return module
        module = wrapped


def canonical(name: str) -> str:
    """Return the name of a tensor without what wrappers inside the module have put into it."""
    return _INNER_WRAPPER.sub("", name)


def _find_slots(chosen: Sequence[tuple[str, Tensor]], named: Sequence[tuple[str, Tensor]]) -> list[Slot]:
    """Return the ``chosen`` tensors, each storage once with all the names it has in ``named``."""
    slots: dict[Any, Slot] = {}
    for name, tensor in chosen:
        slots.setdefault(_key(tensor), Slot(name, tensor))
    for name, tensor in named:
        slot = slots.get(_key(tensor))
        if slot is not None and name not in slot.names:
            slot.names.append(name)
    return list(slots.values())


def _key(tensor: Tensor) -> Any:
    live = _local(tensor)
    return (live.device, live.data_ptr(), live.dtype, tuple(live.shape)) if live.numel() else id(tensor)


def _buffer_places(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    for task, module in modules.items():
        for path, owner in unwrap(module).named_modules(remove_duplicate=False):
            for key, buffer in owner._buffers.items():
                saved = key not in owner._non_persistent_buffers_set
                if buffer is not None and saved and buffer.is_floating_point():
                    name = f"{path}.{key}" if path else key
                    yield prefix_of(task) + canonical(name), owner._buffers, key, buffer


def _local(parameter: Tensor) -> Tensor:
    # the parameter itself and not an alias: it stays right when ``.data`` is replaced
    return getattr(parameter, "_local_tensor", parameter)
