"""The model of type dpa4: the descriptor dpa4 and the fitting network dpa4_ener."""

from deepmd_ema.families.dpa4_model.section import DPA4ModelConfig
from deepmd_ema.registry import Family

FAMILY = Family(
    DPA4ModelConfig,
    module="deepmd_ema.model.build:network_parts",
    tree="deepmd_ema.families.dpa4_model.tree:DPA4ModelTree",
)
