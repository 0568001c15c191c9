"""Three-body descriptor with type embeddings (se_e3_tebd)."""

from __future__ import annotations

from deepmd_ema.families.se_e3_tebd.layers import SeTTebdBlock
from deepmd_ema.model.descriptor.type_embedded import OneBlockDescriptor


class SeE3TebdDescriptor(OneBlockDescriptor):
    """Sums over pairs of neighbors."""

    block: SeTTebdBlock
    make_block = SeTTebdBlock
