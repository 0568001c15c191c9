"""The fitting network ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.ener.section import EnerFittingConfig

FAMILY = Family(
    EnerFittingConfig,
    f"{__name__}.module:EnergyFitting",
    "deepmd_ema.interop.trees.ener:EnerTree",
)
