"""The model of type dpa4: the descriptor dpa4 and the fitting network dpa4_ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4_model.section import DPA4ModelConfig

FAMILY = Family(
    DPA4ModelConfig,
    module="deepmd_ema.model.build:network_parts",
    tree="deepmd_ema.interop.trees.dpa4_model:DPA4ModelTree",
)
