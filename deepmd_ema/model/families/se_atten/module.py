"""DPA-1 (se_atten, se_atten_v2): moments of the environment, embedded by distance and elements."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.model.descriptor.by_type import joined
from deepmd_ema.model.descriptor.type_embedded import ElementBlock, OneBlockDescriptor
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.nn.attention import AttentionLayer
from deepmd_ema.model.nn.layers import freeze, module_list
from deepmd_ema.model.nn.norm import eps_of
from deepmd_ema.model.nn.type_embedding import one_hot, pick
from deepmd_ema.model.ops.attention import LOGIT_SHIFT, Attended, AttentionOptions
from deepmd_ema.model.ops.environment import Radial, directions_and_vjp, switch_and_vjp
from deepmd_ema.model.ops.reference import axis_features, axis_features_vjp, vjp_of
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepmd_ema.model.families.se_atten.section import SeAttenV2Config
    from deepmd_ema.model.interface import Vjp

    # the moments (A, 4, M), and from their gradient those by the rows, the switch and the
    # directions
    Moments = tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]

# A atoms, K neighbor slots, S slots up to sel, T types, E numbers of a type embedding, M channels,
# X axis channels, F frames


class SeAttenBlock(ElementBlock):
    """``D = g^T R (g[:X]^T R)^T`` with ``g^T R = sum_k G_k R_k / S``.

    R_k is the normalised row of neighbor k in the environment matrix. ``G_k`` is a network of
    ``s_k`` and the elements (``concat``), or ``G(s_k) (1 + w_k E(elements))`` with two networks
    (``strip``, w_k the switch if smooth); then attention layers mix the ``G_k`` (DPA-1, Zhang et
    al., arXiv:2208.08236; strip: arXiv:2312.15492).

    Args:
        options: of the block, with the names that they have in the section se_atten.
        sel: S, most neighbors.
        num_types: T.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        options: SeAttenV2Config,
        sel: int,
        num_types: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__(options, sel, num_types, dtype, seed)
        self.one_side = options.type_one_side
        self.num_axis = options.axis_neuron
        self.dim_out = self.num_channels * self.num_axis
        self.interpolation = Interpolation(
            options.interpolate, dtype, sum(options.neuron)
        )
        # the usual 1 / sqrt(width of queries), unless a temperature replaces it
        scaling = options.temperature
        if scaling is None:
            scaling = (options.attn * options.scaling_factor) ** -0.5
        # without a shift, logits jump where a neighbor enters, as in DeePMD-kit
        shift, eps = LOGIT_SHIFT if options.smooth else None, eps_of(options.ln_eps)
        self.attends = AttentionOptions(
            options.attn_dotr, options.normalize, scaling, shift, eps
        )
        self.layers = module_list(
            AttentionLayer(
                self.num_channels,
                options.attn,
                eps=eps,
                trainable_norm=options.trainable_ln,
                dtype=dtype,
                seed=seed_for("attention", seed, index),
            )
            for index in range(options.attn_layer)
        )
        # freeze(self, True) would train a layer normalisation that trainable_ln = false fixes
        if not options.trainable:
            freeze(self, False)

    def features_and_vjp(
        self,
        table: Tensor,
        neighborhood: Neighborhood,
        batch: Batch,
        dropped: Tensor | None,
    ) -> tuple[Tensor, Vjp]:
        """Return the features (A, M X), and their vjp to the vectors (A, K, 3) float64.

        Both are functions of the parameters; arguments are those of :meth:`moments_and_vjp`.
        """
        moments, moments_vjp = self.moments_and_vjp(table, neighborhood, batch, dropped)
        axis = self.num_axis
        return axis_features(moments, axis), lambda grad: moments_vjp(
            axis_features_vjp(grad, moments, axis)
        )

    def moments_and_vjp(
        self,
        table: Tensor,
        neighborhood: Neighborhood,
        batch: Batch,
        dropped: Tensor | None,
    ) -> tuple[Tensor, Vjp]:
        """Return the moments g^T R (A, 4, M), and their vjp to the vectors (A, K, 3) float64.

        Args:
            table: (T, E) type embeddings.
            neighborhood: neighbors inside the cutoff.
            batch: the batch that the neighbors are of.
            dropped: (A, K) bool, pairs that do not see each other here, or None.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        vector = neighborhood.vector
        width = vector.shape[1]
        # an empty slot has the type of the first atom of the frame, as in DeePMD-kit. It counts,
        # because a mean of the environment matrix gives empty slots rows that are not zero
        first_type = batch.first_type
        filler = first_type[batch.atom_frame][:, None]
        neighbor_type = torch.where(mask, batch.neighbor_type[:, :width], filler)
        radial = Radial.of(vector, self.rcut, self.rcut_smth)
        rows, rows_vjp = self.environment_matrix(
            vector, dropped, batch.atom_type, radial=radial
        )
        # the inputs of the moments that depend on positions, each with its vjp to the vectors
        inputs = [rows]
        vjps = [rows_vjp]
        counts = None
        if self.layers or (self.smooth and self.pair_embedding is not None):
            switch, switch_vjp = switch_and_vjp(vector, mask, radial)
            # (A, K), the switch of each neighbor
            inputs, vjps = [*inputs, switch.to(self.dtype)], [*vjps, switch_vjp]
        # interpolation has a function for each element of the centre, and splits the atoms by type:
        # they must be in the order of their types, which batches with images may lack
        in_order = (
            self.one_side
            or self.pair_embedding is not None
            or len(batch.type_counts) == len(self.mean)
        )
        if self.layers:
            # (A, K, 3) unit vectors, whose products weight the attention (attn_dotr)
            direction, direction_vjp = directions_and_vjp(
                vector, mask, radial.distance, self.rcut
            )
            counts = self._counts(neighborhood.mask)
            options = [layer.weights for layer in self.layers], self.attends

            def attention_moments(
                rows: Tensor, switch: Tensor, direction: Tensor
            ) -> Tensor:
                if counts is not None:
                    # slots beyond the last neighbor of an atom are added by `_absent_moments`
                    is_near = torch.arange(width, device=rows.device) < counts[:, None]
                    rows = torch.where(is_near[..., None], rows, 0)
                pairs = (
                    rows[..., :1],
                    batch.atom_type[:, None],
                    neighbor_type,
                    switch[..., None],
                )
                attended = Attended(
                    rows,
                    partial(self._embed, table),
                    pairs,
                    counts,
                    mask,
                    switch,
                    direction,
                    self.sel,
                )
                return self.ops.attended_moments(attended, *options)

            inputs, vjps = [*inputs, direction.to(self.dtype)], [*vjps, direction_vjp]
            moments, moments_vjp = vjp_of(attention_moments, *inputs)
        elif self.interpolation.serves(batch) and in_order:
            interpolated = (
                self._interpolated
                if self.pair_embedding is None
                else self._interpolated_strip
            )
            moments, moments_vjp = interpolated(inputs, neighbor_type, table, batch)
        else:

            def evaluated(rows: Tensor, switch: Tensor | None = None) -> Tensor:
                weight = None if switch is None else switch[..., None]
                pairs = self._embed(
                    table,
                    rows[..., :1],
                    batch.atom_type[:, None],
                    neighbor_type,
                    weight,
                )
                return torch.bmm(rows.transpose(1, 2), pairs)

            moments, moments_vjp = vjp_of(evaluated, *inputs)
        if counts is not None or width < self.sel:
            moments = moments + self._absent_moments(
                counts, width, table, first_type, batch
            )

        def vjp(grad: Tensor) -> Tensor:
            by_inputs = moments_vjp(grad / self.sel)
            by_vector = [
                input_vjp(by_input)
                for input_vjp, by_input in zip(vjps, by_inputs, strict=True)
            ]
            return reduce(torch.add, by_vector)

        return moments / self.sel, vjp

    def _interpolated(
        self, inputs: list[Tensor], neighbor: Tensor, table: Tensor, batch: Batch
    ) -> Moments:
        """Return the moments from interpolations of the network of ``s`` and elements.

        A function of ``s`` alone belongs to each element of the neighbor, or to each pair of
        elements.
        """
        # (A, K, 1, T), and rows in the columns of the element of the neighbor (A, K, 4 T)
        is_type = one_hot(neighbor, len(table), self.dtype).unsqueeze(2)
        rows = inputs[0]
        left = (rows.unsqueeze(3) * is_type).flatten(2)
        s = rows[..., 0]
        in_place = self.ops.is_for_cpu
        if self.one_side:
            sums = [
                self.interpolation(left, s, self.embedding, table, in_place=in_place)
            ]
        else:
            # a function for each element of the centre as well: atoms of one element at once
            parts = zip(
                left.split(batch.type_counts),
                s.split(batch.type_counts),
                table.unbind(0),
                strict=True,
            )
            sums = [
                self.interpolation(
                    part_left,
                    part_s,
                    self.embedding,
                    torch.cat([table, centre.expand_as(table)], -1),
                    number,
                    in_place,
                )
                for number, (part_left, part_s, centre) in enumerate(parts)
            ]

        def vjp(grad: Tensor) -> tuple[Tensor, ...]:
            shares = grad.split([part.left.shape[0] for part in sums])
            by_parts = [
                part.vjp(share) for part, share in zip(sums, shares, strict=True)
            ]
            by_left, by_s = (joined(list(grads)) for grads in zip(*by_parts))
            by_rows = (by_left.unflatten(2, (4, -1)) * is_type).sum(3)
            # s is the first column of the rows
            return (by_rows + functional.pad(by_s.unsqueeze(2), (0, 3)),)

        return joined([part.value for part in sums]), vjp

    def _interpolated_strip(
        self, inputs: list[Tensor], neighbor: Tensor, table: Tensor, batch: Batch
    ) -> Moments:
        """Return the moments from an interpolation of ``G(s)``, summed by element before gates.

        The gate of a pair depends on elements only: sums over the neighbors of each element are
        gated, not every pair.
        """
        is_type = one_hot(neighbor, len(table), self.dtype).unsqueeze(2)  # (A, K, 1, T)
        rows, *weights = inputs  # the switch (A, K), if smooth
        gated = is_type * weights[0][..., None, None] if weights else is_type
        # (A, K, 4 + 4 T): the sum without gate, then those that each element gates
        left = torch.cat([rows, (rows.unsqueeze(3) * gated).flatten(2)], 2)
        summed = self.interpolation(
            left, rows[..., 0], self.embedding, in_place=self.ops.is_for_cpu
        )
        gates = self._gates(table, batch.atom_type).unsqueeze(
            -3
        )  # (A, 1, T, M) or (1, T, M)

        def vjp(grad: Tensor) -> tuple[Tensor, ...]:
            by_gated = (grad.unsqueeze(2) * gates).flatten(1, 2)
            by_left, by_s = summed.vjp(torch.cat([grad, by_gated], 1))
            by_rows, by_type = by_left[..., :4], by_left[..., 4:].unflatten(2, (4, -1))
            by_rows = (
                by_rows
                + (by_type * gated).sum(3)
                + functional.pad(by_s.unsqueeze(2), (0, 3))
            )
            # one gradient by the switch, or none
            return by_rows, *(
                (by_type * rows.unsqueeze(3) * is_type).sum((2, 3)) for _ in weights
            )

        return summed.value[:, :4] + (
            summed.value[:, 4:].unflatten(1, (4, -1)) * gates
        ).sum(2), vjp

    def _embed(
        self,
        table: Tensor,
        s: Tensor,
        centre: Tensor,
        neighbor: Tensor,
        switch: Tensor | None,
    ) -> Tensor:
        """Return the channels (..., K, M) of pairs.

        Args:
            table: (T, E) type embeddings.
            s: (..., K, 1) radial column.
            centre: types, to be expanded to (..., K).
            neighbor: (..., K) types.
            switch: (..., K, 1), which smooth gates need, or None.
        """
        if self.pair_embedding is None:
            shape = s.shape[:-1]
            types = [neighbor] if self.one_side else [neighbor, centre.expand(shape)]
            beside = [pick(table, t) for t in types]
            return cast("Tensor", self.embedding(torch.cat([s, *beside], -1)))
        gate = pick(self._gates(table, centre[..., 0]), neighbor)
        radial: Tensor = self.embedding(s)
        return radial + radial * (
            gate if switch is None or not self.smooth else gate * switch
        )

    def _gates(self, table: Tensor, centre: Tensor) -> Tensor:
        """Return the gates of all elements of neighbors, (T, M) or (..., T, M) by ``centre`` (...).

        They are the outputs of the network of elements.
        """
        assert self.pair_embedding is not None
        num_types = len(table)
        if self.one_side:
            return cast("Tensor", self.pair_embedding(table))
        # a row (T M) of each centre is picked, and of it the gate of each neighbor: one of all T^2
        # pairs for each neighbor would be large
        both = [table.repeat(num_types, 1), table.repeat_interleave(num_types, 0)]
        gates = self.pair_embedding(torch.cat(both, -1)).view(num_types, -1)
        return pick(gates, centre).unflatten(-1, (num_types, -1))

    def _counts(self, mask: Tensor) -> Tensor | None:
        """Return the number of slots (A,) of each atom up to its last neighbor.

        None if the slots beyond are not all alike, or if this is not known without waiting for a
        device.
        """
        if not self.ops.is_for_cpu:
            return None
        # statistics of a run are equal for all slots, but files of DeePMD-kit may hold others
        alike = (self.mean == self.mean[:, :1]).all() & (
            self.stddev == self.stddev[:, :1]
        ).all()
        places = torch.arange(mask.shape[1], device=mask.device) + 1
        return functional.pad(mask * places, (0, 1)).amax(1) if alike else None

    def _absent_moments(
        self,
        counts: Tensor | None,
        width: int,
        table: Tensor,
        filler: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Return the part of the moments (A, 4, M) from slots that are not evaluated as pairs.

        These are slots beyond those of the batch, or beyond the first of each atom. They are empty
        and normalised like all slots, so each has the row ``-mean / stddev`` of the type of the
        centre, and the type embedding of the first atom of the frame, as DeePMD-kit has it:
        constants per type and frame.

        Args:
            counts: (A,) of the first slots, whose others are alike; None: as many as the batch has.
            width: K.
            table: (T, E) type embeddings.
            filler: (F,) type of the first atom of each frame.
            batch: the batch.
        """
        num_types = len(table)
        # slots that are alike: the last represents them, and is multiplied by their number below
        first = width if counts is None else self.sel - 1
        rows = -(self.mean.double() / self.stddev.double()).to(self.dtype)
        rows = rows[:, first:]  # (T, S - first, 4)
        centre = torch.arange(num_types, device=rows.device)[None, :, None]
        neighbor = filler[:, None, None].expand(-1, num_types, rows.shape[1])
        # types (1, T, 1) of the centre and (F, T, S - first) of the neighbor
        s = rows[None, ..., :1].expand(filler.shape[0], -1, -1, -1)
        pairs = self._embed(table, s, centre, neighbor, torch.zeros_like(s))
        for layer in self.layers:
            # an empty slot attends to nothing: its output is the bias of the last linear map
            pairs = layer.norm(pairs + layer.weights.out_bias)
        moments = torch.einsum("tkc,ftkm->ftcm", rows, pairs)
        # (F T, 4, M), of which each atom takes that of its frame and type
        moments = moments.flatten(0, 1)[batch.atom_frame * num_types + batch.atom_type]
        if counts is None:
            return moments
        return moments * (self.sel - counts).to(self.dtype)[:, None, None]


class DPA1Descriptor(OneBlockDescriptor):
    """Moments of the environment with attention (Zhang et al., arXiv:2208.08236)."""

    block: SeAttenBlock
    make_block = SeAttenBlock

    @property
    def dim_equivariants(self) -> int:
        """M, number of equivariant vectors of an atom."""
        return self.block.num_channels

    def _features_and_equivariants(
        self, table: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        neighborhood = batch.within()
        dropped = self.excluded(batch, neighborhood)
        moments, _ = self.block.moments_and_vjp(table, neighborhood, batch, dropped)
        return axis_features(moments, self.block.num_axis), moments[:, 1:].transpose(
            1, 2
        )
