"""The section of the descriptor dpa2 (DPA-2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from deepmd_ema.config.fields import option, options, positive_int, redefined
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import NeighborLists, TypeEmbeddedOptions
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.findings import Finding, error, inside, unused
from deepmd_ema.model.families.se_atten.section import SeAttenConfig
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig
from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig

if TYPE_CHECKING:
    from deepmd_ema.geometry import NeighborStatistics

# the descriptors whose blocks a repinit is made of
Block = TypeVar("Block", SeAttenConfig, SeE3TebdConfig)


@dataclass(frozen=True, kw_only=True)
class RepinitConfig:
    """First features of an atom: se_atten without attention, and angles between neighbors if
    wanted.
    """

    rcut: float = common.cutoff_option(
        doc="Cutoff radius, the largest of this descriptor: above all others."
    )
    rcut_smth: float = common.length_option(
        doc="Distance from which 1/r is switched off smoothly towards `rcut`."
    )
    nsel: int | str = common.sel_option("Most neighbors of an atom, the nearest first.")
    neuron: list[int] = redefined(SeAttenConfig, "neuron", [25, 50, 100])
    axis_neuron: int = option(
        16,
        check=positive_int,
        doc="Number of columns of the embedding matrix that form the second factor of the "
        "features.",
    )
    # names as in se_atten, so that `_block` finds them
    tebd_dim: int = redefined(SeAttenConfig, "tebd_dim")
    tebd_input_mode: str = redefined(SeAttenConfig, "tebd_input_mode")
    set_davg_zero: bool = redefined(SeAttenConfig, "set_davg_zero")
    activation_function: ActivationName = common.activation_option(
        ActivationName("tanh"), "Activation function of the embedding networks."
    )
    resnet_dt: bool = redefined(SeAttenConfig, "resnet_dt")
    type_one_side: bool = redefined(SeAttenConfig, "type_one_side")
    interpolate: str = common.interpolate_option(
        doc="As of se_e2_a, for the networks of the distances of neighbors."
    )
    use_three_body: bool = option(
        False,
        doc="Whether features of the angles between neighbors stand beside those of the neighbors.",
    )
    three_body_neuron: list[int] = option(
        [2, 4, 8],
        check=common.layer_widths,
        doc="Widths of the hidden layers of the embedding network of angles.",
    )
    three_body_sel: int | str = common.sel_option(
        "Most neighbors of an atom that form angles.", 40
    )
    three_body_rcut: float = common.cutoff_option(
        4.0, "Cutoff radius of the angles, at most `rcut`."
    )
    three_body_rcut_smth: float = common.length_option(
        0.5,
        "Distance from which 1/r is switched off smoothly towards `three_body_rcut`.",
    )

    def findings(self) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, and options without effect."""
        yield from common.smooth_before(self.rcut_smth, self.rcut)
        yield from common.axis_fits(self.axis_neuron, self.neuron)
        if not self.use_three_body:
            # all of them by their prefix, so that a further one is not forgotten
            for declared in options(RepinitConfig):
                if declared.name.startswith("three_body_"):
                    yield unused(declared.name, "use_three_body is false")
            return
        rcut = self.three_body_rcut
        yield from common.smooth_before(self.three_body_rcut_smth, rcut, "three_body_")
        # a block reads the first slots of one list, which ends at rcut
        if rcut > self.rcut:
            expected = f"at most rcut = {self.rcut:g} (angstrom)"
            yield error("three_body_rcut", f" = {rcut:g}: expected {expected}.")


