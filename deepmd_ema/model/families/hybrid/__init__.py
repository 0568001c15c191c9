"""The descriptor hybrid."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.hybrid.section import HybridConfig

FAMILY = Family(
    HybridConfig,
    f"{__name__}.module:build_hybrid",
    "deepmd_ema.interop.trees.hybrid:HybridTree",
)
