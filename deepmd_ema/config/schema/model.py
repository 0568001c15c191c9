"""The section ``model``: base class, and the standard type of descriptor and fitting network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.fields import (
    Check,
    WithoutEffect,
    not_negative,
    option,
    positive,
    positive_int,
    section,
)
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.messages import Names, Place, path_of, show
from deepmd_ema.config.registry import Family, Registry
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.bridging import (
    DEFAULT_INNER,
    DEFAULT_OUTER,
    Window,
    bridging_method,
    method_name,
)
from deepmd_ema.config.schema.descriptor import (
    DESCRIPTORS,
    DescriptorConfig,
    HasBridging,
)
from deepmd_ema.config.schema.pair_table import pair_table, read_table, table_findings
from deepmd_ema.findings import Findings, error, inside, unused, warning
from deepmd_ema.utils import is_number

_types = Check(lambda v: all(t >= 0 for t in v), "a list of type numbers, e.g. [0]")
_type_map = Check(
    lambda v: len(v) > 0 and all(name.strip() == name != "" for name in v),
    'a list of element names, e.g. ["O", "H"]',
)


# Records are named, not imported: their folders import this module.
_FAMILIES = "deepmd_ema.model.families"
FITTINGS = Registry(
    {
        "ener": f"{_FAMILIES}.ener:FAMILY",
        "dpa4_ener": f"{_FAMILIES}.dpa4_ener:FAMILY",
        "dipole": f"{_FAMILIES}.quantities:DIPOLE",
        "polar": f"{_FAMILIES}.quantities:POLAR",
        "property": f"{_FAMILIES}.quantities:PROPERTY",
        "dos": f"{_FAMILIES}.quantities:DOS",
    }
)


@section
class ModelConfig:
    """A section ``model`` of any type.

    Attributes:
        first_options: options of all types that are listed first.
    """

    type: ClassVar[str]
    first_options: ClassVar[Names] = (
        "type_map",
        "descriptor",
        "fitting_net",
        "models",
        "weights",
    )
    without_effect: ClassVar[WithoutEffect] = {
        "data_bias_nsample": (10, "the bias is fitted on data_stat_nbatch batches")
    }

    type_map: list[str] = option(
        check=_type_map,
        doc='Names of the elements, e.g. ["O", "H"]; type numbers are places in this list.',
    )
    data_stat_nbatch: int = option(
        10,
        "Number of batches of each system that the statistics are taken from.",
        positive_int,
    )
    data_stat_protect: float = option(
        0.01,
        "Smallest spread that statistics may have, against division by zero.",
        positive,
    )
    model_branch_alias: list[str] = option(
        [],
        "Other names by which `--head` finds the model of a task. No effect with one task.",
    )
    pair_exclude_types: list[list[int]] = option(
        [], "Pairs of types without any interaction, e.g. [[0, 1]].", common.type_pairs
    )
    atom_exclude_types: list[int] = option(
        [], "Types whose atoms contribute no energy of their own, e.g. [0].", _types
    )
    preset_out_bias: dict[str, list[Any]] | None = option(
        None,
        "Energy bias of each element instead of the fitted one; null is fitted. Needs "
        "`set_davg_zero`.",
        Check(
            lambda v: set(v) <= {"energy"},
            'like {"energy": [-13.6, null]}, one entry per element',
        ),
    )
    finetune_head: str = option(
        "",
        "Which model of the file of `--finetune` or `--init-model`, if it holds several, the run "
        "starts from, as `--model-branch`; `RANDOM` is a fresh fitting network. No effect in "
        "other runs. Of several tasks each has its own, for `--finetune`: without it a task "
        "starts from the model of its name, or has a fresh fitting network.",
    )
    finetune_bias: str = option(
        "auto",
        "`fit` moves the output bias to the data at a start with `--finetune`; `keep` takes that "
        "of the file, for data of the same method; `auto` moves it where label minus prediction "
        "is a shift of each element, except in a task that starts from the model of its name. No "
        "effect in other runs.",
        choices=("auto", "fit", "keep"),
    )

    if TYPE_CHECKING:  # options of some types, class attributes of the others

        @property
        def use_srtab(self) -> list[list[float]] | None:
            """Return the rows of a table that takes over at short distances, or None."""

        @property
        def bridging(self) -> Window | None:
            """Return the window of clamped distances beside an analytic pair energy, or None."""

        @property
        def descriptor(self) -> DescriptorConfig:
            """Return the section of the descriptor, or one that represents those of all parts."""

        @property
        def fitting_net(self) -> Any:
            """Return the section of the fitting network, or one that represents all parts."""

    @property
    def excluded_types(self) -> frozenset[int]:
        """Return the types whose atoms have nothing of the predicted quantity."""
        selected = self.fitting_net.sel_type
        excluded = set(self.atom_exclude_types)
        if selected is not None:
            excluded |= set(range(len(self.type_map))) - set(selected)
        return frozenset(excluded)

    def with_descriptor(self, descriptor: DescriptorConfig) -> ModelConfig:
        """Return the section with another descriptor, such as its own with numbers of neighbors."""
        raise NotImplementedError

    def summary(self) -> list[tuple[str, str]]:
        """Return names and texts of the parts of the model, rows of a table."""
        return [("elements", " ".join(self.type_map))]

    def findings(self) -> Findings:
        """Yield findings about the section and its parts, first errors of the section itself."""
        yield from self.conflicts()
        for place, part in self.parts():
            yield from inside(place, part.findings(self.type_map))
        # the caller drops findings about options that the input does not give
        if self.use_srtab is None:
            for name in ("smin_alpha", "sw_rmin", "sw_rmax"):
                yield unused(name, "use_srtab is not given")
        if self.bridging is None:
            for name in ("bridging_r_inner", "bridging_r_outer"):
                yield unused(name, "there is no bridging_method")

    def conflicts(self) -> Findings:
        """Yield errors of options of the section itself that contradict each other."""
        names = self.type_map
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            yield error(
                "type_map",
                f" = {show(names)}: {', '.join(twice)} occurs more than once. Name each element "
                "once.",
            )
        for values in (self.preset_out_bias or {}).values():
            wrong = [v for v in values if not _is_bias(v)]
            if wrong:
                yield error(
                    "preset_out_bias",
                    f": energy has {show(wrong[0])}: expected a number, or null for a bias that "
                    "is fitted.",
                )
            yield from common.not_one_per_element("preset_out_bias", values, names)
        yield from common.unknown_types(
            "pair_exclude_types", chain(*self.pair_exclude_types), names
        )
        excluded = self.atom_exclude_types
        yield from common.unknown_types("atom_exclude_types", excluded, names)
        # with sel_type of the fitting network, which may leave nothing over
        if self.excluded_types >= set(range(len(names))):
            yield error(
                "atom_exclude_types",
                f" = {show(excluded)}: every type is excluded, so nothing would be trained.",
            )

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield place and section of the parts that have findings of their own."""
        yield "descriptor", self.descriptor
        yield "fitting_net", self.fitting_net


