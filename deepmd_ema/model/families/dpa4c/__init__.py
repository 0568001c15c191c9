"""The descriptor dpa4c (DPA4C)."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4c.section import DPA4CConfig

FAMILY = Family(
    DPA4CConfig,
    module="deepmd_ema.model.families.dpa4c.module:DPA4CDescriptor",
    tree="deepmd_ema.interop.trees.dpa4c:DPA4CTree",
    example={"rcut": 4.0, "channels": 8, "lmax": 3, "n_radial": 6, "radial_modes": 2, "precision": "float64"},
)
