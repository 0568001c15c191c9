"""The model linear_ener."""

from deepmd_ema.families.linear_ener.section import LinearConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    LinearConfig,
    module="deepmd_ema.families.linear_ener.module:linear_parts",
    tree="deepmd_ema.families.linear_ener.tree:LinearTree",
)
