"""The section of the descriptor se_e3_tebd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option, redefined
from deepmd_ema.config.schema import shared
from deepmd_ema.config.schema.se_atten import SeAttenConfig
from deepmd_ema.config.schema.texts import ActivationName


@dataclass(frozen=True, kw_only=True)
class SeE3TebdConfig(shared.OneListSection):
    """Descriptor of three-body angular information for any number of elements."""

    type: ClassVar[str] = "se_e3_tebd"
    aliases: ClassVar[tuple[str, ...]] = ()
    neighbors_option: ClassVar[str] = "sel"

    sel: int | list[int] | str = shared.sel_option()
    rcut: float = redefined(SeAttenConfig, "rcut")
    rcut_smth: float = redefined(SeAttenConfig, "rcut_smth")
    neuron: list[int] = redefined(SeAttenConfig, "neuron")
    tebd_dim: int = redefined(SeAttenConfig, "tebd_dim")
    tebd_input_mode: str = option(
        "concat",
        choices=("concat", "strip"),
        doc="`concat` puts the embeddings of the elements of both neighbors beside the product of their directions, "
        "`strip` into a network apart, whose output is computed once per pair of elements: faster, about equally "
        "accurate.",
    )
    resnet_dt: bool = redefined(SeAttenConfig, "resnet_dt")
    set_davg_zero: bool = option(
        True,
        doc="Whether the mean of the environment matrix is set to zero instead of taken from the data. Without effect "
        "on energies: the mean of angular columns is zero.",
    )
    activation_function: ActivationName = redefined(SeAttenConfig, "activation_function")
    env_protection: float = redefined(SeAttenConfig, "env_protection")
    smooth: bool = option(
        True, doc="Whether the gate of `strip` vanishes smoothly at the cutoff. Without effect on `concat`."
    )
    exclude_types: list[list[int]] = redefined(SeAttenConfig, "exclude_types")
    precision: str = shared.precision_option()
    trainable: bool = redefined(SeAttenConfig, "trainable")
    seed: int | None = shared.seed_option()
    concat_output_tebd: bool = redefined(SeAttenConfig, "concat_output_tebd")
    use_econf_tebd: bool = redefined(SeAttenConfig, "use_econf_tebd")
    use_tebd_bias: bool = redefined(SeAttenConfig, "use_tebd_bias", True)

    def problems(self, type_map: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield what does not fit together."""
        yield from shared.smooth_before(self.rcut_smth, self.rcut)
        yield from shared.excluded_types_exist(self.exclude_types, type_map)
        yield from shared.elements_known(self.use_econf_tebd, type_map)

    def idle_options(self) -> Iterator[tuple[str, str]]:
        """Yield the options without effect, and why."""
        yield "set_davg_zero", "only angular columns enter, and their mean is zero"
        if self.tebd_input_mode == "concat":
            yield "smooth", "only the gate of strip is switched off"

    def summary(self) -> str:
        """Return the main options in words."""
        return (
            f"{self.type}, rcut {self.rcut:g} angstrom (smooth from {self.rcut_smth:g}), "
            f"sel {shared.sel_text(self.sel)}, neuron {shared.dashes(self.neuron)}, {self.tebd_input_mode}, "
            f"{shared.dtype_name(self.precision)}"
        )

    @property
    def numbers_per_pair(self) -> int:
        """Return the numbers of the layers, forward and backward, for each of the pairs that a neighbor is in."""
        sel = (self.neighbors or (100,))[0]
        return sel * (3 * sum(self.neuron) + 2 * self.tebd_dim + 1)

    @property
    def vacuum_needs(self) -> str:
        """Return what makes an isolated atom a row of zeros."""
        return "concat_output_tebd = false" if self.concat_output_tebd else ""
