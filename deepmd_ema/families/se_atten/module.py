"""DPA-1: one embedding for all elements, with attention among neighbors (se_atten, se_atten_v2)."""

from __future__ import annotations

from deepmd_ema.families.se_atten.layers import SeAttenBlock
from deepmd_ema.model.descriptor.type_embedded import OneBlockDescriptor


class DPA1Descriptor(OneBlockDescriptor):
    """Moments of the environment with attention (Zhang et al., arXiv:2208.08236)."""

    block: SeAttenBlock
    make_block = SeAttenBlock
