"""What descriptors with one embedding network per element share: networks, statistics, slots that hold no neighbor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import EnvironmentDescriptor, EnvironmentStatistics, add_normalisation
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.interpolation import Interpolation, NeighborSum
from deepmd_ema.model.nn.layers import Network, embedding_network, freeze
from deepmd_ema.model.ops.environment import Environment, RadialEnvironment, radial_parts
from deepmd_ema.model.ops.reference import UsesOperations
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor_bases import PerElementSection

E = TypeVar("E", Environment, RadialEnvironment)

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
        interpolation: of the networks, if they have one input.
    """

    mixed_types = False
    passes_messages = False
    num_columns: ClassVar[int] = 4
    mean: Tensor
    stddev: Tensor

    def __init__(self, config: PerElementSection, num_types: int, seed: int) -> None:
        super().__init__()
        assert not isinstance(config.sel, str), "sel must be resolved to numbers"
        self.section = config
        self.rcut, self.rcut_smth, self.protection = config.rcut, config.rcut_smth, config.env_protection
        self.sel = tuple(config.sel)
        self.one_side = config.type_one_side
        self.num_types, self.num_channels = num_types, config.neuron[-1]
        self.dtype = precision(config.precision)
        self.interpolation: Interpolation | None = None
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        start = seed if config.seed is None else config.seed
        self.embeddings = nn.ModuleList(
            embedding_network(config, 1, self.dtype, seed_for("embedding", start, index))
            for index in range(self._num_networks())
        )
        freeze(self.embeddings, config.trainable)
        add_normalisation(self, (num_types, sum(self.sel), self.num_columns), self.dtype)
        measured = EnvironmentStatistics(
            self,
            config.rcut,
            config.rcut_smth,
            config.env_protection,
            self.sel,
            by_type=True,
            exclude_types=config.exclude_types,
            zero_mean=config.set_davg_zero,
        )
        self.environments = [measured]

    @property
    def networks(self) -> list[Network]:
        """The embedding nets: one per neighbor type, or per pair at ``centre + neighbor * T``."""
        return cast("list[Network]", list(self.embeddings))

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return how this descriptor wants its neighbors."""
        return NeighborLayout(self.rcut, self.sel, self.num_types, by_type=True, excluded_pairs=excluded_pairs)

    def _seen(self, batch: Batch, environment: EnvironmentStatistics) -> tuple[Tensor, Tensor | None]:
        """Return all vectors, and which pairs do not see each other, or None."""
        return batch.vector, self._dropped(batch)

    def _num_networks(self) -> int:
        return self.num_types if self.one_side else self.num_types**2

    def _rows_by_net(self, rows: Tensor, batch: Batch) -> list[list[tuple[Tensor, Network]]]:
        """Return for all atoms, or for those of each type, the rows (A', K', C) and the net of each neighbor type."""
        # split, not sliced: a slice compares its ends with the size, which a compiled graph would be asked about
        centres = [rows] if self.one_side else rows.split(batch.type_counts)
        nets = self._nets_of_centres()
        return [
            list(zip(part.split(batch.slots, 1), own, strict=True)) for part, own in zip(centres, nets, strict=True)
        ]

    def _nets_of_centres(self) -> list[list[Network]]:
        """Return for all atoms, or for those of each type, the net of each neighbor type."""
        types = range(self.num_types)
        if self.one_side:
            return [self.networks]
        return [[self.networks[centre + neighbor * self.num_types] for neighbor in types] for centre in types]

    def _environment_matrix(self, kind: type[E], batch: Batch) -> E:
        """Return the normalised environment matrix of all slots, of the columns that ``kind`` has."""
        distance = torch.linalg.vector_norm(batch.vector, dim=-1)
        parts = radial_parts(distance, self.rcut, self.rcut_smth, self.protection)
        return kind(batch.vector, parts, *self._normalisation(batch), self._dropped(batch), self.dtype)

    def _normalisation(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mean and spread of each slot (A, K, C) in float64."""
        assert all(n <= sel for n, sel in zip(batch.slots, self.sel)), f"slots {batch.slots} exceed sel {self.sel}"
        # picked, not sliced: a graph asks whether a slice is shorter than its table
        starts = accumulate(self.sel, initial=0)
        columns = torch.cat([torch.arange(n, device=self.mean.device) + start for start, n in zip(starts, batch.slots)])
        mean, spread = (table[:, columns].double()[batch.atom_type] for table in (self.mean, self.stddev))
        return mean, spread

    def _dropped(self, batch: Batch) -> Tensor | None:
        """Return (A, K) bool, pairs that do not see each other, however far, or None where all do."""
        return self.excluded(batch, batch.within()) if self.excluded.any else None

    def _interpolated(
        self, parts: list[list[tuple[Tensor, Network]]], left_of: Callable[[Tensor], Tensor]
    ) -> tuple[list[list[NeighborSum]], list[Tensor] | None]:
        """Return sums of interpolated networks over the neighbors in each section, and the embedding of empty slots.

        Args:
            parts: of :meth:`_rows_by_net`.
            left_of: makes of rows (A, K, C) what is summed.

        Returns:
            The sums, and of each section (T S, M), or None if they are not made with the sums.
        """
        interpolation, in_place = self.interpolation, not self.ops.is_reference
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

    def _trimmed(self, batch: Batch, embedded: list[Tensor] | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield what the empty slots of each section beyond those of the batch hold, by type of centre.

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
            made_of = [self.mean, self.stddev, *self.embeddings.parameters()]
            embedded = tables.padding(made_of, self._embedded_padding)
        made = self._embedded_padding() if embedded is None else embedded
        for end, sel, used, values in zip(accumulate(self.sel), self.sel, batch.slots, made):
            padding = rows[:, end - sel : end]
            # by a weight of 0, not by a shorter slice: whether it is empty would be asked of every compiled graph
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
