"""The section of the fitting network dpa4_ener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import Check, option, redefined
from deepmd_ema.config.messages import NOT_AVAILABLE
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.model.families.dpa4.section import some_widths, widths_of
from deepmd_ema.model.families.ener.section import EnerFittingConfig


@dataclass(frozen=True, kw_only=True)
class DPA4EnerConfig(EnerFittingConfig):
    """Network of gated layers from the descriptor of an atom to its energy (DPA-4)."""

    type: ClassVar[str] = "dpa4_ener"
    aliases: ClassVar[tuple[str, ...]] = ("sezm_ener",)

    # 8/3 of the inputs: with gates, about as many parameters as plain layers of 4 times the inputs
    neuron: list[int] = option(
        [0],
        alias=("n_neuron",),
        check=some_widths,
        doc="Widths of the hidden layers. 0 is `8/3` of the number of inputs, rounded up to a "
        "multiple of 32.",
    )
    activation_function: ActivationName = common.activation_option(
        ActivationName("silu"), "Activation function of the gates."
    )
    # as the descriptor dpa4, which is in float32 by default
    precision: str = redefined(EnerFittingConfig, "precision", "float32")
    # declared, because inputs of DeePMD-kit have it for every fitting network
    resnet_dt: bool = option(
        False,
        check=Check(
            lambda v: not v,
            f"false: these layers have no skip connections; true is {NOT_AVAILABLE}",
        ),
        doc="Only false: gated layers have no skip connections.",
    )
    case_film_embd: bool = option(
        False,
        doc="Whether the vector that distinguishes tasks scales and shifts the numbers of all "
        "layers, instead of being an input. No effect with `dim_case_embd` 0.",
    )

    def widths(self, num_inputs: int) -> list[int]:
        """Return the widths of the hidden layers of a network with so many inputs."""
        return widths_of(self.neuron, num_inputs)
