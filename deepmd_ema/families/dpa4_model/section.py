"""The section ``model`` of type ``dpa4``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config.fields import option
from deepmd_ema.config.schema.descriptor import DescriptorConfig
from deepmd_ema.config.schema.model import FittingNetConfig, NetworkConfig
from deepmd_ema.registry import Registry

_DESCRIPTORS = Registry({"dpa4": "deepmd_ema.families.dpa4:FAMILY"})
_FITTINGS = Registry({"dpa4_ener": "deepmd_ema.families.dpa4_ener:FAMILY"})


@dataclass(frozen=True, kw_only=True)
class DPA4ModelConfig(NetworkConfig):
    """The model DPA-4 (SeZM)."""

    type: ClassVar[str] = "dpa4"
    aliases: ClassVar[tuple[str, ...]] = ("DPA4", "SeZM", "sezm")
    use_srtab: ClassVar[None] = None

    descriptor: DescriptorConfig = option(
        registry=_DESCRIPTORS, default_type="dpa4", doc="How the surroundings of an atom are described."
    )
    fitting_net: FittingNetConfig = option(
        registry=_FITTINGS, default_type="dpa4_ener", doc="How the energy follows from the descriptor."
    )
