"""The section of the descriptor dpa4c (DPA4C)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from deepmd_ema.config.fields import Check, not_negative_int, option, positive_int, redefined
from deepmd_ema.config.messages import NOT_AVAILABLE
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import DescriptorOptions, NeighborList

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor import DescriptorConfig
    from deepmd_ema.geometry import NeighborStatistics

CHANNELS, DEGREES = (8, 16, 32, 64, 128), (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class DPA4CConfig(NeighborList):
    """Local descriptor of products of moments of spherical harmonics (DPA4C)."""

    type: ClassVar[str] = "dpa4c"
    aliases: ClassVar[tuple[str, ...]] = ("DPA4C",)
    has_type_embedding: ClassVar[bool] = True
    first_options: ClassVar[tuple[str, ...]] = ("rcut", "channels", "lmax", "radial_modes")

    rcut: float = common.cutoff_option("Cutoff radius.", 6.0)
    channels: int = option(
        32,
        check=Check(lambda v: v in CHANNELS, "8, 16, 32, 64 or 128"),
        doc="Number of functions of the distance of two atoms. Moments of higher degrees have fewer.",
    )
    lmax: int = option(
        2, check=Check(lambda v: v in DEGREES, "2, 3 or 4"), doc="Largest degree of the spherical harmonics: 2, 3 or 4."
    )
    basis_type: str = option("bessel", choices=("bessel", "gaussian"), doc="Functions of the distance.")
    n_radial: int = option(16, check=positive_int, doc="Number of functions of the distance.")
    radial_modes: int = option(
        0,
        check=not_negative_int,
        doc="Number of further functions of the distance, which each pair of elements mixes in its own way. With 0 the "
        "functions of all pairs are those of one, scaled and shifted.",
    )
    use_amp: bool = option(
        False, doc="Whether pairs are computed in bfloat16 in training on a GPU. No effect on a CPU."
    )
    exclude_types: list[list[int]] = redefined(DescriptorOptions, "exclude_types")
    precision: str = redefined(DescriptorOptions, "precision", "float32")
    trainable: bool = redefined(DescriptorOptions, "trainable")
    add_chg_spin_ebd: bool = option(
        False,
        check=Check(lambda v: not v, f"false: charge and spin as an input are {NOT_AVAILABLE}"),
        doc="Embedding of charge and spin. Only false here.",
    )
    default_chg_spin: list[float] | None = option(
        None,
        check=Check(lambda v: v is None, f"null: charge and spin as an input are {NOT_AVAILABLE}"),
        doc="Charge and spin of frames that do not give them. Only null here.",
    )
    seed: int | None = redefined(DescriptorOptions, "seed")
    interpolate: str = common.interpolate_option()

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of channels of the moments of each degree, from 0 to ``lmax``."""
        first = max(4, 2 ** math.ceil(math.log2(self.channels) / 2))
        return (self.channels, first, max(4, first // 2), *(self.lmax - 2) * (1,))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the number of channels of each degree, from 1 to ``lmax``, in products of three moments."""
        return (self.widths[2], 2, *(self.lmax - 2) * (1,))

    @property
    def neighbors(self) -> tuple[int, ...] | None:
        """Return a number that no atom reaches: all neighbors count."""
        return (common.MAX_SIZE,)

    def with_neighbors(self, found: NeighborStatistics) -> DPA4CConfig:
        """Return the section as it is."""
        return self

    def with_neighbors_of(self, saved: DescriptorConfig) -> DPA4CConfig:
        """Return the section as it is."""
        return self

    def problems(self, type_map: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield options that contradict each other."""
        yield from common.unknown_types("exclude_types", chain(*self.exclude_types), type_map)

    def summary(self) -> str:
        """Return the main options as text."""
        modes = f", {self.radial_modes} radial modes" if self.radial_modes else ""
        return (
            f"dpa4c (DPA4C), rcut {self.rcut:g} angstrom, degrees up to {self.lmax}, {self.channels} channels{modes}, "
            f"{common.dtype_name(self.precision)}"
        )

    @property
    def numbers_per_pair(self) -> int:
        """Return the numbers of the radial network and of the harmonics, forward and backward."""
        return 3 * (self.n_radial + 8 * self.channels + self.radial_modes) + 6 * (self.lmax + 1) ** 2

    @property
    def vacuum_needs(self) -> str:
        """Return the setting that makes the features of an isolated atom zero: another type of descriptor."""
        return 'type = "se_e2_a"'
