"""The section of the fitting network ener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import Check, WithoutEffect, not_negative, option
from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.config.messages import NOT_AVAILABLE
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.fitting_base import FittingOptions
from deepmd_ema.findings import Finding


@dataclass(frozen=True, kw_only=True)
class EnerFittingConfig(FittingOptions):
    """Network from the descriptor of an atom to its energy."""

    type: ClassVar[str] = "ener"
    without_effect: ClassVar[WithoutEffect] = {
        "layer_name": (None, "layers are not shared by name")
    }
    labels: ClassVar[tuple[str, ...]] = (ENERGY, FORCE, VIRIAL)

    # least squares of energies over the numbers of atoms of each element: without a bound,
    # elements in fixed proportions, as in one compound, would get huge biases that cancel
    rcond: float | None = option(
        None,
        check=not_negative,
        doc="Singular values below this fraction of the largest count as zero in the "
        "least-squares fit of the energy bias of each element; null is machine precision "
        "times the size of the problem.",
    )
    atom_ener: list[float | None] = option(
        [],
        unit="eV",
        doc="Energy of each isolated atom, one per element; null is fitted. Needs `set_davg_zero`.",
    )
    # declared so that inputs of DeePMD-kit with its default are read
    use_aparam_as_mask: bool = option(
        False,
        check=Check(lambda v: not v, f"false: true is {NOT_AVAILABLE}"),
        doc="Whether atom parameters mark real atoms instead of entering the network. Only false "
        "here.",
    )

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of lists with a wrong length."""
        if self.atom_ener:
            yield from common.not_one_per_element("atom_ener", self.atom_ener, type_map)
        yield from super().findings(type_map)
