"""The section ``model`` of type ``linear_ener``: weighted sums of energies of several models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from deepmd_ema.config.fields import Check, option, redefined
from deepmd_ema.config.messages import show
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor import DescriptorConfig
from deepmd_ema.config.schema.descriptor_bases import NeighborLists, OneListSection
from deepmd_ema.config.schema.model import FITTINGS, ModelConfig, StandardConfig
from deepmd_ema.config.schema.pair_table import (
    Table,
    pair_table,
    read_table,
    table_findings,
)
from deepmd_ema.findings import Finding, error, unused
from deepmd_ema.model.families.ener.section import EnerFittingConfig
from deepmd_ema.model.families.hybrid.section import HybridConfig

_OF_WHOLE = "the energies of the elements are fitted for the whole model"

# negative weights are allowed: a part may be subtracted
_weights = Check(
    lambda v: (
        v in ("mean", "sum")
        if isinstance(v, str)
        else len(v) > 0 and all(map(math.isfinite, v))
    ),
    '"mean", "sum", or a list of numbers, one for each model',
)


@dataclass(frozen=True, kw_only=True)
class NetworkPartConfig:
    """A descriptor and its fitting network as a part of the model."""

    type: ClassVar[str] = "standard"

    type_map: list[str] | None = option(
        None,
        doc="Names of the elements of this part; null takes those of the whole model.",
    )
    descriptor: DescriptorConfig = redefined(StandardConfig, "descriptor")
    fitting_net: Any = option(
        registry=FITTINGS,
        default_type="ener",
        left_out=("dipole", "polar", "property", "dos"),
        doc="How the energy follows from the descriptor.",
    )

    def summary(self) -> str:
        """Return the main options as text."""
        return f"{self.descriptor.summary()}; {self.fitting_net.summary()}"


@dataclass(frozen=True, kw_only=True)
class PairTableConfig(NeighborLists):
    """Pair energies from a table as a part of the model, such as a dispersion correction.

    Nothing of it is trained.
    """

    type: ClassVar[str] = "pairtab"
    aliases: ClassVar[tuple[str, ...]] = ()
    # what a table has in the place of options of a descriptor: it is read where parts are
    precision: ClassVar[str] = "float64"
    vacuum_needs: ClassVar[str] = ""
    has_type_embedding: ClassVar[bool] = False

    type_map: list[str] | None = redefined(NetworkPartConfig, "type_map")
    tab_file: Table = option(
        also=(str,),
        check=pair_table,
        convert=read_table,
        doc="Text file of pair energies: rows of a distance in angstrom, in even steps, and an "
        "energy in eV for each pair of the elements in `type_map` (for O and H: O-O, O-H, "
        "H-H). A checkpoint holds its rows. Nearer than its first row the energy is nan.",
    )
    rcut: float = common.cutoff_option(
        doc="Distance from which the energies are 0. They are cut off there, so the table should "
        "end in zeros."
    )
    sel: int | list[int] | str = redefined(OneListSection, "sel")

    def rows_for(self, type_map: Sequence[str]) -> Table:
        """Return the table with the energies of the pairs of ``type_map``, some of its elements."""
        elements = list(type_map) if self.type_map is None else self.type_map
        # elements that are missing have been refused by `findings`
        places = [elements.index(name) for name in type_map]
        # pairs of the new elements in the order of a table: the first not after the second
        columns = [
            _column(min(a, b), max(a, b), len(elements))
            for n, a in enumerate(places)
            for b in places[n:]
        ]
        # a row begins with its distance
        return [
            [row[0], *(row[1 + column] for column in columns)] for row in self.tab_file
        ]

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of a table that does not fit to the elements and the cutoff."""
        elements = list(type_map) if self.type_map is None else self.type_map
        missing = [name for name in type_map if name not in elements]
        if missing:
            expected = f"all elements of the model; {', '.join(missing)} is missing"
            yield error("type_map", f" = {show(elements)}: expected {expected}.")
        if len(set(elements)) < len(elements):
            yield error("type_map", f" = {show(elements)}: expected each element once.")
        yield from table_findings("tab_file", self.tab_file, len(elements), self.rcut)

    def summary(self) -> str:
        """Return the main options as text."""
        first, last = self.tab_file[0][0], self.tab_file[-1][0]
        return (
            f"pairtab, table from {first:g} to {last:g}, rcut {self.rcut:g}, sel "
            f"{common.sel_text(self.sel)}"
        )


Part = NetworkPartConfig | PairTableConfig


