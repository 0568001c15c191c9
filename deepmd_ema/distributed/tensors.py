"""Tensors of a model: names, copies on the CPU, shards of ranks (FSDP2), and what a rank saves.

Functions of sharded tensors take plain ones as well and return them unchanged, so that callers need
not ask.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepmd_ema.errors import CheckpointError
from deepmd_ema.text import first_few

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# elements: rank 0 writes replicated tensors of fewer, which cost more to distribute than to write
SMALL = 4096


@dataclass(frozen=True)
class RowShard:
    """Rows of a tensor that one rank writes.

    Attributes:
        part: the rows, in host memory.
        first: number of the first of them.
        shape: of the whole tensor.
    """

    part: Tensor
    first: int
    shape: tuple[int, ...]

    def to(self, dtype: torch.dtype) -> RowShard:
        """Return the same rows in another precision."""
        return replace(self, part=self.part.to(dtype))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has been left on the disk.

    Attributes:
        shape: of the tensor.
        dtype: its precision.
        read: returns rows, by the number of the first and how many there are.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.dtype.is_floating_point

    def whole(self) -> Tensor:
        """Read all of it."""
        return self.read(0, self.shape[0] if self.shape else 1)


def whole(tree: Any) -> Any:
    """Return nested dictionaries, lists and tuples with every :class:`StoredTensor` read."""
    # cache: a tensor that has two names is read once
    return map_tensors(cache(StoredTensor.whole), tree, StoredTensor)


def precision(name: str) -> torch.dtype:
    """Return the dtype of an option ``precision``: float32, float64, or default (float64)."""
    return torch.float32 if name == "float32" else torch.float64


def check_weights(
    expected: Mapping[str, Sequence[int]], tensors: Mapping[str, Any], path: str | Path
) -> None:
    """Check names and shapes of the tensors that a model needs.

    Args:
        expected: name to shape in the model of this run.
        tensors: name to tensor (or shape) in the file.
        path: where ``tensors`` were read, for the message.

    Raises:
        CheckpointError: naming every missing, extra, renamed and reshaped tensor.
    """
    want = {name: tuple(shape) for name, shape in expected.items()}
    have = {
        name: tuple(getattr(value, "shape", value)) for name, value in tensors.items()
    }
    missing = [name for name in want if name not in have]
    extra = [name for name in have if name not in want]
    renamed: dict[str, str] = {}  # tensors that are probably there under another name
    for name in missing:
        same_shape = [
            other
            for other in extra
            if have[other] == want[name] and other not in renamed.values()
        ]
        close = get_close_matches(name, same_shape, n=1, cutoff=0.7)
        if close:
            renamed[name] = close[0]
    groups = {
        "missing": [f"{n} {want[n]}" for n in missing if n not in renamed],
        "not of this model": [
            f"{n} {have[n]}" for n in extra if n not in renamed.values()
        ],
        "renamed": [f"{n} is called {other} there" for n, other in renamed.items()],
        "of another shape": [
            f"{n} is {have[n]} there, {want[n]} here"
            for n in want
            if n in have and have[n] != want[n]
        ],
    }
    if not any(groups.values()):
        return
    lines = [
        f"{path}: its weights do not fit the model of this input ({len(have)} tensors there, "
        f"{len(want)} here)."
    ]
    lines += [
        f"  {title}: {first_few(names)}" for title, names in groups.items() if names
    ]
    lines.append(
        "  Use the model section of the run that wrote the file (`dp-ema show` prints it)."
    )
    raise CheckpointError("\n".join(lines))


def prefix_of(task: str) -> str:
    """Return the prefix of the names of a task's tensors; empty for the task without a name."""
    return f"{task}." if task else ""


def on_cpu(tree: Any) -> Any:
    """Return nested dictionaries, lists and tuples with every tensor detached, on the CPU.

    Each is in memory of its own size. Tensors that are so already are not copied: the result may
    share memory with ``tree``.
    """
    return map_tensors(HostCopies(wait=True, share=True), tree)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on ``device``, without waiting; on a CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    # a copy from pageable memory would wait
    return tensor.pin_memory().to(device, non_blocking=True)


def place_of(tensor: Tensor) -> Any:
    """Return a key that is equal for two tensors of the same numbers in the same memory."""
    # empty tensors have one address, 0
    if not tensor.numel():
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


