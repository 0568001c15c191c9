"""DPA4C: moments of spherical harmonics of the neighbors of an atom, and products of these."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.distributed.tensors import precision
from deepmd_ema.model.descriptor.env_statistics import EnvironmentDescriptor
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.families.dpa4.layers import Source, TypeTable
from deepmd_ema.model.families.dpa4c.moments import (
    InvariantReadout,
    pair_numbers,
    slopes,
)
from deepmd_ema.model.families.dpa4c.radial import (
    PairNetwork,
    PairTables,
    RadialNetwork,
    gated_width,
)
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.interpolation.sums import DirectSum
from deepmd_ema.model.nn.layers import freeze
from deepmd_ema.model.nn.type_embedding import one_hot, pick
from deepmd_ema.model.ops.operations import UsesOperations
from deepmd_ema.model.ops.reference import vjp_of
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4c.section import DPA4CConfig
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, T types, S of them of the neighbors in a batch, C channels, M with
# modes, Q harmonics

# added to sums of envelopes before they are divided by: few neighbors near the cutoff count little
FLOOR = 0.25
NUM_MASSES = (
    2  # sums of the second and of the fourth powers of the envelopes of neighbors
)
# elements of a batch up to which sums over neighbors are separated by element: they have a column
# for each element, while without them radial functions are mixed for each pair
MAX_SPECIES = 8


class DPA4CDescriptor(EnvironmentDescriptor, UsesOperations):
    """Products of two, three and four moments of the neighbors of each atom (DPA4C).

    Args:
        config: the section ``model.descriptor``.
        num_types: T.
        seed: of the initial parameters when the section has none.

    Attributes:
        dim_out: D, number of features of an atom.
        feature_mean: (D,) buffer, subtracted from the features.
        feature_spread: (D,) buffer, by which they are divided.
    """

    mixed_types = True
    passes_messages = False

    def __init__(self, config: DPA4CConfig, num_types: int, seed: int) -> None:
        super().__init__()
        self.section = config
        self.num_types = num_types
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        source = Source(
            seed_for("dpa4c", seed if config.seed is None else config.seed), self.dtype
        )
        self.type_embedding = TypeTable(
            num_types, config.channels, source.part("elements")
        )
        # derivatives of the harmonics, see `pair_numbers`; not saved
        self._slopes = nn.Buffer(slopes(config.lmax).to(self.dtype), persistent=False)
        self.radial = RadialNetwork(config, source.part("radial"))
        self.pair_film = PairNetwork(config, source.part("pairs"))
        self.readout = InvariantReadout(config, source.part("readout"))
        self.interpolation = Interpolation(
            config.interpolate, self.dtype, 3 * gated_width(config.channels)
        )
        # products of moments, sums of envelopes, and the embedding of the element of the atom
        self.dim_out = self.readout.dim_out + NUM_MASSES + config.channels
        self.feature_mean = nn.Buffer(torch.zeros(self.dim_out, dtype=self.dtype))
        self.feature_spread = nn.Buffer(torch.ones(self.dim_out, dtype=self.dtype))
        freeze(self, config.trainable)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Name of the sums over features, with a digest of section and weights.

        The features depend on both: sums of other weights must not be read from a stat file.
        """
        text = hashlib.sha1(repr(self.section).encode(), usedforsecurity=False)
        for parameter in self.parameters():
            text.update(parameter.detach().cpu().numpy().tobytes())
        return (f"{text.hexdigest()}/features",)

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return counts, sums and sums of squares (G, 3) of all features but the embeddings."""
        features = self._invariants(batch)[0].double()
        count = torch.full_like(features[0], len(features))
        sums = torch.stack([count, features.sum(0), features.square().sum(0)], 1)
        return {self.sum_names[0]: sums.numpy()}

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set means and scales that make features about as large as embeddings of elements.

        A feature that is 0 in all data keeps its scale, as do sums of envelopes that are the same
        for all atoms.
        """
        count, total, squares = sums[self.sum_names[0]].T
        count = np.maximum(count, 1)
        # features are divided by their root mean square; the last two, sums of envelopes, are
        # shifted by their mean and divided by their spread
        size = np.sqrt(squares / count)
        mean = np.zeros_like(size)
        mean[-NUM_MASSES:] = (total / count)[-NUM_MASSES:]
        spread = np.sqrt(np.maximum(squares / count - mean**2, 0))
        size[-NUM_MASSES:] = spread[-NUM_MASSES:]
        table = self.type_embedding().detach().double().cpu().numpy()
        target = np.sqrt(np.mean(table**2))
        scale = size / (target if target > 0 else 1.0)
        # 0, nan and numbers whose inverse is infinite
        smallest = (
            np.finfo(np.float32).tiny
            if self.dtype == torch.float32
            else np.finfo(np.float64).tiny
        )
        scale[~(scale > smallest)] = 1.0
        number = len(scale)
        self.feature_mean[:number] = torch.as_tensor(mean)
        self.feature_spread[:number] = torch.as_tensor(scale)

    def radial_range(self, min_distance: float) -> tuple[float, float]:
        """Return the least and the largest input of the radial network, angstrom."""
        return min_distance, self.section.rcut

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and their vector-Jacobian product."""
        # the types that neighbors may have are those of the batch, unless a graph must serve all
        # batches or the batch does not count its atoms by type
        all_types = (
            torch.compiler.is_compiling() or len(batch.type_counts) != self.num_types
        )
        species = [
            kind
            for kind in range(self.num_types)
            if all_types or batch.type_counts[kind]
        ]
        is_apart = self.ops.is_for_cpu or self.interpolation.serves(batch)
        if is_apart and len(species) <= MAX_SPECIES:
            invariants, vjp = self._invariants_by_species(batch, species)
        else:
            invariants, vjp = self._invariants(batch)
        number = invariants.shape[1]
        # embeddings do not depend on positions: their part of the gradient is dropped
        embedding = pick(self.type_embedding(), batch.atom_type)
        features = torch.cat([invariants, embedding], 1)
        features = (features - self.feature_mean) / self.feature_spread
        scale = self.feature_spread[:number]
        return features, lambda grad: vjp(grad[:, :number] / scale)

    def _invariants(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, G) without the embeddings of the elements, and their vjp.

        Amplitudes are computed for each pair of atoms.
        """
        numbers, numbers_vjp = self._numbers(batch)
        features, features_vjp = vjp_of(
            lambda *parts: self._pair_features(batch, *parts), *numbers
        )
        return features, lambda grad_features: numbers_vjp(*features_vjp(grad_features))

    def _numbers(
        self, batch: Batch
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
        """Return rows, distances and sums of envelopes of the pairs, and their vjp."""
        dropped = self.excluded(batch, batch.within()) if self.excluded.any else None
        vector, section = batch.vector.to(self.dtype), self.section
        numbers, vjp = pair_numbers(
            vector, dropped, section.rcut, section.lmax, self._slopes
        )
        return numbers, lambda *grads: vjp(*grads).double()

    def _pair_features(
        self, batch: Batch, rows: Tensor, distance: Tensor, masses: Tensor
    ) -> Tensor:
        """Return the features (A, G) from the numbers of pairs."""
        section, widths = self.section, self.section.widths
        # tables of the pairs of each atom, (A, T, ...) by the type of the neighbor
        tables = _rows_of_centres(
            self.pair_film(self.type_embedding()), batch.atom_type
        )
        is_reduced = section.use_amp and self.training and rows.is_cuda
        with torch.autocast("cuda", torch.bfloat16, enabled=is_reduced):
            radial = self.radial(
                distance[..., None]
            )  # (A, K, M), channels and then modes
            # (A, K, T): a product picks the rows of tables, because the derivative of an index adds
            # in any order on a GPU
            is_type = one_hot(batch.neighbor_type, self.num_types, self.dtype)
            scale, shift = is_type @ tables.scale, is_type @ tables.shift
            amplitude = radial[..., : section.channels] * scale + shift
            if tables.mix is not None:
                mix = (is_type @ tables.mix.flatten(2)).unflatten(
                    -1, tables.mix.shape[2:]
                )
                amplitude = amplitude + (
                    mix * radial[..., None, section.channels :]
                ).sum(-1)
        amplitude = amplitude.to(self.dtype)
        # sums over neighbors (A, C) and (A, Q - 1, C_1): higher degrees have the first channels
        scalar = torch.bmm(rows[:, :1], amplitude)[:, 0]
        higher = torch.bmm(rows[:, 1:], amplitude[..., : widths[1]])
        return self._products(scalar, higher, masses)

    def _invariants_by_species(
        self, batch: Batch, species: list[int]
    ) -> tuple[Tensor, Vjp]:
        """Return the same and their vjp, from sums over the neighbors of each element.

        The network of the distance then has one output for all pairs of elements.
        """
        numbers, numbers_vjp = self._numbers(batch)
        rows, distance, masses = numbers
        kinds = torch.tensor(species, device=rows.device)[:, None]
        is_type = (batch.neighbor_type[:, None] == kinds).to(rows)  # (A, S, K)
        left = (
            (rows[:, :, None] * is_type[:, None]).flatten(1, 2).transpose(1, 2)
        )  # (A, K, Q S)
        if self.interpolation.serves(batch):
            sums = self.interpolation(
                left, distance, self.radial, in_place=self.ops.is_for_cpu
            )
        else:
            sums = DirectSum(left, distance, self.radial, None)

        def products(value: Tensor, plain: Tensor, masses: Tensor) -> Tensor:
            return self._sum_features(value, plain, masses, batch, species)

        # sums without radial functions (A, Q, S), which the shifts of amplitudes multiply
        plain = torch.bmm(rows, is_type.transpose(1, 2))
        features, features_vjp = vjp_of(products, sums.value, plain, masses)

        def vjp(grad_features: Tensor) -> Tensor:
            by_value, by_plain, by_masses = features_vjp(grad_features)
            by_left, by_distance = sums.vjp(by_value)
            by_rows = torch.bmm(by_plain, is_type)
            # the part of each element (A, Q, K), added up without a tensor of all (A, Q, S, K)
            parts = by_left.transpose(1, 2).unflatten(1, (-1, len(species))).unbind(2)
            for part, mask in zip(parts, is_type.unbind(1)):
                by_rows = torch.addcmul(by_rows, part, mask[:, None])
            return numbers_vjp(by_rows, by_distance, by_masses)

        return features, vjp

    def _sum_features(
        self,
        value: Tensor,
        plain: Tensor,
        masses: Tensor,
        batch: Batch,
        species: list[int],
    ) -> Tensor:
        """Return the features (A, G) from sums over the neighbors of each element.

        Args:
            value: (A, Q S, M) of rows times channels and modes.
            plain: (A, Q, S) of rows.
            masses: (A, 2).
            batch: for the elements of the atoms.
            species: S elements of neighbors.
        """
        channels, number = self.section.channels, len(species)
        tables = self.pair_film(self.type_embedding())
        # tables keep the columns of the elements at hand
        if number < self.num_types:
            mix = None if tables.mix is None else tables.mix[:, species]
            tables = PairTables(tables.scale[:, species], tables.shift[:, species], mix)
        tables = _rows_of_centres(tables, batch.atom_type)
        value = value.unflatten(1, (-1, number))  # (A, Q, S, M)
        amplitude, modes = value[..., :channels], value[..., channels:]

        def moments(first: int, last: int | None, width: int) -> Tensor:
            """Return (A, harmonics from first to last, width)."""
            scaled = (
                amplitude[:, first:last, :, :width] * tables.scale[:, None, :, :width]
            )
            sums = scaled.sum(2) + torch.bmm(
                plain[:, first:last], tables.shift[..., :width]
            )
            if tables.mix is not None:
                maps = (
                    tables.mix[:, :, :width].permute(0, 1, 3, 2).flatten(1, 2)
                )  # (A, S R, width)
                sums = sums + torch.bmm(modes[:, first:last].flatten(2), maps)
            return sums

        scalar = moments(0, 1, channels)[:, 0]
        return self._products(scalar, moments(1, None, self.section.widths[1]), masses)

    def _products(self, scalar: Tensor, higher: Tensor, masses: Tensor) -> Tensor:
        """Return the features (A, G) from sums over neighbors.

        Args:
            scalar: (A, C) of degree 0.
            higher: (A, Q - 1, C_1) of the degrees from 1 on.
            masses: (A, 2).
        """
        divisors = (masses + FLOOR).sqrt()
        # rows of degree 0 have the envelope as a factor, others its square: both are divided by the
        # root of the sum of squares of this factor
        higher = higher / divisors[:, 1:, None]
        widths = self.section.widths
        parts = higher.split([2 * degree + 1 for degree in range(1, len(widths))], 1)
        moments = [part[..., :width] for part, width in zip(parts, widths[1:])]
        return torch.cat([self.readout(scalar / divisors[:, :1], moments), divisors], 1)


def _rows_of_centres(tables: PairTables, atom_type: Tensor) -> PairTables:
    """Return the rows (A, ...) of tables (T, ...) for the types of atoms.

    `pick` has derivatives of fixed order, which an index has not on a GPU.
    """

    def picked(table: Tensor) -> Tensor:
        return pick(table.flatten(1), atom_type).unflatten(1, table.shape[1:])

    return PairTables(
        picked(tables.scale),
        picked(tables.shift),
        None if tables.mix is None else picked(tables.mix),
    )
