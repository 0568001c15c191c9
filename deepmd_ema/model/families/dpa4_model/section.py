"""The section ``model`` of type ``dpa4``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from deepmd_ema.config.fields import option
from deepmd_ema.config.messages import show
from deepmd_ema.config.registry import Registry
from deepmd_ema.config.schema.descriptor import DescriptorConfig
from deepmd_ema.config.schema.model import NetworkConfig
from deepmd_ema.findings import Finding, error

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4.section import DPA4Config

# a choice of the registries of other models: this type is made for these parts only
_FAMILIES = "deepmd_ema.model.families"
_DESCRIPTORS = Registry({"dpa4": f"{_FAMILIES}.dpa4:FAMILY"})
_FITTINGS = Registry(
    {
        "dpa4_ener": f"{_FAMILIES}.dpa4_ener:FAMILY",
        "property": f"{_FAMILIES}.quantities:PROPERTY",
    }
)


@dataclass(frozen=True, kw_only=True)
class DPA4ModelConfig(NetworkConfig):
    """The model DPA-4 (SeZM)."""

    type: ClassVar[str] = "dpa4"
    aliases: ClassVar[tuple[str, ...]] = ("DPA4", "SeZM", "sezm")
    # DeePMD-kit has no tables for this model
    use_srtab: ClassVar[None] = None

    descriptor: DescriptorConfig = option(
        registry=_DESCRIPTORS,
        default_type="dpa4",
        doc="How the surroundings of an atom are described.",
    )
    fitting_net: Any = option(
        registry=_FITTINGS,
        default_type="dpa4_ener",
        doc="What follows from the descriptor, and how.",
    )

    def __post_init__(self) -> None:
        """Exclude pairs that the descriptor excludes from the whole model, as DeePMD-kit does."""
        # a frozen dataclass: its own fields can be set in here only so
        if not self.pair_exclude_types:
            pairs = [
                list(pair) for pair in cast("DPA4Config", self.descriptor).exclude_types
            ]
            object.__setattr__(self, "pair_exclude_types", pairs)

    def conflicts(self) -> Iterator[Finding]:
        """Yield errors of options that contradict each other, also in descriptor and model."""
        yield from super().conflicts()
        # both are given: pairs may be in any order, also within a pair
        pairs = cast("DPA4Config", self.descriptor).exclude_types
        if pairs and sorted(map(sorted, pairs)) != sorted(
            map(sorted, self.pair_exclude_types)
        ):
            why = f"model.pair_exclude_types = {show(self.pair_exclude_types)} is another choice"
            text = f" = {show(pairs)}: {why}. Give one of the two."
            yield error("descriptor.exclude_types", text)