class HostCopies:
    """Copies in host memory of tensors as they are now, one for each tensor whatever its names.

    Copies from a GPU are enqueued and arrive later. The tensors are referred to as long as this
    object lives, so that their memory is no other tensor's meanwhile; they must not be changed
    before the last copy is taken.

    Args:
        wait: whether a copy is complete when it is returned; else the function from :meth:`arrival`
            waits for it.
        share: whether a tensor that is alone in host memory, and contiguous, is returned itself.
    """

    def __init__(self, wait: bool = False, share: bool = False) -> None:
        self._wait = wait
        self._share = share
        # tensor and copy by the place of the tensor
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}
        self._devices: set[torch.device] = set()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the copy of ``tensor``, of its shape and precision, contiguous, in own memory."""
        source, key = tensor.detach(), place_of(tensor)
        if key not in self._made:
            later = source.is_cuda and not self._wait
            # torch.save() writes the whole memory that a tensor is a view of, as an average is
            is_alone = (
                source.is_contiguous()
                and source.untyped_storage().nbytes() == source.nbytes
            )
            if self._share and source.is_cpu and is_alone:
                copy = source
            else:
                # page-locked: a copy to other memory would wait for the device
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=later)
                copy.copy_(source, non_blocking=later)
            self._made[key] = tensor, copy
            if later:
                self._devices.add(source.device)
        return self._made[key][1]

    def arrival(self) -> Callable[[], None]:
        """Return a function, for any thread, that waits for the copies that were made so far."""
        # events of the stream of this thread; another thread may have another stream
        events = [
            torch.cuda.current_stream(device).record_event() for device in self._devices
        ]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def map_tensors(change: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    """Return nested dictionaries, lists and tuples with ``change`` of every value of ``kind``."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, value, kind) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        changed = [map_tensors(change, value, kind) for value in tree]
        return tuple(changed) if isinstance(tree, tuple) else changed
    return tree


