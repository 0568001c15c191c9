"""The section of the descriptor se_e2_r."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option, redefined
from deepmd_ema.config.schema import shared
from deepmd_ema.config.schema.se_e2_a import SeE2AConfig
from deepmd_ema.config.schema.texts import ActivationName


@dataclass(frozen=True, kw_only=True)
class SeE2RConfig(shared.ListPerElementSection):
    """Smooth descriptor of two-body radial information (DeepPot-SE without angles)."""

    type: ClassVar[str] = "se_e2_r"
    aliases: ClassVar[tuple[str, ...]] = ("se_r",)
    neighbors_option: ClassVar[str] = "sel"

    sel: list[int] | str = redefined(SeE2AConfig, "sel")
    rcut: float = redefined(SeE2AConfig, "rcut")
    rcut_smth: float = redefined(SeE2AConfig, "rcut_smth")
    neuron: list[int] = redefined(SeE2AConfig, "neuron")
    activation_function: ActivationName = redefined(SeE2AConfig, "activation_function")
    resnet_dt: bool = redefined(SeE2AConfig, "resnet_dt")
    type_one_side: bool = option(
        True,
        doc="Whether the embedding network depends on the element of the neighbor only; otherwise there is one network "
        "for each pair of elements. DeePMD-kit declares false and trains true: its torch backends know nothing else, "
        "and do not read a model with false.",
    )
    precision: str = shared.precision_option()
    trainable: bool = redefined(SeE2AConfig, "trainable")
    seed: int | None = shared.seed_option()
    exclude_types: list[list[int]] = redefined(SeE2AConfig, "exclude_types")
    env_protection: float = redefined(SeE2AConfig, "env_protection")
    set_davg_zero: bool = redefined(SeE2AConfig, "set_davg_zero")

    def problems(self, type_map: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield what does not fit together."""
        yield from shared.smooth_before(self.rcut_smth, self.rcut)
        yield from self.sel_problems(type_map)
        yield from shared.excluded_types_exist(self.exclude_types, type_map)

    def summary(self) -> str:
        """Return the main options in words."""
        return (
            f"se_e2_r, rcut {self.rcut:g} angstrom (smooth from {self.rcut_smth:g}), sel {shared.sel_text(self.sel)}, "
            f"neuron {shared.dashes(self.neuron)}, {shared.dtype_name(self.precision)}"
        )

    @property
    def numbers_per_pair(self) -> int:
        """Return the numbers of the embedding's layers, forward and backward, and of a few vectors."""
        return 3 * sum(self.neuron) + 15
