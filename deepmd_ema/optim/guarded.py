"""Optimizers of our own: a step that the device can skip, parameters as vectors, and Adam as one of
their updates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepmd_ema.distributed.tensors import (
    from_local,
    full_tensor,
    is_sharded,
    local_shard,
    on_device,
    shard_like,
)

Values = dict[str, Tensor]
Out = Mapping[str, Tensor | None]
ADAM_EPS = 1e-8  # the default of Adam (arXiv:1412.6980, algorithm 1), of torch and of DeePMD-kit
# that are updated together, if not of a single parameter. On a CPU they stay in the cache of a
# core; on a GPU more would take memory and no less time
BATCH_ENTRIES = {"cpu": 2**17}
GPU_BATCH_ENTRIES = 2**22
WEIGHT = "weight"

# N entries of P parameters on this rank


class ParameterVector:
    """Parameters of one dtype and their states as vectors, which are read, changed, and written
    back together.

    An update of all of them is then a few operations on vectors instead of a few for each
    parameter. Every rank must call :meth:`full` and :meth:`own` when the parameters are sharded.

    Args:
        parameters: of one kind and dtype.
        states: of each parameter, tensors by key, the same keys for all.

    Attributes:
        parameters: as given.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]
    ) -> None:
        self.parameters = parameters
        self._local = [local_shard(p) for p in parameters]
        self._sizes = [t.numel() for t in self._local]
        self._owner: Tensor | None = None
        self._is_sharded = is_sharded(parameters[0])
        tensors = {WEIGHT: self._local}
        tensors |= {
            key: [local_shard(states[p][key]) for p in parameters] for key in states[parameters[0]]
        }
        # those of one dtype together, where each operation has a price
        together = (
            (lambda key: key) if self._local[0].is_cpu else (lambda key: tensors[key][0].dtype)
        )
        self._groups: dict[Hashable, list[str]] = {}
        for key in tensors:
            self._groups.setdefault(together(key), []).append(key)
        self._lengths = {key: sum(t.numel() for t in values) for key, values in tensors.items()}
        # views, into which vectors are copied back: memory of weights and states stays in its place
        self._memory = {
            g: [t.view(-1) for key in keys for t in tensors[key]]
            for g, keys in self._groups.items()
        }
        self._parts = {g: [t.numel() for t in memory] for g, memory in self._memory.items()}

    def read(self) -> dict[Hashable, Tensor]:
        """Return all weights and states as few vectors: copies, or the memory itself of a tensor
        that is alone.
        """
        return {group: joined(memory) for group, memory in self._memory.items()}

    def split(self, vectors: Mapping[Hashable, Tensor]) -> dict[str, Tensor]:
        """Return the vector of the weights (N,) and that of each state by its key, views of
        ``vectors``.
        """
        found: dict[str, Tensor] = {}
        for group, keys in self._groups.items():
            parts = (
                vectors[group].split([self._lengths[key] for key in keys])
                if len(keys) > 1
                else [vectors[group]]
            )
            found |= zip(keys, parts)
        return found

    def write(
        self, values: Mapping[str, Tensor], before: Mapping[Hashable, Tensor], skip: Tensor | None
    ) -> None:
        """Write weights and states, in place.

        Args:
            values: what :meth:`split` returned, changed.
            before: what :meth:`read` returned.
            skip: scalar; where it is True all stays as it was before, bit by bit. None: never, and
                ``values`` may have been changed in place.
        """
        for group, keys in self._groups.items():
            changed, memory = joined([values[key] for key in keys]), self._memory[group]
            if skip is not None:
                changed = torch.where(skip, before[group], changed)
            if changed is not memory[0]:  # else it was changed in its memory
                torch._foreach_copy_(memory, changed.split(self._parts[group]))

    def gradient(self) -> Tensor:
        """Return the gradient, (N,)."""
        return joined(
            [local_shard(p.grad).reshape(-1) for p in self.parameters if p.grad is not None]
        )

    def per_entry(self, values: Tensor) -> Tensor:
        """Return the value of its parameter for each entry, (P,) to (N,); of a single parameter
        (1,).
        """
        if len(self._sizes) == 1:
            return values
        if self._owner is None:
            sizes = torch.tensor(self._sizes)
            owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
            self._owner = on_device(owner, values.device)
        return values.index_select(0, self._owner)

    def norms(self, vector: Tensor) -> Tensor:
        """Return the Euclidean norm of the entries of each parameter, on all ranks: (N,) to
        (P,).
        """
        parts = self._views(vector)
        if not self._is_sharded:
            return torch.stack(torch._foreach_norm(parts))
        pairs = zip(parts, self.parameters)
        return torch.stack(
            [full_tensor(torch.linalg.vector_norm(from_local(t, p))) for t, p in pairs]
        )

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

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [part.view(t.shape) for part, t in zip(vector.split(self._sizes), self._local)]


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` is skipped where ``found_inf`` is 1, as the fused ones of
    torch do.

    State is allocated at construction and changed in place. The learning rate ``lr`` of a group is
    what :func:`deepmd_ema.optim.build.set_learning_rate` takes.

    Attributes:
        with_gradient_only: whether a parameter without a gradient is left as it is.
        number: of the step in the run, from 1.

    Args:
        params: parameters that are trained, or groups of them.
        options: those of the section of the optimizer by their names there, and ``lr``.
    """

    with_gradient_only: ClassVar[bool] = True
    number: int | Tensor = 1

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, options)
        self._vectors: dict[tuple[int, ...], tuple[tuple[int, ...], list[ParameterVector]]] = {}
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = self.first_state(p, group)

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def kind(self, p: Tensor, group: dict[str, Any]) -> Hashable:
        """Return a key that parameters must share to be updated together, None where it is no
        matrix; by default.
        """
        return None

    def vector(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> ParameterVector:
        """Return parameters of one kind as a vector."""
        return ParameterVector(parameters, self.state)

    def updated(
        self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]
    ) -> Values:
        """Return new weights and states of parameters of one kind that have gradients, or all have
        none.

        Args:
            vector: the parameters.
            values: their weights and states, vectors by name.
            out: where the new ones are put, ``values`` themselves where they may be changed; None:
                new memory.
            group: options of the parameters, with ``lr``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Sharded parameters: every rank must call this.

        Where ``found_inf`` is 1 they stay bit by bit, and nothing waits for the device.
        """
        assert closure is None, "no optimizer here evaluates the loss again"
        skip = None if (found_inf := getattr(self, "found_inf", None)) is None else found_inf > 0
        if skip is not None and skip.is_cpu:  # the host may ask: it waits for no device
            if skip:
                return
            skip = None
        self._update_unless(skip)

    def _update_unless(self, skip: Tensor | None) -> None:
        for group in self.param_groups:
            lr = group["lr"]  # products with a scalar in float32 would be rounded to it
            options = {**group, "lr": lr.to(torch.float64) if isinstance(lr, Tensor) else lr}
            # those with gradients are those of one task
            found = [p for p in group["params"] if p.grad is not None]
            others = (
                [] if self.with_gradient_only else [p for p in group["params"] if p.grad is None]
            )
            for vector in (*self._vectors_of(found, group), *self._vectors_of(others, group)):
                before = vector.read()
                values = vector.split(before)
                out = values if skip is None else dict.fromkeys(values)
                vector.write(self.updated(vector, values, out, options), before, skip)

    def adam_updated(
        self,
        vector: ParameterVector,
        values: Values,
        out: Out,
        group: dict[str, Any],
        eps: float = ADAM_EPS,
        decay: float = 0.0,
    ) -> Values:
        """Return parameters and their states after an update by Adam with moments in float32.

        ``w <- (1 - lr * decay) * w - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``
        (arXiv:1412.6980, algorithm 1; the decay as in arXiv:1711.05101). With ``lr_adjust > 0`` the
        learning rate is divided by it.

        Args:
            vector: parameters with gradients.
            values: their weights, and states from :func:`adam_state`.
            out: as for :meth:`GuardedOptimizer.updated`.
            group: options ``lr``, ``lr_adjust``, ``adam_beta1`` and ``adam_beta2``.
            eps: keeps the denominator from zero.
            decay: decoupled weight decay.
        """
        lr = group["lr"]
        b1 = group["adam_beta1"]
        b2 = group["adam_beta2"]
        lr = lr / group["lr_adjust"] if group["lr_adjust"] > 0 else lr
        gradient = vector.gradient().to(torch.float32)
        steps = torch.add(values["step"], 1, out=out["step"])
        mean = torch.lerp(values["exp_avg"], gradient, 1 - b1, out=out["exp_avg"])
        square = torch.lerp(
            values["exp_avg_sq"], gradient * gradient, 1 - b2, out=out["exp_avg_sq"]
        )
        wide = steps.to(
            torch.float64
        )  # b2^t is close to 1: float32 would lose the digits of 1 - b2^t
        rates, corrections = (1 - b1**wide).reciprocal() * lr, 1 - b2**wide
        lengths = (square / vector.per_entry(corrections.to(torch.float32))).sqrt() + eps
        direction = mean / lengths * vector.per_entry(rates.to(torch.float32))
        weights = self.decayed(values[WEIGHT], lr, decay, out[WEIGHT])
        weights = torch.sub(weights, direction.to(weights.dtype), out=out[WEIGHT])
        return {WEIGHT: weights, "step": steps, "exp_avg": mean, "exp_avg_sq": square}

    @staticmethod
    def decayed(weights: Tensor, lr: float | Tensor, decay: float, out: Tensor | None) -> Tensor:
        """Return ``(1 - lr * decay) * weights``, in ``out`` if given."""
        return torch.mul(weights, 1 - lr * decay, out=out) if decay else weights

    def _vectors_of(
        self, parameters: Sequence[Tensor], group: dict[str, Any]
    ) -> list[ParameterVector]:
        """Return parameters of a group as vectors."""
        # a wrapper of the optimizer may move the weights to other memory
        chosen, where = (
            tuple(map(id, parameters)),
            tuple(local_shard(p).data_ptr() for p in parameters),
        )
        kept = self._vectors.get(chosen)
        if kept is None or kept[0] != where:
            together = batches(parameters, lambda p: self.kind(p, group))
            kept = self._vectors[chosen] = where, [self.vector(batch, group) for batch in together]
        return kept[1]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other along dim 0; a single one is returned itself."""
    return torch.cat(tuple(tensors)) if len(tensors) > 1 else tensors[0]


def batches(
    parameters: Iterable[Tensor], kind: Callable[[Tensor], Hashable]
) -> Iterator[list[Tensor]]:
    """Yield parameters of one kind and one dtype together, in their order, with at most
    ``BATCH_ENTRIES`` entries.
    """
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


def adam_state(p: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the moments of Adam before the first update; those of :func:`adam_updated` are in
    float32.
    """
    moments = {name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
