"""Base of the optimizers of this package: a step that the device can skip, parameters as vectors.

Adam is one of their updates.
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
# Entries that are updated together, where they are not those of a single parameter. On a CPU they
# stay in the cache of a core; on a GPU more would take memory and no less time.
BATCH_ENTRIES = {"cpu": 2**17}
GPU_BATCH_ENTRIES = 2**22
WEIGHT = "weight"

# N entries of P parameters on this rank


class ParameterVector:
    """Parameters of one dtype and their states as vectors.

    They are read, changed, and written back together: an update is then a few operations on vectors
    instead of a few for each parameter. Every rank must call :meth:`full` and :meth:`own` when the
    parameters are sharded.

    Args:
        parameters: of one kind and dtype.
        states: of each parameter, tensors by key, the same keys for all.

    Attributes:
        parameters: as given.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        states: Mapping[Tensor, Mapping[str, Tensor]],
    ) -> None:
        self.parameters = parameters
        self._local = [local_shard(p) for p in parameters]
        self._sizes = [t.numel() for t in self._local]
        self._owner: Tensor | None = None  # made when it is first needed
        self._is_sharded = is_sharded(parameters[0])
        tensors = {WEIGHT: self._local}
        tensors |= {
            key: [local_shard(states[p][key]) for p in parameters]
            for key in states[parameters[0]]
        }
        # On a GPU each operation costs a launch: weights and states of one dtype are one vector,
        # which one operation reads or writes. On a CPU that saves nothing, and a tensor that is
        # alone in its vector needs no copy.
        together = (
            (lambda key: key)
            if self._local[0].is_cpu
            else (lambda key: tensors[key][0].dtype)
        )
        self._groups: dict[Hashable, list[str]] = {}
        for key in tensors:
            self._groups.setdefault(together(key), []).append(key)
        self._lengths = {
            key: sum(t.numel() for t in values) for key, values in tensors.items()
        }
        # Views, into which vectors are copied back: weights and states stay in their memory, to
        # which averages, captured graphs and collectives refer.
        self._memory = {
            g: [t.view(-1) for key in keys for t in tensors[key]]
            for g, keys in self._groups.items()
        }
        self._parts = {
            g: [t.numel() for t in memory] for g, memory in self._memory.items()
        }

    def read(self) -> dict[Hashable, Tensor]:
        """Return all weights and states as few vectors.

        They are copies, or the memory itself of a tensor that is alone.
        """
        return {group: joined(memory) for group, memory in self._memory.items()}

    def split(self, vectors: Mapping[Hashable, Tensor]) -> dict[str, Tensor]:
        """Return the vector of the weights (N,) and of each state by its key, views of ``vectors``.

        A state of one number for each parameter, as a counter, is a vector (P,).
        """
        by_key: dict[str, Tensor] = {}
        for group, keys in self._groups.items():
            parts = (
                vectors[group].split([self._lengths[key] for key in keys])
                if len(keys) > 1
                else [vectors[group]]
            )
            by_key |= zip(keys, parts)
        return by_key

    def write(
        self,
        values: Mapping[str, Tensor],
        before: Mapping[Hashable, Tensor],
        skip: Tensor | None,
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
            [
                local_shard(p.grad).reshape(-1)
                for p in self.parameters
                if p.grad is not None
            ]
        )

    def per_entry(self, values: Tensor) -> Tensor:
        """Return the value of its parameter for each entry, (P,) to (N,).

        That of a single parameter stays (1,).
        """
        if len(self._sizes) == 1:
            return values
        if self._owner is None:
            # the number of its parameter for each entry, (N,), kept from step to step; index_select
            # needs no host number, whereas repeat_interleave by a tensor on the device would wait
            sizes = torch.tensor(self._sizes)
            owner = torch.repeat_interleave(
                torch.arange(len(sizes), dtype=torch.int32), sizes
            )
            self._owner = on_device(owner, values.device)
        return values.index_select(0, self._owner)

    def norms(self, vector: Tensor) -> Tensor:
        """Return the Euclidean norm of each parameter over its entries on all ranks, (N,) to (P,).

        Every rank must call this when the parameters are sharded.
        """
        parts = self._views(vector)
        if not self._is_sharded:
            return torch.stack(torch._foreach_norm(parts))
        # the norm of a DTensor adds up the squares of all shards; full_tensor takes the result
        # that every rank then has
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
        return [
            part.view(t.shape)
            for part, t in zip(vector.split(self._sizes), self._local)
        ]


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` is skipped where ``found_inf`` is 1.

    The fused optimizers of torch do so, too.
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
        self._vectors: dict[
            tuple[int, ...], tuple[tuple[int, ...], list[ParameterVector]]
        ] = {}
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = self.first_state(p, group)

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def kind(self, p: Tensor, group: dict[str, Any]) -> Hashable:
        """Return a key that parameters must share to be updated together.

        By default all of them may be: None, which subclasses return for what is no matrix.
        """
        return None

    def vector(
        self, parameters: Sequence[Tensor], group: dict[str, Any]
    ) -> ParameterVector:
        """Return parameters of one kind as a vector."""
        return ParameterVector(parameters, self.state)

    def updated(
        self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]
    ) -> Values:
        """Return new weights and states of parameters of one kind.

        Args:
            vector: the parameters; all of them have gradients, or none has.
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
        # the attribute that torch.amp.GradScaler and guarded_step set for the time of a step
        skip = (
            None
            if (found_inf := getattr(self, "found_inf", None)) is None
            else found_inf > 0
        )
        if skip is not None and skip.is_cpu:  # the host may ask: it waits for no device
            if skip:
                return
            skip = None
        self._update_unless(skip)

    def _update_unless(self, skip: Tensor | None) -> None:
        for group in self.param_groups:
            # A rate on the device is in float32 (set_learning_rate); 1 - lr * decay and lr / (1 -
            # b1^t) would be rounded to float32, other than with a rate of the host.
            lr = group["lr"]
            options = {
                **group,
                "lr": lr.to(torch.float64) if isinstance(lr, Tensor) else lr,
            }
            # With several tasks only the parameters of the task of this step have gradients. The
            # two sets are updated apart, because `updated` treats all parameters of a vector alike.
            trained = [p for p in group["params"] if p.grad is not None]
            idle = (
                []
                if self.with_gradient_only
                else [p for p in group["params"] if p.grad is None]
            )
            for vector in (
                *self._vectors_of(trained, group),
                *self._vectors_of(idle, group),
            ):
                before = vector.read()
                values = vector.split(before)
                # In place where nothing is skipped. Else new memory, of which `write` takes over
                # what is not skipped: `before` must stay intact to be put back.
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
        gradient = vector.gradient().to(torch.float32)  # (N,), as the moments
        steps = torch.add(values["step"], 1, out=out["step"])  # (P,)
        mean = torch.lerp(values["exp_avg"], gradient, 1 - b1, out=out["exp_avg"])
        square = torch.lerp(
            values["exp_avg_sq"], gradient * gradient, 1 - b2, out=out["exp_avg_sq"]
        )
        # in float64: b2^t is close to 1, and float32 would lose the digits of 1 - b2^t
        wide = steps.to(torch.float64)
        # both corrections are taken per parameter, (P,), and spread to the entries afterwards
        rates, corrections = (1 - b1**wide).reciprocal() * lr, 1 - b2**wide
        lengths = (
            square / vector.per_entry(corrections.to(torch.float32))
        ).sqrt() + eps
        direction = mean / lengths * vector.per_entry(rates.to(torch.float32))
        weights = self.decayed(values[WEIGHT], lr, decay, out[WEIGHT])
        weights = torch.sub(weights, direction.to(weights.dtype), out=out[WEIGHT])
        return {WEIGHT: weights, "step": steps, "exp_avg": mean, "exp_avg_sq": square}

    @staticmethod
    def decayed(
        weights: Tensor, lr: float | Tensor, decay: float, out: Tensor | None
    ) -> Tensor:
        """Return ``(1 - lr * decay) * weights``, in ``out`` if given."""
        return torch.mul(weights, 1 - lr * decay, out=out) if decay else weights

    def _vectors_of(
        self, parameters: Sequence[Tensor], group: dict[str, Any]
    ) -> list[ParameterVector]:
        """Return parameters of a group as vectors, which are kept for the next step."""
        # By the parameters and their memory: the task of a step decides which have gradients, and
        # a wrapper of the optimizer (ZeroRedundancyOptimizer) may move the weights to other memory,
        # which the views of a vector would miss.
        chosen = tuple(map(id, parameters))
        addresses = tuple(local_shard(p).data_ptr() for p in parameters)
        entry = self._vectors.get(chosen)
        if entry is None or entry[0] != addresses:
            together = batches(parameters, lambda p: self.kind(p, group))
            vectors = [self.vector(batch, group) for batch in together]
            entry = self._vectors[chosen] = addresses, vectors
        return entry[1]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other along dim 0; a single one is returned itself."""
    return torch.cat(tuple(tensors)) if len(tensors) > 1 else tensors[0]


def batches(
    parameters: Iterable[Tensor], kind: Callable[[Tensor], Hashable]
) -> Iterator[list[Tensor]]:
    """Yield parameters of one kind and one dtype together, in their order.

    A batch has at most ``BATCH_ENTRIES`` entries, or one parameter.
    """
    # one batch for each kind is filled at a time
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
    """Return the moments of Adam before the first update.

    Those of :meth:`GuardedOptimizer.adam_updated` are in float32.
    """
    moments = {
        name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")
    }
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
