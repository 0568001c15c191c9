"""The descriptor se_e2_a."""

from deepmd_ema.families.se_e2_a.section import SeE2AConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    SeE2AConfig,
    module="deepmd_ema.families.se_e2_a.module:SeE2ADescriptor",
    tree="deepmd_ema.families.se_e2_a.tree:SeE2ATree",
    example={"sel": [20, 20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8, 16], "axis_neuron": 4},
)
