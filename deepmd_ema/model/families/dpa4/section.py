"""The section of the descriptor dpa4 (DPA-4, SeZM)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, ClassVar

from deepmd_ema.config.fields import (
    Check,
    WithoutEffect,
    not_negative_int,
    option,
    positive,
    positive_int,
    redefined,
)
from deepmd_ema.config.messages import show
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.bridging import Window
from deepmd_ema.config.schema.descriptor_bases import (
    ChargeSpinOptions,
    DescriptorOptions,
    NeighborLists,
)
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.findings import Finding, error, unused

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing since Python 3.11

    from deepmd_ema.config.schema.descriptor import DescriptorConfig
    from deepmd_ema.geometry import NeighborStatistics

# tables of rotations grow fast: 455 monomials for each of 49 x 49 elements at degree 6
MAX_DEGREE = 6

_degree = Check(
    lambda v: 0 <= v <= MAX_DEGREE, f"a whole number from 0 to {MAX_DEGREE}"
)
_some_degrees = Check(
    lambda v: all(0 <= n <= MAX_DEGREE for n in v),
    f"a list of whole numbers from 0 to {MAX_DEGREE}",
)
# the first of radial functions, the second of messages
_exponents = Check(
    lambda v: len(v) == 2 and min(v) > 0, "a list of two whole numbers > 0"
)


def _flags(number: int) -> Check:
    """Return the check of an option that is one boolean or a list of ``number``."""
    return Check(
        lambda v: not isinstance(v, list) or len(v) == number,
        f"a list of {number} booleans",
    )


some_widths = Check(
    lambda v: all(0 <= n <= common.MAX_SIZE for n in v),
    f"a list of whole numbers from 0 to {common.MAX_SIZE:,}",
)


def widths_of(neuron: Sequence[int], num_inputs: int) -> list[int]:
    """Return the widths of the hidden layers of a network with so many inputs, 0 resolved."""
    # multiples of 32, as DeePMD-kit has them
    return [width or 32 * math.ceil(8 * num_inputs / 3 / 32) for width in neuron]


# one number for all three places of `grid_operation`, or one for each
_branches = Check(
    lambda v: len(v) == 3 and min(v) >= 0 if isinstance(v, list) else v >= 0,
    "a whole number >= 0, or a list of three of them",
)


@dataclass(frozen=True, kw_only=True)
class AllNeighborsSection(ChargeSpinOptions, NeighborLists):
    """Options of descriptors of spherical harmonics, which see all neighbors inside the cutoff."""

    has_type_embedding: ClassVar[bool] = True
    # the layers give an isolated atom features, which are not zero: another type is needed
    vacuum_needs: ClassVar[str] = 'type = "se_e2_a"'

    rcut: float = common.cutoff_option(6.0, "Cutoff radius.")
    basis_type: str = option(
        "bessel", choices=("bessel", "gaussian"), doc="Functions of the distance."
    )
    n_radial: int = option(
        16, check=positive_int, doc="Number of functions of the distance."
    )
    precision: str = redefined(DescriptorOptions, "precision", "float32")
    trainable: bool = redefined(DescriptorOptions, "trainable")
    seed: int | None = redefined(DescriptorOptions, "seed")
    exclude_types: list[list[int]] = redefined(DescriptorOptions, "exclude_types")

    @property
    def neighbors(self) -> tuple[int, ...] | None:
        """Return a number that no atom reaches: all neighbors count."""
        # the list of a batch is as long as its atom with the most neighbors needs
        return (common.MAX_SIZE,)

    def with_neighbors(self, statistics: NeighborStatistics) -> Self:
        """Return the section as it is."""
        return self

    def with_neighbors_of(self, saved: DescriptorConfig) -> Self:
        """Return the section as it is."""
        return self

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of options that contradict each other."""
        yield from common.unknown_types(
            "exclude_types", chain(*self.exclude_types), type_map
        )


