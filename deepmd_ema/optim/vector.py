"""Parameters that are updated together, with their states: the entries of all in one vector."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepmd_ema.distributed.tensors import from_local, full_tensor, is_sharded, local_shard, on_device, shard_like

# that are updated together, if not of a single parameter. On a CPU they stay in the cache of a core; on a GPU more
# would take memory and no less time
BATCH_ENTRIES = {"cpu": 2**17}
GPU_BATCH_ENTRIES = 2**22
WEIGHT = "weight"

# N entries of P parameters on this rank


class ParameterVector:
    """Parameters of one dtype and their states as vectors, which are read, changed, and written back together.

    An update of all of them is then a few operations on vectors instead of a few for each parameter. Every rank must
    call :meth:`full` and :meth:`own` when the parameters are sharded.

    Args:
        parameters: of one kind and dtype.
        states: of each parameter, tensors by key, the same keys for all.

    Attributes:
        parameters: as given.
    """

    def __init__(self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        self.parameters = parameters
        self._local = shards(parameters)
        self._sizes = [t.numel() for t in self._local]
        self._owner: Tensor | None = None
        tensors = {WEIGHT: self._local}
        tensors |= {key: shards(states[p][key] for p in parameters) for key in states[parameters[0]]}
        # those of one dtype together, where each operation has a price
        together = (lambda key: key) if self._local[0].is_cpu else (lambda key: tensors[key][0].dtype)
        self._groups: dict[Hashable, list[str]] = {}
        for key in tensors:
            self._groups.setdefault(together(key), []).append(key)
        self._lengths = {key: sum(t.numel() for t in values) for key, values in tensors.items()}
        # views, into which vectors are copied back: memory of weights and states stays in its place
        self._memory = {g: [t.view(-1) for key in keys for t in tensors[key]] for g, keys in self._groups.items()}
        self._parts = {g: [t.numel() for t in memory] for g, memory in self._memory.items()}

    def read(self) -> dict[Hashable, Tensor]:
        """Return all weights and states as few vectors: copies, or the memory itself of a tensor that is alone."""
        return {group: joined(memory) for group, memory in self._memory.items()}

    def split(self, vectors: Mapping[Hashable, Tensor]) -> dict[str, Tensor]:
        """Return the vector of the weights (N,) and that of each state by its key, views of ``vectors``."""
        found: dict[str, Tensor] = {}
        for group, keys in self._groups.items():
            parts = vectors[group].split([self._lengths[key] for key in keys]) if len(keys) > 1 else [vectors[group]]
            found |= zip(keys, parts)
        return found

    def write(self, values: Mapping[str, Tensor], before: Mapping[Hashable, Tensor], skip: Tensor | None) -> None:
        """Write weights and states, in place.

        Args:
            values: what :meth:`split` returned, changed.
            before: what :meth:`read` returned.
            skip: scalar; where it is True all stays as it was before, bit by bit. None: never, and ``values`` may have
                been changed in place.
        """
        for group, keys in self._groups.items():
            changed, memory = joined([values[key] for key in keys]), self._memory[group]
            if skip is not None:
                changed = torch.where(skip, before[group], changed)
            if changed is not memory[0]:  # else it was changed in its memory
                torch._foreach_copy_(memory, changed.split(self._parts[group]))

    def gradient(self) -> Tensor:
        """Return the gradient, (N,)."""
        return joined([g.reshape(-1) for g in shards(p.grad for p in self.parameters)])

    def per_entry(self, values: Tensor) -> Tensor:
        """Return the value of its parameter for each entry, (P,) to (N,); of a single parameter (1,)."""
        if len(self._sizes) == 1:
            return values
        if self._owner is None:
            sizes = torch.tensor(self._sizes)
            owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
            self._owner = on_device(owner, values.device)
        return values.index_select(0, self._owner)

    def norms(self, vector: Tensor) -> Tensor:
        """Return the Euclidean norm of the entries of each parameter, on all ranks: (N,) to (P,)."""
        parts = self._views(vector)
        if not self._is_sharded:
            return torch.stack(torch._foreach_norm(parts))
        pairs = zip(parts, self.parameters)
        return torch.stack([full_tensor(torch.linalg.vector_norm(from_local(t, p))) for t, p in pairs])

    def full(self, vector: Tensor) -> Tensor:
        """Return a vector (N,) with the entries of all ranks; without sharding, itself."""
        if not self._is_sharded:
            return vector
        pairs = zip(self._views(vector), self.parameters)
        return torch.cat([full_tensor(from_local(t, p)).reshape(-1) for t, p in pairs])

    def own(self, full: Tensor) -> Tensor:
        """Return the entries of this rank of what :meth:`full` returned."""
        if not self._is_sharded:
            return full
        pairs = zip(full.split([p.numel() for p in self.parameters]), self.parameters)
        return torch.cat([shard_like(t.view(p.shape), p).reshape(-1) for t, p in pairs])

    @property
    def _is_sharded(self) -> bool:
        return is_sharded(self.parameters[0])

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [part.view(t.shape) for part, t in zip(vector.split(self._sizes), self._local)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other along dim 0; a single one is returned itself."""
    return torch.cat(tuple(tensors)) if len(tensors) > 1 else tensors[0]


def shards(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the parts of tensors that this rank has, detached; a plain tensor is its own part."""
    return [local_shard(t) for t in tensors if t is not None]


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the addresses of the parts of tensors that this rank has."""
    return tuple(t.data_ptr() for t in shards(tensors))


def batches(parameters: Iterable[Tensor], kind: Callable[[Tensor], Hashable]) -> Iterator[list[Tensor]]:
    """Yield parameters of one kind and one dtype together, in their order, with at most ``BATCH_ENTRIES`` entries."""
    open_batches: dict[Hashable, list[Tensor]] = {}
    for p in parameters:
        key = kind(p), p.dtype
        batch = open_batches.setdefault(key, [])
        most = BATCH_ENTRIES.get(p.device.type, GPU_BATCH_ENTRIES)
        if batch and sum(q.numel() for q in batch) + p.numel() > most:
            yield open_batches.pop(key)
            batch = open_batches[key] = []
        batch.append(p)
    yield from open_batches.values()
