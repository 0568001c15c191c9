"""The descriptor dpa2."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa2.section import DPA2Config

FAMILY = Family(
    DPA2Config,
    f"{__name__}.module:DPA2Descriptor",
    "deepmd_ema.interop.trees.dpa2:DPA2Tree",
)
