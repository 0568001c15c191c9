"""Tensors by name: precision, copies on the CPU, the digest of a tree, and the check that weights fit a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.errors import CheckpointError, first_few


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

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

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
    """Return nested dictionaries, lists and tuples with every :class:`StoredTensor` read; one of two names once."""
    seen: dict[int, Tensor] = {}

    def read(stored: StoredTensor) -> Tensor:
        if id(stored) not in seen:
            seen[id(stored)] = stored.whole()
        return seen[id(stored)]

    return map_tensors(read, tree, StoredTensor)


def precision(name: str) -> torch.dtype:
    """Return the torch dtype of an option ``precision``: ``float32``, ``float64``, or ``default`` (float64)."""
    return torch.float32 if name == "float32" else torch.float64


def check_weights(expected: Mapping[str, Sequence[int]], found: Mapping[str, Any], path: str | Path) -> None:
    """Check names and shapes of the tensors that a model needs.

    Args:
        expected: name to shape in the model of this run.
        found: name to tensor (or shape) in the file.
        path: where ``found`` was read, for the message.

    Raises:
        CheckpointError: naming every missing, extra, renamed and reshaped tensor.
    """
    want = {name: tuple(shape) for name, shape in expected.items()}
    have = {name: tuple(getattr(value, "shape", value)) for name, value in found.items()}
    missing = [name for name in want if name not in have]
    extra = [name for name in have if name not in want]
    renamed: dict[str, str] = {}  # tensors that are probably there under another name
    for name in missing:
        same_shape = [other for other in extra if have[other] == want[name] and other not in renamed.values()]
        close = get_close_matches(name, same_shape, n=1, cutoff=0.7)
        if close:
            renamed[name] = close[0]
    groups = {
        "missing": [f"{n} {want[n]}" for n in missing if n not in renamed],
        "not of this model": [f"{n} {have[n]}" for n in extra if n not in renamed.values()],
        "renamed": [f"{n} is called {other} there" for n, other in renamed.items()],
        "of another shape": [
            f"{n} is {have[n]} there, {want[n]} here" for n in want if n in have and have[n] != want[n]
        ],
    }
    if not any(groups.values()):
        return
    lines = [f"{path}: its weights do not fit the model of this input ({len(have)} tensors there, {len(want)} here)."]
    lines += [f"  {title}: {first_few(names)}" for title, names in groups.items() if names]
    lines.append("  Use the model section of the run that wrote the file (`dp-ema show` prints it).")
    raise CheckpointError("\n".join(lines))


def prefix_of(task: str) -> str:
    """Return the prefix of the names of a task's tensors; empty for the task without a name."""
    return f"{task}." if task else ""


def cpu_copy(tree: Any) -> Any:
    """Return a copy of nested dictionaries, lists and tuples with every tensor cloned to the CPU.

    The copy shares no memory with ``tree``. A tensor that occurs under several names is copied once.
    """
    return map_tensors(HostCopies(wait=True), tree)


def on_cpu(tree: Any) -> Any:
    """Return nested dictionaries, lists and tuples with every tensor detached, on the CPU, in memory of its own size.

    Tensors that are so already are not copied: the result may share memory with ``tree``.
    """
    seen: dict[Any, Tensor] = {}  # a tensor that occurs under several names stays one

    def plain(tensor: Tensor) -> Tensor:
        key = _place_of(tensor)
        if key not in seen:
            host = tensor.detach().to("cpu")
            # files hold all of the memory behind a tensor
            if not (host.is_contiguous() and host.untyped_storage().nbytes() == host.nbytes):
                host = host.clone(memory_format=torch.contiguous_format)
            seen[key] = host
        return seen[key]

    return map_tensors(plain, tree)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on ``device``, without waiting for it; on a CPU it is returned itself."""
    if device.type == "cpu":
        return tensor
    # a copy from pageable memory would wait
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies in host memory of tensors as they are now; each tensor is copied once, under whatever names it comes.

    Copies from a GPU are enqueued and arrive later. The tensors are referred to as long as this object lives, so that
    their memory is no other tensor's meanwhile; they must not be changed before the last copy is taken.

    Args:
        wait: whether a copy is complete when it is returned; else the function from :meth:`arrival` waits for it.
    """

    def __init__(self, wait: bool = False) -> None:
        self._wait = wait
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}
        self._devices: set[torch.device] = set()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the copy of ``tensor``: of its shape and precision, contiguous, and alone in its memory."""
        source, key = tensor.detach(), _place_of(tensor)
        if key not in self._made:
            later = source.is_cuda and not self._wait
            # page-locked: a copy to other memory would wait for the device
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=later)
            self._made[key] = tensor, copy.copy_(source, non_blocking=later)
            if later:
                self._devices.add(source.device)
        return self._made[key][1]

    def arrival(self) -> Callable[[], None]:
        """Return a function, to be called in any thread, that waits for the copies that were made so far."""
        events = [torch.cuda.current_stream(device).record_event() for device in self._devices]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def map_tensors(change: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    """Return nested dictionaries, lists and tuples with ``change`` of every tensor, of a ``kind``, in its place."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, value, kind) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        changed = [map_tensors(change, value, kind) for value in tree]
        return tuple(changed) if isinstance(tree, tuple) else changed
    return tree


def content_digest(tree: Any) -> str:
    """Return a SHA-256 of nested dictionaries and lists of numbers, texts, tensors on the CPU and arrays.

    It is that of the content, not of the bytes of a file: a tuple counts as a list, a number of numpy as an array.
    """
    digest = hashlib.sha256()
    for piece in _pieces(tree):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(tree: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that identify the content of ``tree``; each part begins with its kind and its size."""
    if isinstance(tree, Tensor):
        yield f"{tree.dtype} {tuple(tree.shape)};".encode()
        yield tree.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
    elif isinstance(tree, np.ndarray | np.generic):
        array = np.asarray(tree)
        yield f"{array.dtype.str} {array.shape};".encode()  # with its byte order, which `name` lacks
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


def _place_of(tensor: Tensor) -> Any:
    """Return a key that is equal for two tensors of the same numbers in the same memory."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
