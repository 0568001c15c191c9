"""The section ``model``: elements, descriptor and fitting network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from deepmd_ema.config.fields import Check, not_negative, not_negative_int, option, positive, positive_int

ACTIVATIONS = (
    "tanh", "relu", "relu6", "softplus", "sigmoid", "gelu", "gelu_tf", "silu", "silut", "linear", "none", "None",
)  # fmt: skip
PRECISIONS = ("default", "float64", "float32")

_bent = Check(lambda v: re.fullmatch(r"silut:\d+(\.\d*)?", v) is not None, "silut:T with a number T, e.g. silut:3")
_layers = Check(lambda v: len(v) > 0 and all(n > 0 for n in v), "a list of at least one whole number > 0")
_pairs = Check(
    lambda v: all(len(pair) == 2 and min(pair) >= 0 for pair in v),
    "a list of pairs of type numbers, e.g. [[0, 1]]",
)
_types = Check(lambda v: all(t >= 0 for t in v), "a list of type numbers, e.g. [0]")


def _is_sel(value: Any) -> bool:
    if isinstance(value, str):
        found = re.fullmatch(r"auto(?::(\d+(?:\.\d*)?))?", value)
        return found is not None and (found[1] is None or float(found[1]) >= 1)
    return len(value) > 0 and min(value) >= 0 and sum(value) > 0


_sel = Check(_is_sel, 'a list with one whole number per element of type_map, e.g. [46, 92], or "auto" or "auto:1.2"')
_type_map = Check(
    lambda v: len(v) > 0 and all(name.strip() == name != "" for name in v),
    'a list of element names, e.g. ["O", "H"]',
)


@dataclass(frozen=True, kw_only=True)
class SeE2A:
    """Smooth descriptor of two-body radial and angular information (DeepPot-SE)."""

    type: ClassVar[str] = "se_e2_a"
    aliases: ClassVar[tuple[str, ...]] = ("se_a",)

    sel: list[int] | str = option(
        "auto",
        check=_sel,
        doc="Most neighbors kept of each element, the nearest first. `auto` counts the neighbors in the training data "
        "and takes 1.1 times the largest number, rounded up to a multiple of 4; `auto:1.2` takes 1.2 times.",
    )
    rcut: float = option(6.0, unit="angstrom", check=positive, doc="Cutoff radius.")
    rcut_smth: float = option(
        0.5, unit="angstrom", check=not_negative, doc="Distance from which 1/r is switched off smoothly towards `rcut`."
    )
    neuron: list[int] = option(
        [10, 20, 40],
        check=_layers,
        doc="Widths of the hidden layers of the embedding network. A layer as wide as the one before it, or twice as "
        "wide, has a skip connection.",
    )
    axis_neuron: int = option(
        4,
        alias=("n_axis_neuron",),
        check=positive_int,
        doc="Number of columns of the embedding matrix that form the second factor of the descriptor.",
    )
    activation_function: str = option(
        "tanh",
        choices=ACTIVATIONS,
        check=_bent,
        doc="Activation function of the embedding network; `linear` and `none` are none. `silut:T` is silu up to T and "
        "bends into a tanh above; T of `silut` is 3.",
    )
    resnet_dt: bool = option(False, doc="Whether skip connections have a trained step size.")
    type_one_side: bool = option(
        False,
        doc="Whether the embedding network depends on the element of the neighbor only; otherwise there is one network "
        "for each pair of elements. True is faster, about equally accurate.",
    )
    precision: str = option("default", choices=PRECISIONS, doc="Precision of the parameters; `default` is float64.")
    trainable: bool = option(True, doc="Whether the parameters are trained.")
    seed: int | None = option(
        None, check=not_negative_int, doc="Seed of the initial parameters; null takes it from `training.seed`."
    )
    exclude_types: list[list[int]] = option(
        [], check=_pairs, doc="Pairs of types (places in `type_map`) that do not see each other, e.g. [[0, 1]]."
    )
    env_protection: float = option(
        0.0, unit="angstrom", check=not_negative, doc="Added to distances before they are divided by."
    )
    set_davg_zero: bool = option(
        False, doc="Whether the mean of the environment matrix is set to zero instead of taken from the data."
    )

    @property
    def sel_numbers(self) -> list[int] | None:
        """``sel`` as numbers, or None while it is left to the data."""
        return None if isinstance(self.sel, str) else list(self.sel)

    @property
    def sel_margin(self) -> float:
        """How many slots more than the neighbors found ``auto`` takes, as a factor: ``auto:1.2``; ``auto`` is 1.1."""
        return float(str(self.sel).partition(":")[2] or 1.1)


@dataclass(frozen=True, kw_only=True)
class EnerFitting:
    """Network from the descriptor of an atom to its energy."""

    type: ClassVar[str] = "ener"

    numb_fparam: int = option(
        0, check=not_negative_int, doc="Number of frame parameters (`fparam.npy`), e.g. an electronic temperature."
    )
    numb_aparam: int = option(0, check=not_negative_int, doc="Number of parameters per atom (`aparam.npy`).")
    default_fparam: list[float] | None = option(
        None, doc="Frame parameters of systems without `fparam.npy`; `numb_fparam` numbers."
    )
    dim_case_embd: int = option(
        0,
        check=Check(lambda v: v == 0, "0: case embeddings are known to DeePMD-kit, not available in dp-ema 0.1"),
        doc="Number of cases of a multi-task model; 0 here.",
    )
    neuron: list[int] = option(
        [120, 120, 120],
        alias=("n_neuron",),
        check=_layers,
        doc="Widths of the hidden layers. A layer as wide as the one before it has a skip connection.",
    )
    activation_function: str = option(
        "tanh",
        choices=ACTIVATIONS,
        check=_bent,
        doc="Activation function of the hidden layers; the same names as in the descriptor.",
    )
    precision: str = option("default", choices=PRECISIONS, doc="Precision of the parameters; `default` is float64.")
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
    seed: int | None = option(
        None, check=not_negative_int, doc="Seed of the initial parameters; null takes it from `training.seed`."
    )
    atom_ener: list[float | None] = option(
        [], unit="eV", doc="Energy of each isolated atom, one per element; null is fitted. Needs `set_davg_zero`."
    )
    layer_name: list[str | None] | None = option(
        None, doc="Names for sharing layers in DeePMD-kit's TensorFlow backend. No effect here."
    )
    use_aparam_as_mask: bool = option(
        False,
        check=Check(lambda v: not v, "false: true is known to DeePMD-kit, not available in dp-ema 0.1"),
        doc="Whether atom parameters mark real atoms instead of entering the network. Only false here.",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained: elements, descriptor and fitting network."""

    type: ClassVar[str] = "standard"

    type_map: list[str] = option(
        check=_type_map, doc='Names of the elements, e.g. ["O", "H"]; type numbers are places in this list.'
    )
    descriptor: SeE2A = option(doc="How the surroundings of an atom are described.")
    fitting_net: EnerFitting = option(default_type="ener", doc="How the energy follows from the descriptor.")
    data_stat_nbatch: int = option(
        10, check=positive_int, doc="Number of batches of each system that the statistics are taken from."
    )
    data_stat_protect: float = option(
        0.01, check=positive, doc="Smallest spread that statistics may have, against division by zero."
    )
    data_bias_nsample: int = option(10, check=positive_int, doc="Not used by DeePMD-kit's torch backends. No effect.")
    pair_exclude_types: list[list[int]] = option(
        [], check=_pairs, doc="Pairs of types without any interaction, e.g. [[0, 1]]."
    )
    atom_exclude_types: list[int] = option(
        [], check=_types, doc="Types whose atoms contribute no energy of their own, e.g. [0]."
    )
    preset_out_bias: dict[str, list[Any]] | None = option(
        None,
        check=Check(lambda v: set(v) <= {"energy"}, 'like {"energy": [-13.6, null]}, one entry per element'),
        doc="Energy bias of each element instead of the fitted one; null is fitted. Needs `set_davg_zero`.",
    )
