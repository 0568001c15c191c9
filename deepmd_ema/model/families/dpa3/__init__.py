"""The descriptor dpa3."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa3.section import DPA3Config

FAMILY = Family(
    DPA3Config,
    f"{__name__}.module:DPA3Descriptor",
    "deepmd_ema.interop.trees.dpa3:DPA3Tree",
)