@dataclass(frozen=True, kw_only=True)
class RepformerConfig:
    """Layers in which atoms and pairs of neighbors exchange their features."""

    rcut: float = common.cutoff_option(
        doc="Cutoff radius of the messages, below `repinit.rcut`."
    )
    rcut_smth: float = common.length_option(
        doc="Distance from which messages are switched off smoothly towards `rcut`."
    )
    nsel: int | str = common.sel_option("Most neighbors of an atom, the nearest first.")
    nlayers: int = option(3, check=positive_int, doc="Number of layers.")
    g1_dim: int = option(128, check=positive_int, doc="Features of an atom.")
    g2_dim: int = option(16, check=positive_int, doc="Features of a pair.")
    axis_neuron: int = option(
        4,
        check=positive_int,
        doc="Number of features that form the second factor of the terms `grrg` and `drrd`.",
    )
    direct_dist: bool = option(
        False,
        doc="Whether the first features and vector of a pair are its distance and vector divided "
        "by `rcut`, instead of its row of the environment matrix.",
    )
    update_g1_has_conv: bool = option(
        True,
        doc="Whether an atom takes the features of its neighbors, each times those of the pair.",
    )
    update_g1_has_drrd: bool = option(
        True,
        doc="Whether an atom takes the scalar products of the moments of its neighbors' features.",
    )
    update_g1_has_grrg: bool = option(
        True,
        doc="Whether an atom takes the scalar products of the moments of the features of its "
        "pairs.",
    )
    update_g1_has_attn: bool = option(
        True, doc="Whether an atom attends to its neighbors."
    )
    update_g2_has_g1g1: bool = option(
        True, doc="Whether a pair takes the product of the features of its atoms."
    )
    update_g2_has_attn: bool = option(
        True, doc="Whether a pair attends to the other pairs of the same atom."
    )
    use_sqrt_nnei: bool = option(
        True,
        doc="Whether moments are divided by the square root of the number of neighbors instead of "
        "the number.",
    )
    g1_out_conv: bool = option(
        True,
        doc="Whether the term `conv` is a change of its own, instead of an input of the layer of "
        "all terms.",
    )
    g1_out_mlp: bool = option(
        True,
        doc="Whether an atom's own features change it through a layer apart, instead of as an "
        "input of the layer of all terms.",
    )
    update_h2: bool = option(
        False, doc="Whether the vectors of the pairs are changed by attention."
    )
    attn1_hidden: int = option(
        64, check=positive_int, doc="Width of the attention of atoms, for each head."
    )
    attn1_nhead: int = option(
        4, check=positive_int, doc="Number of heads of the attention of atoms."
    )
    attn2_hidden: int = option(
        16, check=positive_int, doc="Width of the attention of pairs, for each head."
    )
    attn2_nhead: int = option(
        4, check=positive_int, doc="Number of heads of the attention of pairs."
    )
    attn2_has_gate: bool = option(
        False,
        doc="Whether logits of the attention of pairs are multiplied by the scalar products of "
        "their vectors.",
    )
    activation_function: ActivationName = common.activation_option(
        ActivationName("tanh"), "Activation function of the layers."
    )
    # the options that `deepmd_ema.model.nn.update.Update` reads; dpa3 takes them from here
    update_style: str = option(
        "res_avg",
        choices=("res_avg", "res_incr", "res_residual"),
        doc="How features u take n changes: `res_avg` (u + sum of changes) / sqrt(n + 1), "
        "`res_incr` u + sum of changes / sqrt(n), `res_residual` u + the changes, each times "
        "trained numbers.",
    )
    update_residual: float = option(
        0.001,
        doc="Size of the trained numbers of `res_residual` at the start; no effect with another "
        "style.",
    )
    update_residual_init: str = option(
        "norm",
        choices=("norm", "const"),
        doc="Whether these numbers start as `update_residual` (`const`) or as random ones of that "
        "spread (`norm`).",
    )
    set_davg_zero: bool = redefined(SeE2AConfig, "set_davg_zero", True)
    trainable_ln: bool = redefined(SeAttenConfig, "trainable_ln")
    ln_eps: float | None = redefined(SeAttenConfig, "ln_eps")

    @property
    def terms(self) -> int:
        """Return the number of inputs of the layer of all terms."""
        # numbers, not booleans, from here: true counts as 1
        conv = self.update_g1_has_conv and not self.g1_out_conv
        return (
            (not self.g1_out_mlp)
            + self.update_g1_has_grrg
            + self.update_g1_has_drrd
            + conv
        )

    def findings(self) -> Iterator[Finding]:
        """Yield errors of options that contradict each other."""
        yield from common.smooth_before(self.rcut_smth, self.rcut)
        # the second factor is made of the first columns of the moments: there must be so many
        if self.update_g1_has_grrg and self.axis_neuron > self.g2_dim:
            text = f" = {self.axis_neuron}: expected at most g2_dim = {self.g2_dim}."
            yield error("axis_neuron", text)
        if self.update_g1_has_drrd and self.axis_neuron > self.g1_dim:
            text = f" = {self.axis_neuron}: expected at most g1_dim = {self.g1_dim}."
            yield error("axis_neuron", text)
        if not self.terms:
            why = "the layer of all terms would have no input"
            instead = (
                "Set it to false, or update_g1_has_grrg or update_g1_has_drrd to true."
            )
            yield error("g1_out_mlp", f" = true: {why}. {instead}")

    def unused_options(self) -> Iterator[Finding]:
        """Yield options without effect, which the section around it yields last."""
        # the last layer has no parameters of pairs
        attends = self.update_g2_has_attn and self.nlayers > 1
        if self.nlayers == 1:
            for name in ("update_g2_has_g1g1", "update_g2_has_attn", "update_h2"):
                yield unused(
                    name, "pairs do not change in the last layer, and there is one"
                )
        if not self.update_g1_has_attn:
            for name in ("attn1_hidden", "attn1_nhead"):
                yield unused(name, "update_g1_has_attn is false")
        if not attends and not (self.update_h2 and self.nlayers > 1):
            for name in ("attn2_hidden", "attn2_nhead", "attn2_has_gate"):
                yield unused(name, "there is no attention of pairs")
        if not attends:
            # the only layer normalisation is behind that attention
            for name in ("trainable_ln", "ln_eps"):
                yield unused(
                    name, "channels of pairs have no attention, which is normalised"
                )
        if not (self.update_g1_has_grrg or self.update_g1_has_drrd):
            for name in ("axis_neuron", "use_sqrt_nnei"):
                yield unused(
                    name, "update_g1_has_grrg and update_g1_has_drrd are false"
                )
        if not self.update_g1_has_conv:
            yield unused("g1_out_conv", "update_g1_has_conv is false")
        if self.direct_dist:
            yield unused("set_davg_zero", "direct_dist is true")
        if self.update_style != "res_residual":
            for name in ("update_residual", "update_residual_init"):
                yield unused(name, f"update_style is {self.update_style}")


