"""Parts side by side whose energies are added up with weights (``linear_ener``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.labels import APARAM, FPARAM
from deepmd_ema.errors import ConfigError
from deepmd_ema.model.build import build_networks
from deepmd_ema.model.families.hybrid.module import HybridDescriptor
from deepmd_ema.model.families.linear_ener.layers import PairTableDescriptor, PairTableFitting
from deepmd_ema.model.families.linear_ener.section import PairTableConfig
from deepmd_ema.model.pair_table import PairTable
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.linear_ener.section import LinearConfig, PartDescriptors, PartFittings
    from deepmd_ema.model.interface import Block, Descriptor, Fitting, Sums

# A atoms, D features of all parts together


def linear_parts(config: LinearConfig, seed: int) -> tuple[Descriptor, Fitting, None]:
    """Return all parts side by side; each starts from random numbers of its own."""
    descriptors: list[Descriptor] = []
    fittings: list[Fitting] = []
    for index, part in enumerate(config.models):
        if isinstance(part, PairTableConfig):
            assert part.neighbors is not None, "sel is resolved"
            table = PairTable.of_rows(part.rows_for(config.type_map), part.rcut)
            descriptors.append(PairTableDescriptor(table, sum(part.neighbors)))
            fittings.append(PairTableFitting(len(config.type_map), tuple(config.atom_exclude_types)))
        else:
            made = build_networks(config, part.descriptor, part.fitting_net, seed_for("part", seed, index))
            descriptors.append(made[0])
            fittings.append(made[1])
    widths = [one.dim_out for one in descriptors]
    section = cast("PartDescriptors", config.descriptor)
    return LinearDescriptor(section, descriptors), LinearFitting(config.fitting_net, fittings, widths), None


class LinearDescriptor(HybridDescriptor):
    """The features of all parts, one after the other; each part sees the neighbors inside its own cutoff only."""

    knows_cutoffs: ClassVar[bool] = True

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return a layout in which every part finds its neighbors, with those of shorter cutoffs counted."""
        whole = super().layout(excluded_pairs)
        layouts = (part.layout(frozenset()) for part in self.descriptors)
        inner = [(one.rcut, sum(one.sel)) for one in layouts if not one.by_type and one.rcut < whole.rcut]
        return whole if whole.by_type else replace(whole, inner=tuple(dict.fromkeys([*whole.inner, *inner])))


class LinearFitting(nn.Module):
    """The weighted sum of the energies of all parts.

    Args:
        section: weights and sections of the parts.
        parts: what turns the features of each part into energies.
        widths: number of features of each part.
    """

    def __init__(self, section: PartFittings, parts: Sequence[Fitting], widths: Sequence[int]) -> None:
        super().__init__()
        self.section, self._widths = section, list(widths)
        self.parts = nn.ModuleList(cast("list[nn.Module]", list(parts)))

    @property
    def fittings(self) -> list[Fitting]:
        """The parts, first to last."""
        return cast("list[Fitting]", list(self.parts))

    @property
    def skips_absent(self) -> bool:
        """Whether nets of elements that a batch does not have are left out in evaluation."""
        return all(part.skips_absent for part in self.fittings)

    @skips_absent.setter
    def skips_absent(self, value: bool) -> None:
        for part in self.fittings:
            part.skips_absent = value

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the energies (A,) float64, eV, and their gradient with respect to the features (A, D)."""
        energy, grads = torch.zeros(len(features), dtype=torch.float64, device=features.device), []
        split = features.split(self._widths, 1)
        for part, weight, own in zip(self.fittings, self.section.weights, split, strict=True):
            of_part, grad = part(own, batch)
            energy = energy + weight * of_part
            grads.append(weight * grad)
        return energy, torch.cat(grads, 1)

    def share_networks(self, other: LinearFitting, whose: str) -> None:
        """Refuse: the networks of parts are not shared by tasks.

        Raises:
            ConfigError: in any case.
        """
        raise ConfigError(f"{whose} share fitting networks, which a model of type linear_ener cannot.")

    @property
    def case(self) -> int:
        """The index of the task, as in the parts that distinguish tasks."""
        return max(part.case for part in self.fittings)

    def set_case(self, index: int) -> None:
        """Set the index of the task in every part."""
        for part in self.fittings:
            part.set_case(index)

    def apply_statistics(self, sums: Sums, protect: float) -> None:
        """Hand the parts that read frame or atom parameters their sums."""
        for part, net in zip(self.fittings, self.section.nets, strict=True):
            reads = {} if net is None else {FPARAM: net.numb_fparam, APARAM: net.numb_aparam}
            part.apply_statistics({name: found for name, found in sums.items() if reads.get(name)}, protect)

    def blocks(self) -> list[Block]:
        """Return those of the parts."""
        return [block for part in self.fittings for block in part.blocks()]
