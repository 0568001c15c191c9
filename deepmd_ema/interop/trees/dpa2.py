"""The tree of the descriptor dpa2 (DPA-2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop import parts
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.interop.trees.type_embedded import block_tree
from deepmd_ema.model.families.dpa2.layers import RepformerLayer
from deepmd_ema.model.families.dpa2.module import DPA2Descriptor
from deepmd_ema.model.nn.norm import eps_of
from deepmd_ema.model.ops.attention import LOGIT_SHIFT

# options of all layers together
OF_ALL_LAYERS = (
    "nsel",
    "nlayers",
    "direct_dist",
    "update_residual",
    "update_residual_init",
    "set_davg_zero",
)
PAIR_OPTIONS = (
    "update_g2_has_g1g1",
    "update_g2_has_attn",
    "update_h2",
)  # false in the last layer
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
RESIDUALS = {
    "g1_residual": "node_update",
    "g2_residual": "pair_update",
    "h2_residual": "vector_update",
}
LATER_OPTIONS = (
    "use_sqrt_nnei",
    "g1_out_conv",
    "g1_out_mlp",
)  # false in files before version 3


class DPA2Tree(parts.PartTree):
    """Tree of dpa2."""

    version: ClassVar[float] = 3
    modules = dict.fromkeys(
        parts.BACKENDS,
        (
            (r"^(repinit|repinit_three_body|repformers)_variable\.", r"\1."),
            (r"^repformers\.repformer_layers\.", "repformers.layers."),
            *parts.STATISTICS,
        ),
    )

    def write(self, part: DPA2Descriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        section: Any = config.descriptor
        options = plain(section)
        types = config.type_map
        former = part.repformer
        repformer_args = {
            **options["repformer"],
            "ln_eps": eps_of(options["repformer"]["ln_eps"]),
        }
        tree: Tree = {
            **parts.node("Descriptor", 3),
            "type": "dpa2",
            "ntypes": len(types),
            "repinit_args": parts.options_tree(section.repinit),
            "repformer_args": repformer_args,
            **parts.options_tree(section, "repinit", "repformer"),
            "precision": parts.precision_of(part.dtype),
            "type_map": list(types),
            "type_embedding": parts.type_embedding_tree(
                part.type_embedding, types, options["trainable"]
            ),
            "g1_shape_tranform": {"@class": "Identity", "@version": 1},
            "repinit_variable": block_tree(
                part.repinit, options["repinit"], len(types)
            ),
            "repformers_variable": {
                "g2_embd": parts.layer_tree(former.pair_embedding),
                "repformer_layers": [
                    _layer_tree(layer, part, repformer_args) for layer in former.layers
                ],
                "env_mat": parts.env_mat_tree(
                    former.rcut, former.rcut_smth, former.protection
                ),
                VARIABLES: parts.statistics_tree(former),
            },
        }
        dense = {"g1_shape_tranform": "to_repformer", "tebd_transform": "add_element"}
        tree |= {
            name: parts.layer_tree(layer) for name, layer in parts.parts_of(part, dense)
        }
        if part.angles is not None:
            tree["repinit_three_body_variable"] = block_tree(
                part.angles, options["repinit"], len(types)
            )
        return tree

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        later = dict(tree["repformer_args"])
        if tree.get("@version", 3) < 3:
            later |= dict.fromkeys(LATER_OPTIONS, False)
        # files of version 1 do not say that the type embedding has a bias
        return {
            "use_tebd_bias": True,
            **super().section(tree),
            "repinit": tree["repinit_args"],
            "repformer": later,
        }

    def upgraded(self, tree: Tree) -> Tree:
        """Return the tree if its statistics are those of its blocks."""
        if "repinit_three_body_variable" in tree:
            parts.refuse_angular_means(
                tree["repinit_three_body_variable"], "repinit_three_body: "
            )
        return tree


def _layer_tree(
    layer: RepformerLayer, part: DPA2Descriptor, args: Mapping[str, Any]
) -> Tree:
    """Return the tree of one layer."""
    precision = parts.precision_of(part.dtype)
    common = {"@version": 1, "precision": precision}
    tree: Tree = {
        **parts.node("RepformerLayer", 2),
        **{name: value for name, value in args.items() if name not in OF_ALL_LAYERS},
        "sel": [part.repformer.sel],
        "ntypes": part.num_types,
        "update_chnnl_2": not layer.last,
        **{name: args[name] and not layer.last for name in PAIR_OPTIONS},
        "smooth": part.repformer.smooth,
        "precision": precision,
        "ln_eps": args["ln_eps"],
    }
    softmax = {"smooth": part.repformer.smooth, "attnw_shift": LOGIT_SHIFT}
    node_options = {
        "input_dim": args["g1_dim"],
        "hidden_dim": args["attn1_hidden"],
        "head_num": args["attn1_nhead"],
    }
    pair_options = {"input_dim": args["g2_dim"], "head_num": args["attn2_nhead"]}
    heads: Tree = {
        "loc_attn": {"@class": "LocalAtten", **common, **node_options, **softmax},
        "attn2g_map": {
            "@class": "Atten2Map",
            **common,
            **pair_options,
            "hidden_dim": args["attn2_hidden"],
            "has_gate": args["attn2_has_gate"],
            **softmax,
        },
        "attn2_mh_apply": {"@class": "Atten2MultiHeadApply", **common, **pair_options},
        "attn2_ev_apply": {"@class": "Atten2EquiVarApply", **common, **pair_options},
    }
    for place, dense in parts.parts_of(layer, DENSE):
        *head, name = place.rsplit(".", 1)
        owner: Any = tree.setdefault(head[0], heads[head[0]]) if head else tree
        owner[name] = parts.layer_tree(dense)
    tree |= {
        name: parts.norm_tree(norm)
        for name, norm in parts.parts_of(layer, {"attn2_lm": "norm"})
    }
    if args["update_style"] == "res_residual":
        tree |= parts.residuals_tree(layer, RESIDUALS)
    return tree
