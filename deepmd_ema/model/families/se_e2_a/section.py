"""The section of the descriptor se_e2_a."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option, positive_int
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import PerElementSection
from deepmd_ema.findings import Finding


@dataclass(frozen=True, kw_only=True)
class SeE2AConfig(PerElementSection):
    """Smooth descriptor of two-body radial and angular information (DeepPot-SE)."""

    type: ClassVar[str] = "se_e2_a"
    has_equivariants: ClassVar[bool] = True
    aliases: ClassVar[tuple[str, ...]] = ("se_a",)

    # an atom has neuron[-1] * axis_neuron features
    axis_neuron: int = option(
        4,
        alias=("n_axis_neuron",),
        check=positive_int,
        doc="Number of columns of the embedding matrix that form the second factor of the "
        "descriptor.",
    )
    # the default of DeePMD-kit, T^2 networks, so that its inputs mean the same
    type_one_side: bool = option(
        False,
        doc="Whether the embedding network depends on the element of the neighbor only; otherwise "
        "there is one network for each pair of elements. True is faster, about equally "
        "accurate.",
    )
    set_davg_zero: bool = option(
        False,
        doc="Whether the mean of the environment matrix is set to zero instead of taken from the "
        "data.",
    )
    interpolate: str = common.interpolate_option()

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of options that contradict each other."""
        yield from super().findings(type_map)
        # the second factor is made of the first columns of the embedding
        yield from common.axis_fits(self.axis_neuron, self.neuron)

    def words(self) -> Iterator[str]:
        """Yield further options for the summary."""
        yield f"axis_neuron {self.axis_neuron}"
