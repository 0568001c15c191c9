"""Networks from descriptors to dipoles, polarizabilities, properties and densities of states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.config.labels import LABELS
from deepmd_ema.model.families.dpa4.section import widths_of
from deepmd_ema.model.families.ener.module import EnergyFitting
from deepmd_ema.model.interface import Block

if TYPE_CHECKING:
    from deepmd_ema.model.families.quantities.section import (
        DosFittingConfig,
        PolarFittingConfig,
    )

# A atoms, D features, M equivariant vectors of an atom, W components, T types


class QuantityFitting(EnergyFitting):
    """Base of the networks from features to values of atoms other than energies.

    Args:
        config: the section ``model.fitting_net``.
        dim_in: D.
        num_types: T.
        seed: of the initial parameters when the section has none.
        mixed_types: whether one network serves all types.
        dim_equivariants: M; 0 if the descriptor has none.

    Attributes:
        width: W.
        is_mean: whether the value of a frame is the mean over its atoms, else the sum.
    """

    def __init__(
        self,
        config: Any,
        dim_in: int,
        num_types: int,
        seed: int,
        mixed_types: bool,
        dim_equivariants: int = 0,
    ) -> None:
        # before the base class, which builds networks of `num_out` outputs
        self.section = config
        self.dim_equivariants = dim_equivariants
        self.width = math.prod(LABELS[config.labels[0]].shape)
        self.is_mean = config.intensive
        self.distinguishes_types = config.distinguish_types
        self.num_out = self._num_out()
        super().__init__(config, dim_in, num_types, seed, mixed_types)

    def _num_out(self) -> int:
        return self.width

    def _network(self, config: Any, seed: int) -> Any:
        # a width of 0 is resolved here, because it follows from the number of inputs
        neuron = widths_of(config.neuron, self.num_inputs)
        return super()._network(replace(config, neuron=neuron), seed)

    def blocks(self) -> list[Block]:
        """Return the networks, which are called, not evaluated with their gradients."""
        return [(net, ()) for net in self.nets]

    def outputs(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the outputs of the networks (A, num_out)."""
        inputs, shares = self._inputs(features, batch)
        parts = inputs.split(shares)
        outputs = [
            net(net_inputs) for net, net_inputs in zip(self.nets, parts, strict=True)
        ]
        return torch.cat(outputs) + self.bias_atom_e[batch.atom_type].to(self.dtype)

    def values(
        self,
        features: Tensor,
        vectors: Tensor | None,
        batch: Batch,
        bias: Tensor,
        std: Tensor,
    ) -> Tensor:
        """Return the values of the atoms (A, W) float64.

        Args:
            features: (A, D).
            vectors: (A, M, 3), equivariant; None unless they are needed.
            batch: frames with their neighbors.
            bias: (T, W) of the data.
            std: (T, W) of the data.
        """
        raise NotImplementedError


class InvariantFitting(QuantityFitting):
    """Invariant numbers: outputs plus the bias of the element.

    Outputs for a property are in units of the spread of the data.
    """

    section: DosFittingConfig

    def values(
        self,
        features: Tensor,
        vectors: Tensor | None,
        batch: Batch,
        bias: Tensor,
        std: Tensor,
    ) -> Tensor:
        """Return the values of the atoms (A, W) float64."""
        kind = batch.atom_type
        # one bias serves all elements: that of the first row
        if not self.distinguishes_types:
            kind = torch.zeros_like(kind)
        out = self.outputs(features, batch).double()
        return (out * std[kind] if self.section.type == "property" else out) + bias[
            kind
        ]


class TensorFitting(QuantityFitting):
    """Dipoles ``sum_m f_m r_m`` and polarizabilities ``sum_mn r_m f_mn r_n^T``.

    r are equivariant vectors and f the outputs, a symmetric or a diagonal matrix for
    polarizabilities. Sommers et al., Phys. Chem. Chem. Phys. 22, 10592 (2020); Zhang et al., Phys.
    Rev. B 102, 041121 (2020).
    """

    section: PolarFittingConfig

    def __init__(self, config: Any, dim_in: int, num_types: int, *args: Any) -> None:
        super().__init__(config, dim_in, num_types, *args)
        if self.width > 3:  # a polarizability, which has 9 components
            scale = (
                config.scale
                if isinstance(config.scale, list)
                else [config.scale] * num_types
            )
            self.scale = nn.Buffer(
                torch.tensor(scale, dtype=torch.float64)[:, None], persistent=False
            )

    def _num_out(self) -> int:
        # f_m, or all of f_mn
        is_diagonal = self.width == 3 or self.section.fit_diag
        return self.dim_equivariants if is_diagonal else self.dim_equivariants**2

    def values(
        self,
        features: Tensor,
        vectors: Tensor | None,
        batch: Batch,
        bias: Tensor,
        std: Tensor,
    ) -> Tensor:
        """Return the values of the atoms (A, W) float64."""
        assert vectors is not None
        out, rows = (
            self.outputs(features, batch),
            vectors.to(self.dtype),
        )  # (A, M) and (A, M, 3)
        if self.width == 3:
            return torch.bmm(out.unsqueeze(1), rows).squeeze(1).double()
        scale = self.scale[batch.atom_type]
        out = out * scale.to(self.dtype)
        if self.section.fit_diag:
            weighted = out.unsqueeze(2) * rows
        else:
            # the symmetric part, because a polarizability is symmetric
            matrix = out.unflatten(1, (self.dim_equivariants, -1))
            weighted = torch.bmm((matrix + matrix.transpose(1, 2)) / 2, rows)
        polarizability = torch.bmm(rows.transpose(1, 2), weighted).double()  # (A, 3, 3)
        if self.section.shift_diag:
            # a multiple of the unit matrix is the only bias that does not depend on the orientation
            mean = bias.unflatten(1, (3, 3)).diagonal(dim1=1, dim2=2).mean(1)
            unit = torch.eye(
                3, dtype=polarizability.dtype, device=polarizability.device
            )
            shift = mean[batch.atom_type, None] * scale
            polarizability = polarizability + shift.unsqueeze(2) * unit
        return polarizability.flatten(1)
