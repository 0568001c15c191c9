"""Trained tensors by the names that a checkpoint uses, and the part of each that this process holds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

_INNER_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Slot:
    """A trained tensor and all its names.

    Attributes:
        names: at least one.
        parameter: the tensor as the optimizer sees it.
        live: the part of it that this process holds, the same memory; all of it when nothing is sharded.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.names = [name]
        self.parameter = parameter
        self.live = _local(parameter)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its average: float32 or wider."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.parameter.shape)

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is this process's part. Every rank must call this when sharded."""
        if self.live is self.parameter:
            return part.detach()
        from torch.distributed.tensor import DTensor

        like = self.parameter
        assert isinstance(like, DTensor)
        # without shape and stride, parts of different sizes would be put together wrongly
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of ``whole``. Every rank must call this when sharded."""
        if self.live is self.parameter:
            return whole
        from torch.distributed.tensor import DTensor, distribute_tensor

        like = self.parameter
        assert isinstance(like, DTensor)
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements).to_local()


def find_slots(named: Sequence[tuple[str, Tensor]]) -> list[Slot]:
    """Return the trained tensors, each storage once with all the names it has."""
    slots: dict[Any, Slot] = {}
    for name, parameter in named:
        live = _local(parameter)
        key = (live.device, live.data_ptr(), live.dtype, tuple(live.shape)) if live.numel() else id(parameter)
        if key in slots:
            slots[key].names.append(name)
        elif parameter.requires_grad:
            slots[key] = Slot(name, parameter)
    return list(slots.values())


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


def prefix_of(task: str) -> str:
    """Return what stands before the names of a task's tensors."""
    return f"{task}." if task else ""


def _local(parameter: Tensor) -> Tensor:
    # the parameter itself and not an alias: it stays right when ``.data`` is replaced
    return getattr(parameter, "_local_tensor", parameter)
