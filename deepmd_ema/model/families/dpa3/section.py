"""The section of the descriptor dpa3 (DPA-3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import (
    Check,
    WithoutEffect,
    not_negative,
    not_negative_int,
    option,
    positive,
    positive_int,
    redefined,
)
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import (
    ChargeSpinOptions,
    NeighborLists,
    TypeEmbeddedOptions,
)
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.findings import Finding, error, inside, unused
from deepmd_ema.model.families.dpa2.section import RepformerConfig

# widths of tensors, which a mistyped number must not fill the memory with
_width = Check(
    lambda v: 0 < v <= common.MAX_SIZE, f"a whole number from 1 to {common.MAX_SIZE:,}"
)


@dataclass(frozen=True, kw_only=True)
class RepflowConfig:
    """Layers that update features of atoms (nodes), of pairs (edges) and of pairs of neighbors
    (angles).
    """

    without_effect: ClassVar[WithoutEffect] = {
        "optim_update": (True, "both values are the same function")
    }

    # names of DeePMD-kit: n, e and a for nodes, edges and angles
    n_dim: int = option(
        128, check=_width, doc="Numbers of a node, the features of an atom."
    )
    e_dim: int = option(
        64, check=_width, doc="Numbers of an edge, the features of a pair of atoms."
    )
    a_dim: int = option(
        64,
        check=_width,
        doc="Numbers of an angle, the features of two neighbors of an atom.",
    )
    nlayers: int = option(
        6,
        check=positive_int,
        doc="Number of layers. One layer sees as far as `e_rcut`, two twice.",
    )
    e_rcut: float = common.cutoff_option(doc="Cutoff radius of edges.")
    e_rcut_smth: float = common.length_option(
        doc="Distance from which edges are switched off smoothly towards `e_rcut`."
    )
    e_sel: int | str = common.sel_option("Most edges of an atom, the nearest first.")
    a_rcut: float = common.cutoff_option(
        doc="Cutoff radius of the neighbors that have angles; at most `e_rcut`."
    )
    a_rcut_smth: float = common.length_option(
        doc="Distance from which angles are switched off smoothly towards `a_rcut`."
    )
    a_sel: int | str = common.sel_option(
        "Most neighbors of an atom that have angles, the nearest first."
    )
    a_compress_rate: int = option(
        0,
        check=not_negative_int,
        doc="Angles see nodes of `a_dim / a_compress_rate` numbers and edges of half as many; 0: "
        "all of them.",
    )
    a_compress_e_rate: int = option(
        1,
        check=positive_int,
        doc="Factor on the numbers of an edge that angles see, beside `a_compress_rate`.",
    )
    a_compress_use_split: bool = option(
        False,
        doc="Whether angles see the first numbers of nodes and edges instead of a trained linear "
        "map of all.",
    )
    n_multi_edge_message: int = option(
        1, check=positive_int, doc="Number of messages from the edges to a node."
    )
    axis_neuron: int = option(
        4,
        check=positive_int,
        doc="Columns of the second factor of the symmetrised message; at most `n_dim`, `e_dim`.",
    )
    fix_stat_std: float = option(
        0.3,
        check=not_negative,
        doc="What the environment matrix is divided by; 0 takes its spread in the data.",
    )
    skip_stat: bool = option(
        False, doc="True means `fix_stat_std: 0.3`, the later name of this option."
    )
    update_angle: bool = option(
        True, doc="Whether there are angles; otherwise only nodes and edges."
    )
    # as the options of the repformer, with the defaults of DPA-3
    update_style: str = redefined(RepformerConfig, "update_style", "res_residual")
    update_residual: float = option(
        0.1,
        check=not_negative,
        doc="Size of the trained numbers of `res_residual` at the start.",
    )
    update_residual_init: str = redefined(
        RepformerConfig, "update_residual_init", "const"
    )
    smooth_edge_update: bool = option(
        False,
        doc="Whether an edge without angles gets nothing from them. False gives it itself, as in "
        "DeePMD-kit, which makes the energy jump where a neighbor crosses `a_rcut`: choose "
        "true for new models.",
    )
    edge_init_use_dist: bool = option(
        False,
        alias=("edge_use_dist",),
        doc="Whether edges begin with the distance instead of its inverse.",
    )
    use_exp_switch: bool = option(
        False,
        alias=("use_env_envelope",),
        doc="Whether the switch is exp(-exp(20 (r - s) / s)), s = `rcut_smth`, instead of a "
        "polynomial. It does not quite reach zero at the cutoff: s = 5.3 for 6 angstrom and "
        "3.5 for 4 keep the jump below 1e-6 and 1e-7.",
    )
    use_dynamic_sel: bool = option(
        False,
        doc="Whether sums over neighbors are divided by `e_sel / sel_reduce_factor` instead of "
        "`e_sel` (angles alike), so that `e_sel` and `a_sel` may be far more than needed. "
        "Needs `smooth_edge_update`.",
    )
    sel_reduce_factor: float = option(
        10.0, check=positive, doc="See `use_dynamic_sel`."
    )
    sequential_update: bool = option(
        False,
        doc="Whether each update of a layer sees the ones before it: edges, angles, edges by "
        "angles, nodes. Needs `update_style: res_residual` and `update_angle`.",
    )

    def __post_init__(self) -> None:
        # the older name of an option is turned into the newer one, and then not written
        if self.skip_stat:
            object.__setattr__(self, "fix_stat_std", 0.3)
            object.__setattr__(self, "skip_stat", False)

    @property
    def e_norm(self) -> float:
        """Number of edges that sums over them are divided by."""
        assert isinstance(self.e_sel, int), "e_sel must be resolved to a number"
        # a fixed number, not the neighbors at hand: no jump where a neighbor enters
        return self.e_sel / (self.sel_reduce_factor if self.use_dynamic_sel else 1)

    @property
    def a_norm(self) -> float:
        """Number of neighbors with angles that sums over them are divided by."""
        assert isinstance(self.a_sel, int), "a_sel must be resolved to a number"
        return self.a_sel / (self.sel_reduce_factor if self.use_dynamic_sel else 1)

    @property
    def n_angle_dim(self) -> int:
        """Numbers of a node that angles see."""
        # compressed or split numbers; without compression angles see all
        return (
            self.a_dim // self.a_compress_rate if self.a_compress_rate else self.n_dim
        )

    @property
    def e_angle_dim(self) -> int:
        """Numbers of an edge that angles see."""
        if not self.a_compress_rate:
            return self.e_dim
        return self.a_dim // (2 * self.a_compress_rate) * self.a_compress_e_rate

    def findings(self) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, and options without effect."""
        yield from common.smooth_before(self.e_rcut_smth, self.e_rcut, "e_")
        yield from common.smooth_before(self.a_rcut_smth, self.a_rcut, "a_")
        # edges with angles are the first of all edges
        if self.a_rcut > self.e_rcut:
            expected = f"at most e_rcut = {self.e_rcut:g} (angstrom)"
            yield error("a_rcut", f" = {self.a_rcut:g}: expected {expected}.")
        if (
            isinstance(self.a_sel, int)
            and isinstance(self.e_sel, int)
            and self.a_sel > self.e_sel
        ):
            yield error(
                "a_sel", f" = {self.a_sel}: expected at most e_sel = {self.e_sel}."
            )
        for name in ("e_rcut_smth", "a_rcut_smth"):
            # its exponent is divided by the length where it begins
            if self.use_exp_switch and getattr(self, name) == 0:
                yield error(
                    name, " = 0: use_exp_switch divides by it. Expected a number > 0."
                )
        if self.use_dynamic_sel and not self.smooth_edge_update:
            yield error("use_dynamic_sel", " = true: needs smooth_edge_update = true.")
        # it multiplies each message by the trained numbers of its own
        if self.sequential_update and self.update_style != "res_residual":
            needs = 'needs update_style = "res_residual"'
            yield error(
                "sequential_update", f' = true: {needs}, not "{self.update_style}".'
            )
        if self.sequential_update and not self.update_angle:
            yield error("sequential_update", " = true: needs update_angle = true.")
        yield from self._width_findings()
        if not self.update_angle:
            yield unused("smooth_edge_update", "update_angle is false")
            yield unused("a_compress_rate", "update_angle is false")
        if not (self.update_angle and self.a_compress_rate):
            why = "a_compress_rate is 0 or update_angle is false"
            yield unused("a_compress_e_rate", why)
            yield unused("a_compress_use_split", why)
        if not self.use_dynamic_sel:
            yield unused("sel_reduce_factor", "use_dynamic_sel is false")
        if self.update_style != "res_residual":
            why = f"update_style is {self.update_style}"
            yield unused("update_residual", why)
            yield unused("update_residual_init", why)

    def _width_findings(self) -> Iterator[Finding]:
        # the first columns of the moments of nodes and of edges
        narrow = min(self.n_dim, self.e_dim)
        if self.axis_neuron > narrow:
            expected = f"at most {narrow}, the smaller of n_dim and e_dim"
            yield error("axis_neuron", f" = {self.axis_neuron}: expected {expected}.")
        rate = self.a_compress_rate
        if not rate or not self.update_angle:
            return
        # as DeePMD-kit: edges have half of the numbers of nodes, and both must be whole
        if (
            self.a_dim < rate
            or (self.a_dim // rate) % 2
            or self.a_dim * self.a_compress_e_rate % (2 * rate)
        ):
            expected = f"a number of which twice divides a_dim = {self.a_dim}"
            yield error("a_compress_rate", f" = {rate}: expected {expected}.")
        elif self.a_compress_use_split:
            nodes = ("n_dim", self.n_dim, self.n_angle_dim)
            edges = ("e_dim", self.e_dim, self.e_angle_dim)
            for name, width, least in (nodes, edges):
                if width < least:
                    expected = (
                        f"at least {least}, the first numbers of it that angles see"
                    )
                    yield error(name, f" = {width}: expected {expected}.")


@dataclass(frozen=True, kw_only=True)
class DPA3Config(ChargeSpinOptions, TypeEmbeddedOptions, NeighborLists):
    """Descriptor of messages between atoms, pairs and angles (DPA-3)."""

    type: ClassVar[str] = "dpa3"
    # see `DPA3Descriptor`: moments of the last edges
    has_equivariants: ClassVar[bool] = True
    neighbors_option: ClassVar[str] = "repflow.e_sel"
    without_effect: ClassVar[WithoutEffect] = {
        "use_loc_mapping": (True, "there are no images of atoms to be numbered")
    }
    sel_options: ClassVar[Mapping[str, str]] = {
        "repflow.e_sel": "repflow.e_rcut",
        "repflow.a_sel": "repflow.a_rcut",
    }
    # the layers give an isolated atom features, which are not zero: another type is needed
    vacuum_needs: ClassVar[str] = 'type = "se_e2_a"'

    repflow: RepflowConfig = option(doc="Layers of the descriptor.")
    concat_output_tebd: bool = redefined(
        TypeEmbeddedOptions, "concat_output_tebd", False
    )
    activation_function: ActivationName = common.activation_option(
        ActivationName("silu"), "Activation function of all layers."
    )

    def inner_neighbors(self) -> Iterator[tuple[str, float, int]]:
        """Yield ``a_sel``."""
        flow = self.repflow
        # without angles, no list is read but that of edges
        if flow.update_angle and isinstance(flow.a_sel, int):
            yield "repflow.a_sel", flow.a_rcut, flow.a_sel

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield findings of the layers and of the elements."""
        yield from inside("repflow", self.repflow.findings())
        yield from self.element_findings(type_map)

    def summary(self) -> str:
        """Return the main options as text."""
        flow = self.repflow
        angles = (
            f"angles of {flow.a_dim} within {flow.a_rcut:g} angstrom (sel {flow.a_sel})"
        )
        return (
            f"dpa3 (DPA-3), {flow.nlayers} layers, nodes of {flow.n_dim}, edges of {flow.e_dim} "
            f"within {flow.e_rcut:g} angstrom (sel {flow.e_sel}), "
            f"{angles if flow.update_angle else 'no angles'}, {common.dtype_name(self.precision)}"
        )
