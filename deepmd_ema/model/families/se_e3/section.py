"""The section of the descriptor se_e3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import redefined
from deepmd_ema.config.schema.descriptor_bases import PerElementSection
from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig


@dataclass(frozen=True, kw_only=True)
class SeE3Config(PerElementSection):
    """Smooth descriptor of three-body angular information, one network for each pair of elements of the neighbors."""

    type: ClassVar[str] = "se_e3"
    aliases: ClassVar[tuple[str, ...]] = ("se_at", "se_a_3be", "se_t")
    vacuum_needs: ClassVar[str] = ""  # the features of an isolated atom are zero
    type_one_side: ClassVar[bool] = True  # the networks do not know the element of the centre

    set_davg_zero: bool = redefined(SeE3TebdConfig, "set_davg_zero", False)

    def idle_options(self) -> Iterator[tuple[str, str]]:
        """Yield the option without effect, and why."""
        yield "set_davg_zero", "only angular columns enter, and their mean is zero"
