"""Moments of the environment of an atom, embedded by distance and elements, with attention among neighbors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.model.descriptor.by_type import joined
from deepmd_ema.model.descriptor.env_statistics import environment, normalised
from deepmd_ema.model.descriptor.type_embedded import ElementBlock
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.interpolation.sums import NeighborSum
from deepmd_ema.model.nn.attention import AttentionLayer
from deepmd_ema.model.nn.layers import freeze, module_list
from deepmd_ema.model.nn.norm import eps_of
from deepmd_ema.model.nn.type_embedding import one_hot, pick
from deepmd_ema.model.ops.environment import environment_rows
from deepmd_ema.model.ops.reference import (
    LOGIT_SHIFT,
    Attended,
    AttentionOptions,
    axis_features,
    axis_features_vjp,
    occupied_slots,
)
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.families.se_atten.section import SeAttenV2Config

# A atoms, K neighbor slots, S slots up to sel, T types, E numbers of a type embedding, M channels, X axis channels,
# F frames


class SeAttenBlock(ElementBlock):
    """``D = g^T R (g[:X]^T R)^T`` with ``g^T R = sum_k G_k R_k / S``, R_k the normalised row of neighbor k.

    ``G_k`` is a network of ``s_k`` and the elements (``concat``), or ``G(s_k) (1 + w_k E(elements))`` with two networks
    (``strip``, w_k the switch if smooth); then attention layers mix the ``G_k`` (DPA-1, Zhang et al.,
    arXiv:2208.08236; strip: arXiv:2312.15492).

    Args:
        options: of the block, with the names that they have in the section se_atten.
        sel: S, most neighbors.
        num_types: T.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(self, options: SeAttenV2Config, sel: int, num_types: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__(options, sel, num_types, dtype, seed, num_elements=1 if options.type_one_side else 2)
        self.one_side, self.num_axis = options.type_one_side, options.axis_neuron
        self.interpolation = Interpolation(options.interpolate, dtype, sum(options.neuron))
        scaling = options.temperature
        if scaling is None:
            scaling = (options.attn * options.scaling_factor) ** -0.5
        self.attends = AttentionOptions(
            gated=options.attn_dotr,
            unit=options.normalize,
            scaling=scaling,
            shift=LOGIT_SHIFT if options.smooth else None,
            eps=eps_of(options.ln_eps),
        )
        self.layers = module_list(
            AttentionLayer(
                self.num_channels,
                options.attn,
                eps=self.attends.eps,
                trainable_norm=options.trainable_ln,
                dtype=dtype,
                seed=seed_for("attention", seed, index),
            )
            for index in range(options.attn_layer)
        )
        if not options.trainable:
            freeze(self, False)

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels * self.num_axis

    def forward(
        self, vector: Tensor, neighborhood: Neighborhood, table: Tensor, batch: Batch, dropped: Tensor | None
    ) -> Tensor:
        """Return the features (A, M X), which can be differentiated by ``vector``.

        Args:
            vector: (A, K, 3) those of ``neighborhood``.
            neighborhood: neighbors inside the cutoff.
            table: (T, E) type embeddings.
            batch: the batch that the neighbors are of.
            dropped: (A, K) bool, pairs that do not see each other here, or None.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        neighbor_type = _neighbor_type(mask, batch)
        width = vector.shape[1]
        distance = torch.linalg.vector_norm(vector, dim=-1)
        raw, switch = environment_rows(vector, distance, self.rcut, self.rcut_smth, self.protection)
        rows = normalised(torch.where(neighborhood.mask[..., None], raw, 0), self, batch.atom_type)
        if dropped is not None:
            rows = rows * (~(dropped & neighborhood.mask))[..., None]
        rows, switch = rows.to(self.dtype), torch.where(mask, switch, 0).to(self.dtype)
        counts = None
        if self.layers:
            near = mask & (distance < self.rcut)  # the list may reach farther
            direction = (vector * torch.where(near, 1 / distance, 0)[..., None]).to(self.dtype)
            counts = self._counts(neighborhood.mask)
            if counts is not None:
                rows = torch.where((torch.arange(width, device=rows.device) < counts[:, None])[..., None], rows, 0)
            inputs = rows[..., :1], batch.atom_type[:, None], neighbor_type, switch[..., None]
            weights = [layer.weights for layer in self.layers]
            given = Attended(rows, partial(self._embed, table), inputs, counts, mask, switch, direction, self.sel)
            moments = self.ops.attended_moments(given, weights, self.attends)
        elif self._is_interpolated(batch):
            moments = self._interpolated_moments(rows, table, neighbor_type, switch, batch)
        else:
            pairs = self._embed(table, rows[..., :1], batch.atom_type[:, None], neighbor_type, switch[..., None])
            moments = torch.bmm(rows.transpose(1, 2), pairs)
        return axis_features(self._of_all_slots(moments, counts, width, table, batch), self.num_axis)

    def is_written_out(self, batch: Batch) -> bool:
        """Whether :meth:`features_and_vjp` serves a batch."""
        return self.ops.is_for_cpu and self.pair_embedding is None and self._is_interpolated(batch)

    def features_and_vjp(
        self, neighborhood: Neighborhood, table: Tensor, batch: Batch, dropped: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the features (A, M X), and the function from their gradient to that by the vectors (A, K, 3) float64.

        Arguments are those of :meth:`forward`. Both are functions of the parameters alone, from operations whose
        gradient is written out.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        rows, rows_vjp = environment(self, neighborhood.vector, dropped, batch.atom_type)
        of_type = one_hot(_neighbor_type(mask, batch), len(table), self.dtype).unsqueeze(2)
        sums = self._interpolated_sums((rows.unsqueeze(3) * of_type).flatten(2), rows[..., 0], table, batch)
        moments = joined([one.value for one in sums])
        moments = self._of_all_slots(moments, None, rows.shape[1], table, batch)

        def vjp(grad: Tensor) -> Tensor:
            by_moments = axis_features_vjp(grad, moments, self.num_axis) / self.sel
            parts = by_moments.split([one.left.shape[0] for one in sums])
            of_left, of_s = zip(*(one.vjp(part) for one, part in zip(sums, parts, strict=True)))
            by_rows = (joined(list(of_left)).unflatten(2, (4, -1)) * of_type).sum(3)
            return rows_vjp(by_rows + functional.pad(joined(list(of_s)).unsqueeze(2), (0, 3)))

        return axis_features(moments, self.num_axis), vjp

    def _is_interpolated(self, batch: Batch) -> bool:
        """Whether embedding nets are evaluated by an interpolation for a batch."""
        # functions for each element of the centre need atoms in the order of their types, which images may lack
        in_order = self.one_side or self.pair_embedding is not None or len(batch.type_counts) == len(self.mean)
        return self.interpolation.serves(batch) and not self.layers and in_order

    def _of_all_slots(self, moments: Tensor, counts: Tensor | None, width: int, table: Tensor, batch: Batch) -> Tensor:
        """Return means over all slots (A, 4, M) from the sums over the first ``counts`` (A,), or ``width`` if None."""
        if counts is not None or width < self.sel:
            moments = moments + self._absent_moments(counts, width, table, batch.first_type, batch)
        return moments / self.sel

    def _embed(self, table: Tensor, s: Tensor, centre: Tensor, neighbor: Tensor, switch: Tensor) -> Tensor:
        """Return the channels (..., K, M) of pairs from ``s`` and ``switch`` (..., K, 1) and their types (..., K)."""
        if self.pair_embedding is None:
            shape = s.shape[:-1]
            types = [neighbor] if self.one_side else [neighbor, centre.expand(shape)]
            return cast("Tensor", self.embedding(torch.cat([s, *(pick(table, t) for t in types)], -1)))
        gate = pick(self._gates(table, centre[..., 0]), neighbor)
        radial: Tensor = self.embedding(s)
        return radial + radial * (gate * switch if self.smooth else gate)

    def _gates(self, table: Tensor, centre: Tensor) -> Tensor:
        """Return the network of elements for all elements of a neighbor, (T, M), or (..., T, M) by ``centre`` (...)."""
        assert self.pair_embedding is not None
        num_types = len(table)
        if self.one_side:
            return cast("Tensor", self.pair_embedding(table))
        # first of each centre, then of each neighbor: a row of all T^2 pairs for each neighbor would be large
        both = [table.repeat(num_types, 1), table.repeat_interleave(num_types, 0)]
        of_pair = self.pair_embedding(torch.cat(both, -1)).view(num_types, -1)
        return pick(of_pair, centre).unflatten(-1, (num_types, -1))

    def _interpolated_moments(
        self, rows: Tensor, table: Tensor, neighbor: Tensor, switch: Tensor, batch: Batch
    ) -> Tensor:
        """Return the moments (A, 4, M) of all slots from interpolations of the network of ``s``."""
        num_types, s, in_place = len(table), rows[..., 0], self.ops.is_for_cpu
        of_type = one_hot(neighbor, num_types, rows.dtype)
        if self.pair_embedding is not None:  # G(s) (1 + gate): one function, summed by element
            gated = of_type * switch[..., None] if self.smooth else of_type
            by_type = (rows[..., None] * gated[..., None, :]).flatten(2)
            summed = self.interpolation(torch.cat([rows, by_type], -1), s, self.embedding, in_place=in_place).value
            gates = self._gates(table, batch.atom_type).unsqueeze(-3)  # (A, 1, T, M) or (1, T, M)
            return summed[:, :4] + (summed[:, 4:].unflatten(1, (4, num_types)) * gates).sum(2)
        left = (rows[..., None] * of_type[..., None, :]).flatten(2)
        return joined([one.value for one in self._interpolated_sums(left, s, table, batch)])

    def _interpolated_sums(self, left: Tensor, s: Tensor, table: Tensor, batch: Batch) -> list[NeighborSum]:
        """Return the sums of ``left`` (A, K, 4 T) times the network of ``s`` and elements: for all atoms or by type."""
        in_place = self.ops.is_for_cpu
        if self.one_side:
            return [self.interpolation(left, s, self.embedding, table, in_place=in_place)]
        # a function for each element of the centre as well: atoms of one element at once
        parts = zip(left.split(batch.type_counts), s.split(batch.type_counts), table.unbind(0), strict=True)
        return [
            self.interpolation(
                of_centre, its_s, self.embedding, torch.cat([table, centre.expand_as(table)], -1), number, in_place
            )
            for number, (of_centre, its_s, centre) in enumerate(parts)
        ]

    def _counts(self, mask: Tensor) -> Tensor | None:
        """Return the number of slots (A,) of each atom up to its last neighbor, if those beyond are all alike.

        Statistics are equal for all slots, but files may hold others. None: not known without waiting for a device.
        """
        if not self.ops.is_for_cpu:
            return None
        alike = (self.mean == self.mean[:, :1]).all() & (self.stddev == self.stddev[:, :1]).all()
        return occupied_slots(mask) if alike else None

    def _absent_moments(self, counts: Tensor | None, width: int, table: Tensor, filler: Tensor, batch: Batch) -> Tensor:
        """Return the part of the moments from slots beyond those of the batch, or beyond the first of each atom.

        They are empty and normalised like all slots, so each has the row ``-mean / stddev`` of the type of the centre,
        and the type embedding of the first atom of the frame, as DeePMD-kit has it: constants per type and frame.

        Args:
            counts: (A,) of the first slots, whose others are alike; None: as many as the batch has.
            width: K.
            table: (T, E) type embeddings.
            filler: (F,) type of the first atom of each frame.
            batch: the batch.

        Returns:
            (A, 4, M).
        """
        num_types, first = len(table), width if counts is None else self.sel - 1
        rows = -(self.mean.double() / self.stddev.double()).to(self.dtype)[:, first:]  # (T, S - first, 4)
        centre = torch.arange(num_types, device=rows.device)[None, :, None]
        neighbor = filler[:, None, None].expand(-1, num_types, rows.shape[1])
        s = rows[None, ..., :1].expand(filler.shape[0], -1, -1, -1)
        pairs = self._embed(table, s, centre, neighbor, torch.zeros_like(s))
        for layer in self.layers:
            # an empty slot attends to nothing: of the last linear map the bias is left
            pairs = layer.norm(pairs + layer.weights.out_bias)
        moments = torch.einsum("tkc,ftkm->ftcm", rows, pairs)
        moments = moments.flatten(0, 1)[batch.atom_frame * num_types + batch.atom_type]
        return moments if counts is None else moments * (self.sel - counts).to(self.dtype)[:, None, None]


def _neighbor_type(mask: Tensor, batch: Batch) -> Tensor:
    """Return the types (A, K) of neighbors; outside of ``mask`` that of the first atom of the frame."""
    filler = batch.first_type[batch.atom_frame][:, None]
    return torch.where(mask, batch.neighbor_type[:, : mask.shape[1]], filler)
