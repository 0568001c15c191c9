"""Tensors by name: precision, copies on the CPU, the digest of a tree, and the check that weights fit a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.errors import CheckpointError, first_few


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
    return _cpu_copy(tree, {})


def content_digest(tree: Any) -> str:
    """Return a SHA-256 of nested dictionaries and lists of numbers, texts, tensors on the CPU and arrays.

    It is that of the content, not of the bytes of a file: a tuple counts as a list, a number of numpy as an array.
    """
    digest = hashlib.sha256()
    for piece in _pieces(tree):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(tree: Any) -> Iterator[bytes | memoryview]:
    """Yield what tells ``tree`` from every other content; each part begins with its kind and its size."""
    if isinstance(tree, Tensor):
        yield f"{tree.dtype} {tuple(tree.shape)};".encode()
        yield tree.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
    elif isinstance(tree, np.ndarray | np.generic):
        array = np.asarray(tree)
        yield f"{array.dtype.str} {array.shape};".encode()  # its order of bytes as well, which `name` does not tell
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


def _cpu_copy(tree: Any, seen: dict[Any, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        key = (tree.device, tree.data_ptr(), tree.dtype, tuple(tree.shape), tree.stride()) if tree.numel() else id(tree)
        if key not in seen:
            copy = torch.empty(tree.shape, dtype=tree.dtype)
            seen[key] = copy.copy_(tree.detach())
        return seen[key]
    if isinstance(tree, Mapping):
        return {key: _cpu_copy(value, seen) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        copies = [_cpu_copy(value, seen) for value in tree]
        return tuple(copies) if isinstance(tree, tuple) else copies
    return tree
