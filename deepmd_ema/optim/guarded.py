"""Optimizers of our own: a step that the device can skip, and Adam as one of their updates."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepmd_ema.optim.vector import WEIGHT, ParameterVector, addresses, batches

Values = dict[str, Tensor]
Out = Mapping[str, Tensor | None]
ADAM_EPS = 1e-8  # the default of Adam (arXiv:1412.6980, algorithm 1), of torch and of DeePMD-kit


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` is skipped where ``found_inf`` is 1, as the fused ones of torch do.

    State is allocated at construction and changed in place. The learning rate ``lr`` of a group is what
    :func:`deepmd_ema.optim.build.set_learning_rate` takes.

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

    def is_matrix(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter is updated as a matrix; by default none is."""
        return False

    def kind(self, p: Tensor, group: dict[str, Any]) -> Hashable:
        """Return a key that parameters must share to be updated together."""
        return self.is_matrix(p, group)

    def vector(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> ParameterVector:
        """Return parameters of one kind as a vector."""
        return ParameterVector(parameters, self.state)

    def updated(self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]) -> Values:
        """Return new weights and states of parameters of one kind that have gradients, or all have none.

        Args:
            vector: the parameters.
            values: their weights and states, vectors by name.
            out: where the new ones are put, ``values`` themselves where they may be changed; None: new memory.
            group: options of the parameters, with ``lr``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Sharded parameters: every rank must call this."""
        assert closure is None, "no optimizer here evaluates the loss again"
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not found_inf.is_cpu:
            self._update_unless(found_inf)
        elif not found_inf:  # the host may ask: it waits for no device
            self._update_unless(None)

    def _update_unless(self, found_inf: Tensor | None) -> None:
        """Update all parameters; where ``found_inf`` is 1 they stay bit by bit, and nothing waits for the device."""
        skip = None if found_inf is None else found_inf > 0
        for group in self.param_groups:
            lr = group["lr"]  # products with a scalar in float32 would be rounded to it
            options = {**group, "lr": lr.to(torch.float64) if isinstance(lr, Tensor) else lr}
            # those with gradients are those of one task
            found = [p for p in group["params"] if p.grad is not None]
            others = [] if self.with_gradient_only else [p for p in group["params"] if p.grad is None]
            for vector in (*self._vectors_of(found, group), *self._vectors_of(others, group)):
                before = vector.read()
                values = vector.split(before)
                out = values if skip is None else dict.fromkeys(values)
                vector.write(self.updated(vector, values, out, options), before, skip)

    def _vectors_of(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> list[ParameterVector]:
        """Return parameters of a group as vectors."""
        # a wrapper of the optimizer may move the weights to other memory
        chosen, where = tuple(map(id, parameters)), addresses(parameters)
        kept = self._vectors.get(chosen)
        if kept is None or kept[0] != where:
            together = batches(parameters, lambda p: self.kind(p, group))
            kept = self._vectors[chosen] = where, [self.vector(batch, group) for batch in together]
        return kept[1]


def adam_state(p: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the moments of Adam before the first update; those of :func:`adam_updated` are in float32."""
    moments = {name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}


def adam_updated(
    vector: ParameterVector, values: Values, out: Out, group: dict[str, Any], eps: float = ADAM_EPS, decay: float = 0.0
) -> Values:
    """Return parameters and their states after an update by Adam with moments in float32.

    ``w <- (1 - lr * decay) * w - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` (arXiv:1412.6980, algorithm 1;
    the decay as in arXiv:1711.05101). With ``lr_adjust > 0`` the learning rate is divided by it.

    Args:
        vector: parameters with gradients.
        values: their weights, and states from :func:`adam_state`.
        out: as for :meth:`GuardedOptimizer.updated`.
        group: options ``lr``, ``lr_adjust``, ``adam_beta1`` and ``adam_beta2``.
        eps: keeps the denominator from zero.
        decay: decoupled weight decay.
    """
    lr, b1, b2 = group["lr"], group["adam_beta1"], group["adam_beta2"]
    lr = lr / group["lr_adjust"] if group["lr_adjust"] > 0 else lr
    gradient = vector.gradient().to(torch.float32)
    steps = torch.add(values["step"], 1, out=out["step"])
    mean = torch.lerp(values["exp_avg"], gradient, 1 - b1, out=out["exp_avg"])
    square = torch.lerp(values["exp_avg_sq"], gradient * gradient, 1 - b2, out=out["exp_avg_sq"])
    wide = steps.to(torch.float64)  # b2^t is close to 1: float32 would lose the digits of 1 - b2^t
    rates, corrections = (1 - b1**wide).reciprocal() * lr, 1 - b2**wide
    lengths = (square / vector.per_entry(corrections.to(torch.float32))).sqrt() + eps
    direction = mean / lengths * vector.per_entry(rates.to(torch.float32))
    weights = decayed(values[WEIGHT], lr, decay, out[WEIGHT])
    weights = torch.sub(weights, direction.to(weights.dtype), out=out[WEIGHT])
    return {WEIGHT: weights, "step": steps, "exp_avg": mean, "exp_avg_sq": square}


def decayed(weights: Tensor, lr: float | Tensor, decay: float, out: Tensor | None) -> Tensor:
    """Return ``(1 - lr * decay) * weights``, in ``out`` if given."""
    return torch.mul(weights, 1 - lr * decay, out=out) if decay else weights