def content_digest(tree: Any) -> str:
    """Return a SHA-256 of nested containers of numbers, texts, tensors on the CPU and arrays.

    It is that of the content, not of the bytes of a file: a tuple counts as a list, a number of
    numpy as an array.
    """
    digest = hashlib.sha256()
    for piece in _pieces(tree):
        digest.update(piece)
    return digest.hexdigest()


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds only a shard of ``tensor``."""
    # Not imported: that takes half a second, and before somebody has imported it there is no
    # sharded tensor. Another thread, which writes a sharded checkpoint, may be importing it: then
    # the module has no DTensor yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of ``tensor`` on this rank, sharing memory and detached.

    A plain tensor is returned itself.
    """
    if not is_sharded(tensor):
        return tensor
    # with gradients on, it records an operation and returns another object each time
    with torch.no_grad():
        return tensor.to_local()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` gathered from all ranks, in memory of its own.

    Every rank must call this if it is sharded.
    """
    if not is_sharded(tensor):
        return tensor
    mesh = tensor.device_mesh
    # An operation on shards has returned it, such as a norm. Where it is the same on all ranks
    # full_tensor() returns the local one itself: clone() gives it memory of its own.
    if not is_row_sharded(tensor):
        return tensor.full_tensor().clone()
    # DTensor's own way takes twice as long: most of it is bookkeeping, and the tensors of a model
    # are small
    shard = local_shard(tensor).detach()
    return all_gather_rows(shard, tensor.shape[0], mesh.size(), mesh.get_group())


def all_gather_rows(
    part: Tensor, rows: int, size: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the parts of all ranks, one after the other along dim 0. A collective.

    Args:
        part: rows of this rank, cut as ``torch.chunk`` does: equally many on all ranks but the last
            ones.
        rows: of all ranks together.
        size: number of ranks.
        group: of these ranks; the default group if None.
    """
    longest = -(-rows // size)
    # all_gather needs parts of one size; only the last ranks have fewer rows, so that the padding
    # is at the end
    if len(part) < longest:
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        part = padded
    whole = part.new_empty(size * longest, *part.shape[1:])
    dist.all_gather(list(whole.chunk(size)), part.contiguous(), group=group)
    return whole[:rows]


def from_local(shard: Tensor, like: Tensor) -> Tensor:
    """Return ``shard`` as a tensor that is sharded as ``like`` is, without communication."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    # shape and stride must be given: guessed from one shard they are wrong where shards differ in
    # size
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def settle_shards(module: nn.Module) -> None:
    """Move the shards of ``module`` to the memory where they stay.

    Must be called by every rank, if it is sharded.

    Call it before anything refers to their memory, as averages and optimizers do.
    """
    # torch before 2.10 copies shards with fewer rows than others in the first forward pass, unless
    # they have been gathered before
    if torch.__version__ < "2.10" and "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
                part.reshard()


def is_row_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds rows of ``tensor``, as FSDP2 shards parameters."""
    return is_sharded(tensor) and [
        place.is_shard(0) for place in tensor.placements
    ] == [True]


def first_row(tensor: Tensor) -> int:
    """Return the number of the first row that this rank holds of a row-sharded tensor."""
    assert is_sharded(tensor)
    mesh = tensor.device_mesh
    first, _ = rows_of(tensor.shape[0], mesh.get_local_rank(), mesh.size())
    return first


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank and how many it has, cut as ``torch.chunk`` does."""
    longest = -(-rows // size)
    first = min(rank * longest, rows)
    return first, min(longest, rows - first)


def shard_like(full: Tensor | StoredTensor, like: Tensor) -> Tensor:
    """Return this rank's shard of ``full``, cut as ``like`` is, without communication.

    It is on the device of ``full``.

    Args:
        full: a tensor that every rank holds, or one on the disk, of which only this shard is read.
        like: a tensor of that shape, sharded by rows or not.
    """
    if not is_sharded(like):
        return full.whole() if isinstance(full, StoredTensor) else full
    assert is_row_sharded(like)
    first, count = first_row(like), len(local_shard(like))
    return (
        full.read(first, count)
        if isinstance(full, StoredTensor)
        else full[first : first + count]
    )


@dataclass(frozen=True)
class WholeTensors:
    """Copies whole tensors to host memory.

    Every rank must call it, for the same tensors, where they are sharded.

    Attributes:
        copies: makes the copies of what is not gathered.
        keep: whether this rank wants the result; else it takes part in collectives only and gets
            None.
    """

    copies: HostCopies = field(default_factory=partial(HostCopies, wait=True))
    keep: bool = True

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Return the whole of ``tensor``."""
        whole = full_tensor(tensor)
        if not self.keep:
            return None
        # one after the other: no device holds the whole model at once
        if is_sharded(tensor):
            return whole.cpu()
        return self.copies(whole)

    def owned(self, tensor: Tensor) -> Tensor:
        """Return all of a tensor that only this rank holds, complete, so that it can be sent."""
        return tensor.to("cpu", copy=True)


@dataclass(frozen=True)
class OwnRows:
    """Copies the rows of tensors that this rank writes into a sharded checkpoint to host memory.

    Of a tensor that is sharded these are the rows that the rank holds, without communication. Rows
    of one that every rank holds are distributed evenly over the ranks.

    Attributes:
        rank: of this process.
        size: number of processes.
        copies: makes the copies.
    """

    keep: ClassVar[bool] = True  # every rank writes
    rank: int
    size: int
    copies: HostCopies

    def __call__(self, tensor: Tensor) -> RowShard | Tensor:
        """Return the rows of this rank, or all of a small tensor that every rank holds.

        Args:
            tensor: sharded as FSDP2 does it, or the same on all ranks.
        """
        if is_row_sharded(tensor):
            return RowShard(
                self.copies(local_shard(tensor)), first_row(tensor), tuple(tensor.shape)
            )
        replicated = full_tensor(tensor).detach()
        if replicated.numel() <= SMALL:
            return self.copies(replicated)
        first, count = rows_of(replicated.shape[0], self.rank, self.size)
        rows = replicated[first : first + count]
        return RowShard(self.copies(rows), first, tuple(replicated.shape))

    def owned(self, tensor: Tensor) -> RowShard:
        """Return all of a tensor that only this rank holds."""
        return RowShard(self.copies(tensor), 0, tuple(tensor.shape))


Take: TypeAlias = WholeTensors | OwnRows
"""What a rank saves of a tensor."""


def _pieces(tree: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that identify the content of ``tree``.

    Each part begins with its kind and its size.
    """
    if isinstance(tree, Tensor):
        yield f"{tree.dtype} {tuple(tree.shape)};".encode()
        yield tree.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
    elif isinstance(tree, np.ndarray | np.generic):
        array = np.asarray(tree)
        # dtype.str has the byte order, which dtype.name lacks
        yield f"{array.dtype.str} {array.shape};".encode()
        yield array.tobytes()
    elif isinstance(tree, Mapping):
        yield f"dict {len(tree)};".encode()
        for key, value in tree.items():
            yield f"{key!r};".encode()
            yield from _pieces(value)
    elif isinstance(tree, list | tuple):
        yield f"list {len(tree)};".encode()
        for value in tree:
            yield from _pieces(value)
    else:
        yield f"{tree!r};".encode()
