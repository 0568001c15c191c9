"""The tree of the descriptor dpa3 (DPA-3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop import parts
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.families.dpa3.module import DPA3Descriptor, RepflowLayer
from deepmd_ema.model.families.dpa3.section import RepflowConfig

# options of all layers together
OF_ALL_LAYERS = (
    "nlayers",
    "skip_stat",
    "fix_stat_std",
    "edge_init_use_dist",
    "use_exp_switch",
)
# names there, names here
LINEAR = {
    "node_self_mlp": "node_self",
    "node_sym_linear": "node_sym",
    "node_edge_linear": "node_edge",
    "edge_self_linear": "edge_self",
    "edge_angle_linear1": "edge_angle",
    "edge_angle_linear2": "edge_angle_out",
    "angle_self_linear": "angle_self",
    "a_compress_n_linear": "compress_node",
    "a_compress_e_linear": "compress_edge",
}
RESIDUALS = {
    "n_residual": "node_update",
    "e_residual": "edge_update",
    "a_residual": "angle_update",
}


class DPA3Tree(parts.PartTree):
    """Tree of dpa3."""

    modules = dict.fromkeys(
        parts.BACKENDS,
        (
            (r"^repflow_variable\.", "repflows."),
            (r"^repflows\.repflow_layers\.", "repflows.layers."),
            *parts.STATISTICS,
        ),
    )

    def write(self, part: DPA3Descriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        options = plain(config.descriptor)
        return {
            "@class": "Descriptor",
            "type": "dpa3",
            "@version": 2,
            "ntypes": part.num_types,
            "repflow_args": parts.options_tree(part.flow, "skip_stat"),
            **parts.options_tree(config.descriptor, "repflow"),
            "precision": parts.precision_of(part.dtype),
            "type_map": list(config.type_map),
            "type_embedding": parts.type_embedding_tree(
                part.type_embedding, config.type_map, options["trainable"]
            ),
            "repflow_variable": {
                "edge_embd": parts.layer_tree(part.edge_embedding),
                "angle_embd": parts.layer_tree(part.angle_embedding),
                "repflow_layers": [
                    _layer_tree(layer, part, options) for layer in part.layers
                ],
                # what DeePMD-kit writes whatever the options, and does not read
                "env_mat": parts.env_mat_tree(
                    part.flow.e_rcut, part.flow.e_rcut_smth, 0.0
                ),
                VARIABLES: parts.statistics_tree(part),
            },
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        names = [field.name for field in fields(RepflowConfig)]
        # the default is without effect in a model that does not embed charge and spin
        return {
            **super().section(tree),
            "default_chg_spin": None,
            "repflow": parts.chosen(tree["repflow_args"], names),
        }

    def upgraded(self, tree: Tree) -> Tree:
        """Return the tree in the form of version 2.

        Files of version 1 have the trained factors beside the options.
        """
        values = tree["repflow_variable"]
        layers = [{VARIABLES: layer, **layer} for layer in values["repflow_layers"]]
        return {**tree, "repflow_variable": {**values, "repflow_layers": layers}}


def _layer_tree(
    layer: RepflowLayer, part: DPA3Descriptor, options: Mapping[str, Any]
) -> Tree:
    args = parts.tree_without_effect(part.flow)
    args |= {
        name: value
        for name, value in options["repflow"].items()
        if name not in OF_ALL_LAYERS
    }
    tree = {
        **parts.node("RepFlowLayer", 2),
        **args,
        "e_sel": [part.sel],
        "ntypes": part.num_types,
        "activation_function": options["activation_function"],
        "precision": parts.precision_of(part.dtype),
        **{
            key: parts.layer_tree(linear)
            for key, linear in parts.parts_of(layer, LINEAR)
        },
    }
    if args["update_style"] == "res_residual":
        tree |= parts.residuals_tree(layer, RESIDUALS)
    return tree
