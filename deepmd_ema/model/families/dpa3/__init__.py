"""The descriptor dpa3."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa3.section import DPA3Config

FAMILY = Family(
    DPA3Config,
    module="deepmd_ema.model.families.dpa3.module:DPA3Descriptor",
    tree="deepmd_ema.interop.trees.dpa3:DPA3Tree",
    example={
        "repflow": {
            "n_dim": 8, "e_dim": 6, "a_dim": 4, "nlayers": 3, "e_rcut": 4.0, "e_rcut_smth": 1.0, "e_sel": 60,
            "a_rcut": 3.0, "a_rcut_smth": 1.0, "a_sel": 30, "axis_neuron": 3, "smooth_edge_update": True,
            "update_residual": 1.0,
        },
    },
)  # fmt: skip
