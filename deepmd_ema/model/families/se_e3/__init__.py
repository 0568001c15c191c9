"""The descriptor se_e3."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e3.section import SeE3Config

FAMILY = Family(
    SeE3Config,
    module="deepmd_ema.model.families.se_e3.module:SeE3Descriptor",
    tree="deepmd_ema.interop.trees.se_e3:SeE3Tree",
    example={"sel": [20, 20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [2, 4, 8]},
)
