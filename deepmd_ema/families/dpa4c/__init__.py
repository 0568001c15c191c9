"""The descriptor dpa4c (DPA4C)."""

from deepmd_ema.families.dpa4c.section import DPA4CConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    DPA4CConfig,
    module="deepmd_ema.families.dpa4c.module:DPA4CDescriptor",
    tree="deepmd_ema.families.dpa4c.tree:DPA4CTree",
    example={"rcut": 4.0, "channels": 8, "lmax": 3, "n_radial": 6, "radial_modes": 2, "precision": "float64"},
)
