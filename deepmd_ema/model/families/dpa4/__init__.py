"""The descriptor dpa4 (DPA-4, SeZM)."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4.section import DPA4Config

FAMILY = Family(
    DPA4Config,
    module="deepmd_ema.model.families.dpa4.module:DPA4Descriptor",
    tree="deepmd_ema.interop.trees.dpa4:DPA4Tree",
    example={
        "rcut": 4.0, "channels": 8, "n_radial": 6, "edge_norm": False, "lmax": 2, "n_blocks": 2, "mixing_layers": 2,
        "message_node_so3": True, "ffn_neurons": 8, "ffn_so3_grid": True, "grid_branch": [0, 0, 1],
        "so3_readout": "mlp", "precision": "float64",
    },
)  # fmt: skip
