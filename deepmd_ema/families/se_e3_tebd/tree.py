"""The tree of the descriptor se_e3_tebd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.families.se_atten.tree import block_tree, fill_block, has_exp_switch
from deepmd_ema.families.se_e3_tebd.module import SeE3TebdDescriptor
from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.interchange.dp.networks import (
    PartTree,
    chosen,
    fill_type_embedding,
    precision_of,
    type_embedding_tree,
)

OPTIONS = (
    "rcut", "rcut_smth", "neuron", "tebd_dim", "tebd_input_mode", "resnet_dt", "set_davg_zero", "activation_function",
    "env_protection", "exclude_types", "trainable", "concat_output_tebd", "use_econf_tebd", "smooth",
)  # fmt: skip


class SeE3TebdTree(PartTree):
    """Tree of se_e3_tebd."""

    renamed = ((r"\.se_ttebd\.", "."),)

    def write(self, part: SeE3TebdDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor."""
        block, options, ntypes = part.block, plain(config.descriptor), len(config.type_map)
        return {
            "@class": "Descriptor",
            "type": "se_e3_tebd",
            "@version": 1,
            **chosen(options, OPTIONS),
            "sel": [part.sel],
            "ntypes": ntypes,
            "type_map": list(config.type_map),
            "precision": precision_of(part.dtype),
            **block_tree(block, options, ntypes),
            "type_embedding": type_embedding_tree(part.type_embedding, config.type_map, options["trainable"]),
        }

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "descriptor version 2 (compressed)": tree.get("@version", 1) > 1,
            "an exponential switch": has_exp_switch(tree),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # this option is only in the tree of the type embedding
        return {**super().section(tree), "use_tebd_bias": bool(tree["type_embedding"].get("use_tebd_bias", True))}

    def fill(self, part: SeE3TebdDescriptor, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        fill_type_embedding(part.type_embedding, tree["type_embedding"])
        fill_block(part.block, tree)
