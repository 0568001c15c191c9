"""The tree of the descriptor se_e3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from deepmd_ema.config import ModelConfig
from deepmd_ema.interop.parts import STATISTICS, Names
from deepmd_ema.interop.tree_files import Tree
from deepmd_ema.interop.trees.se_e2_a import SeE2ATree
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.families.se_e3.module import SeE3Descriptor
from deepmd_ema.model.nn.layers import Network


class SeE3Tree(SeE2ATree):
    """Tree of se_e3: a network for each pair (a, b) of types, at ``a + b * T``; DeePMD-kit uses those with a <= b."""

    type: ClassVar[str] = "se_e3"
    modules: ClassVar[Names] = {"pt": ((r"^", "seat."), *STATISTICS), "pt_expt": ()}

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor; the networks that are not used are those of the pair in the other order."""
        tree = super().write(part, config)
        return {name: value for name, value in tree.items() if name != "spin"}

    def _networks(self, part: ByTypeDescriptor) -> tuple[Sequence[Network], int]:
        assert isinstance(part, SeE3Descriptor)
        by_pair = dict(zip(part.pairs, part.embeddings, strict=True))
        types = range(part.num_types)
        # the used one of a pair is the later one, so that its arrays are those that `fill` leaves
        return [by_pair[min(a, b), max(a, b)] for b in types for a in types], 2