@dataclass(frozen=True, kw_only=True)
class DPA2Config(TypeEmbeddedOptions, NeighborLists):
    """Descriptor with messages between atoms and attention among pairs, for models of many systems
    (DPA-2).
    """

    type: ClassVar[str] = "dpa2"
    has_equivariants: ClassVar[bool] = True
    # the longest list, which is that of a batch
    neighbors_option: ClassVar[str] = "repinit.nsel"
    # every list with its cutoff, the longest first
    sel_options: ClassVar[Mapping[str, str]] = {
        "repinit.nsel": "repinit.rcut",
        "repinit.three_body_sel": "repinit.three_body_rcut",
        "repformer.nsel": "repformer.rcut",
    }
    # the layers give an isolated atom features, which are not zero: another type is needed
    vacuum_needs: ClassVar[str] = 'type = "se_e2_a"'

    repinit: RepinitConfig = option(doc="The first features of an atom.")
    repformer: RepformerConfig = option(
        doc="The layers in which atoms and pairs exchange their features."
    )
    smooth: bool = option(
        True,
        doc="Whether messages and attention vanish smoothly at the cutoffs. False makes the "
        "potential energy jump where a neighbor enters.",
    )
    add_tebd_to_repinit_out: bool = option(
        False,
        alias=("repformer_add_type_ebd_to_seq",),
        doc="Whether the embedding of its element is added to the first features of an atom, "
        "through a matrix.",
    )

    def with_neighbors(self, statistics: NeighborStatistics) -> DPA2Config:
        """Return the section with numbers of neighbors that are ``auto`` as numbers."""
        first = self.repinit
        later = self.repformer
        counted = super().with_neighbors(statistics)
        most: Any = counted.repinit.nsel
        angles: Any = counted.repinit.three_body_sel
        nsel: Any = counted.repformer.nsel
        # DeePMD-kit refuses a part that looks farther and has fewer neighbors, and equal numbers of
        # the two main parts. In small systems all parts count the same number: a counted number is
        # enlarged, one of the input is not
        if first.use_three_body:
            if isinstance(later.nsel, str) and later.rcut >= first.three_body_rcut:
                nsel = max(nsel, angles)
            if (
                isinstance(first.three_body_sel, str)
                and later.rcut <= first.three_body_rcut
            ):
                angles = max(nsel, angles)
        if isinstance(first.nsel, str):
            most = max(
                most, nsel + common.SEL_MULTIPLE, angles if first.use_three_body else 0
            )
        return common.with_options(
            self, dict(zip(self.sel_options, (most, angles, nsel)))
        )

    def inner_neighbors(self) -> Iterator[tuple[str, float, int]]:
        """Yield the numbers of neighbors of the parts that look less far."""
        first, later = self.repinit, self.repformer
        if first.use_three_body and isinstance(first.three_body_sel, int):
            yield "repinit.three_body_sel", first.three_body_rcut, first.three_body_sel
        if isinstance(later.nsel, int):
            yield "repformer.nsel", later.rcut, later.nsel

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield findings of both parts, and errors of options that contradict each other."""
        yield from inside("repinit", self.repinit.findings())
        yield from inside("repformer", self.repformer.findings())
        first, later = self.repinit, self.repformer
        if later.rcut >= first.rcut:
            expected = f"less than repinit.rcut = {first.rcut:g} (angstrom)"
            yield error("repformer.rcut", f" = {later.rcut:g}: expected {expected}.")
        # parts with a longer cutoff that have fewer neighbors, which DeePMD-kit refuses: in the
        # order of cutoffs, each is compared with the next
        named = sorted(
            (rcut, most, name) for name, rcut, most in self.inner_neighbors()
        )
        named += (
            [(first.rcut, first.nsel, "repinit.nsel")]
            if isinstance(first.nsel, int)
            else []
        )
        for (_, fewer, name), (_, more, beyond) in pairwise(named):
            if fewer > more:
                expected = f"at most {beyond} = {more}, which is within a larger cutoff"
                yield error(name, f" = {fewer}: expected {expected}.")
        if isinstance(later.nsel, int) and later.nsel == first.nsel:
            expected = f"less than repinit.nsel = {first.nsel}"
            yield error("repformer.nsel", f" = {later.nsel}: expected {expected}.")
        yield from self.element_findings(type_map)
        # last, because rules end at the first option that is wrong in itself, and these read most
        yield from inside("repformer", self.repformer.unused_options())

    def summary(self) -> str:
        """Return the main options as text."""
        first, later = self.repinit, self.repformer
        angles = (
            f", angles within {first.three_body_rcut:g}" if first.use_three_body else ""
        )
        return (
            f"dpa2 (DPA-2), rcut {first.rcut:g} angstrom (smooth from {first.rcut_smth:g}), nsel "
            f"{first.nsel}, neuron {common.dashes(first.neuron)}{angles}, {later.nlayers} layers "
            f"within {later.rcut:g} (smooth from {later.rcut_smth:g}), nsel {later.nsel}, "
            f"{later.g1_dim} features of an atom, {later.g2_dim} of a pair, "
            f"{common.dtype_name(self.precision)}"
        )

    @property
    def first_block(self) -> SeAttenConfig:
        """Return the options of ``repinit`` as a section of its descriptor."""
        return _block(
            self,
            SeAttenConfig,
            sel=self.repinit.nsel,
            # without attention; the switch of the whole is that of its gates
            attn_layer=0,
            smooth_type_embedding=self.smooth,
        )

    @property
    def angle_block(self) -> SeE3TebdConfig:
        """Return the options of the angles of ``repinit`` as a section of their descriptor."""
        first = self.repinit
        return _block(
            self,
            SeE3TebdConfig,
            sel=first.three_body_sel,
            # options of angles replace those of the same name
            rcut=first.three_body_rcut,
            rcut_smth=first.three_body_rcut_smth,
            neuron=first.three_body_neuron,
            smooth=self.smooth,
        )


def _block(whole: DPA2Config, kind: type[Block], **changes: Any) -> Block:
    """Return the options that a part of ``repinit`` reads as a section ``kind``.

    They are those of ``repinit``, and some of the whole.
    """
    # options of the same name; others of the descriptor have their defaults
    both = {f.name for f in fields(RepinitConfig)} & {f.name for f in fields(kind)}
    values = {name: getattr(whole.repinit, name) for name in both}
    values |= {
        name: getattr(whole, name)
        for name in ("trainable", "exclude_types", "env_protection")
    }
    return kind(**(values | changes))
