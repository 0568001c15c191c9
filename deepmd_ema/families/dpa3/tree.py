"""The tree of the descriptor dpa3 (DPA-3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.dpa3.layers import RepflowLayer
from deepmd_ema.families.dpa3.module import DPA3Descriptor
from deepmd_ema.families.dpa3.section import RepflowConfig
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import (
    BACKENDS,
    STATISTICS,
    PartTree,
    array,
    chosen,
    layer_tree,
    parts_of,
    precision_of,
    statistics_tree,
    type_embedding_tree,
)

OPTIONS = (
    "concat_output_tebd", "activation_function", "exclude_types", "env_protection", "trainable", "use_econf_tebd",
    "use_tebd_bias", "use_loc_mapping", "add_chg_spin_ebd", "default_chg_spin",
)  # fmt: skip
FLOW_OPTIONS = tuple(field.name for field in fields(RepflowConfig) if field.name != "skip_stat")
LAYER_OPTIONS = tuple(name for name in FLOW_OPTIONS if name not in (
    "nlayers", "fix_stat_std", "edge_init_use_dist", "use_exp_switch",
))  # fmt: skip
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
RESIDUALS = {"n_residual": "node_update", "e_residual": "edge_update", "a_residual": "angle_update"}


class DPA3Tree(PartTree):
    """Tree of dpa3."""

    modules = dict.fromkeys(
        BACKENDS,
        ((r"^repflow_variable\.", "repflows."), (r"^repflows\.repflow_layers\.", "repflows.layers."), *STATISTICS),
    )

    def write(self, part: DPA3Descriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        options = plain(config.descriptor)
        flow = part.flow
        return {
            "@class": "Descriptor",
            "type": "dpa3",
            "@version": 2,
            "ntypes": part.num_types,
            "repflow_args": chosen(options["repflow"], FLOW_OPTIONS),
            **chosen(options, OPTIONS),
            "precision": precision_of(part.dtype),
            "type_map": list(config.type_map),
            "type_embedding": type_embedding_tree(part.type_embedding, config.type_map, options["trainable"]),
            "repflow_variable": {
                "edge_embd": layer_tree(part.edge_embedding, resnet=False),
                "angle_embd": layer_tree(part.angle_embedding, resnet=False),
                "repflow_layers": [_layer_tree(layer, part, options) for layer in part.layers],
                # what DeePMD-kit writes whatever the options, and does not read
                "env_mat": {
                    "rcut": flow.e_rcut,
                    "rcut_smth": flow.e_rcut_smth,
                    "protection": 0.0,
                    "use_exp_switch": False,
                },
                VARIABLES: statistics_tree(part),
            },
        }

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "charge and spin as an input": bool(tree.get("add_chg_spin_ebd")),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        return {
            **super().section(tree),
            "default_chg_spin": None,  # without effect in a model that does not embed it
            "repflow": chosen(tree["repflow_args"], FLOW_OPTIONS),
        }

    def fill(self, part: DPA3Descriptor, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        values = tree["repflow_variable"]
        # files of version 1 have the trained factors beside the options
        layers = [{VARIABLES: layer, **layer} for layer in values["repflow_layers"]]
        super().fill(part, config, {**tree, "repflow_variable": {**values, "repflow_layers": layers}})


def _layer_tree(layer: RepflowLayer, part: DPA3Descriptor, options: Mapping[str, Any]) -> Tree:
    tree = {
        "@class": "RepFlowLayer",
        "@version": 2,
        **chosen(options["repflow"], LAYER_OPTIONS),
        "e_sel": [part.sel],
        "ntypes": part.num_types,
        "activation_function": options["activation_function"],
        "precision": precision_of(part.dtype),
        **{key: layer_tree(linear, resnet=False) for key, linear in parts_of(layer, LINEAR)},
    }
    if options["repflow"]["update_style"] == "res_residual":
        found = {key: [array(factors) for factors in update.factors] for key, update in parts_of(layer, RESIDUALS)}
        tree[VARIABLES] = {**{key: [] for key in RESIDUALS}, **found}
    return tree
