"""The section of the descriptor se_e3_tebd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option, redefined
from deepmd_ema.config.schema import common
from deepmd_ema.config.schema.descriptor_bases import (
    OneListSection,
    TypeEmbeddedOptions,
)
from deepmd_ema.findings import Finding, unused


@dataclass(frozen=True, kw_only=True)
class SeE3TebdConfig(OneListSection):
    """Descriptor of three-body angular information for any number of elements."""

    type: ClassVar[str] = "se_e3_tebd"

    tebd_input_mode: str = option(
        "concat",
        choices=("concat", "strip"),
        doc="`concat` puts the embeddings of the elements of both neighbors beside the product of "
        "their directions, `strip` into a network apart, whose output is computed once per "
        "pair of elements: faster, about equally accurate.",
    )
    # declared for inputs of DeePMD-kit; se_e3 takes it from here, without effect as well
    set_davg_zero: bool = option(
        True,
        doc="Whether the mean of the environment matrix is set to zero instead of taken from the "
        "data. Without effect on energies: the mean of angular columns is zero.",
    )
    smooth: bool = option(
        True,
        doc="Whether the gate of `strip` vanishes smoothly at the cutoff. Without effect on "
        "`concat`.",
    )
    use_tebd_bias: bool = redefined(TypeEmbeddedOptions, "use_tebd_bias", True)

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, and options without effect."""
        yield from common.smooth_before(self.rcut_smth, self.rcut)
        yield from self.element_findings(type_map)
        yield unused(
            "set_davg_zero", "only angular columns enter, and their mean is zero"
        )
        # concat needs no switch: rows at the cutoff are zero, and so are products with them
        if self.tebd_input_mode == "concat":
            yield unused("smooth", "only the gate of strip is switched off")

    def words(self) -> Iterator[str]:
        """Yield further options for the summary."""
        yield self.tebd_input_mode

    @property
    def vacuum_needs(self) -> str:
        """Return the setting that makes the features of an isolated atom zero."""
        # an embedding beside the features does not vanish with the neighbors
        return "concat_output_tebd = false" if self.concat_output_tebd else ""
