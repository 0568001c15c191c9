"""Three-body descriptor with type embeddings (se_e3_tebd)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_ema.model.descriptor.se_t_tebd_block import SeTTebdBlock
from deepmd_ema.model.descriptor.type_embedded import TypeEmbeddedDescriptor

if TYPE_CHECKING:
    from deepmd_ema.config.schema.se_e3_tebd import SeE3TebdConfig


class SeE3TebdDescriptor(TypeEmbeddedDescriptor):
    """Sums over pairs of neighbors, and the type embedding of the atom.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be a number.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    block: SeTTebdBlock

    def __init__(self, config: SeE3TebdConfig, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, SeTTebdBlock)
