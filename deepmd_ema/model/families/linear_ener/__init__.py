"""The model linear_ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.linear_ener.section import LinearConfig

FAMILY = Family(
    LinearConfig,
    f"{__name__}.module:linear_parts",
    "deepmd_ema.interop.trees.linear_ener:LinearTree",
)
