"""The descriptor se_e2_a."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

FAMILY = Family(
    SeE2AConfig,
    module="deepmd_ema.model.families.se_e2_a.module:SeE2ADescriptor",
    tree="deepmd_ema.interop.trees.se_e2_a:SeE2ATree",
    example={"sel": [20, 20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8, 16], "axis_neuron": 4},
)
