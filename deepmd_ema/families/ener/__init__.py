"""The fitting network ener."""

from deepmd_ema.families.ener.section import EnerFittingConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    EnerFittingConfig,
    module="deepmd_ema.families.ener.module:EnergyFitting",
    tree="deepmd_ema.families.ener.tree:EnerTree",
)
