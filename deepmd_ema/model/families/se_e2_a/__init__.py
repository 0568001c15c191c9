"""The descriptor se_e2_a."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

FAMILY = Family(
    SeE2AConfig,
    f"{__name__}.module:SeE2ADescriptor",
    "deepmd_ema.interop.trees.by_type:SeE2ATree",
)
