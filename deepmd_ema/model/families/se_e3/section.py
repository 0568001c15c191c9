"""The section of the descriptor se_e3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import redefined
from deepmd_ema.config.schema.descriptor_bases import PerElementSection
from deepmd_ema.findings import Finding, unused
from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig


@dataclass(frozen=True, kw_only=True)
class SeE3Config(PerElementSection):
    """Smooth descriptor of three-body angular information, one network for each pair of elements of
    the neighbors.
    """

    type: ClassVar[str] = "se_e3"
    aliases: ClassVar[tuple[str, ...]] = ("se_at", "se_a_3be", "se_t")
    # no setting is needed: an isolated atom has features of zero
    vacuum_needs: ClassVar[str] = ""
    # the networks do not see the element of the centre
    type_one_side: ClassVar[bool] = True

    set_davg_zero: bool = redefined(SeE3TebdConfig, "set_davg_zero", False)

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, and the option without effect."""
        yield from super().findings(type_map)
        yield unused(
            "set_davg_zero", "only angular columns enter, and their mean is zero"
        )
