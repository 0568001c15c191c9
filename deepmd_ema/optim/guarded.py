"""Optimizers of our own: a step that the device can skip, and Adam as one of their updates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.dist.dtensor import local_shard

# that are updated together, if not of a single parameter: more would take memory and no less time
BATCH_ENTRIES = 2**22
ADAM_EPS = 1e-8  # the default of Adam (arXiv:1412.6980, algorithm 1), of torch and of DeePMD-kit


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` is skipped where ``found_inf`` is 1, as the fused ones of torch do.

    State is allocated at construction. A parameter without a gradient is left as it is.

    Args:
        params: parameters that are trained, or groups of them.
        options: those of the section of the optimizer by their names there, and ``lr``.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, options)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = self.first_state(p, group)

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update parameters that have gradients, and their states, in place.

        Args:
            parameters: some of ``group``, of which this rank may have parts.
            group: its options, with ``lr``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Sharded parameters: every rank must call this."""
        assert closure is None, "no optimizer here evaluates the loss again"
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not found_inf.is_cpu:
            self._update_unless(found_inf)
        elif not found_inf:  # the host may ask: it waits for no device
            self._update_unless(None)

    def _update_unless(self, found_inf: Tensor | None) -> None:
        """Update all parameters; where ``found_inf`` is 1, they are put back bit by bit, without asking the device."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            changed = shards(t for p in parameters for t in (p, *self.state[p].values()))
            before = [] if found_inf is None else [t.clone() for t in changed]
            self.update(parameters, group)
            if found_inf is not None:
                for tensor, old in zip(changed, before):
                    torch.where(found_inf > 0, old, tensor, out=tensor)


def shards(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the parts of tensors that this rank has; a plain tensor is its own part."""
    return [local_shard(t) for t in tensors if t is not None]


def batches(parameters: Iterable[Tensor], kind: Callable[[Tensor], Hashable]) -> Iterator[list[Tensor]]:
    """Yield parameters of one kind and one dtype together, in their order, with at most ``BATCH_ENTRIES`` entries."""
    open_batches: dict[Hashable, list[Tensor]] = {}
    for p in parameters:
        key = kind(p), p.dtype
        batch = open_batches.setdefault(key, [])
        if batch and sum(q.numel() for q in batch) + p.numel() > BATCH_ENTRIES:
            yield open_batches.pop(key)
            batch = open_batches[key] = []
        batch.append(p)
    yield from open_batches.values()


def adam_state(p: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the moments of Adam before the first update; those of :func:`adam_update` are in float32."""
    moments = {name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}


def adam_update(
    parameters: Sequence[Tensor],
    group: dict[str, Any],
    states: Mapping[Tensor, dict[str, Tensor]],
    eps: float = ADAM_EPS,
    decay: float = 0.0,
) -> None:
    """Update parameters and their states, in place, by Adam with moments in float32.

    ``w <- (1 - lr * decay) * w - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` (arXiv:1412.6980, algorithm 1;
    the decay as in arXiv:1711.05101). With ``lr_adjust > 0`` the learning rate is divided by it.

    Args:
        parameters: with gradients.
        group: options ``lr``, ``lr_adjust``, ``adam_beta1`` and ``adam_beta2``.
        states: from :func:`adam_state`.
        eps: keeps the denominator from zero.
        decay: decoupled weight decay.
    """
    if not parameters:
        return
    lr, b1, b2 = group["lr"], group["adam_beta1"], group["adam_beta2"]
    lr = lr / group["lr_adjust"] if group["lr_adjust"] > 0 else lr
    steps, means, squares = (shards(states[p][key] for p in parameters) for key in ("step", "exp_avg", "exp_avg_sq"))
    gradients = [g.to(torch.float32) for g in shards(p.grad for p in parameters)]
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(means, gradients, 1 - b1)
    torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - b2)
    wide = torch.stack(steps).to(torch.float64)  # b2^t is close to 1: float32 would lose the digits of 1 - b2^t
    rates, corrections = (t.to(torch.float32).unbind() for t in (lr / (1 - b1**wide), 1 - b2**wide))
    lengths = torch._foreach_sqrt(torch._foreach_div(squares, corrections))
    torch._foreach_add_(lengths, eps)
    directions = torch._foreach_mul(torch._foreach_div(means, lengths), rates)
    weights = shards(parameters)
    torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_sub_(weights, [d.to(w.dtype) for d, w in zip(directions, weights)])
