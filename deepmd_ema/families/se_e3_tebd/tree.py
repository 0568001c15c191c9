"""The tree of the descriptor se_e3_tebd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.se_atten.tree import check_angular_means, one_block_tree
from deepmd_ema.families.se_e3_tebd.module import SeE3TebdDescriptor
from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.interchange.dp.networks import BACKENDS, STATISTICS, PartTree, has_exp_switch

OPTIONS = (
    "rcut", "rcut_smth", "neuron", "tebd_dim", "tebd_input_mode", "resnet_dt", "set_davg_zero", "activation_function",
    "env_protection", "exclude_types", "trainable", "concat_output_tebd", "use_econf_tebd", "smooth",
)  # fmt: skip


class SeE3TebdTree(PartTree):
    """Tree of se_e3_tebd."""

    modules = dict.fromkeys(BACKENDS, ((r"^(?!type_embedding\.)", "se_ttebd."), *STATISTICS))

    def write(self, part: SeE3TebdDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        return {"type": "se_e3_tebd", "@version": 1, **one_block_tree(part, config, OPTIONS)}

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

    def fill(self, part: SeE3TebdDescriptor, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        check_angular_means(tree)
        super().fill(part, config, tree)
