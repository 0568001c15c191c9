"""The section of the descriptor se_e2_r."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option, redefined
from deepmd_ema.config.schema.descriptor_bases import PerElementSection
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig


@dataclass(frozen=True, kw_only=True)
class SeE2RConfig(PerElementSection):
    """Smooth descriptor of two-body radial information (DeepPot-SE without angles)."""

    type: ClassVar[str] = "se_e2_r"
    aliases: ClassVar[tuple[str, ...]] = ("se_r",)

    # see doc/differences.md
    type_one_side: bool = option(
        True,
        doc="Whether the embedding network depends on the element of the neighbor only; otherwise "
        "there is one network for each pair of elements. DeePMD-kit declares false and trains "
        "true: its torch backends know nothing else, and do not read a model with false.",
    )
    # SeE2AConfig is no base: features are the sums themselves, without axis_neuron
    set_davg_zero: bool = redefined(SeE2AConfig, "set_davg_zero")
    interpolate: str = redefined(SeE2AConfig, "interpolate")
