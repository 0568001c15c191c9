"""The descriptor se_e3."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e3.section import SeE3Config

FAMILY = Family(
    SeE3Config,
    f"{__name__}.module:SeE3Descriptor",
    "deepmd_ema.interop.trees.by_type:SeE3Tree",
)
