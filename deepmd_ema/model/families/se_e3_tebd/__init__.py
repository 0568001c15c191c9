"""The descriptor se_e3_tebd."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig

FAMILY = Family(
    SeE3TebdConfig,
    module="deepmd_ema.model.families.se_e3_tebd.module:SeE3TebdDescriptor",
    tree="deepmd_ema.interop.trees.se_e3_tebd:SeE3TebdTree",
    example={"sel": 60, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [2, 4, 8], "tebd_dim": 4},
)
