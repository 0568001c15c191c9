"""The reference operations of descriptors, in plain torch, and how a module gets another set of operations.

Every function here returns new tensors. This is the code that is compiled, exported, differentiated by ``torch.func``
or twice. :mod:`deepmd_ema.model.ops.cpu` replaces what is faster in eager mode on a CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.activation import Activation
from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.nn.norm import normalised
from deepmd_ema.model.nn.type_embedding import pick

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, M channels of a pair, X axis channels, N inputs and C columns

LOGIT_SHIFT = 20.0  # a neighbor at the cutoff has the logit of an empty slot, -20, in smooth attention; as DeePMD-kit
EPS = 1e-12  # shorter rows are divided by this number; as torch.nn.functional.normalize
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class AttentionOptions:
    """Options of the layers of attention.

    Attributes:
        gated: whether weights are multiplied by the cosines of the angles between neighbors.
        unit: whether queries, keys and values have the length 1.
        scaling: factor of the product of query and key.
        shift: added to logits before they are multiplied by the switch; None where they are not, which is not smooth.
        eps: of the layer norm.
    """

    gated: bool
    unit: bool
    scaling: float
    shift: float | None
    eps: float


@dataclass(frozen=True)
class Attended:
    """Inputs of layers of attention among the neighbors of each atom.

    Attributes:
        rows: (A, K, C), with which the channels of the pairs are summed at the end.
        embed: a function of ``inputs`` that returns the channels of the pairs (A, K, M).
        inputs: (A, K, ...) or (A, 1, ...).
        counts: (A,) slots of each atom that are computed, beyond which its rows are 0; None: all.
        mask: (A, K) bool, where there is a neighbor.
        switch: (A, K).
        direction: (A, K, 3) unit vectors.
        num_slots: slots of an atom with those that are not here.
    """

    rows: Tensor
    embed: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    counts: Tensor | None
    mask: Tensor
    switch: Tensor
    direction: Tensor
    num_slots: int


@dataclass(frozen=True)
class Moments:
    """``sum_k rows[k, c] G(s_k)`` over the neighbors of each atom, s = rows[..., 0], and its vector-Jacobian product.

    Attributes:
        rows: (A, K, 4) normalised environment matrix in the precision of the net, a constant.
        value: (A, 4, M), a function of the parameters of the net.
        jet: (A, 2, K, M), G and dG/ds at ``rows[..., 0]``, functions of its parameters.
    """

    rows: Tensor
    value: Tensor
    jet: Tensor

    def vjp(self, grad_moments: Tensor) -> Tensor:
        """Return the gradient with respect to the rows (A, K, 4), also through s, from that of the moments."""
        both = torch.bmm(self.jet.flatten(1, 2), grad_moments.transpose(1, 2)).view(*self.jet.shape[:3], 4)
        through_s = (both[:, 1] * self.rows).sum(-1, keepdim=True)
        return torch.cat([both[:, 0, :, :1] + through_s, both[:, 0, :, 1:]], -1)


class Operations:
    """The operations of which there may be several versions of equal values and derivatives.

    Attributes:
        is_for_cpu: whether operations work in place, in portions, and may read numbers, for which a GPU would wait.
            Those of the reference can be traced, and differentiated any number of times by anything; those of other
            sets need eager mode, and their gradients can be differentiated by the parameters alone.
    """

    is_for_cpu: ClassVar[bool] = False

    def activated(self, z: Tensor, function: Activation) -> Tensor:
        """Return ``function(z)``."""
        return function.value(z)

    def moments(self, rows: Tensor, net: Network) -> Moments:
        """Return the moments of a net of one number; ``rows`` are (A, K, 4)."""
        # atoms and slots stay two dimensions: inductor cannot lower a view that splits a product of two symbolic sizes
        jet = torch.stack(net.value_and_derivative(rows[..., :1].contiguous()), 1)
        return Moments(rows, torch.bmm(rows.transpose(1, 2), jet[:, 0]), jet)

    def values_and_gradients(self, x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs (A,) of networks of one output and their gradients by the inputs (A, N).

        Args:
            x: (A, N), the rows of each network one after the other.
            nets: all of the same options.
            shares: rows of each network.
        """
        if len(nets) == 1:  # the number of rows may be a symbol of a graph, whose value a split would need
            return nets[0].value_and_gradient(x)
        found = [net.value_and_gradient(own) for net, own in zip(nets, x.split(list(shares)), strict=True)]
        values, grads = zip(*found, strict=True)
        return torch.cat(values), torch.cat(grads)

    def triple_sums(self, products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network) -> Tensor:
        """Return ``sum_jk c_jk G(c_jk, E_j, E_k)`` (A, M).

        Args:
            products: (A, K, K), the c; 0 where there is no neighbor.
            types: (A, K) of the neighbors.
            mask: (A, K) bool, where there is a neighbor.
            table: (T, E) type embeddings.
            net: G.
        """
        embedded, width = pick(table, types), products.shape[1]
        first, second = embedded[:, :, None].expand(-1, -1, width, -1), embedded[:, None].expand(-1, width, -1, -1)
        values = net(torch.cat([products[..., None], first, second], -1))
        return torch.bmm(products.flatten(1)[:, None], values.flatten(1, 2)).squeeze(1)

    def attended_moments(self, given: Attended, layers: Sequence[Weights], options: AttentionOptions) -> Tensor:
        """Return ``rows^T Y`` (A, C, M), Y the channels of the pairs after all layers of attention."""
        pairs = given.embed(*given.inputs)
        for weights in layers:
            pairs = _attention_layer(pairs, given, weights, options)
        return torch.bmm(given.rows.transpose(1, 2), pairs)

    def repformer_layers(self, stack: Any, node: Tensor, rows: Tensor, around: Any) -> Tensor:
        """Return the features of atoms (A, C) after all layers of a repformer.

        Args:
            stack: the module with the layers.
            node: (A, C) features.
            rows: (A, K, 4), radial number and vector of each pair.
            around: the neighbors.
        """
        return cast("Tensor", stack.evaluate(node, rows, around))

    def triple_sums_and_vjp(
        self, products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the sums and a function from their gradient to that by ``products``."""
        return with_vjp(lambda c: self.triple_sums(c, types, mask, table, net), products)

    def repformer_layers_and_vjp(
        self, stack: Any, node: Tensor, rows: Tensor, around: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
        """Return the features and a function from their gradient to those by node, rows and weight."""

        def features(node: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
            return self.repformer_layers(stack, node, rows, replace(around, weight=weight))

        return cast("Any", torch.func.vjp(features, node, rows, around.weight))


REFERENCE = Operations()


class UsesOperations(nn.Module):
    """A module that calls operations of the set which :func:`use_operations` gave it."""

    _operations: Operations = REFERENCE

    @property
    def ops(self) -> Operations:
        """The set of operations; while a graph is made, the reference."""
        return REFERENCE if torch.compiler.is_compiling() else self._operations


def use_operations(module: nn.Module, operations: Operations) -> None:
    """Give a module and all modules in it a set of operations."""
    for part in module.modules():
        if isinstance(part, UsesOperations):
            part._operations = operations


def with_operations(module: ModuleT, operations: Operations) -> ModuleT:
    """Return a module with another set of operations and the same parameters, buffers and other attributes.

    It is for one evaluation: attributes that are set later on the given module are not seen.
    """
    children = {name: child and with_operations(child, operations) for name, child in module._modules.items()}
    same = all(child is module._modules[name] for name, child in children.items())
    if same and not isinstance(module, UsesOperations):
        return module  # so that hooks of sharded networks, and tables by network, find the same object
    found: ModuleT = object.__new__(type(module))
    found.__dict__.update(vars(module), _modules=children)
    if isinstance(found, UsesOperations):
        found._operations = operations
    return found


def with_vjp(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Vjp]:
    """Return ``function(x)`` and its vector-Jacobian product, an ordinary function of the parameters.

    Args:
        function: as from the vectors of a batch to features, of operations that ``torch.func`` knows.
        x: any tensor, ``batch.vector`` for example.
    """
    value, vjp = torch.func.vjp(function, x)  # type: ignore[misc]  # three values with has_aux only
    return value, lambda grad_features: cast("Tensor", vjp(grad_features)[0])


def axis_features(moments: Tensor, axis: int) -> Tensor:
    """Return ``g^T g[:X]`` (A, M X) of moments (A, 4, M)."""
    return torch.bmm(moments.transpose(1, 2), moments[..., :axis]).flatten(1)


def axis_features_vjp(grad: Tensor, moments: Tensor, axis: int) -> Tensor:
    """Return the gradient by the moments (A, 4, M) from that by the features (A, M X)."""
    grad = grad.view(moments.shape[0], -1, axis)
    whole = torch.bmm(moments[..., :axis], grad.transpose(1, 2))
    first = whole[..., :axis] + torch.bmm(moments, grad)
    return torch.cat([first, whole[..., axis:]], -1)


def softmax_with_absent(logits: Tensor, num_slots: int) -> Tensor:
    """Return the softmax of ``logits`` (..., K) among ``num_slots`` of which those beyond K are empty, at -20."""
    absent = torch.full_like(logits[..., :1], num_slots - logits.shape[-1]).log() - LOGIT_SHIFT
    return torch.cat([logits, absent], -1).softmax(-1)[..., :-1]


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of ``logits`` (..., K) where ``mask`` is true; equal numbers where it is nowhere true."""
    # finite, so that a row of empty slots has no nan
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)


