"""The descriptor se_e3_tebd."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig

FAMILY = Family(
    SeE3TebdConfig,
    f"{__name__}.module:SeE3TebdDescriptor",
    "deepmd_ema.interop.trees.type_embedded:SeE3TebdTree",
)
