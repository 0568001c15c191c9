"""The section of the fitting network ener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import Check, not_negative, option, redefined
from deepmd_ema.config.messages import NOT_AVAILABLE, show
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import DescriptorOptions
from deepmd_ema.config.schema.text_options import ActivationName


@dataclass(frozen=True, kw_only=True)
class EnerFittingConfig:
    """Network from the descriptor of an atom to its energy."""

    type: ClassVar[str] = "ener"

    numb_fparam: int = option(
        0, check=common.num_parameters, doc="Number of frame parameters (`fparam.npy`), e.g. an electronic temperature."
    )
    numb_aparam: int = option(0, check=common.num_parameters, doc="Number of parameters per atom (`aparam.npy`).")
    default_fparam: list[float] | None = option(
        None, doc="Frame parameters of systems without `fparam.npy`; `numb_fparam` numbers."
    )
    dim_case_embd: int = option(
        0,
        check=common.num_parameters,
        doc="Length of the vector that distinguishes the tasks of a multi-task model, an input of the network; zeros "
        "with one task.",
    )
    neuron: list[int] = option(
        [120, 120, 120],
        alias=("n_neuron",),
        check=common.layer_widths,
        doc="Widths of the hidden layers. A layer as wide as the one before it has a skip connection.",
    )
    activation_function: ActivationName = common.activation_option(
        "Activation function of the hidden layers; the same names as in the descriptor."
    )
    precision: str = redefined(DescriptorOptions, "precision")
    resnet_dt: bool = option(True, doc="Whether skip connections have a trained step size.")
    trainable: bool | list[bool] = option(
        True, doc="Whether the parameters are trained; a list (one per layer) trains them only if all are true."
    )
    rcond: float | None = option(
        None,
        check=not_negative,
        doc="Singular values below this fraction of the largest count as zero in the least-squares fit of the energy "
        "bias of each element; null is machine precision times the size of the problem.",
    )
    seed: int | None = redefined(DescriptorOptions, "seed")
    atom_ener: list[float | None] = option(
        [], unit="eV", doc="Energy of each isolated atom, one per element; null is fitted. Needs `set_davg_zero`."
    )
    layer_name: list[str | None] | None = option(
        None, doc="Names for sharing layers in DeePMD-kit's TensorFlow backend. No effect here."
    )
    use_aparam_as_mask: bool = option(
        False,
        check=Check(lambda v: not v, f"false: true is {NOT_AVAILABLE}"),
        doc="Whether atom parameters mark real atoms instead of entering the network. Only false here.",
    )

    def problems(self, type_map: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the option and the rest of the message of what does not fit together."""
        if self.atom_ener:
            yield from common.not_one_per_element("atom_ener", self.atom_ener, type_map)
        if self.default_fparam is not None and len(self.default_fparam) != self.numb_fparam:
            found = f" = {show(self.default_fparam)}: has length {len(self.default_fparam)}"
            yield "default_fparam", f"{found}, expected numb_fparam = {self.numb_fparam}."
        if isinstance(self.trainable, list) and len(self.trainable) != len(self.neuron) + 1:
            expected = f"{len(self.neuron) + 1}: one for each layer of neuron and one for the output"
            yield "trainable", f" = {show(self.trainable)}: has length {len(self.trainable)}, expected {expected}."

    def idle_options(self) -> Iterator[tuple[str, str]]:
        """Yield the option without effect, and why."""
        yield "layer_name", "layers are not shared by name"

    def summary(self) -> str:
        """Return the main options as text."""
        conditions = [f"{name} {number}" for name in ("numb_fparam", "numb_aparam") if (number := getattr(self, name))]
        return ", ".join([f"ener, neuron {common.dashes(self.neuron)}", *conditions, common.dtype_name(self.precision)])