@dataclass(frozen=True, kw_only=True)
class DPA4Config(AllNeighborsSection):
    """Descriptor of messages of spherical harmonics (DPA-4, SeZM).

    Attributes:
        window: distances (angstrom) between which bridging fades atoms out, or None.
    """

    type: ClassVar[str] = "dpa4"
    aliases: ClassVar[tuple[str, ...]] = ("DPA4", "SeZM", "sezm")
    # defaults of DeePMD-kit; other values are read, and reported as without effect
    without_effect: ClassVar[WithoutEffect] = {
        "sel": (256, "all neighbors inside the cutoff count"),
        "random_gamma": (
            True,
            "results do not depend on a rotation of each pair about its axis",
        ),
    }
    first_options: ClassVar[tuple[str, ...]] = (
        "rcut",
        "channels",
        "lmax",
        "mmax",
        "n_blocks",
        "mixing_layers",
    )

    # radial functions, and the first coefficients of atoms
    env_exp: list[int] = option(
        [7, 5],
        check=_exponents,
        doc="Exponents of the envelopes of radial functions and of messages. The larger they are, "
        "the later the envelope falls from 1.",
    )
    channels: int = option(
        64, check=positive_int, doc="Channels of each coefficient of an atom."
    )
    radial_mlp: list[int] = option(
        [0],
        check=some_widths,
        doc="Widths of the hidden layers behind the functions of the distance; 0 is `channels`.",
    )
    edge_norm: bool = option(
        True,
        doc="Whether numbers that vanish at the cutoff are normalised. The potential then has a "
        "bend just inside the cutoff where an atom has few neighbors; false is smooth.",
    )
    use_env_seed: bool = option(
        True,
        doc="Whether the first coefficients of an atom depend on its surroundings, not on its "
        "element only.",
    )
    # options of DeePMD-kit that change formulas: only their defaults are read
    edge_cartesian: bool = common.unavailable_option(False, "Cartesian messages are")
    node_cartesian: str | int = common.unavailable_option(
        "none", "Cartesian products are"
    )
    # degrees and orders of coefficients; schedules have one number for each block
    lmax: int = option(
        3,
        check=_degree,
        doc=f"Largest degree of the spherical harmonics, at most {MAX_DEGREE}.",
    )
    l_schedule: list[int] | None = option(
        None,
        check=_some_degrees,
        doc="Largest degree in each block, not increasing; replaces `lmax` and `n_blocks`.",
    )
    mmax: int | None = option(
        1,
        check=_degree,
        doc="Largest order in the frames of pairs; at most the degree, which is taken for null.",
    )
    kmax: int = option(
        1, check=_degree, doc="Largest order of the frames of functions of rotations."
    )
    m_schedule: list[int] | None = option(
        None, check=_some_degrees, doc="Largest order in each block instead of `mmax`."
    )
    extra_node_l: int = option(
        0,
        check=_degree,
        doc="How much larger the degree of the coefficients of atoms is than that of messages.",
    )
    n_blocks: int = option(
        3,
        check=not_negative_int,
        doc="Number of blocks. With one block an atom sees as far as `rcut`.",
    )
    # layers in the frames of pairs
    so2_norm: bool = option(
        False,
        doc="Whether coefficients are normalised before each layer but the last of a frame.",
    )
    mixing_layers: int = option(
        4,
        alias=("so2_layers",),
        check=not_negative_int,
        doc="Number of linear layers in the frames of pairs.",
    )
    so2_attn_res: str = common.unavailable_option(
        "none", "attention over layers of a frame is"
    )
    radial_so2_mode: str = option(
        "degree_channel",
        choices=("none", "degree", "degree_channel"),
        doc="How a message depends on the distance: `none` by a factor of each degree, `degree` "
        "by a matrix between the degrees, `degree_channel` by one for each channel.",
    )
    radial_so2_rank: int = option(
        1,
        check=not_negative_int,
        doc="Rank, over channels, of the matrices of `degree_channel`; 0: the full one.",
    )
    # streams of messages, and the attention by which messages are summed
    n_focus: int = option(
        1,
        check=positive_int,
        doc="Number of streams of messages, with their own layers.",
    )
    focus_dim: int = option(
        0, check=not_negative_int, doc="Channels of a stream; 0 is `channels`."
    )
    n_atten_head: int = option(
        1,
        check=not_negative_int,
        doc="Heads of the attention by which messages are summed; 0: sums without attention.",
    )
    atten_f_mix: bool = option(False, doc="Whether attention sees all streams as one.")
    atten_v_proj: bool = option(False, doc="Whether a linear map comes before the sum.")
    atten_o_proj: bool = option(False, doc="Whether a linear map comes after the sum.")
    # networks of atoms, norms, and how layers are added
    ffn_neurons: int = option(
        0,
        check=not_negative_int,
        doc="Hidden width of the networks of atoms; 0: `8/3 channels` with gates of their own, `4 "
        "channels` without, rounded up to a multiple of 32.",
    )
    grid_mlp: bool | list[bool] = option(
        False,
        check=_flags(3),
        doc="Whether products on grids are between linear maps of the channels; a list is that of "
        "pairs, of messages with atoms, and of the networks of atoms.",
    )
    grid_branch: int | list[int] = option(
        0,
        check=_branches,
        doc="Number of products on grids among which scalars choose; a list as for `grid_mlp`.",
    )
    ffn_blocks: int = option(
        1, check=positive_int, doc="Networks of atoms in each block."
    )
    sandwich_norm: list[bool] = option(
        [False, True, True, False],
        check=_flags(4),
        doc="Whether coefficients are normalised before and after messages, before and after "
        "networks of atoms.",
    )
    mlp_bias: bool = option(False, doc="Whether layers have biases.")
    layer_scale: bool = option(
        False,
        doc="Whether each layer is added with trained factors, small at the start.",
    )
    full_attn_res: str = common.unavailable_option("none", "attention over layers is")
    block_attn_res: str = common.unavailable_option("none", "attention over blocks is")
    # places where functions on grids are multiplied: `grid_mlp` and `grid_branch` give the kind
    s2_activation: list[bool] = option(
        [False, True],
        check=_flags(2),
        doc="Whether functions of directions are multiplied instead of gated, in the frames of "
        "pairs and in the networks of atoms.",
    )
    ffn_so3_grid: bool = option(
        False, doc="Whether networks of atoms multiply functions of rotations."
    )
    node_wise_s2: bool = option(
        False,
        doc="Whether functions of directions of both atoms of a pair are multiplied.",
    )
    node_wise_so3: bool = option(False, doc="The same of functions of rotations.")
    message_node_s2: bool = option(
        False,
        doc="Whether messages are multiplied with the atom, as functions of directions.",
    )
    message_node_so3: bool = option(False, doc="The same as functions of rotations.")
    so3_readout: str = option(
        "none",
        choices=("none", "glu", "mlp"),
        doc="How features follow from coefficients: `none` of degree 0 alone, or by products of "
        "all, as with `grid_mlp` off (`glu`) or on (`mlp`).",
    )
    readout_layers: int = option(
        1,
        check=positive_int,
        doc="Number of networks between coefficients and features.",
    )
    lebedev_quadrature: bool | list[bool] = option(
        True,
        check=_flags(2),
        doc="Has no effect: DeePMD-kit's choice of points on a sphere. Products are exact on any "
        "points here.",
    )
    activation_function: ActivationName = common.activation_option(
        ActivationName("silu"), "Activation function of all layers."
    )
    glu_activation: bool = option(
        True, doc="Whether gates of networks of atoms have channels of their own."
    )
    use_amp: bool = option(
        True,
        doc="Whether blocks are computed in bfloat16 in training on a GPU. No effect on a CPU.",
    )
    eps: float = option(
        1e-7, check=positive, doc="Added to numbers before they are divided by."
    )
    # no option: it follows from model.bridging_method, see `bridged`
    window: Window | None = None

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the largest degree of the messages in each block."""
        return (
            tuple(self.l_schedule)
            if self.l_schedule is not None
            else (self.lmax,) * self.n_blocks
        )

    @property
    def orders(self) -> tuple[int, ...]:
        """Return the largest order in each block."""
        # an order is at most the degree; null is all orders
        if self.m_schedule is not None:
            return tuple(self.m_schedule)
        return tuple(
            degree if self.mmax is None else min(self.mmax, degree)
            for degree in self.degrees
        )

    @property
    def largest_degree(self) -> int:
        """Return the largest degree of messages."""
        return max(self.degrees, default=self.lmax)

    @property
    def readout_degree(self) -> int:
        """Return the largest degree from which features follow."""
        if self.so3_readout == "none":
            return 0
        # the last block decides; without blocks, the first coefficients are read
        return (
            self.degrees[-1] if self.degrees else self.largest_degree
        ) + self.extra_node_l

    def grid_operation(self, place: int) -> tuple[str, int]:
        """Return kind and number of the products of pairs (0), messages (1) or networks (2)."""
        branches = (
            self.grid_branch[place]
            if isinstance(self.grid_branch, list)
            else self.grid_branch
        )
        is_mlp = (
            self.grid_mlp[place] if isinstance(self.grid_mlp, list) else self.grid_mlp
        )
        return ("branch", branches) if branches else ("mlp" if is_mlp else "glu", 1)

    def hidden_width(self, gated: bool) -> int:
        """Return the hidden width of a network of atoms."""
        # gates double the parameters of the first map: 8/3 keeps the number of a plain layer of 4 C
        wide = 8 * self.channels / 3 if gated else 4 * self.channels
        return self.ffn_neurons or 32 * math.ceil(wide / 32)

    def bridged(self, window: Window) -> DPA4Config:
        """Return the section of a descriptor whose atoms fade out in a window of distances."""
        return replace(self, window=window)

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, and options without effect."""
        yield from super().findings(type_map)
        # a block reads the coefficients of the one before it, and cannot add degrees
        if any(first < second for first, second in pairwise(self.degrees)):
            text = f" = {show(self.l_schedule)}: expected numbers that do not increase."
            yield error("l_schedule", text)
        if len(self.orders) != len(self.degrees):
            expected = f"{len(self.degrees)}, one for each block"
            text = f" = {show(self.m_schedule)}: has length {len(self.orders)}"
            yield error("m_schedule", f"{text}, expected {expected}.")
        elif any(order > degree for order, degree in zip(self.orders, self.degrees)):
            expected = f"at most the degrees of the blocks, {show(list(self.degrees))}"
            yield error(
                "m_schedule", f" = {show(self.m_schedule)}: expected {expected}."
            )
        if self.kmax > self.largest_degree:
            expected = f"at most the largest degree, {self.largest_degree}"
            yield error("kmax", f" = {self.kmax}: expected {expected}.")
        if self.largest_degree + self.extra_node_l > MAX_DEGREE:
            expected = (
                f"at most {MAX_DEGREE - self.largest_degree}, so that no degree is above "
                f"{MAX_DEGREE}"
            )
            yield error("extra_node_l", f" = {self.extra_node_l}: expected {expected}.")
        # heads share the channels of a stream, or of all streams, evenly
        width = self.focus_dim or self.channels
        seen = width * self.n_focus if self.atten_f_mix else width
        if self.n_atten_head and seen % self.n_atten_head:
            expected = f"a divisor of {seen}, the channels of a stream"
            yield error("n_atten_head", f" = {self.n_atten_head}: expected {expected}.")
        # points of DeePMD-kit without Lebedev quadrature are exact for orders up to 3 only, and the
        # exact points here would give other numbers
        steps = (
            self.lebedev_quadrature[0]
            if isinstance(self.lebedev_quadrature, list)
            else self.lebedev_quadrature
        )
        if (
            not steps
            and max(self.orders, default=0) > 3
            and (self.s2_activation[0] or self.node_wise_s2)
        ):
            text = "the points of DeePMD-kit are too few for products of orders above 3. Use true."
            yield error(
                "lebedev_quadrature", f" = {show(self.lebedev_quadrature)}: {text}"
            )
        if self.l_schedule is not None:
            # a schedule replaces these options
            yield unused("lmax", "l_schedule gives the degrees")
            yield unused("n_blocks", "l_schedule gives the blocks")
        if self.m_schedule is not None:
            yield unused("mmax", "m_schedule gives the orders")
        if self.radial_so2_mode != "degree_channel":
            yield unused(
                "radial_so2_rank", f"radial_so2_mode is {self.radial_so2_mode}"
            )
        if not self.n_atten_head:
            for name in ("atten_f_mix", "atten_v_proj", "atten_o_proj"):
                yield unused(name, "there is no attention")

    def summary(self) -> str:
        """Return the main options as text."""
        degrees = common.dashes(self.degrees) or str(self.largest_degree)
        return (
            f"dpa4 (DPA-4), {len(self.degrees)} blocks of {self.mixing_layers} layers, rcut "
            f"{self.rcut:g} angstrom, degrees {degrees}, orders {common.dashes(self.orders)}, "
            f"{self.channels} channels, {common.dtype_name(self.precision)}"
        )
