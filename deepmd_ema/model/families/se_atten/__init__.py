"""The descriptors se_atten (DPA-1) and se_atten_v2."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_atten.section import SeAttenConfig, SeAttenV2Config

_MODULE = f"{__name__}.module:DPA1Descriptor"
_TREE = "deepmd_ema.interop.trees.type_embedded:SeAttenTree"
SE_ATTEN = Family(SeAttenConfig, _MODULE, _TREE)
SE_ATTEN_V2 = Family(SeAttenV2Config, _MODULE, _TREE)
