"""The fitting network dpa4_ener."""

from deepmd_ema.families.dpa4_ener.section import DPA4EnerConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    DPA4EnerConfig,
    module="deepmd_ema.families.dpa4_ener.module:DPA4Fitting",
    tree="deepmd_ema.families.dpa4_ener.tree:DPA4EnerTree",
)
