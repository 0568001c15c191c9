"""Several descriptors side by side (hybrid)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.model.descriptor.views import View, view_of
from deepmd_ema.model.nn.layers import module_list
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.hybrid.section import HybridConfig
    from deepmd_ema.model.interface import Descriptor, Vjp

# A atoms, K neighbor slots, D features


def build_hybrid(config: HybridConfig, num_types: int, seed: int) -> HybridDescriptor:
    """Return a hybrid with its parts, each of which starts from random numbers of its own."""
    parts = [
        DESCRIPTORS[part.type].load("module")(
            part, num_types, seed_for("part", seed, index)
        )
        for index, part in enumerate(config.list)
    ]
    return HybridDescriptor(config, parts)


class HybridDescriptor(nn.Module):
    """The features of all parts, one after the other.

    All parts read one list of neighbors: by type if all of them want it so, otherwise the nearest
    of all types, in which parts by type look up their types. As in DeePMD-kit, the list
    ends at the largest cutoff and at the largest ``sel`` of all parts, and a part with a shorter
    cutoff does not know which neighbors are beyond its own cutoff.

    Args:
        config: the section ``model.descriptor``.
        parts: one descriptor for each section of ``list``.

    Attributes:
        knows_cutoffs: whether each part sees only the neighbors inside its own cutoff.
    """

    # as in DeePMD-kit; parts of a linear_ener see their own cutoff only
    knows_cutoffs: ClassVar[bool] = False

    def __init__(self, config: HybridConfig, parts: Sequence[Descriptor]) -> None:
        super().__init__()
        self.section = config
        self.parts: Sequence[Any] = module_list(cast("Sequence[nn.Module]", parts))
        self.dim_out = sum(part.dim_out for part in parts)
        # one part that distinguishes the elements suffices for one fitting network of all of them
        self.mixed_types = any(part.mixed_types for part in parts)
        self.passes_messages = any(part.passes_messages for part in parts)
        # the higher precision, so that no part loses digits where features are concatenated
        self.dtype = max(
            (part.dtype for part in parts), key=lambda dtype: torch.finfo(dtype).bits
        )

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return a layout in which every part finds its neighbors."""
        layouts = [part.layout(excluded_pairs) for part in self.parts]
        rcut, num_types = max(part.rcut for part in layouts), layouts[0].num_types
        # for each type, the largest number of neighbors that a part by type reads
        sels_by_type = [part.sel for part in layouts if part.by_type]
        type_sel = tuple(max(sel) for sel in zip(*sels_by_type))
        # a part may be a hybrid, whose parts read the first slots only
        inner_order = any(part.nearest_first for part in layouts)
        if len(sels_by_type) == len(layouts):
            return NeighborLayout(
                rcut,
                type_sel,
                num_types,
                by_type=True,
                excluded_pairs=excluded_pairs,
                nearest_first=inner_order
                or any(sel != type_sel for sel in sels_by_type),
            )
        # one list of the nearest; type_sel lets views of parts by type have slots of fixed number
        total = max(sum(part.sel) for part in layouts)
        return NeighborLayout(
            rcut,
            (total,),
            num_types,
            by_type=False,
            excluded_pairs=excluded_pairs,
            type_sel=type_sel,
            # the shorter lists that parts take from the batch, each once
            inner=tuple(
                dict.fromkeys(inner for part in layouts for inner in part.inner)
            ),
            nearest_first=inner_order or any(sum(part.sel) < total for part in layouts),
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The names of the sums of each part after its place in the list."""
        return tuple(
            f"{k}_{name}"
            for k, part in enumerate(self.parts)
            for name in part.sum_names
        )

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the sums of all parts."""
        views = self._views(batch)
        return {
            f"{k}_{name}": sums
            for k, (part, view) in enumerate(zip(self.parts, views, strict=True))
            for name, sums in part.measure(view.batch).items()
        }

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Hand each part its own sums."""
        for k, part in enumerate(self.parts):
            part.apply_statistics(
                {name: sums[f"{k}_{name}"] for name in part.sum_names}
            )

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and their vjp, the sum of those of the parts."""
        views = self._views(batch)
        outputs = [
            part(view.batch) for part, view in zip(self.parts, views, strict=True)
        ]
        features, vjps = zip(*outputs, strict=True)
        # (A, D_k) of part k, in its precision
        widths = [values.shape[1] for values in features]

        def vjp(grad_features: Tensor) -> Tensor:
            parts = zip(
                grad_features.split(widths, 1), features, views, vjps, strict=True
            )
            # a part gets the gradient in its own precision; its view puts the slots back in place
            by_vector = [
                view.vjp(part_vjp(grad.to(values.dtype)))
                for grad, values, view, part_vjp in parts
            ]
            return reduce(torch.add, by_vector)

        return torch.cat([values.to(self.dtype) for values in features], 1), vjp

    @property
    def dim_equivariants(self) -> int:
        """Number of equivariant vectors of an atom."""
        return sum(part.dim_equivariants for part in self.parts)

    def features_and_equivariants(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the features (A, D) and equivariant vectors (A, M, 3)."""
        outputs = [
            part.features_and_equivariants(view.batch)
            for part, view in zip(self.parts, self._views(batch))
        ]
        # both are concatenated in their second dimension: (A, D_k) and (A, M_k, 3) of part k
        features, vectors = (
            torch.cat([values.to(self.dtype) for values in tensors], 1)
            for tensors in zip(*outputs)
        )
        return features, vectors

    def _views(self, batch: Batch) -> list[View]:
        # excluded pairs are absent from the batch already, so that layouts need not name them
        whole = self.layout(frozenset())
        return [
            view_of(batch, whole, part.layout(frozenset()), self.knows_cutoffs)
            for part in self.parts
        ]
