"""Zone bridging: an analytic pair energy for close atoms, with clamped distances for the network.

Three parts share a window of distances (DPA-4, arXiv:2606.02419):

- the screened repulsion of two nuclei (Ziegler, Biersack and Littmark, 1985) is added for all pairs
  inside the cutoff,
- the network gets vectors to neighbors with lengths clamped from below at the inner edge of the
  window,
- an atom with a neighbor nearer than that sends no messages, because the direction to it changes
  fast.

The first two are done here, for any descriptor. A descriptor that passes messages multiplies those
of an atom j by ``source_gate``; it gets the window by its section
(``config.schema.descriptor.HasBridging``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.config.elements import SYMBOLS

if TYPE_CHECKING:
    from deepmd_ema.config.schema.bridging import Window
    from deepmd_ema.model.interface import Network

# A atoms, K neighbor slots, T types

COULOMB = 14.3996  # e^2 / (4 pi epsilon_0), eV angstrom, as DeePMD-kit rounds it
# angstrom: of the Thomas-Fermi atom, times the Bohr radius
SCREENING_LENGTH = 0.88534 * 0.5291772109
SCREENING_EXPONENT = 0.23  # exponent of the charges in the length
# coefficients and exponents of the screening function
SCREENING = (
    (0.18175, 3.1998),
    (0.50986, 0.94229),
    (0.28022, 0.4029),
    (0.028171, 0.20162),
)


def clamped_distance(distance: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return clamped distances, angstrom, and their derivatives by the distances.

    ``inner + (outer - inner) (20 t^4 - 45 t^5 + 36 t^6 - 10 t^7)``, t from 0 to 1 in the window,
    with three continuous derivatives: constant before it, the distance itself behind it.

    Args:
        distance: of any shape, angstrom.
        window: where the change is.
    """
    width = window.outer - window.inner
    t = ((distance - window.inner) / width).clamp(0, 1)
    value = window.inner + width * t**4 * (20 + t * (-45 + t * (36 - 10 * t)))
    slope = t**3 * (80 + t * (-225 + t * (216 - 70 * t)))
    is_behind = distance >= window.outer
    return torch.where(is_behind, distance, value), torch.where(is_behind, 1.0, slope)


def pair_switch(distance: Tensor, window: Window) -> Tensor:
    """Return the weight of a neighbor in the gate, ``35 t^4 - 84 t^5 + 70 t^6 - 20 t^7``.

    t goes from 0 to 1 in the window.

    It is 0 before the window and 1 behind it, with three continuous derivatives.

    Args:
        distance: of any shape, angstrom.
        window: where the change is.
    """
    t = ((distance - window.inner) / (window.outer - window.inner)).clamp(0, 1)
    return t**4 * (35 + t * (-84 + t * (70 - 20 * t)))


def source_gate(distance: Tensor, near: Tensor, window: Window) -> Tensor:
    """Return the factors (A,) of the messages of each atom.

    The factor of an atom is the product of ``pair_switch`` over its neighbors.

    It may be differentiated twice. A product of torch with two zeros has no second derivative in
    compiled code, so that logarithms are added up.

    Args:
        distance: (A, K) lengths of the vectors that the descriptor gets, which are clamped already,
            angstrom.
        near: (A, K) which slots hold a neighbor.
        window: of the model.
    """
    weight = torch.where(near, pair_switch(distance, window), 1.0)
    is_zero = weight == 0
    product = torch.where(is_zero, 1.0, weight).log().sum(1).exp()
    return torch.where(is_zero.any(1), 0.0, product)


class ZblEnergies(nn.Module):
    """The screened repulsion of the nuclei of each pair and its derivative; without parameters.

    ``V(r) = COULOMB Z_i Z_j / r sum_k a_k exp(-b_k r / l)`` with ``l = SCREENING_LENGTH / (Z_i^p +
    Z_j^p)``, p = ``SCREENING_EXPONENT``. As in DeePMD-kit it is not switched off but ends at the
    cutoff, where it is 1 meV for two oxygen atoms at 6 angstrom.

    Its buffers are not saved: they follow from the elements.

    Args:
        type_map: symbols of the elements.
    """

    def __init__(self, type_map: Sequence[str]) -> None:
        super().__init__()
        charge = torch.tensor(
            [SYMBOLS.index(name) + 1 for name in type_map], dtype=torch.float64
        )
        power = charge**SCREENING_EXPONENT
        self.num_types = len(type_map)
        self._strength = nn.Buffer(
            (COULOMB * charge[:, None] * charge).flatten(), persistent=False
        )
        inverse = (power[:, None] + power).flatten() / SCREENING_LENGTH
        self._inverse_length = nn.Buffer(inverse, persistent=False)

    def forward(
        self, batch: Batch, distance: Tensor, near: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the energy (A, K) of each pair, eV, and its derivative by distance, eV/angstrom.

        Args:
            batch: frames with their neighbors.
            distance: (A, K) of each pair, angstrom.
            near: (A, K) which pairs count; the others have no energy.
        """
        kinds = (
            batch.atom_type[:, None] * self.num_types + batch.neighbor_type
        )  # (A, K)
        inverse_length = self._inverse_length[kinds]
        reduced = distance * inverse_length
        screening = [(a * torch.exp(-b * reduced), b) for a, b in SCREENING]
        value = sum((term for term, _ in screening), torch.zeros_like(distance))
        derivative = -sum(
            (b * term for term, b in screening), torch.zeros_like(distance)
        )
        # no distance is 0: an empty slot is at 2 * rcut
        bare = self._strength[kinds] / distance
        energy = torch.where(near, bare * value, 0.0)
        slope = torch.where(
            near, bare * (derivative * inverse_length - value / distance), 0.0
        )
        return energy, slope


class Bridging(nn.Module):
    """Analytic pair energies beside a network that gets clamped vectors; without parameters.

    Args:
        pairs: energies of pairs.
        window: of the clamped distances.
        rcut: cutoff of the network, which is that of the pair energies, angstrom.
    """

    def __init__(self, pairs: ZblEnergies, window: Window, rcut: float) -> None:
        super().__init__()
        self.pairs = pairs
        self.window = window
        self._rcut = rcut

    def forward(
        self, batch: Batch, network: Network, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the energies (A,), eV, and their gradient by ``batch.vector`` (A, K, 3).

        Args:
            batch: frames with their neighbors.
            network: the rest of the model, which is given clamped vectors.
            counted: (T,) 0 for types whose atoms have no energy of their own, nor has a pair with
                one of them; else 1.
        """
        distance = torch.linalg.vector_norm(batch.vector, dim=-1)
        clamped, slope = clamped_distance(distance, self.window)
        scale = clamped / distance  # exactly 1 behind the window
        clamped_vector = scale.unsqueeze(-1) * batch.vector
        energies = network(replace(batch, vector=clamped_vector))
        grad = energies.vjp(energies.grad_features)
        near = distance < self._rcut  # empty slots are at 2 * rcut
        is_counted = counted.bool()
        near = (
            near
            & is_counted[batch.atom_type][:, None]
            & is_counted[batch.neighbor_type]
        )
        pair, pair_slope = self.pairs(batch, distance, near)
        # each pair is in the list of both of its atoms: half of its energy belongs to each
        unit = batch.vector / distance.unsqueeze(-1)
        # the part of the gradient along the vector changes by the slope of the clamped distance,
        # the rest by the scale
        along = (slope - scale) * (grad * unit).sum(-1) + 0.5 * pair_slope
        energy = energies.atom_energy + 0.5 * pair.sum(1)
        return energy, scale.unsqueeze(-1) * grad + along.unsqueeze(-1) * unit
