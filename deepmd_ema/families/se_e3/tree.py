"""The tree of the descriptor se_e3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config import ModelConfig
from deepmd_ema.families.se_e2_a.tree import SeE2ATree
from deepmd_ema.families.se_e3.module import SeE3Descriptor
from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.nn.layers import Network


class SeE3Tree(SeE2ATree):
    """Tree of se_e3: a network for each pair (a, b) of types, at ``a + b * T``; DeePMD-kit uses those with a <= b."""

    type: ClassVar[str] = "se_e3"

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor; the networks that are not used are those of the pair in the other order."""
        tree = super().write(part, config)
        return {name: value for name, value in tree.items() if name != "spin"}

    def fill(self, part: ByTypeDescriptor, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        assert isinstance(part, SeE3Descriptor)
        nets = tree["embeddings"]["networks"]
        if len(nets) != part.num_types**2:
            raise ValueError(f"embeddings: {len(nets)} networks, expected {part.num_types**2}")
        used = [nets[a + b * part.num_types] for a, b in part.pairs]
        super().fill(part, {**tree, "embeddings": {"networks": used}})

    def _networks(self, part: ByTypeDescriptor) -> list[Network]:
        assert isinstance(part, SeE3Descriptor)
        by_pair = dict(zip(part.pairs, part.networks, strict=True))
        types = range(part.num_types)
        return [by_pair[min(a, b), max(a, b)] for b in types for a in types]

    def _ndim(self, part: ByTypeDescriptor) -> int:
        return 2
