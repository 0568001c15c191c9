"""The tree of the descriptor se_e3_tebd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop.parts import BACKENDS, STATISTICS, PartTree, refuse_angular_means
from deepmd_ema.interop.tree_files import Tree
from deepmd_ema.interop.trees.se_atten import one_block_tree
from deepmd_ema.model.families.se_e3_tebd.module import SeE3TebdDescriptor


class SeE3TebdTree(PartTree):
    """Tree of se_e3_tebd."""

    version: ClassVar[float] = 1
    modules = dict.fromkeys(BACKENDS, ((r"^(?!type_embedding\.)", "se_ttebd."), *STATISTICS))

    def write(self, part: SeE3TebdDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        return {"type": "se_e3_tebd", "@version": 1, **one_block_tree(part, config, "sel", "use_tebd_bias")}

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # this option is only in the tree of the type embedding
        return {**super().section(tree), "use_tebd_bias": bool(tree["type_embedding"].get("use_tebd_bias", True))}

    def upgraded(self, tree: Tree) -> Tree:
        """Return the tree if its statistics are those of a block of pairs of neighbors."""
        refuse_angular_means(tree)
        return tree
