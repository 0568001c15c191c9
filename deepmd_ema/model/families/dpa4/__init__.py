"""The descriptor dpa4 (DPA-4, SeZM)."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4.section import DPA4Config

FAMILY = Family(
    DPA4Config,
    f"{__name__}.module:DPA4Descriptor",
    "deepmd_ema.interop.trees.dpa4:DPA4Tree",
)
