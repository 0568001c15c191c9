"""The sections of the descriptors se_atten (DPA-1) and se_atten_v2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import (
    Check,
    not_negative_int,
    option,
    positive,
    positive_int,
    redefined,
)
from deepmd_ema.config.messages import NOT_AVAILABLE
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import OneListSection
from deepmd_ema.findings import Finding, unused
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig


@dataclass(frozen=True, kw_only=True)
class SeAttenV2Config(OneListSection):
    """Descriptor with attention among neighbors for any number of elements, smooth, elements in a
    network apart.
    """

    type: ClassVar[str] = "se_atten_v2"
    has_equivariants: ClassVar[bool] = True

    axis_neuron: int = redefined(SeE2AConfig, "axis_neuron")
    lmax: int = option(
        1,
        check=Check(lambda v: v == 1, f"1: higher angular degrees are {NOT_AVAILABLE}"),
        doc="Largest angular degree of the moments; 1 here.",
    )
    type_one_side: bool = option(
        False,
        doc="Whether the embedding depends on the element of the neighbor only, not on that of "
        "the centre.",
    )
    attn: int = option(
        128,
        check=positive_int,
        doc="Width of queries, keys and values of the attention.",
    )
    attn_layer: int = option(
        2, check=not_negative_int, doc="Number of attention layers."
    )
    attn_dotr: bool = option(
        True,
        doc="Whether attention weights are multiplied by the cosines of the angles between "
        "neighbors.",
    )
    # declared with its one value, so that inputs of DeePMD-kit are read
    attn_mask: bool = option(
        False,
        check=Check(lambda v: not v, "false: true has no effect in DeePMD-kit either"),
        doc="Whether the diagonal of the attention is masked. Only false.",
    )
    set_davg_zero: bool = option(
        False,
        doc="Whether the mean of the environment matrix is set to zero instead of taken from the "
        "data. False makes the energy jump where a neighbor enters, and depend on the order "
        "of the atoms, as in DeePMD-kit.",
    )
    trainable_ln: bool = option(
        True, doc="Whether shift and scale of the layer normalisation are trained."
    )
    ln_eps: float | None = option(
        None,
        check=positive,
        doc="Added to the variance in the layer normalisation; null is 1e-5.",
    )
    scaling_factor: float = option(
        1.0,
        check=positive,
        doc="Factor s in the scale 1 / sqrt(attn * s) of queries; without effect beside "
        "`temperature`.",
    )
    normalize: bool = option(
        True, doc="Whether queries, keys and values have length 1."
    )
    temperature: float | None = option(
        None,
        check=positive,
        doc="Scale of queries; null is 1 / sqrt(attn * scaling_factor).",
    )

    # tables of G(s) serve all pairs, as long as no pair changes another
    interpolate: str = common.interpolate_option(
        doc="As of se_e2_a; without effect beside attention layers, which see each pair."
    )

    # fixed in this version, options of se_atten
    tebd_input_mode: ClassVar[str] = "strip"
    smooth: ClassVar[bool] = True

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, and options without effect."""
        yield from common.smooth_before(self.rcut_smth, self.rcut)
        yield from common.axis_fits(self.axis_neuron, self.neuron)
        yield from self.element_findings(type_map)
        # attention changes G of a pair by other pairs: it is no function of s and elements alone
        if self.attn_layer and self.interpolate == "always":
            yield unused("interpolate", f"attn_layer = {self.attn_layer}")

    def words(self) -> Iterator[str]:
        """Yield further options for the summary."""
        yield f"axis_neuron {self.axis_neuron}"
        yield (
            f"{self.attn_layer} attention layers of {self.attn}"
            if self.attn_layer
            else "no attention"
        )

    @property
    def vacuum_needs(self) -> str:
        """Return the setting that makes the features of an isolated atom zero."""
        if self.concat_output_tebd:
            return "concat_output_tebd = false"
        # with a mean, empty slots have rows that are not zero
        return "" if self.set_davg_zero else "set_davg_zero = true"


@dataclass(frozen=True, kw_only=True)
class SeAttenConfig(SeAttenV2Config):
    """Descriptor with attention among neighbors for any number of elements (DPA-1)."""

    type: ClassVar[str] = "se_atten"
    aliases: ClassVar[tuple[str, ...]] = ("dpa1",)

    # defaults of the two types differ in DeePMD-kit, too
    set_davg_zero: bool = redefined(SeAttenV2Config, "set_davg_zero", True)
    tebd_input_mode: str = option(  # type: ignore[misc]  # an option here, fixed in se_atten_v2
        "concat",
        choices=("concat", "strip"),
        doc="`concat` puts the embeddings of the elements beside the distance, `strip` into a "
        "network apart, whose output is computed once per pair of elements: faster, about "
        "equally accurate.",
    )
    stripped_type_embedding: bool | None = option(
        None, doc="True means `tebd_input_mode: strip`, the later name of this option."
    )
    smooth_type_embedding: bool = option(
        False,
        alias=("smooth_type_embdding",),
        doc="Whether attention weights, and the gate of `strip`, vanish smoothly at the cutoff. "
        "False makes the potential energy jump where a neighbor enters.",
    )

    def __post_init__(self) -> None:
        if self.stripped_type_embedding:
            # the older name is turned into the newer one, and then left out of what is written
            object.__setattr__(self, "tebd_input_mode", "strip")
            object.__setattr__(self, "stripped_type_embedding", None)

    @property
    def smooth(self) -> bool:  # type: ignore[override]
        """Return ``smooth_type_embedding``."""
        return self.smooth_type_embedding
