"""Sets of operations of equal values and derivatives, and how a module gets one.

The reason is in doc/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn import norm
from deepmd_ema.model.ops import attention, few_kernels, reference
from deepmd_ema.model.ops.cpu import attention as cpu_attention
from deepmd_ema.model.ops.cpu import moments, silu, tanh_gradients, triples

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Operations(NamedTuple):
    """The operations of which there may be several versions, with the signatures of the reference.

    Attributes:
        is_for_cpu: whether operations work in place, in portions, and may read numbers, for which a
            GPU would wait. Those of the reference can be traced, and differentiated any number of
            times by anything; those of other sets need eager mode, and their gradients can be
            differentiated by the parameters alone.
    """

    activated: Callable[..., Tensor] = reference.activated
    moments: Callable[..., reference.Moments] = reference.moments
    values_and_gradients: Callable[..., tuple[Tensor, Tensor]] = (
        reference.values_and_gradients
    )
    attended_moments: Callable[..., Tensor] = attention.attended_moments
    triple_sums_and_vjp: Callable[..., tuple[Tensor, Any]] = (
        reference.triple_sums_and_vjp
    )
    normalised: Callable[..., Tensor] = norm.normalised
    symmetrized: Callable[..., Tensor] = reference.symmetrized
    is_for_cpu: bool = False


REFERENCE = Operations()
# operations in place, in portions that fit the cache, with written-out gradients
CPU = Operations(
    silu.activated,
    moments.tanh_moments,
    tanh_gradients.tanh_values_and_gradients,
    cpu_attention.attended_moments,
    triples.triple_sums_and_vjp,
    is_for_cpu=True,
)
# operations that launch fewer kernels and never wait for the device
GPU = Operations(
    activated=silu.activated_on_gpu,
    moments=moments.tanh_moments,
    values_and_gradients=tanh_gradients.stacked_values_and_gradients,
    attended_moments=partial(
        attention.attended_moments, normalised=few_kernels.normalised
    ),
    normalised=few_kernels.normalised,
    symmetrized=few_kernels.symmetrized,
)
OF_DEVICE = {
    "cpu": CPU,
    "cuda": GPU,
}  # for models that are evaluated eagerly; REFERENCE on others


class UsesOperations(nn.Module):
    """A module that calls operations of the set which :func:`use_operations` gave it."""

    _operations: Operations = REFERENCE

    @property
    def ops(self) -> Operations:
        """The set of operations; while a graph is made, the reference."""
        # read at each call, as one module may be compiled and evaluated eagerly in one run
        return REFERENCE if torch.compiler.is_compiling() else self._operations


def use_operations(module: nn.Module, operations: Operations) -> None:
    """Give a module and all modules in it a set of operations."""
    for part in module.modules():
        if isinstance(part, UsesOperations):
            part._operations = operations


def with_operations(module: ModuleT, operations: Operations) -> ModuleT:
    """Return a module with another set of operations.

    It has the same parameters, buffers and other attributes. It is for one evaluation: attributes
    that are set later on the module itself are not seen.
    """
    children = {
        name: child and with_operations(child, operations)
        for name, child in module._modules.items()
    }
    same = all(child is module._modules[name] for name, child in children.items())
    if same and not isinstance(module, UsesOperations):
        # hooks of sharded networks, and tables by network, must find the same object
        return module
    # a shallow copy, without a call of __init__: parameters and buffers are the same tensors
    other: ModuleT = object.__new__(type(module))
    other.__dict__.update(vars(module), _modules=children)
    if isinstance(other, UsesOperations):
        other._operations = operations
    return other
