"""The model linear_ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.linear_ener.section import LinearConfig

FAMILY = Family(
    LinearConfig,
    module="deepmd_ema.model.families.linear_ener.module:linear_parts",
    tree="deepmd_ema.interop.trees.linear_ener:LinearTree",
)
