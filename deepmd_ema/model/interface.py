"""Protocol of the descriptor, base of the fitting networks, and sums over data for both.

Both are ``torch.nn.Module``; their parameters and persistent buffers are what checkpoints and
averages hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.labels import WEIGHT, WEIGHT_OF

# F frames, A atoms, K neighbor slots, T types, D features
Sums: TypeAlias = Mapping[str, np.ndarray]
"""Named sums over data that add up over batches: those of two batches are the sums of each."""

Block: TypeAlias = tuple[nn.Module, tuple[str, ...]]
"""A module whose parameters may be gathered on their own, and the methods beside ``forward`` that
use them.

All parameters of descriptors are gathered at once: their networks are small, and a step uses all of
them."""


Vjp: TypeAlias = Callable[[Tensor], Tensor]
"""From the gradient of an energy by features (A, D) to that by ``batch.vector`` (A, K, 3) float64,
which can be differentiated by the parameters."""


class NetworkEnergies(NamedTuple):
    """Energies that the networks of a model give for a batch, without the bias of elements.

    Attributes:
        atom_energy: (A,) eV.
        grad_features: (A, D), gradient of the sum of the energies by the features, eV.
        vjp: of the features.
    """

    atom_energy: Tensor
    grad_features: Tensor
    vjp: Vjp


Network: TypeAlias = Callable[[Batch], NetworkEnergies]
"""From a batch to the energies of its atoms and what their gradient by vectors follows from."""


class ShortRange(Protocol):
    """Pair energies that act at short distances beside a network, or instead of it.

    There are no parameters.
    """

    def __call__(
        self, batch: Batch, network: Network, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return energies of atoms (A,), eV, and the gradient of their sum by vectors (A, K, 3).

        Args:
            batch: frames with their neighbors.
            network: evaluated once, on ``batch`` or with other vectors. Its energies are without
                the bias of elements.
            counted: (T,) 0 for types whose atoms have no energy of their own, else 1.
        """


class Descriptor(Protocol):
    """Features of each atom, which do not change under rotation, translation and exchange of atoms.

    Attributes:
        dtype: precision of the parameters and of the features.
        mixed_types: whether the features distinguish the elements, so that one fitting network
            serves all of them.
        passes_messages: whether the features of an atom depend on the neighbors of its neighbors.
    """

    dtype: torch.dtype
    mixed_types: bool
    passes_messages: bool

    @property
    def dim_out(self) -> int:
        """Return D, the number of features of an atom."""

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return the neighbors that a batch must hold, and their order.

        Args:
            excluded_pairs: pairs of types, in both orders, that do not see each other at all.
        """

    def __call__(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and what turns their gradient into that of ``batch.vector``.

        A hand-written vjp and that of ``torch.func.vjp`` both fit. Features must go to those of an
        atom without this neighbor, with two derivatives, where the vector of a neighbor reaches the
        cutoff.
        """

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Return the names of the sums of ``measure``: entries of a stat file (``folder/name``).

        The names of sums that depend on weights are others for other weights.
        """

    def measure(self, batch: Batch) -> Sums:
        """Return the sums over a batch, on the CPU, from which ``apply_statistics`` sets buffers.

        There may be none.
        """

    def apply_statistics(self, sums: Sums) -> None:
        """Set means and spreads from the sums over all data."""


class HasEquivariants(Descriptor, Protocol):
    """A descriptor that gives vectors of an atom as well, of which dipoles are made.

    Attributes:
        dim_equivariants: M, number of these vectors.
    """

    dim_equivariants: int

    def features_and_equivariants(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return features (A, D) and equivariant vectors (A, M, 3), functions of the parameters."""


class Fitting(nn.Module):
    """Base of the fitting, from features of atoms to energies, here without networks.

    ``forward(features, batch)`` returns the energies (A,) float64, eV, and their gradient with
    respect to the features (A, D).

    Attributes:
        skips_absent: whether nets of elements that a batch does not have are left out in
            evaluation. False where parameters are sharded: to gather a net is a collective, so
            every rank must evaluate all of them.
        distinguishes_types: whether each element has an output bias of its own.
    """

    skips_absent = True
    # class attributes, which a fitting sets on itself where it differs
    distinguishes_types = True

    def share_networks(self, other: Any, whose: str) -> None:
        """Take the networks of another fitting of the same section.

        Args:
            other: which has them.
            whose: names of both owners, for messages.

        Raises:
            ConfigError: if they do not fit.
        """

    @property
    def case(self) -> int:
        """Index of the task that :meth:`set_case` has set; 0 if tasks are not distinguished."""
        return 0

    def set_case(self, index: int) -> None:
        """Set the index of this task among those of the run."""

    def apply_statistics(self, sums: Sums, protect: float) -> None:
        """Set means and spreads of the conditions: (P, 3) sums by name, ``fparam`` and ``aparam``.

        Args:
            sums: count, sum and sum of squares of each number; names that are not read may be among
                them.
            protect: smallest spread.
        """

    def blocks(self) -> list[Block]:
        """Return modules whose parameters may be sharded and gathered on their own."""
        return []


def mean_and_spread(sums: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation (N,) from count, sum and sum of squares (N, 3).

    The standard deviation is at least ``smallest``.
    """
    # nothing measured: mean 0, and the least spread
    count = np.maximum(sums[:, 0], 1)
    mean = sums[:, 1] / count
    # rounding may make the variance of equal numbers negative
    variance = np.maximum(sums[:, 2] / count - mean**2, 0)
    return mean, np.maximum(np.sqrt(variance), smallest)


def label_weight(batch: Batch, name: str) -> Tensor:
    """Return the weight of a label in each frame (F,), 0 without the label.

    Without weights it is that of ``has_label``.
    """
    weight = batch.has_label[name]
    # the weight of the frame, times that of this label
    for kind in (WEIGHT, WEIGHT_OF.get(name, "")):
        if kind in batch.labels:
            # a frame without a weight has weight 1, not the zero of a missing label
            weight = weight * batch.labels[kind].where(batch.has_label[kind] > 0, 1.0)
    return weight


def sum_by_type(per_atom: Tensor, batch: Batch) -> np.ndarray:
    """Return the sums (T, ...) over the atoms of each type of (A, ...)."""
    # atoms are sorted by type: those of one are a slice
    return np.stack([part.sum(0).numpy() for part in per_atom.split(batch.type_counts)])