@dataclass(frozen=True, kw_only=True)
class PartDescriptors(HybridConfig):
    """Descriptors of the parts of a model; no section of an input."""

    type: ClassVar[str] = "linear_ener"

    def part(self, number: int) -> str:
        """Return the place of a part in the section ``model``."""
        # places in messages are those of the input, where a table is no section in a section
        is_table = isinstance(self.list[number], PairTableConfig)
        return f"models[{number}]" if is_table else f"models[{number}].descriptor"


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ModelConfig):
    """Several models of the same atoms, whose energies are added up with weights, and one energy of
    each element.
    """

    type: ClassVar[str] = "linear_ener"
    # options of other models that code reads of any model; a table is a part here
    use_srtab: ClassVar[None] = None
    bridging: ClassVar[None] = None

    models: list[NetworkPartConfig | PairTableConfig] = option(
        default_type="standard",
        doc="The sections of the parts: networks, which are trained together, and tables of pair "
        "energies. They share one list of neighbors, of which each sees those inside its own "
        "cutoff. DeePMD-kit's torch backend reads such a model if all its descriptors "
        "distinguish elements (not `se_e2_a`).",
    )
    weights: list[float] | str = option(
        check=_weights,
        doc="Weight of the energy of each part: `sum` is 1, `mean` is 1 divided by their number, "
        "a list has one number for each.",
    )

    @property
    def descriptor(self) -> DescriptorConfig:
        """Return a section that represents the descriptors of all parts, also of tables."""
        parts = [
            part if isinstance(part, PairTableConfig) else part.descriptor
            for part in self.models
        ]
        return PartDescriptors(list=parts)

    @property
    def fitting_net(self) -> EnerFittingConfig:
        """Return a section with the numbers of conditions, on which parts that read any agree."""
        # no network is built from it: checks, batches and biases read numbers of conditions here
        nets = [
            part.fitting_net
            for part in self.models
            if isinstance(part, NetworkPartConfig)
        ]
        return EnerFittingConfig(
            numb_fparam=max((net.numb_fparam for net in nets), default=0),
            numb_aparam=max((net.numb_aparam for net in nets), default=0),
            dim_case_embd=max((net.dim_case_embd for net in nets), default=0),
            default_fparam=next(
                (net.default_fparam for net in nets if net.numb_fparam), None
            ),
        )

    @property
    def part_weights(self) -> tuple[float, ...]:
        """Return the weight of each part."""
        if isinstance(self.weights, str):
            # "sum" adds up parts of one energy; "mean" is an ensemble of models of the same energy
            count = len(self.models)
            return (1.0 / count if self.weights == "mean" else 1.0,) * count
        return tuple(self.weights)

    def with_descriptor(self, descriptor: DescriptorConfig) -> LinearConfig:
        """Return the section with the parts of ``descriptor``, a changed copy of its own."""
        assert isinstance(descriptor, PartDescriptors)
        models: list[Part] = []
        for part, part_descriptor in zip(self.models, descriptor.list):
            if isinstance(part, NetworkPartConfig):
                models.append(replace(part, descriptor=part_descriptor))
            else:
                # a table is its own descriptor section
                assert isinstance(part_descriptor, PairTableConfig)
                models.append(part_descriptor)
        return replace(self, models=models)

    def standard(self, part: NetworkPartConfig) -> StandardConfig:
        """Return a part as the section of a model, without options of the whole."""
        return StandardConfig(
            type_map=self.type_map,
            descriptor=part.descriptor,
            fitting_net=part.fitting_net,
        )

    def summary(self) -> list[tuple[str, str]]:
        """Return names and texts of what the model is."""
        parts = enumerate(zip(self.models, self.part_weights))
        return [
            *super().summary(),
            *(
                (f"part {k}", f"{weight:g} x {part.summary()}")
                for k, (part, weight) in parts
            ),
        ]

    def findings(self) -> Iterator[Finding]:
        """Yield findings, also an option of the parts that has no effect."""
        yield from super().findings()
        for place, _ in self.parts():
            # tables and descriptors are among the places
            if place.endswith("fitting_net"):
                yield unused(f"{place}.rcond", _OF_WHOLE)

    def conflicts(self) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, also between the parts."""
        yield from super().conflicts()
        # tables have no parameters, and an optimizer needs some
        if not any(isinstance(part, NetworkPartConfig) for part in self.models):
            expected = (
                "at least one part with a descriptor, because nothing else is trained"
            )
            yield error("models", f": expected {expected}.")
        # the type of values is checked before, so that a text is one of the two words
        if not isinstance(self.weights, str) and len(self.weights) != len(self.models):
            expected = f"{len(self.models)}, one for each of models"
            text = f" = {show(self.weights)}: has length {len(self.weights)}"
            yield error("weights", f"{text}, expected {expected}.")
        for k, part in enumerate(self.models):
            if not isinstance(part, NetworkPartConfig):
                continue
            # batches have the types of the model, and parts read them without a map of elements
            if part.type_map not in (None, self.type_map):
                expected = f"that of the model, {show(self.type_map)}"
                text = f" = {show(part.type_map)}: expected {expected}. Remove it."
                yield error(f"models[{k}].type_map", text)
            # each part would be shifted to these energies, which their weighted sum is not
            energies = part.fitting_net.atom_ener
            if energies:
                text = f" = {show(energies)}: {_OF_WHOLE}."
                instead = "Remove it, or give model.preset_out_bias."
                yield error(f"models[{k}].fitting_net.atom_ener", f"{text} {instead}")
        # all parts get the same frame and atom parameters; 0 of a part means that it reads none
        nets = [
            part.fitting_net
            for part in self.models
            if isinstance(part, NetworkPartConfig)
        ]
        for name in ("numb_fparam", "numb_aparam", "default_fparam", "dim_case_embd"):
            count = "numb_fparam" if name == "default_fparam" else name
            values = [getattr(net, name) for net in nets if getattr(net, count)]
            if any(value != values[0] for value in values):
                text = f": {name} of the fitting networks is {show(values)}"
                yield error("models", f"{text}, expected one value, or 0 for none.")

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield place and section of descriptors, fitting networks and tables."""
        for k, part in enumerate(self.models):
            if isinstance(part, NetworkPartConfig):
                yield f"models[{k}].descriptor", part.descriptor
                yield f"models[{k}].fitting_net", part.fitting_net
            else:
                yield f"models[{k}]", part


def _column(first: int, second: int, num_types: int) -> int:
    """Return the place of a pair of elements in the upper triangle of ``num_types``, row by row.

    The first element is not after the second.
    """
    return first * num_types - first * (first - 1) // 2 + second - first
