"""The descriptor dpa4c (DPA4C)."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4c.section import DPA4CConfig

FAMILY = Family(
    DPA4CConfig,
    f"{__name__}.module:DPA4CDescriptor",
    "deepmd_ema.interop.trees.dpa4c:DPA4CTree",
)
