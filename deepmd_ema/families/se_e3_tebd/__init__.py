"""The descriptor se_e3_tebd."""

from deepmd_ema.families.se_e3_tebd.section import SeE3TebdConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    SeE3TebdConfig,
    module="deepmd_ema.families.se_e3_tebd.module:SeE3TebdDescriptor",
    tree="deepmd_ema.families.se_e3_tebd.tree:SeE3TebdTree",
    example={"sel": 60, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [2, 4, 8], "tebd_dim": 4},
)
