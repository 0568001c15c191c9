"""The model of type dpa4: the descriptor dpa4 and the fitting network dpa4_ener."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.dpa4_model.section import DPA4ModelConfig

# no model class of its own: it is a choice of descriptor and fitting network
FAMILY = Family(
    DPA4ModelConfig,
    "deepmd_ema.model.build:network_parts",
    "deepmd_ema.interop.trees.dpa4_model:DPA4ModelTree",
)
