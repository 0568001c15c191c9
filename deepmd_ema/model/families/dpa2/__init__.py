"""The descriptor dpa2."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa2.section import DPA2Config

FAMILY = Family(
    DPA2Config,
    module="deepmd_ema.model.families.dpa2.module:DPA2Descriptor",
    tree="deepmd_ema.interop.trees.dpa2:DPA2Tree",
    example={
        "repinit": {
            "rcut": 4.0, "rcut_smth": 1.0, "nsel": 60, "neuron": [4, 8, 16], "axis_neuron": 4, "tebd_dim": 4,
            "use_three_body": True, "three_body_neuron": [2, 4], "three_body_sel": 30, "three_body_rcut": 3.0,
            "three_body_rcut_smth": 1.0,
        },
        "repformer": {
            "rcut": 3.2, "rcut_smth": 1.0, "nsel": 40, "nlayers": 3, "g1_dim": 8, "g2_dim": 6, "axis_neuron": 3,
            "attn1_hidden": 4, "attn1_nhead": 2, "attn2_hidden": 4, "attn2_nhead": 2, "update_h2": True,
            "attn2_has_gate": True, "update_style": "res_residual", "update_residual": 0.05,
        },
        "add_tebd_to_repinit_out": True,
    },
)  # fmt: skip
