"""The fitting network dpa4_ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4_ener.section import DPA4EnerConfig

FAMILY = Family(
    DPA4EnerConfig,
    module="deepmd_ema.model.families.dpa4_ener.module:DPA4Fitting",
    tree="deepmd_ema.interop.trees.dpa4_ener:DPA4EnerTree",
)
