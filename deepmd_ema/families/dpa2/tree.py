"""The tree of the descriptor dpa2 (DPA-2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.dpa2.module import DPA2Descriptor
from deepmd_ema.families.dpa2.repformer_layer import RepformerLayer
from deepmd_ema.families.se_atten.tree import block_tree, check_angular_means
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import (
    BACKENDS,
    STATISTICS,
    PartTree,
    array,
    chosen,
    env_mat_tree,
    has_exp_switch,
    layer_tree,
    norm_tree,
    parts_of,
    precision_of,
    statistics_tree,
    type_embedding_tree,
)
from deepmd_ema.model.nn.norm import eps_of
from deepmd_ema.model.ops.reference import LOGIT_SHIFT

OPTIONS = (
    "concat_output_tebd", "smooth", "exclude_types", "env_protection", "trainable", "add_tebd_to_repinit_out",
    "use_econf_tebd", "use_tebd_bias",
)  # fmt: skip
OWN_OPTIONS = ("interpolate",)  # that DeePMD-kit does not have, and refuses
LAYER_OPTIONS = (
    "rcut", "rcut_smth", "g1_dim", "g2_dim", "axis_neuron", "update_g1_has_conv", "update_g1_has_drrd",
    "update_g1_has_grrg", "update_g1_has_attn", "attn1_hidden", "attn1_nhead", "attn2_hidden", "attn2_nhead",
    "attn2_has_gate", "activation_function", "update_style", "trainable_ln", "use_sqrt_nnei", "g1_out_conv",
    "g1_out_mlp",
)  # fmt: skip
PAIR_OPTIONS = ("update_g2_has_g1g1", "update_g2_has_attn", "update_h2")  # false in the last layer
# names of the parts of a layer there, names here
DENSE = {
    "linear1": "linear_node",
    "g1_self_mlp": "node_mlp",
    "proj_g1g2": "conv",
    "loc_attn.mapq": "attention.query",
    "loc_attn.mapkv": "attention.key_value",
    "loc_attn.head_map": "attention.head_map",
    "linear2": "linear_pair",
    "proj_g1g1g2": "product",
    "attn2g_map.mapqk": "pair_attention.query_key",
    "attn2_mh_apply.mapv": "pair_attention.value",
    "attn2_mh_apply.head_map": "pair_attention.head_map",
    "attn2_ev_apply.head_map": "pair_attention.vector_map",
}
RESIDUALS = {"g1_residual": "node_update", "g2_residual": "pair_update", "h2_residual": "vector_update"}
LATER_OPTIONS = ("use_sqrt_nnei", "g1_out_conv", "g1_out_mlp")  # false in files before version 3


class DPA2Tree(PartTree):
    """Tree of dpa2."""

    modules = dict.fromkeys(
        BACKENDS,
        (
            (r"^(repinit|repinit_three_body|repformers)_variable\.", r"\1."),
            (r"^repformers\.repformer_layers\.", "repformers.layers."),
            *STATISTICS,
        ),
    )

    def write(self, part: DPA2Descriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        options, types = plain(config.descriptor), config.type_map
        repformer_args = {**options["repformer"], "ln_eps": eps_of(options["repformer"]["ln_eps"])}
        tree: Tree = {
            "@class": "Descriptor",
            "@version": 3,
            "type": "dpa2",
            "ntypes": len(types),
            "repinit_args": {name: value for name, value in options["repinit"].items() if name not in OWN_OPTIONS},
            "repformer_args": repformer_args,
            **chosen(options, OPTIONS),
            "precision": precision_of(part.dtype),
            "type_map": list(types),
            "type_embedding": type_embedding_tree(part.type_embedding, types, options["trainable"]),
            "g1_shape_tranform": {"@class": "Identity", "@version": 1},
            "repinit_variable": block_tree(part.repinit, options["repinit"], len(types)),
            "repformers_variable": {
                "g2_embd": layer_tree(part.repformer.pair_embedding, resnet=False),
                "repformer_layers": [_layer_tree(layer, part, repformer_args) for layer in part.repformer.layers],
                "env_mat": env_mat_tree(part.repformer),
                VARIABLES: statistics_tree(part.repformer),
            },
        }
        if part.to_repformer is not None:
            tree["g1_shape_tranform"] = layer_tree(part.to_repformer, resnet=False)
        if part.add_element is not None:
            tree["tebd_transform"] = layer_tree(part.add_element, resnet=False)
        if part.angles is not None:
            tree["repinit_three_body_variable"] = block_tree(part.angles, options["repinit"], len(types))
        return tree

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        parts = ("repinit_variable", "repformers_variable", "repinit_three_body_variable")
        return {
            "descriptor version 4 (compressed)": tree.get("@version", 3) == 4
            or bool(tree["repinit_variable"].get("compress")),
            "an exponential switch": any(has_exp_switch(tree.get(part) or {}) for part in parts),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        later = dict(tree["repformer_args"])
        if tree.get("@version", 3) < 3:
            later |= dict.fromkeys(LATER_OPTIONS, False)
        # files of version 1 do not say that the type embedding has a bias
        return {"use_tebd_bias": True, **super().section(tree), "repinit": tree["repinit_args"], "repformer": later}

    def fill(self, part: DPA2Descriptor, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        if part.angles is not None:
            check_angular_means(tree["repinit_three_body_variable"], "repinit_three_body: ")
        super().fill(part, config, tree)


def _layer_tree(layer: RepformerLayer, part: DPA2Descriptor, args: Mapping[str, Any]) -> Tree:
    """Return the tree of one layer."""
    precision = precision_of(part.dtype)
    common = {"@version": 1, "precision": precision}
    tree: Tree = {
        "@class": "RepformerLayer",
        "@version": 2,
        **chosen(args, LAYER_OPTIONS),
        "sel": [part.repformer.sel],
        "ntypes": part.num_types,
        "update_chnnl_2": not layer.last,
        **{name: args[name] and not layer.last for name in PAIR_OPTIONS},
        "smooth": part.repformer.smooth,
        "precision": precision,
        "ln_eps": args["ln_eps"],
    }
    softmax = {"smooth": part.repformer.smooth, "attnw_shift": LOGIT_SHIFT}
    of_node = {"input_dim": args["g1_dim"], "hidden_dim": args["attn1_hidden"], "head_num": args["attn1_nhead"]}
    of_pair = {"input_dim": args["g2_dim"], "head_num": args["attn2_nhead"]}
    heads: Tree = {
        "loc_attn": {"@class": "LocalAtten", **common, **of_node, **softmax},
        "attn2g_map": {
            "@class": "Atten2Map",
            **common,
            **of_pair,
            "hidden_dim": args["attn2_hidden"],
            "has_gate": args["attn2_has_gate"],
            **softmax,
        },
        "attn2_mh_apply": {"@class": "Atten2MultiHeadApply", **common, **of_pair},
        "attn2_ev_apply": {"@class": "Atten2EquiVarApply", **common, **of_pair},
    }
    for place, dense in parts_of(layer, DENSE):
        head, _, name = place.rpartition(".")
        owner: Any = tree.setdefault(head, heads[head]) if head else tree
        owner[name] = layer_tree(dense, resnet=False)
    for name, norm in parts_of(layer, {"attn2_lm": "norm"}):
        tree[name] = norm_tree(norm)
    if args["update_style"] == "res_residual":
        lists = {name: [array(r) for r in update.factors] for name, update in parts_of(layer, RESIDUALS)}
        tree[VARIABLES] = {**{name: [] for name in RESIDUALS}, **lists}
    return tree