def occupied_slots(mask: Tensor) -> Tensor:
    """Return the number of slots (A,) up to the last one that is true in ``mask`` (A, K)."""
    places = torch.arange(mask.shape[1], device=mask.device) + 1
    return nn.functional.pad(mask * places, (0, 1)).amax(1)


def _attention_layer(pairs: Tensor, given: Attended, weights: Weights, options: AttentionOptions) -> Tensor:
    """Return the channels of the pairs (A, K, M) after a layer."""
    flat = torch.addmm(weights.in_bias, pairs.flatten(0, -2), weights.in_weight)
    projected = flat.view(*pairs.shape[:-1], len(weights.in_bias)).unflatten(-1, (3, -1))
    if options.unit:
        # as torch.nn.functional.normalize, but of rows about as short as EPS, in fewer operations
        projected = projected * (projected.square().sum(-1, keepdim=True) + EPS**2).rsqrt()
    query, key, value = projected.unbind(-2)
    logits = torch.bmm(query * options.scaling, key.transpose(1, 2))
    both = given.switch[:, :, None] * given.switch[:, None, :]
    if options.shift is not None:
        logits = (logits + options.shift) * both - options.shift
        attention, factor = softmax_with_absent(logits, given.num_slots), both  # 0 where there is no neighbor
    else:
        attention = masked_softmax(logits, given.mask[:, None, :])
        factor = given.mask[:, :, None].to(logits.dtype)
    if options.gated:
        factor = factor * torch.bmm(given.direction, given.direction.transpose(1, 2))
    attended = torch.bmm(attention * factor, value)
    flat = torch.addmm(weights.out_bias, attended.flatten(0, -2), weights.out_weight)
    return normalised(pairs + flat.view(pairs.shape), weights.norm_weight, weights.norm_bias, options.eps)
