"""The sections of the fitting networks dipole, polar, property and dos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import Check, option, positive_int
from deepmd_ema.config.labels import (
    APARAM,
    ATOM_DIPOLE,
    ATOM_POLAR,
    DIPOLE,
    DOS,
    FPARAM,
    LABELS,
    NAMES_OF_DPDATA,
    POLAR,
)
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.fitting_base import FittingOptions
from deepmd_ema.findings import Finding
from deepmd_ema.model.families.dpa4.section import some_widths


def _as_list(types: int | list[int]) -> list[int]:
    return types if isinstance(types, list) else [types]


# numbers, not symbols, as in DeePMD-kit; whether there are so many is checked with the type map
_types = Check(
    lambda v: v != [] and all(t >= 0 for t in _as_list(v)),
    "type numbers, e.g. [0]; null is all",
)
_SELECTED = (
    "Types whose atoms have a {0}, as `model.atom_exclude_types` names the others; null is all. "
    "Files of atoms "
)
_SELECTED += (
    "may then have rows of these atoms only. DeePMD-kit's torch backends ignore it."
)

# names of files that a set of frames may have already: a property of this name would be read from
# them
_TAKEN = {"coord", "box", "atom_types", "atype", *NAMES_OF_DPDATA, FPARAM, APARAM}
_TAKEN |= {name for label in LABELS.values() for name in (label.name, *label.files)}


@dataclass(frozen=True, kw_only=True)
class DipoleFittingConfig(FittingOptions):
    """Network from the descriptor of an atom to its dipole, a vector that rotates with the
    atoms.
    """

    type: ClassVar[str] = "dipole"
    labels: ClassVar[tuple[str, ...]] = (DIPOLE, ATOM_DIPOLE)
    # the values turn with the atoms: the descriptor must have equivariant vectors
    is_equivariant: ClassVar[bool] = True
    loss: ClassVar[str] = "tensor"

    sel_type: list[int] | None = option(
        None,
        alias=("dipole_type",),
        also=(int,),
        convert=_as_list,
        check=_types,
        doc=_SELECTED.format("dipole"),
    )

    @property
    def bias_effect(self) -> float | list[float]:
        """A vector has no bias that turns with the atoms."""
        return 0.0

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of lists that do not fit to the elements."""
        yield from super().findings(type_map)
        yield from common.unknown_types("sel_type", self.sel_type or (), type_map)


@dataclass(frozen=True, kw_only=True)
class PolarFittingConfig(DipoleFittingConfig):
    """Network from the descriptor of an atom to its polarizability, a symmetric matrix that rotates
    too.
    """

    type: ClassVar[str] = "polar"
    labels: ClassVar[tuple[str, ...]] = (POLAR, ATOM_POLAR)

    sel_type: list[int] | None = option(
        None,
        alias=("pol_type",),
        also=(int,),
        convert=_as_list,
        check=_types,
        doc=_SELECTED.format("polarizability"),
    )
    # DeePMD-kit has true: M outputs instead of M^2
    fit_diag: bool = option(
        True,
        doc="Whether the network gives the diagonal of a matrix between equivariant vectors, or "
        "all of it.",
    )
    scale: float | list[float] = option(
        1.0,
        doc="Factor of the network for all elements, or of each, for numbers of about 1.",
    )
    shift_diag: bool = option(
        True,
        doc="Whether the mean of the diagonal for each element is added, which is taken from the "
        "data.",
    )

    @property
    def bias_effect(self) -> float | list[float]:
        """The bias of the diagonal is multiplied like the network."""
        # the fit of biases multiplies counts of atoms by it; 0: nothing is fitted
        return self.scale if self.shift_diag else 0.0

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of lists that do not fit to the elements."""
        yield from super().findings(type_map)
        if isinstance(self.scale, list):
            yield from common.not_one_per_element("scale", self.scale, type_map)


@dataclass(frozen=True, kw_only=True)
class PropertyFittingConfig(FittingOptions):
    """Network from the descriptor of an atom to invariant numbers of a frame, such as a band
    gap.
    """

    type: ClassVar[str] = "property"
    loss: ClassVar[str] = "property"

    neuron: list[int] = option(
        [120, 120, 120],
        alias=("n_neuron",),
        check=some_widths,
        doc="Widths of the hidden layers. A layer as wide as the one before it has a skip "
        "connection. 0 is 8/3 of the number of inputs, rounded up to a multiple of 32.",
    )
    # names of atomic and of spectral labels are made by a prefix
    property_name: str = option(
        check=Check(
            lambda v: (
                v.isidentifier()
                and v not in _TAKEN
                and not v.startswith(("atom_", DOS))
            ),
            "the name of a file without .npy that is no other label, e.g. band_gap",
        ),
        doc="Name of the labels: `NAME.npy` of a set, or that of `info` of a frame.",
    )
    task_dim: int = option(1, check=positive_int, doc="How many numbers a frame has.")
    intensive: bool = option(
        False,
        doc="Whether the property is the mean over atoms (a band gap), not their sum (a "
        "magnetization).",
    )
    distinguish_types: bool = option(
        True, doc="Whether each element has a bias of its own."
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what the model predicts."""
        # a number in brackets is the width of a label, which is no part of its name
        name = f"{self.property_name}[{self.task_dim}]"
        return name, f"atom_{name}"


@dataclass(frozen=True, kw_only=True)
class DosFittingConfig(FittingOptions):
    """Network from the descriptor of an atom to its density of states."""

    type: ClassVar[str] = "dos"
    loss: ClassVar[str] = "dos"

    numb_dos: int = option(
        300,
        check=positive_int,
        doc="Number of energies at which the density of states is given.",
    )
    # bounds the biases of elements in fixed proportions, as in the fitting network ener
    rcond: float | None = option(
        None,
        doc="Singular values below this fraction of the largest count as zero in the fit of the "
        "bias.",
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what the model predicts."""
        return f"{DOS}[{self.numb_dos}]", f"atom_{DOS}[{self.numb_dos}]"
