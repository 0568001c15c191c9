"""The descriptor se_e2_r."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e2_r.section import SeE2RConfig

FAMILY = Family(
    SeE2RConfig,
    module="deepmd_ema.model.families.se_e2_r.module:SeE2RDescriptor",
    tree="deepmd_ema.interop.trees.se_e2_r:SeE2RTree",
    example={"sel": [20, 20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8, 16]},
)
