"""The descriptor hybrid."""

from deepmd_ema.families import se_e2_a, se_e3_tebd
from deepmd_ema.families.hybrid.section import HybridConfig
from deepmd_ema.registry import Family

# the second part has a shorter cutoff
_BY_TYPE = {"type": "se_e2_a", **se_e2_a.FAMILY.example}
_BY_DISTANCE = {"type": "se_e3_tebd", **se_e3_tebd.FAMILY.example, "rcut": 3.5}
FAMILY = Family(
    HybridConfig,
    module="deepmd_ema.families.hybrid.module:build_hybrid",
    tree="deepmd_ema.families.hybrid.tree:HybridTree",
    example={"list": [_BY_TYPE, _BY_DISTANCE]},
)
