"""The section of the descriptor se_e2_a."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from deepmd_ema.config.fields import Check, not_negative, option, positive_int
from deepmd_ema.config.schema import shared
from deepmd_ema.config.schema.texts import ActivationName


def _is_sel(value: Any) -> bool:
    if isinstance(value, str):
        return shared.is_auto_sel(value)
    return len(value) > 0 and min(value) >= 0 and 0 < sum(value) <= shared.LARGEST_SIZE


_sel = Check(
    _is_sel,
    f"a list with one whole number per element of type_map, e.g. [46, 92], at most {shared.LARGEST_SIZE:,} together, "
    f'or "auto" or "auto:1.2", the number from 1 to {shared.LARGEST_RATIO}',
)


@dataclass(frozen=True, kw_only=True)
class SeE2AConfig(shared.ListPerElementSection):
    """Smooth descriptor of two-body radial and angular information (DeepPot-SE)."""

    type: ClassVar[str] = "se_e2_a"
    aliases: ClassVar[tuple[str, ...]] = ("se_a",)
    neighbors_option: ClassVar[str] = "sel"

    sel: list[int] | str = option(
        "auto",
        check=_sel,
        doc="Most neighbors kept of each element, the nearest first. `auto` counts the neighbors in the training data "
        "and takes 1.1 times the largest number, rounded up to a multiple of 4; `auto:1.2` takes 1.2 times.",
    )
    rcut: float = option(6.0, unit="angstrom", check=shared.cutoff, doc="Cutoff radius.")
    rcut_smth: float = option(
        0.5, unit="angstrom", check=not_negative, doc="Distance from which 1/r is switched off smoothly towards `rcut`."
    )
    neuron: list[int] = option(
        [10, 20, 40],
        check=shared.layer_widths,
        doc="Widths of the hidden layers of the embedding network. A layer as wide as the one before it, or twice as "
        "wide, has a skip connection.",
    )
    axis_neuron: int = option(
        4,
        alias=("n_axis_neuron",),
        check=positive_int,
        doc="Number of columns of the embedding matrix that form the second factor of the descriptor.",
    )
    activation_function: ActivationName = shared.activation_option(
        "Activation function of the embedding network; `linear` and `none` are none. `silut:T` is silu up to T and "
        "bends into a tanh above; T of `silut` is 3."
    )
    resnet_dt: bool = option(False, doc="Whether skip connections have a trained step size.")
    type_one_side: bool = option(
        False,
        doc="Whether the embedding network depends on the element of the neighbor only; otherwise there is one network "
        "for each pair of elements. True is faster, about equally accurate.",
    )
    precision: str = shared.precision_option()
    trainable: bool = option(True, doc="Whether the parameters are trained.")
    seed: int | None = shared.seed_option()
    exclude_types: list[list[int]] = option(
        [],
        check=shared.type_pairs,
        doc="Pairs of types (places in `type_map`) that do not see each other, e.g. [[0, 1]].",
    )
    env_protection: float = option(
        0.0, unit="angstrom", check=not_negative, doc="Added to distances before they are divided by."
    )
    set_davg_zero: bool = option(
        False, doc="Whether the mean of the environment matrix is set to zero instead of taken from the data."
    )

    def problems(self, type_map: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield what does not fit together."""
        yield from shared.smooth_before(self.rcut_smth, self.rcut)
        yield from shared.axis_fits(self.axis_neuron, self.neuron)
        yield from self.sel_problems(type_map)
        yield from shared.excluded_types_exist(self.exclude_types, type_map)

    def summary(self) -> str:
        """Return the main options in words."""
        return (
            f"se_e2_a, rcut {self.rcut:g} angstrom (smooth from {self.rcut_smth:g}), sel {shared.sel_text(self.sel)}, "
            f"neuron {shared.dashes(self.neuron)}, axis_neuron {self.axis_neuron}, {shared.dtype_name(self.precision)}"
        )

    @property
    def numbers_per_pair(self) -> int:
        """Return the numbers of the embedding's layers, forward and backward, and of a few vectors."""
        return 3 * sum(self.neuron) + 30
