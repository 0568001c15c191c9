"""Base of descriptors with one embedding network per element: networks, statistics, slots without neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import (
    EnvironmentDescriptor,
    EnvironmentStatistics,
    add_normalisation,
    environment,
)
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.interpolation.sums import NeighborSum
from deepmd_ema.model.nn.layers import Network, embedding_network, freeze, module_list
from deepmd_ema.model.ops.reference import UsesOperations
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor_bases import PerElementSection

GradRows: TypeAlias = Callable[[Tensor], Tensor]
"""From the gradient of sums over neighbors to that of the rows of the environment matrix."""

Sums: TypeAlias = tuple[Tensor, GradRows]
"""Sums of a net over the neighbors of each atom, and their vector-Jacobian product."""

# A atoms, K neighbor slots, S slots up to sel, T types, M channels, C columns of the environment matrix


class ByTypeDescriptor(EnvironmentDescriptor, UsesOperations):
    """Networks of one input, one per neighbor type or per pair of types, on slots in one section per neighbor type.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.

    Attributes:
        num_columns: C, 4 or, of a descriptor that is radial only, 1.
        interpolation: of the networks, if the section has the option.
    """

    mixed_types = False
    passes_messages = False
    num_columns: ClassVar[int] = 4
    mean: Tensor
    stddev: Tensor
    interpolation: Interpolation | None

    def __init__(self, config: PerElementSection, num_types: int, seed: int) -> None:
        super().__init__()
        assert not isinstance(config.sel, str), "sel must be resolved to numbers"
        self.section = config
        self.rcut, self.rcut_smth, self.protection = config.rcut, config.rcut_smth, config.env_protection
        self.sel = tuple(config.sel)
        self.one_side = config.type_one_side
        self.num_types, self.num_channels = num_types, config.neuron[-1]
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        start = seed if config.seed is None else config.seed
        # one per neighbor type, or per pair at ``centre + neighbor * T``
        self.embeddings = module_list(
            embedding_network(config, 1, self.dtype, seed_for("embedding", start, index))
            for index in range(self._num_networks())
        )
        freeze(self, config.trainable)
        add_normalisation(self, (num_types, sum(self.sel), self.num_columns), self.dtype)
        self.environments = [EnvironmentStatistics(self, config.exclude_types, config.set_davg_zero)]
        choice = getattr(config, "interpolate", None)
        self.interpolation = None if choice is None else Interpolation(choice, self.dtype, sum(config.neuron))

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return the layout of neighbors of this descriptor."""
        return NeighborLayout(self.rcut, self.sel, self.num_types, by_type=True, excluded_pairs=excluded_pairs)

    def _seen(self, batch: Batch, environment: EnvironmentStatistics) -> tuple[Tensor, Tensor | None]:
        """Return all vectors, and which pairs do not see each other, or None."""
        return batch.vector, self._dropped(batch)

    def _num_networks(self) -> int:
        return self.num_types if self.one_side else self.num_types**2

    def _nets_of_centres(self) -> list[list[Network]]:
        """Return for all atoms, or for those of each type, the net of each neighbor type."""
        types = range(self.num_types)
        if self.one_side:
            return [list(self.embeddings)]
        return [[self.embeddings[centre + neighbor * self.num_types] for neighbor in types] for centre in types]

    def _sums(
        self,
        batch: Batch,
        left_of: Callable[[Tensor], Tensor],
        of_sum: Callable[[NeighborSum], Sums],
        evaluated: Callable[[Tensor, Network], Sums],
    ) -> tuple[Tensor, GradRows, list[Tensor] | None]:
        """Return sums of the nets over the neighbors that the batch has.

        Args:
            batch: frames with their neighbors.
            left_of: makes of rows (A, K, C) the factors of the nets.
            of_sum: makes of the interpolated sums of a section those of the descriptor.
            evaluated: returns these from the rows of a section and its net.

        Returns:
            The sums (A, ...), their vector-Jacobian product to ``batch.vector``, and the embedding of empty slots as of
            :meth:`_interpolated`.
        """
        rows, rows_vjp = environment(self, batch.vector, self._dropped(batch), batch.atom_type, self._slots(batch))
        # split, not sliced: a slice compares its ends with the size, on which a compiled graph would depend
        centres = [rows] if self.one_side else rows.split(batch.type_counts)
        nets = zip(centres, self._nets_of_centres(), strict=True)
        # for all atoms, or for those of each type, the rows (A', K', C) and the net of each neighbor type
        parts = [list(zip(own.split(batch.slots, 1), of_own, strict=True)) for own, of_own in nets]
        embedded = None
        assert self.interpolation is not None
        if self.interpolation.serves(batch):
            interpolated, embedded = self._interpolated(parts, left_of)
            groups = [[of_sum(one) for one in group] for group in interpolated]
        else:
            groups = [[evaluated(own, net) for own, net in part] for part in parts]
        summed = [reduce(torch.add, [value for value, _ in group]) for group in groups]

        def vjp(grad: Tensor) -> Tensor:
            shares = zip(grad.split([one.shape[0] for one in summed]), groups, strict=True)
            return rows_vjp(joined([joined([of_rows(own) for _, of_rows in group], 1) for own, group in shares]))

        return joined(summed), vjp, embedded

    def _slots(self, batch: Batch) -> Tensor:
        """Return the places (K,) of the slots of a batch among those of all sections."""
        assert all(n <= sel for n, sel in zip(batch.slots, self.sel)), f"slots {batch.slots} exceed sel {self.sel}"
        starts = accumulate(self.sel, initial=0)
        return torch.cat([torch.arange(n, device=self.mean.device) + start for start, n in zip(starts, batch.slots)])

    def _dropped(self, batch: Batch) -> Tensor | None:
        """Return (A, K) bool, pairs that do not see each other, however far, or None where all do."""
        return self.excluded(batch, batch.within()) if self.excluded.any else None

    def _interpolated(
        self, parts: list[list[tuple[Tensor, Network]]], left_of: Callable[[Tensor], Tensor]
    ) -> tuple[list[list[NeighborSum]], list[Tensor] | None]:
        """Return sums of interpolated networks over the neighbors in each section, and the embedding of empty slots.

        Args:
            parts: for all atoms, or for those of each type, the rows and the net of each neighbor type.
            left_of: makes of rows (A, K, C) what is summed.

        Returns:
            The sums, and of each section (T S, M), or None if they are not made with the sums.
        """
        interpolation, in_place = self.interpolation, self.ops.is_for_cpu
        assert interpolation is not None
        if interpolation.tables is not None:
            groups = [
                [interpolation(left_of(rows), rows[..., 0], net, in_place=in_place) for rows, net in part]
                for part in parts
            ]
            return groups, None
        found = [
            [
                interpolation.series(left_of(rows), rows[..., 0], net, further=s, in_place=in_place)
                for (rows, net), s in zip(part, padding, strict=True)
            ]
            for part, padding in zip(parts, self._padding(), strict=True)
        ]
        embedded = [joined([values for _, values in section]) for section in zip(*found, strict=True)]
        return [[summed for summed, _ in part] for part in found], embedded

    def _trimmed(self, batch: Batch, embedded: list[Tensor] | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the content of the empty slots of each section beyond those of the batch, by type of centre.

        They are normalised like all slots, so each holds the row ``-mean / stddev`` of its type of centre: a constant
        per type, whose embedding is evaluated once.

        Args:
            batch: whose slots are known.
            embedded: of :meth:`_interpolated`.

        Yields:
            rows (T, S, C), embedded (T, S, M) and a weight (S, 1), 1 for the slots beyond those of the batch.
        """
        rows = -(self.mean.double() / self.stddev.double()).to(self.dtype)
        tables = None if self.interpolation is None or torch.is_grad_enabled() else self.interpolation.tables
        if embedded is None and tables is not None:
            made_of = [self.mean, self.stddev, *(p for net in self.embeddings for p in net.parameters())]
            embedded = tables.padding(made_of, self._embedded_padding)
        made = self._embedded_padding() if embedded is None else embedded
        for end, sel, used, values in zip(accumulate(self.sel), self.sel, batch.slots, made):
            padding = rows[:, end - sel : end]
            # by a weight of 0, not by a shorter slice: a compiled graph would depend on whether it is empty
            beyond = (torch.arange(sel, device=rows.device) >= used).to(self.dtype)
            yield padding, values.view(self.num_types, sel, self.num_channels), beyond[:, None]

    def _embedded_padding(self) -> list[Tensor]:
        """Return the embedding of all empty slots of each section, (T S, M)."""
        groups = zip(self._nets_of_centres(), self._padding(), strict=True)
        embedded = [[net(s[:, None]) for net, s in zip(*group, strict=True)] for group in groups]
        return [joined(list(of_section)) for of_section in zip(*embedded, strict=True)]

    def _padding(self) -> list[list[Tensor]]:
        """Return s of all empty slots for all atoms, or for those of each type, and of each section."""
        s = -(self.mean[..., 0].double() / self.stddev[..., 0].double()).to(self.dtype)
        groups = s.split(self.num_types if self.one_side else 1)
        return [[section.flatten() for section in group.split(self.sel, 1)] for group in groups]


def of_atoms(by_type: Tensor, batch: Batch) -> Tensor:
    """Return (A, ...), for each atom the entry of its type in (T, ...)."""
    shape = by_type.shape[1:]
    return torch.cat([by_type[t : t + 1].expand(n, *shape) for t, n in enumerate(batch.type_counts)])


def joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Return the concatenation, or the only tensor itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
