"""The descriptor dpa3."""

from deepmd_ema.families.dpa3.section import DPA3Config
from deepmd_ema.registry import Family

FAMILY = Family(
    DPA3Config,
    module="deepmd_ema.families.dpa3.module:DPA3Descriptor",
    tree="deepmd_ema.families.dpa3.tree:DPA3Tree",
    example={
        "repflow": {
            "n_dim": 8, "e_dim": 6, "a_dim": 4, "nlayers": 3, "e_rcut": 4.0, "e_rcut_smth": 1.0, "e_sel": 60,
            "a_rcut": 3.0, "a_rcut_smth": 1.0, "a_sel": 30, "axis_neuron": 3, "smooth_edge_update": True,
            "update_residual": 1.0,
        },
    },
)  # fmt: skip
