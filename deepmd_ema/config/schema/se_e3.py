"""The section of the descriptor se_e3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option, redefined
from deepmd_ema.config.schema import shared
from deepmd_ema.config.schema.se_e2_a import SeE2AConfig
from deepmd_ema.config.schema.texts import ActivationName


@dataclass(frozen=True, kw_only=True)
class SeE3Config(shared.ListPerElementSection):
    """Smooth descriptor of three-body angular information, one network for each pair of elements of the neighbors."""

    type: ClassVar[str] = "se_e3"
    aliases: ClassVar[tuple[str, ...]] = ("se_at", "se_a_3be", "se_t")
    neighbors_option: ClassVar[str] = "sel"
    type_one_side: ClassVar[bool] = True  # the networks do not know the element of the centre

    sel: list[int] | str = redefined(SeE2AConfig, "sel")
    rcut: float = redefined(SeE2AConfig, "rcut")
    rcut_smth: float = redefined(SeE2AConfig, "rcut_smth")
    neuron: list[int] = redefined(SeE2AConfig, "neuron")
    activation_function: ActivationName = redefined(SeE2AConfig, "activation_function")
    resnet_dt: bool = redefined(SeE2AConfig, "resnet_dt")
    precision: str = shared.precision_option()
    trainable: bool = redefined(SeE2AConfig, "trainable")
    seed: int | None = shared.seed_option()
    exclude_types: list[list[int]] = redefined(SeE2AConfig, "exclude_types")
    env_protection: float = redefined(SeE2AConfig, "env_protection")
    set_davg_zero: bool = option(
        False,
        doc="Whether the mean of the environment matrix is set to zero instead of taken from the data. Without effect "
        "on energies: the mean of angular columns is zero.",
    )

    def problems(self, type_map: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield what does not fit together."""
        yield from shared.smooth_before(self.rcut_smth, self.rcut)
        yield from self.sel_problems(type_map)
        yield from shared.excluded_types_exist(self.exclude_types, type_map)

    def summary(self) -> str:
        """Return the main options in words."""
        return (
            f"se_e3, rcut {self.rcut:g} angstrom (smooth from {self.rcut_smth:g}), sel {shared.sel_text(self.sel)}, "
            f"neuron {shared.dashes(self.neuron)}, {shared.dtype_name(self.precision)}"
        )

    @property
    def numbers_per_pair(self) -> int:
        """Return the numbers of the network's layers for each third atom, forward and backward."""
        return 3 * sum(self.neuron) * max(sum(self.neighbors or ()), 1) + 30

    @property
    def vacuum_needs(self) -> str:
        """Return nothing: the features of an isolated atom are zero."""
        return ""
