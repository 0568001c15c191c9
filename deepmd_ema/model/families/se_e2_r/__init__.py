"""The descriptor se_e2_r."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e2_r.section import SeE2RConfig

FAMILY = Family(
    SeE2RConfig,
    f"{__name__}.module:SeE2RDescriptor",
    "deepmd_ema.interop.trees.by_type:SeE2RTree",
)