@section
class NetworkConfig(ModelConfig):
    """A model of one descriptor and one fitting network."""

    descriptor: DescriptorConfig = option(
        registry=DESCRIPTORS, doc="How the surroundings of an atom are described."
    )
    fitting_net: Any = option(
        registry=FITTINGS,
        default_type="ener",
        doc="What follows from the descriptor, and how.",
    )
    bridging_method: str | None = option(
        None,
        "Analytic pair energy that is added, for atoms that come close: `zbl`, the screened "
        "repulsion of the nuclei, or `none`. The descriptor, which must be `dpa4`, then gets "
        "clamped distances. Frames with atoms nearer than `bridging_r_inner` should be left out "
        "of training by `training.training_data.min_pair_dist`.",
        bridging_method,
        convert=method_name,
    )
    bridging_r_inner: float = option(
        DEFAULT_INNER,
        "With `bridging_method`: shorter distances are this one for the descriptor.",
        positive,
        unit="angstrom",
    )
    bridging_r_outer: float = option(
        DEFAULT_OUTER,
        "With `bridging_method`: longer distances are not changed for the descriptor.",
        positive,
        unit="angstrom",
    )

    @property
    def bridging(self) -> Window | None:
        """Return the window of clamped distances beside an analytic pair energy, or None."""
        if self.bridging_method is None:
            return None
        return Window(self.bridging_r_inner, self.bridging_r_outer)

    def with_descriptor(self, descriptor: DescriptorConfig) -> NetworkConfig:
        """Return the section with another descriptor."""
        return replace(self, descriptor=descriptor)

    def summary(self) -> list[tuple[str, str]]:
        """Return names and texts of the parts of the model."""
        parts = [
            ("descriptor", self.descriptor.summary()),
            ("fitting", self.fitting_net.summary()),
        ]
        if self.bridging is not None:
            text = (
                f"{self.bridging_method}, distances clamped from "
                f"{self.bridging.inner:g} to {self.bridging.outer:g} angstrom"
            )
            parts.append(("short range", text))
        return [*super().summary(), *parts]

    def findings(self) -> Findings:
        """Yield findings, also warnings of energies that an isolated atom will not have."""
        yield from super().findings()
        # without the setting an isolated atom has the energy of the network beside the one given
        setting = self.descriptor.vacuum_needs
        if not setting:
            return
        text = f" is given: an isolated atom has this energy only with model.descriptor.{setting}."
        if self.fitting_net.atom_ener:
            yield warning("fitting_net.atom_ener", text)
        if self.preset_out_bias:
            yield warning("preset_out_bias", text)

    def conflicts(self) -> Findings:
        """Yield errors of options that contradict each other, also those of bridging."""
        yield from super().conflicts()
        fitting = self.fitting_net
        if fitting.is_equivariant and not getattr(
            self.descriptor, "has_equivariants", False
        ):
            text = (
                f": the descriptor {self.descriptor.type} has no vectors of which a "
                f"{fitting.labels[0]} is made."
            )
            yield error(
                "fitting_net.type",
                f"{text} Use se_e2_a, se_atten, dpa2, dpa3, or a hybrid of them.",
            )
        if ENERGY not in fitting.labels:
            text = f": is about energies, and fitting_net.type {fitting.type} has none. Remove it."
            for name in ("preset_out_bias", "use_srtab", "bridging_method"):
                if getattr(self, name):
                    yield error(name, text)
        if self.bridging is None:
            return
        # the clamped distances end within the cutoff, and zbl needs the charges of the nuclei
        first = ("bridging_r_inner", self.bridging_r_inner)
        last = ("bridging_r_outer", self.bridging_r_outer)
        yield from common.in_order(first, last, self.descriptor.cutoff)
        unknown = [name for name in self.type_map if name not in SYMBOLS]
        if unknown:
            yield error(
                "type_map",
                f" = {show(self.type_map)}: {unknown[0]} is no element, whose charge zbl needs.",
            )
        if not isinstance(self.descriptor, HasBridging):
            yield error(
                "bridging_method",
                f" = {show(self.bridging_method)}: the descriptor "
                f"{self.descriptor.type} does not have it, nor in DeePMD-kit. Use the "
                "descriptor dpa4, or use_srtab, a table.",
            )


