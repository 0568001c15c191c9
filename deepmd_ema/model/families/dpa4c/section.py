"""The section of the descriptor dpa4c (DPA4C)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import Check, not_negative_int, option
from deepmd_ema.config.schema import common
from deepmd_ema.model.families.dpa4.section import AllNeighborsSection

# channels are powers of 2, from which widths follow; harmonics are written out to degree 4
CHANNELS, DEGREES = (8, 16, 32, 64, 128), (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class DPA4CConfig(AllNeighborsSection):
    """Local descriptor of products of moments of spherical harmonics (DPA4C)."""

    type: ClassVar[str] = "dpa4c"
    aliases: ClassVar[tuple[str, ...]] = ("DPA4C",)
    first_options: ClassVar[tuple[str, ...]] = (
        "rcut",
        "channels",
        "lmax",
        "radial_modes",
    )

    channels: int = option(
        32,
        check=Check(lambda v: v in CHANNELS, "8, 16, 32, 64 or 128"),
        doc="Number of functions of the distance of two atoms. Moments of higher degrees have "
        "fewer.",
    )
    lmax: int = option(
        2,
        check=Check(lambda v: v in DEGREES, "2, 3 or 4"),
        doc="Largest degree of the spherical harmonics: 2, 3 or 4.",
    )
    radial_modes: int = option(
        0,
        check=not_negative_int,
        doc="Number of further functions of the distance, which each pair of elements mixes in "
        "its own way. With 0 the functions of all pairs are those of one, scaled and shifted.",
    )
    use_amp: bool = option(
        False,
        doc="Whether pairs are computed in bfloat16 in training on a GPU. No effect on a CPU.",
    )
    interpolate: str = common.interpolate_option()

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of channels of the moments of each degree, from 0 to ``lmax``."""
        # degree 1 has about the root of the channels, degree 2 half of that, higher degrees one:
        # the number of products grows with the square and the cube of these
        first = max(4, 2 ** math.ceil(math.log2(self.channels) / 2))
        return (self.channels, first, max(4, first // 2), *(self.lmax - 2) * (1,))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the number of channels of each degree, from 1 to ``lmax``, in products of three
        moments.
        """
        # degree 1 is reduced to the width of degree 2, and degree 2 to two channels
        return (self.widths[2], 2, *(self.lmax - 2) * (1,))

    def summary(self) -> str:
        """Return the main options as text."""
        modes = f", {self.radial_modes} radial modes" if self.radial_modes else ""
        return (
            f"dpa4c (DPA4C), rcut {self.rcut:g} angstrom, degrees up to {self.lmax}, "
            f"{self.channels} channels{modes}, {common.dtype_name(self.precision)}"
        )
