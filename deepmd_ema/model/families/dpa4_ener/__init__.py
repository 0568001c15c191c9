"""The fitting network dpa4_ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4_ener.section import DPA4EnerConfig

FAMILY = Family(
    DPA4EnerConfig,
    f"{__name__}.module:DPA4Fitting",
    "deepmd_ema.interop.trees.ener:DPA4EnerTree",
)
