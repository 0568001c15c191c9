"""Base classes of sections of descriptors: options, neighbors, rules and summaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.fields import (
    not_negative,
    not_negative_int,
    option,
    positive_int,
    section,
)
from deepmd_ema.config.messages import Names, Values, show
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.findings import Findings, error

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor import DescriptorConfig
    from deepmd_ema.geometry import NeighborStatistics

Section = TypeVar("Section", bound="NeighborLists")


@section
class DescriptorOptions:
    """Options that every descriptor has."""

    aliases: ClassVar[Names] = ()

    precision: str = option(
        "default",
        "Precision of the parameters; `default` is float64.",
        choices=("default", "float64", "float32"),
        unavailable=r"b?float16\Z",
    )
    trainable: bool = option(True, "Whether the parameters are trained.")
    seed: int | None = option(
        None,
        "Seed of the initial parameters; null takes it from `training.seed`.",
        not_negative_int,
    )
    exclude_types: list[list[int]] = option(
        [],
        "Pairs of types (places in `type_map`) that do not see each other, e.g. [[0, 1]].",
        common.type_pairs,
    )
    env_protection: float = option(
        0.0,
        "Added to distances before they are divided by.",
        not_negative,
        unit="angstrom",
    )


@section
class TypeEmbeddedOptions(DescriptorOptions):
    """Options of descriptors with a type embedding, in which one network serves all elements."""

    has_type_embedding = True

    concat_output_tebd: bool = option(
        True, "Whether the embedding of its element is among the features of an atom."
    )
    use_econf_tebd: bool = option(
        False,
        "Whether the embedding of an element is a function of its electronic configuration; "
        "`type_map` must hold symbols of elements.",
    )
    use_tebd_bias: bool = option(False, "Whether the embedding of elements has a bias.")

    def element_findings(self, type_map: Sequence[str]) -> Findings:
        """Yield errors of options that contradict the elements."""
        yield from common.unknown_types(
            "exclude_types", chain(*self.exclude_types), type_map
        )
        # names of types are free otherwise: O_water and O_ion may be two of them
        unknown = (
            [name for name in type_map if name not in SYMBOLS]
            if self.use_econf_tebd
            else []
        )
        if unknown:
            yield error(
                "use_econf_tebd",
                f" = true: type_map has {show(unknown[0])}, expected symbols of "
                "elements, whose electronic configurations are known.",
            )


@section
class NeighborLists:
    """Sections with a list of neighbors, and perhaps shorter ones inside of it.

    Attributes:
        sel_options: options of the most neighbors of each list, each with that of its cutoff; the
            longest list first.
        counts_elements: whether the number is a list of numbers by element, or one for all.
    """

    neighbors_option: ClassVar[str] = "sel"
    sel_options: ClassVar[Mapping[str, str]] = {"sel": "rcut"}
    counts_elements: ClassVar[bool] = False

    @property
    def cutoff(self) -> float:
        """Return the cutoff of the longest list."""
        # attrgetter, because an option of an inner section has a dot in its name: repinit.nsel
        return float(attrgetter(self.sel_options[self.neighbors_option])(self))

    @property
    def neighbors(self) -> tuple[int, ...] | None:
        """Return the number of the longest list, by element or one for all.

        None while any list is ``auto``.
        """
        # the longest list is declared first
        sels = [attrgetter(name)(self) for name in self.sel_options]
        if any(isinstance(sel, str) for sel in sels):
            return None
        numbers = sels[0] if isinstance(sels[0], list) else sels[:1]
        return tuple(numbers) if self.counts_elements else (sum(numbers),)

    def with_neighbors(self: Section, statistics: NeighborStatistics) -> Section:
        """Return the section with each ``auto`` replaced by a number, or by one per element."""
        values: Values = {}
        for name, cutoff in self.sel_options.items():
            sel = attrgetter(name)(self)
            if not isinstance(sel, str):
                continue
            if self.counts_elements:
                values[name] = common.auto_sel(statistics.max_neighbors, sel)
            elif name == self.neighbors_option:
                (values[name],) = common.auto_sel([statistics.max_total], sel)
            else:
                # a shorter list; the statistics were measured at the cutoff of the longest
                total = statistics.max_within(attrgetter(cutoff)(self))
                (values[name],) = common.auto_sel([total], sel)
        return common.with_options(self, values)

    def with_neighbors_of(self: Section, saved: DescriptorConfig) -> Section:
        """Return the section with each number that is ``auto`` as in ``saved``."""
        # another type of descriptor gives the numbers another meaning
        if not isinstance(saved, type(self)):
            return self
        left_open = [
            name for name in self.sel_options if isinstance(attrgetter(name)(self), str)
        ]
        return common.with_options(
            self, {name: attrgetter(name)(saved) for name in left_open}
        )


@section
class ChargeSpinOptions:
    """Options of descriptors that may see charge and spin of a frame in DeePMD-kit."""

    add_chg_spin_ebd: bool = common.unavailable_option(
        False, "charge and spin as an input are"
    )
    default_chg_spin: list[float] | None = common.unavailable_option(
        None, "charge and spin of frames without them are"
    )


@section
class ListSection(DescriptorOptions, NeighborLists):
    """Options of descriptors with one cutoff, one list of neighbors and an embedding network."""

    if TYPE_CHECKING:  # subclasses declare it, with values of different types
        sel: Any

    type: ClassVar[str]
    first_options: ClassVar[Names] = (
        "rcut",
        "rcut_smth",
        "neuron",
        "activation_function",
        "resnet_dt",
        "sel",
        "tebd_dim",
    )

    rcut: float = common.cutoff_option(6.0, "Cutoff radius.")
    rcut_smth: float = common.length_option(
        0.5, "Distance from which 1/r is switched off smoothly towards `rcut`."
    )
    neuron: list[int] = option(
        [10, 20, 40],
        "Widths of the hidden layers of the embedding network. A layer as wide as the one before "
        "it, or twice as wide, has a skip connection.",
        common.layer_widths,
    )
    activation_function: ActivationName = common.activation_option(
        ActivationName("tanh"),
        "Activation function of the embedding network; `linear` and `none` are none. `silut:T` is "
        "silu up to T and bends into a tanh above; T of `silut` is 3.",
    )
    resnet_dt: bool = option(
        False, "Whether skip connections have a trained step size."
    )

    def summary(self) -> str:
        """Return the main options as text."""
        texts = (
            f"{self.type}, rcut {self.rcut:g} angstrom (smooth from {self.rcut_smth:g})",
            f"sel {common.sel_text(self.sel)}",
            f"neuron {common.dashes(self.neuron)}",
            *self.words(),
            common.dtype_name(self.precision),
        )
        return ", ".join(texts)

    def words(self) -> Iterator[str]:
        """Yield further options for the summary."""
        yield from ()


@section
class PerElementSection(ListSection):
    """Sections that keep the nearest ``sel`` neighbors of each element, with a network for each."""

    has_type_embedding = False
    counts_elements = True

    if TYPE_CHECKING:  # options of subclasses, whose defaults and texts differ
        set_davg_zero: bool

        @property
        def type_one_side(self) -> bool:
            """Return whether the network does not depend on the element of the centre."""

    sel: list[int] | str = common.sel_option(
        "Most neighbors kept of each element, the nearest first.",
        "auto",
        "a list with one whole number per element of type_map, e.g. [46, 92], at most "
        f"{common.MAX_SIZE:,} together",
    )

    def findings(self, type_map: Sequence[str]) -> Findings:
        """Yield errors of options that contradict each other."""
        yield from common.smooth_before(self.rcut_smth, self.rcut)
        if not isinstance(self.sel, str):
            yield from common.not_one_per_element("sel", self.sel, type_map)
        yield from common.unknown_types(
            "exclude_types", chain(*self.exclude_types), type_map
        )

    @property
    def vacuum_needs(self) -> str:
        """Return the setting that makes the features of an isolated atom zero.

        Without it they are features of rows ``-mean / stddev``.
        """
        return "" if self.set_davg_zero else "set_davg_zero = true"


@section
class OneListSection(TypeEmbeddedOptions, ListSection):
    """Options of descriptors with one list of neighbors for all elements, which are embedded."""

    if TYPE_CHECKING:

        @property
        def tebd_input_mode(self) -> str:
            """Return ``concat``, elements are inputs of the network, or ``strip``, of another."""

        @property
        def smooth(self) -> bool:
            """Return whether the gate of ``strip`` vanishes smoothly at the cutoff."""

    sel: int | list[int] | str = common.sel_option(
        "Most neighbors kept, of all elements together, the nearest first; a list is added up.",
        "auto",
        f"a whole number > 0 (or a list of them, which are added up), at most {common.MAX_SIZE:,}",
    )
    tebd_dim: int = option(8, "Numbers of the embedding of an element.", positive_int)
