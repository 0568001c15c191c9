"""DPA-1: one embedding for all elements, with attention among neighbors (se_atten, se_atten_v2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_ema.model.descriptor.se_atten_block import SeAttenBlock
from deepmd_ema.model.descriptor.type_embedded import TypeEmbeddedDescriptor

if TYPE_CHECKING:
    from deepmd_ema.config.schema.se_atten import SeAttenConfig, SeAttenV2Config


class DPA1Descriptor(TypeEmbeddedDescriptor):
    """Moments of the environment with attention, and the type embedding of the atom (Zhang et al., arXiv:2208.08236).

    Args:
        config: the section ``model.descriptor``; ``sel`` must be a number.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    block: SeAttenBlock

    def __init__(self, config: SeAttenConfig | SeAttenV2Config, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, SeAttenBlock)
