"""Options that sections of all fitting networks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from deepmd_ema.config.fields import option, redefined, section
from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.messages import Names, show
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import DescriptorOptions
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.findings import Findings, error


@section
class FittingOptions:
    """A network from the descriptor of an atom, and conditions, to a quantity of it.

    Attributes:
        labels: names of the predicted labels, first that of a frame, which are read where data have
            them.
        rcond: singular values below this fraction of the largest count as zero in the fit of the
            bias; None is machine precision times the size of the problem.
        atom_ener: energy of each isolated atom, as far as it is given, eV.
        sel_type: types whose atoms have the quantity; None: all.
        intensive: whether the value of a frame is the mean over its atoms, not their sum.
        distinguish_types: whether each element has a bias of its own.
        is_equivariant: whether it rotates with the atoms, as vectors and tensors do.
        loss: the type of the loss that compares it with labels.
    """

    type: ClassVar[str]
    is_equivariant: ClassVar[bool] = False
    loss: ClassVar[str] = "ener"

    numb_fparam: int = option(
        0,
        "Number of frame parameters (`fparam.npy`), e.g. an electronic temperature.",
        common.num_parameters,
    )
    numb_aparam: int = option(
        0, "Number of parameters per atom (`aparam.npy`).", common.num_parameters
    )
    default_fparam: list[float] | None = option(
        None, "Frame parameters of systems without `fparam.npy`; `numb_fparam` numbers."
    )
    dim_case_embd: int = option(
        0,
        "Length of the vector that distinguishes the tasks of a multi-task model, an input of the "
        "network; zeros with one task.",
        common.num_parameters,
    )
    neuron: list[int] = option(
        [120, 120, 120],
        "Widths of the hidden layers. A layer as wide as the one before it has a skip connection.",
        common.layer_widths,
        alias=("n_neuron",),
    )
    activation_function: ActivationName = common.activation_option(
        ActivationName("tanh"),
        "Activation function of the hidden layers; the same names as in the descriptor.",
    )
    precision: str = redefined(DescriptorOptions, "precision")
    resnet_dt: bool = option(True, "Whether skip connections have a trained step size.")
    trainable: bool | list[bool] = option(
        True,
        "Whether the parameters are trained; a list (one per layer) trains them only if all are "
        "true.",
    )
    seed: int | None = redefined(DescriptorOptions, "seed")

    if TYPE_CHECKING:  # options of some types only

        @property
        def labels(self) -> Names:
            """Return the names of the predicted labels."""

        @property
        def rcond(self) -> float | None:
            """Return the fraction."""

        @property
        def atom_ener(self) -> Sequence[float | None]:
            """Return the energies."""

        @property
        def intensive(self) -> bool:
            """Return whether the value of a frame is the mean over its atoms."""

        @property
        def distinguish_types(self) -> bool:
            """Return whether each element has a bias of its own."""

        @property
        def sel_type(self) -> Sequence[int] | None:
            """Return the types."""

    else:  # values of types without these options; as annotations they would be options themselves
        rcond = None
        atom_ener = ()
        sel_type = None
        intensive = False
        distinguish_types = True

    @property
    def bias_effect(self) -> float | list[float]:
        """Change of the value of an atom per unit of the output bias, of all elements or each.

        0: there is no bias.
        """
        return 1.0

    @property
    def metrics(self) -> Names:
        """Letters of the errors in tables."""
        return tuple(
            error.metric
            for name in self.labels
            for error in LABELS[name].errors
            if error.metric
        )

    def findings(self, type_map: Sequence[str]) -> Findings:
        """Yield errors of lists with a wrong length."""
        if (
            self.default_fparam is not None
            and len(self.default_fparam) != self.numb_fparam
        ):
            yield error(
                "default_fparam",
                f" = {show(self.default_fparam)}: has length "
                f"{len(self.default_fparam)}, expected numb_fparam = {self.numb_fparam}.",
            )
        if (
            isinstance(self.trainable, list)
            and len(self.trainable) != len(self.neuron) + 1
        ):
            yield error(
                "trainable",
                f" = {show(self.trainable)}: has length {len(self.trainable)}, expected "
                f"{len(self.neuron) + 1}: one for each layer of neuron and one for the "
                "output.",
            )

    def summary(self) -> str:
        """Return the main options as text."""
        conditions = [
            f"{name} {number}"
            for name in ("numb_fparam", "numb_aparam")
            if (number := getattr(self, name))
        ]
        parts = [
            f"{self.type}, neuron {common.dashes(self.neuron)}",
            *conditions,
            common.dtype_name(self.precision),
        ]
        return ", ".join(parts)
