"""The descriptor hybrid."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families import se_e2_a, se_e3_tebd
from deepmd_ema.model.families.hybrid.section import HybridConfig

# the second part has a shorter cutoff
_BY_TYPE = {"type": "se_e2_a", **se_e2_a.FAMILY.example}
_BY_DISTANCE = {"type": "se_e3_tebd", **se_e3_tebd.FAMILY.example, "rcut": 3.5}
FAMILY = Family(
    HybridConfig,
    module="deepmd_ema.model.families.hybrid.module:build_hybrid",
    tree="deepmd_ema.interop.trees.hybrid:HybridTree",
    example={"list": [_BY_TYPE, _BY_DISTANCE]},
)
