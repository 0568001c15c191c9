"""The descriptors se_atten (DPA-1) and se_atten_v2."""

from deepmd_ema.config.registry import Family
from deepmd_ema.model.families.se_atten.section import SeAttenConfig, SeAttenV2Config

_MODULE = "deepmd_ema.model.families.se_atten.module:DPA1Descriptor"
_TREE = "deepmd_ema.interop.trees.se_atten:SeAttenTree"
_EXAMPLE = {"sel": 60, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8, 16], "axis_neuron": 4, "attn": 8, "tebd_dim": 4}

FAMILY = Family(SeAttenConfig, _MODULE, _TREE, {**_EXAMPLE, "attn_layer": 2, "smooth_type_embedding": True})
FAMILY_V2 = Family(SeAttenV2Config, _MODULE, _TREE, {**_EXAMPLE, "attn_layer": 1})
