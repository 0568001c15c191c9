"""The tree of the descriptor dpa2 (DPA-2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.families.dpa2.module import DPA2Descriptor
from deepmd_ema.families.dpa2.repformer_layer import RepformerLayer
from deepmd_ema.families.se_atten.tree import block_tree, env_mat_tree, fill_block, has_exp_switch
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import (
    PartTree,
    array,
    chosen,
    fill,
    fill_layer,
    fill_norm,
    fill_statistics,
    fill_type_embedding,
    layer_tree,
    norm_tree,
    precision_of,
    statistics_tree,
    type_embedding_tree,
)
from deepmd_ema.model.nn.layers import Layer
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
LATER_OPTIONS = ("use_sqrt_nnei", "g1_out_conv", "g1_out_mlp")  # false in files before version 3


class DPA2Tree(PartTree):
    """Tree of dpa2."""

    renamed = (
        (r"\.repformers\.layers\.", ".repformers.repformer_layers."),
        (r"\.(repinit|repinit_three_body|repformers)\.", r".\1_variable."),
    )

    def write(self, part: DPA2Descriptor, config: ModelConfig) -> Tree:
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
                "repformer_layers": [_layer_tree(layer, part, repformer_args) for layer in part.repformer.stack],
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

    def fill(self, part: DPA2Descriptor, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        fill_type_embedding(part.type_embedding, tree["type_embedding"])
        fill_block(part.repinit, tree["repinit_variable"], "repinit: ")
        if part.angles is not None:
            fill_block(part.angles, tree["repinit_three_body_variable"], "repinit_three_body: ")
        if part.to_repformer is not None:
            fill_layer("g1_shape_tranform", part.to_repformer, tree["g1_shape_tranform"])
        if part.add_element is not None:
            fill_layer("tebd_transform", part.add_element, tree["tebd_transform"])
        values = tree["repformers_variable"]
        fill_layer("g2_embd", part.repformer.pair_embedding, values["g2_embd"])
        fill_statistics(part.repformer, values, "repformers: ")
        layers = values["repformer_layers"]
        if len(layers) != len(part.repformer.stack):
            raise ValueError(f"repformer_layers: {len(layers)} layers, expected {len(part.repformer.stack)}")
        for index, (layer, one) in enumerate(zip(part.repformer.stack, layers)):
            _fill_layer(f"repformer_layers[{index}]", layer, one)


def _dense_layers(layer: RepformerLayer) -> Iterator[tuple[tuple[str, ...], Layer]]:
    """Yield the dense layers of a layer by the place of their trees."""
    found: list[tuple[tuple[str, ...], Layer | None]] = [
        (("linear1",), layer.linear_node),
        (("g1_self_mlp",), layer.node_mlp),
        (("proj_g1g2",), layer.conv),
    ]
    if layer.attention is not None:
        attention = layer.attention
        found += [
            (("loc_attn", "mapq"), attention.query),
            (("loc_attn", "mapkv"), attention.key_value),
            (("loc_attn", "head_map"), attention.head_map),
        ]
    if not layer.last:
        found += [(("linear2",), layer.linear_pair), (("proj_g1g1g2",), layer.product)]
    if not layer.last and layer.pair_attention is not None:
        pairs = layer.pair_attention
        found += [
            (("attn2g_map", "mapqk"), pairs.query_key),
            (("attn2_mh_apply", "mapv"), pairs.value),
            (("attn2_mh_apply", "head_map"), pairs.head_map),
            (("attn2_ev_apply", "head_map"), pairs.vector_map),
        ]
    yield from ((place, dense) for place, dense in found if dense is not None)


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
    for place, dense in _dense_layers(layer):
        owner: Any = tree if len(place) == 1 else tree.setdefault(place[0], heads[place[0]])
        owner[place[-1]] = layer_tree(dense, resnet=False)
    if not layer.last and layer.norm is not None:
        tree["attn2_lm"] = norm_tree(layer.norm)
    if args["update_style"] == "res_residual":
        lists = {name: [array(r) for r in update.factors] for name, update in _updates(layer).items()}
        tree[VARIABLES] = {"g2_residual": [], "h2_residual": [], **lists}
    return tree


def _fill_layer(name: str, layer: RepformerLayer, tree: Mapping[str, Any]) -> None:
    """Write the arrays of the tree of one layer; ``name`` is for messages."""
    for place, dense in _dense_layers(layer):
        owner = tree if len(place) == 1 else tree[place[0]]
        fill_layer(".".join([name, *place]), dense, owner[place[-1]])
    if not layer.last and layer.norm is not None:
        fill_norm(f"{name}.attn2_lm", layer.norm, tree["attn2_lm"])
    for key, update in _updates(layer).items():
        values = tree.get(VARIABLES, {}).get(key, [])
        if len(values) != len(update.factors):
            raise ValueError(f"{name}.{key}: {len(values)} arrays, expected {len(update.factors)}")
        for residual, value in zip(update.factors, values):
            fill(f"{name}.{key}", residual, value)


def _updates(layer: RepformerLayer) -> dict[str, Any]:
    """Return the modules with the residual weights of a layer, by the names of their lists."""
    found = {"g1_residual": layer.node_update}
    if not layer.last:
        found["g2_residual"] = layer.pair_update
        if layer.vector_update is not None:
            found["h2_residual"] = layer.vector_update
    return found
