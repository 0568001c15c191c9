"""Averaged tensors by name, flat memory of averages and its update, staging memory on the host."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deepmd_ema.distributed import tensors
from deepmd_ema.distributed.tensors import (
    StoredTensor,
    local_shard,
    place_of,
    prefix_of,
)

T = TypeVar("T")
# parts of the names that torch.compile, FSDP1 and activation checkpointing put before inner modules
_INNER_WRAPPER = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_requires_grad = attrgetter("requires_grad")
# elements to whose multiples tensors are padded in a flat buffer, so that vector loads stay aligned
_ALIGN = 64
# elements of live weights that are widened and averaged together: 1 MiB in float64, which stays in
# the cache of a core while several averages read it
_AT_ONCE = 1 << 17


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
        named: list[tuple[str, Tensor]] = []
        # name, the dict of the module that holds the buffer, its key there, the buffer
        places: list[tuple[str, dict[str, Any], str, Tensor]] = []
        # All names of a shared tensor: a reader of a file looks up any of them.
        for task, module in modules.items():
            prefix, bare = prefix_of(task), unwrap(module)
            for name, p in bare.named_parameters(remove_duplicate=False):
                if p.is_floating_point():
                    named.append((prefix + canonical(name), p))
            for path, owner in bare.named_modules(remove_duplicate=False):
                # The dict itself, in which is_stale() sees that another tensor was assigned.
                # Buffers that are not saved are computed anew from others: they have no average.
                for key, buffer in owner._buffers.items():
                    saved = key not in owner._non_persistent_buffers_set
                    if buffer is not None and saved and buffer.is_floating_point():
                        name = f"{path}.{key}" if path else key
                        places.append(
                            (prefix + canonical(name), owner._buffers, key, buffer)
                        )
        self._trained = [p for _, p in named if p.requires_grad]
        self._frozen = [p for _, p in named if not p.requires_grad]
        self.shards = _find_shards(
            [(name, p) for name, p in named if p.requires_grad], named
        )
        trained = {name for shard in self.shards for name in shard.names}
        # by name: a frozen parameter that shares its memory with a trained one is averaged
        self.frozen = [name for name, _ in named if name not in trained]
        self.floating_buffers = [name for name, _, _, _ in places]
        self._places = places if buffers else []
        buffers_by_name = [(name, buffer) for name, _, _, buffer in self._places]
        self.buffers = _find_shards(buffers_by_name, buffers_by_name)
        self.names = trained | {name for name, _ in buffers_by_name}

    def is_stale(self) -> bool:
        """Whether parameters were frozen or released, or buffers replaced, since."""
        # called in every step: map() with attrgetter stays in C
        if not all(map(_requires_grad, self._trained)) or any(
            map(_requires_grad, self._frozen)
        ):
            return True
        # a forward may assign a new tensor to a buffer: the old one would be averaged for ever
        return any(
            owner.get(key) is not buffer for _, owner, key, buffer in self._places
        )


class Shard:
    """An averaged tensor with all its names, as the modules hold it.

    Attributes:
        names: at least one.
        parameter: the tensor as the optimizer sees it, or a buffer.
        local: the part of it that this process averages, the same memory; all of it when nothing is
            sharded.
        is_sharded: whether other processes average other parts of it.
        shape: of the full tensor.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.names = [name]
        self.parameter = parameter
        self.local = local_shard(parameter)
        self.is_sharded = self.local is not parameter
        self.shape = tuple(parameter.shape)

    def as_tensor(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is the local shard, sharded as the parameter is."""
        return tensors.from_local(part.detach(), self.parameter)

    def full_tensor(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is the local shard. A collective when sharded."""
        return tensors.full_tensor(self.as_tensor(part))

    def local_shard(self, full: Tensor | StoredTensor) -> Tensor:
        """Return the local shard of ``full``, which every rank has or can read."""
        return tensors.shard_like(full, self.parameter)


class Buffer:
    """The averages of all tensors of one device and precision, one after the other in flat memory.

    Attributes:
        flat: the averages.
        views: one view of ``flat`` per tensor.
        parts: ``views`` of the tensors that are updated at once.
        source: one of the live tensors.
        key: the same in buffers of the same live tensors, device and precision.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        home: torch.device,
        dtype: torch.dtype,
        gathered: bool,
    ) -> None:
        self.shapes = [
            shard.shape if gathered else tuple(shard.local.shape) for shard in shards
        ]
        self.flat = _flat(self.shapes, dtype, home)
        self.views = _views(self.flat, self.shapes)
        self._shards = shards
        self._gathered = gathered
        self._local = [shard.local for shard in shards]
        self.source = self._local[0]
        # on a GPU all tensors at once: kernels cost more than the cache saves
        self._slices = (
            list(_slices(self.shapes)) if home.type == "cpu" else [slice(None)]
        )
        self.parts = [self.views[chosen] for chosen in self._slices]
        # live weights in the precision of the averages, by part; allocated when first needed
        self._wide: list[list[Tensor]] | None = None
        # gathered tensors differ in shape from local ones, so a buffer of them has a key of its own
        self.key = (home, dtype, gathered, tuple(map(id, self._local)))

    def live(self) -> list[Tensor]:
        """Return the live tensors that belong to ``views``. A collective when gathered."""
        return (
            [shard.full_tensor(shard.local) for shard in self._shards]
            if self._gathered
            else self._local
        )

    def live_parts(self, live: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield ``live`` in the precision of the averages, as ``parts``.

        Use each before the next one: they may share their memory.
        """
        if live[0].dtype == self.flat.dtype:
            yield from (live[chosen] for chosen in self._slices)
        elif self.flat.device.type == "cpu":
            # All parts share the memory of the largest, which stays in the cache; a new tensor for
            # each would come from main memory.
            if self._wide is None:
                shapes = [self.shapes[chosen] for chosen in self._slices]
                memory = _flat(
                    max(shapes, key=_size), self.flat.dtype, self.flat.device
                )
                self._wide = [_views(memory, part) for part in shapes]
            for wide, chosen in zip(self._wide, self._slices):
                torch._foreach_copy_(wide, live[chosen])
                yield wide
        else:
            yield [tensor.to(self.flat.dtype) for tensor in live]


class Staging:
    """Host memory through which the weights of a device reach averages that are kept on the host.

    A copy is enqueued after a step and waited for when the next update begins or the average is
    read, so training does not wait for it. Whether the step was good, which only the device knows,
    is copied with the weights.

    Args:
        buffers: averages on the host.

    Attributes:
        flats: memory of the copies, one for each of ``buffers``.
        step: of the copy that was enqueued; None: there is none, or it is not wanted any more.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        # page-locked memory: a copy to pageable memory would wait for the device
        pin = torch.cuda.is_available()
        self.flats = [
            _flat(b.shapes, b.source.dtype, torch.device("cpu"), pin) for b in buffers
        ]
        self._views = [_views(flat, b.shapes) for flat, b in zip(self.flats, buffers)]
        self._good = torch.empty((), pin_memory=pin)
        self.step: int | None = None
        self._events: list[torch.cuda.Event] = []

    def start(self, step: int, ok: Tensor | None) -> None:
        """Enqueue a copy of the live weights after ``step``, and of ``ok``."""
        # enqueued before the copies of the weights; the events below come after both
        if ok is None:
            self._good.fill_(1)
        else:
            self._good.copy_(ok.detach(), non_blocking=True)
        sources = {b.source.device for b in self._buffers} | (
            {ok.device} if ok is not None else set()
        )
        for buffer, flat in zip(self._buffers, self.flats):
            # packed on the device first: one copy to the host instead of one for each tensor
            gathered = torch.zeros_like(flat, device=buffer.source.device)
            torch._foreach_copy_(_views(gathered, buffer.shapes), buffer.live())
            flat.copy_(gathered, non_blocking=True)
        self._events = [
            torch.cuda.current_stream(d).record_event()
            for d in sources
            if d.type == "cuda"
        ]
        self.step = step

    def finish(self) -> tuple[int, list[list[Tensor]]] | None:
        """Return the step of the copy and the weights of each buffer, or None.

        None means that no copy was enqueued, or that of a bad step.
        """
        step, self.step = self.step, None
        if step is None:
            return None
        # only the copies are waited for: the device may be busy with the next step
        for event in self._events:
            event.synchronize()
        return (step, self._views) if bool(self._good > 0) else None


def lerp(
    moves: Iterable[tuple[Buffer, float]], live: list[Tensor] | None = None
) -> None:
    """Move the averages of each buffer towards the live tensors by its share of the distance.

    Buffers of the same tensors are updated together, part by part, so that each is read from memory
    and widened once.

    Args:
        moves: buffers and their shares.
        live: what they are moved towards, if not the live tensors as they are now.
    """
    for alike in _by_live_tensors(moves):
        first, share = alike[0]
        targets = first.live() if live is None else live
        # one average in the precision of its weights reads them once anyhow, without portions
        if len(alike) == 1 and targets[0].dtype == first.flat.dtype:
            torch._foreach_lerp_(first.views, targets, share)
            continue
        for k, part in enumerate(first.live_parts(targets)):
            for buffer, share in alike:
                torch._foreach_lerp_(buffer.parts[k], part, share)


def lerp_on_device(moves: Iterable[tuple[Buffer, Tensor]], good: Tensor | None) -> None:
    """Do :func:`lerp` by shares that only the device knows, and nothing where ``good`` is False.

    Args:
        moves: buffers and their shares, scalars on the device, 0 where ``good`` is False.
        good: bool scalar; None: always True.
    """
    for alike in _by_live_tensors(moves):
        first, _ = alike[0]
        # Flat, so that an average takes one kernel. Zeros between the tensors, because that kernel
        # reads the padding as well.
        live = torch.zeros_like(first.flat)
        torch._foreach_copy_(_views(live, first.shapes), first.live())
        if good is not None:
            # A share of 0 alone is not enough: 0 * nan is nan. The average itself takes the place
            # of bad weights.
            torch.where(good.to(live.device), live, first.flat, out=live)
        for buffer, share in alike:
            buffer.flat.lerp_(live, share.to(buffer.flat))


def needs_staging(buffers: Sequence[Buffer]) -> bool:
    """Whether some averages are on another device than their weights."""
    return any(b.source.device != b.flat.device for b in buffers)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers, as DDP and torch.compile are.

    A wrapper has one child, ``module`` or ``_orig_mod``, and no parameters or buffers.
    """
    while True:
        children = dict(module.named_children())
        wrapped = children.get("_orig_mod", children.get("module"))
        if (
            wrapped is None
            or len(children) > 1
            or module._parameters
            or module._buffers
        ):
            return module
        module = wrapped


def canonical(name: str) -> str:
    """Return the name of a tensor without the parts that wrappers inside the module add to it."""
    return _INNER_WRAPPER.sub("", name)


def _find_shards(
    chosen: Sequence[tuple[str, Tensor]], named: Sequence[tuple[str, Tensor]]
) -> list[Shard]:
    """Return the ``chosen`` tensors, each storage once with all the names it has in ``named``."""

    def place(tensor: Tensor) -> Any:
        live = local_shard(tensor)
        # Tensors that share memory are one. Empty ones have no memory and all the same address: a
        # rank may hold no rows of a sharded tensor.
        return place_of(live) if live.numel() else id(tensor)

    shards: dict[Any, Shard] = {}
    for name, tensor in chosen:
        shards.setdefault(place(tensor), Shard(name, tensor))
    for name, tensor in named:
        shard = shards.get(place(tensor))
        if shard is not None and name not in shard.names:
            shard.names.append(name)
    return list(shards.values())


def _by_live_tensors(
    moves: Iterable[tuple[Buffer, T]],
) -> Iterable[list[tuple[Buffer, T]]]:
    """Return the moves in groups of the same live tensors, device and precision."""
    together: dict[Any, list[tuple[Buffer, T]]] = {}
    for move in moves:
        together.setdefault(move[0].key, []).append(move)
    return together.values()


def _flat(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    pin: bool = False,
) -> Tensor:
    # zeros: the padding between tensors is read by operations on the whole buffer
    return torch.zeros(_size(shapes), dtype=dtype, device=device, pin_memory=pin)


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    # `flat` may be longer: parts of different sizes share one memory
    parts = flat[: _size(shapes)].split([_stride(shape) for shape in shapes])
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes)]


def _size(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the elements of a flat buffer of tensors of these shapes."""
    return sum(map(_stride, shapes))


def _stride(shape: tuple[int, ...]) -> int:
    """Return the elements from the start of a tensor of ``shape`` to that of the next one."""
    return -(-math.prod(shape) // _ALIGN) * _ALIGN


def _slices(shapes: Sequence[tuple[int, ...]]) -> Iterator[slice]:
    """Yield slices of neighboring tensors: ``_AT_ONCE`` elements at most, or one tensor."""
    first = size = 0
    for i, shape in enumerate(shapes):
        size += _stride(shape)
        if size > _AT_ONCE and i > first:
            yield slice(first, i)
            first, size = i, _stride(shape)
    yield slice(first, len(shapes))
