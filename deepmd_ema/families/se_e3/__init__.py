"""The descriptor se_e3."""

from deepmd_ema.families.se_e3.section import SeE3Config
from deepmd_ema.registry import Family

FAMILY = Family(
    SeE3Config,
    module="deepmd_ema.families.se_e3.module:SeE3Descriptor",
    tree="deepmd_ema.families.se_e3.tree:SeE3Tree",
    example={"sel": [20, 20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [2, 4, 8]},
)