@section
class StandardConfig(NetworkConfig):
    """The model that is trained: elements, descriptor and fitting network."""

    type = "standard"
    is_usual = True  # the manual names its options without the type

    use_srtab: list[list[float]] | None = option(
        None,
        "Text file of pair energies that take over at short distances: rows of a distance in "
        "angstrom, in even steps, and an energy in eV for each pair of elements (for O and H: "
        "O-O, O-H, H-H). A checkpoint holds its rows. Nearer than its first row the energy is "
        "nan. DeePMD-kit's torch backend has this for descriptors of mixed types only (not for "
        "`se_e2_a`), and reads only such frozen models.",
        pair_table,
        also=(str,),
        convert=read_table,
    )
    smin_alpha: float = option(
        0.1,
        "Decay length of the soft minimum of the distances to the neighbors, by which `use_srtab` "
        "is switched on.",
        positive,
        unit="angstrom",
    )
    sw_rmin: float | None = option(
        None,
        "An atom whose nearest neighbor (soft minimum) is nearer than this has the energy of "
        "`use_srtab` only.",
        not_negative,
        unit="angstrom",
    )
    sw_rmax: float | None = option(
        None,
        "An atom whose nearest neighbor is farther than this has the energy of the network only.",
        positive,
        unit="angstrom",
    )

    def summary(self) -> list[tuple[str, str]]:
        """Return names and texts of the parts of the model."""
        if self.use_srtab is None:
            return super().summary()
        first, last = self.use_srtab[0][0], self.use_srtab[-1][0]
        text = (
            f"table from {first:g} to {last:g} angstrom, off from {self.sw_rmin} "
            f"to {self.sw_rmax}"
        )
        return [*super().summary(), ("short range", text)]

    def conflicts(self) -> Findings:
        """Yield errors of options that contradict each other, also with the table."""
        yield from super().conflicts()
        if self.use_srtab is not None:
            rcut = self.descriptor.cutoff
            yield from table_findings(
                "use_srtab", self.use_srtab, len(self.type_map), rcut
            )
            if self.bridging is not None:
                yield error(
                    "use_srtab",
                    ": bridging_method is given too, and both act at short distances. Remove one "
                    "of the two.",
                )
            for name in ("sw_rmin", "sw_rmax"):
                if getattr(self, name) is None:
                    yield error(
                        name, ": required beside use_srtab, in angstrom, but missing."
                    )
        if self.sw_rmin is not None and self.sw_rmax is not None:
            # the switch reads distances to neighbors, of which there are none beyond the cutoff
            rmin = ("sw_rmin", self.sw_rmin)
            rmax = ("sw_rmax", self.sw_rmax)
            yield from common.in_order(rmin, rmax, self.descriptor.cutoff)


@dataclass(frozen=True)
class Link:
    """A part of the model of a task that other tasks may have too.

    Attributes:
        task: name of the task.
        part: ``type_map``, ``descriptor``, ``descriptor.list[0]`` or ``fitting_net``.
        key: name of the part in ``model.shared_dict``.
        level: extent shared with the first task that has the part: 0 all of it, 1 the embedding of
            elements only.
    """

    task: str
    part: str
    key: str
    level: int = 0

    @property
    def place(self) -> Place:
        """Place of the part in the model."""
        return path_of(self.part)

    @property
    def text(self) -> str:
        """The link as an input has it."""
        return f"{self.key}:{self.level}" if self.level else self.key


STANDARD = Family(
    StandardConfig,
    module="deepmd_ema.model.build:network_parts",
    tree="deepmd_ema.interop.dp:StandardTree",
)
MODELS = Registry(
    {
        "standard": "deepmd_ema.config.schema.model:STANDARD",
        "dpa4": f"{_FAMILIES}.dpa4_model:FAMILY",
        "linear_ener": f"{_FAMILIES}.linear_ener:FAMILY",
    }
)


def _is_bias(value: Any) -> bool:
    # DeePMD-kit also takes a bias as a list of its one component
    if isinstance(value, list):
        return len(value) == 1 and _is_bias(value[0])
    return value is None or (is_number(value) and math.isfinite(value))
