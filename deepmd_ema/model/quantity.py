"""The model of a dipole, a polarizability, a property or a density of states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.energy import EnergyModel, frame_sums

if TYPE_CHECKING:
    from deepmd_ema.model.interface import HasEquivariants

COUNTED = (
    "counted"  # beside the predictions: (A,) 1 for atoms that have the quantity, else 0
)
# beside the predictions: (1, W) spread of a property in the data, the unit of its loss
SPREAD = "spread"

# F frames, A atoms, W components


class QuantityModel(EnergyModel):
    """Values of atoms whose sum or mean is the value of their frame.

    There are no derivatives by positions.
    """

    def forward(
        self,
        batch: Batch,
        create_graph: bool | None = None,
        need_virial: bool = True,
        need_hessian: bool = False,
    ) -> dict[str, Tensor]:
        """Return values of frames (F, W) and of atoms (A, W), float64, by name, and constants.

        The names are those in ``labels``.

        Args:
            batch: frames with neighbors in ``layout``, on the device of the model.
            create_graph: whether the outputs can be differentiated with respect to the parameters;
                by default in training mode only.
            need_virial: no effect.
            need_hessian: no effect.
        """
        fitting: Any = self.fitting  # a QuantityFitting
        frame_label, atom_label = self.labels
        with torch.set_grad_enabled(
            self.training if create_graph is None else create_graph
        ):
            vectors = None
            # dipoles and polarizabilities are made of vectors of an atom
            if fitting.section.is_equivariant:
                descriptor = cast("HasEquivariants", self.descriptor)
                features, vectors = descriptor.features_and_equivariants(
                    batch
                )  # (A, D), (A, M, 3)
            else:
                features, _ = self.descriptor(batch)
            counted = self._counted[batch.atom_type]  # (A,)
            values = fitting.values(
                features, vectors, batch, self.out_bias[0], self.out_std[0]
            )
            values = values * counted[:, None]  # (A, W)
            sums = frame_sums(batch)
            whole = sums(values)
            if fitting.is_mean:
                whole = whole / sums(counted).clamp(min=1)[:, None]
            return {
                frame_label: whole,
                atom_label: values,
                COUNTED: counted,
                SPREAD: self.out_std[:, 0],
            }
