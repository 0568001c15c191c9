"""Selection of the tensors that are averaged, by their names in a checkpoint, and the shard of each on this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from deepmd_ema.distributed.tensors import StoredTensor, from_local, full_tensor, local_shard, prefix_of, shard_like

_INNER_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_requires_grad = attrgetter("requires_grad")


class Binding:
    """The tensors of the modules that are averaged, selected at construction.

    Args:
        modules: by task name, as :class:`deepmd_ema.averaging.AverageBank` takes them.
        buffers: whether some average takes buffers in.

    Attributes:
        shards: trained parameters.
        buffers: floating-point buffers of the state dict; none if no average takes them.
        floating_buffers: names of all floating-point buffers of the state dict.
        frozen: names of the parameters that are not trained.
        names: those of ``shards`` and ``buffers``.
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
        self.shards = _find_shards([(name, p) for name, p in named if p.requires_grad], named)
        trained = {name for shard in self.shards for name in shard.names}
        # by name: a frozen parameter that shares its storage with a trained one is averaged
        self.frozen = [name for name, _ in named if name not in trained]
        places = list(_buffer_places(modules))
        self.floating_buffers = [name for name, _, _, _ in places]
        places = places if buffers else []
        self._places = [(owner, key, buffer) for _, owner, key, buffer in places]
        kept = [(name, buffer) for name, _, _, buffer in places]
        self.buffers = _find_shards(kept, kept)
        self.names = trained | {name for name, _ in kept}

    def is_stale(self) -> bool:
        """Whether parameters were frozen or released, or buffers replaced, since."""
        if not all(map(_requires_grad, self._trained)) or any(map(_requires_grad, self._frozen)):
            return True
        # a forward may assign a new tensor to a buffer: the old one would be averaged for ever
        return bool(self._places) and any(owner.get(key) is not buffer for owner, key, buffer in self._places)


class Shard:
    """An averaged tensor with all its names, as the modules hold it.

    Attributes:
        names: at least one.
        parameter: the tensor as the optimizer sees it, or a buffer.
        local: the part of it that this process averages, the same memory; all of it when nothing is sharded.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.names = [name]
        self.parameter = parameter
        self.local = local_shard(parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether other processes average other parts of it."""
        return self.local is not self.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return tuple(self.parameter.shape)

    def as_tensor(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is the local shard, sharded as the parameter is."""
        return from_local(part.detach(), self.parameter)

    def full_tensor(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is the local shard. A collective when sharded."""
        return full_tensor(self.as_tensor(part))

    def local_shard(self, full: Tensor | StoredTensor) -> Tensor:
        """Return the local shard of ``full``, which every rank has or can read."""
        return shard_like(full, self.parameter)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers (DDP, torch.compile): those whose only child is ``module`` or ``_orig_mod``."""
    while True:
        children = dict(module.named_children())
        wrapped = children.get("_orig_mod", children.get("module"))
        if wrapped is None or len(children) > 1 or module._parameters or module._buffers:
            return module
        module = wrapped


def canonical(name: str) -> str:
    """Return the name of a tensor without the parts that wrappers inside the module add to it."""
    return _INNER_WRAPPER.sub("", name)


def _find_shards(chosen: Sequence[tuple[str, Tensor]], named: Sequence[tuple[str, Tensor]]) -> list[Shard]:
    """Return the ``chosen`` tensors, each storage once with all the names it has in ``named``."""
    shards: dict[Any, Shard] = {}
    for name, tensor in chosen:
        shards.setdefault(_key(tensor), Shard(name, tensor))
    for name, tensor in named:
        shard = shards.get(_key(tensor))
        if shard is not None and name not in shard.names:
            shard.names.append(name)
    return list(shards.values())


def _key(tensor: Tensor) -> Any:
    live = local_shard(tensor)
    return (live.device, live.data_ptr(), live.dtype, tuple(live.shape)) if live.numel() else id(tensor)


def _buffer_places(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    for task, module in modules.items():
        for path, owner in unwrap(module).named_modules(remove_duplicate=False):
            for key, buffer in owner._buffers.items():
                saved = key not in owner._non_persistent_buffers_set
                if buffer is not None and saved and buffer.is_floating_point():
                    name = f"{path}.{key}" if path else key
                    yield prefix_of(task) + canonical(name), owner._buffers, key, buffer
