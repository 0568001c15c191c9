"""The trees of the descriptors se_atten (DPA-1) and se_atten_v2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.se_atten.layers import SeAttenBlock
from deepmd_ema.families.se_atten.module import DPA1Descriptor
from deepmd_ema.families.se_e3_tebd.layers import SeTTebdBlock
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import (
    BACKENDS,
    STATISTICS,
    PartTree,
    chosen,
    embedding_tree,
    env_mat_tree,
    has_exp_switch,
    layer_tree,
    network_trees,
    norm_tree,
    precision_of,
    statistics_tree,
    type_embedding_tree,
)
from deepmd_ema.model.descriptor.type_embedded import OneBlockDescriptor
from deepmd_ema.model.nn.attention import AttentionLayer
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.nn.norm import eps_of

OPTIONS = (
    "rcut", "rcut_smth", "neuron", "axis_neuron", "tebd_dim", "set_davg_zero", "attn", "attn_layer",
    "attn_dotr", "attn_mask", "activation_function", "resnet_dt", "scaling_factor", "normalize", "temperature",
    "trainable_ln", "type_one_side", "concat_output_tebd", "use_econf_tebd", "use_tebd_bias", "exclude_types",
    "env_protection", "trainable",
)  # fmt: skip


class SeAttenTree(PartTree):
    """Tree of se_atten, in which DeePMD-kit calls it dpa1, and of se_atten_v2."""

    modules = dict.fromkeys(
        BACKENDS,
        ((r"^attention_layers\.", "dpa1_attention."), (r"^(?!type_embedding\.)", "se_atten."), *STATISTICS),
    )

    def write(self, part: DPA1Descriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        section, options = config.descriptor, plain(config.descriptor)
        own = {"type": section.type}
        if section.type == "se_atten":
            own = {"type": "dpa1", **chosen(options, ("tebd_input_mode", "smooth_type_embedding"))}
        return {
            "@version": 2,
            **own,
            "ln_eps": eps_of(options["ln_eps"]),
            **one_block_tree(part, config, OPTIONS),
            "attention_layers": attention_tree(part.block, options),
            "spin": None,
        }

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "descriptor version 3 (compressed)": tree.get("@version", 2) == 3 or bool(tree.get("compress")),
            "angular degrees above 1": tree.get("lmax", 1) != 1,
            "spin": bool(tree.get("spin")),
            "an exponential switch": has_exp_switch(tree),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # files of version 1 do not say that the type embedding has a bias
        return {"use_tebd_bias": True, **super().section(tree)}


def one_block_tree(part: OneBlockDescriptor, config: StandardConfig, names: Sequence[str]) -> Tree:
    """Return the entries of a descriptor of one block; ``names`` are the options that the tree has."""
    options, ntypes = plain(config.descriptor), len(config.type_map)
    return {
        "@class": "Descriptor",
        **chosen(options, names),
        "sel": [part.sel],
        "ntypes": ntypes,
        "type_map": list(config.type_map),
        "precision": precision_of(part.dtype),
        **block_tree(part.block, options, ntypes),
        "type_embedding": type_embedding_tree(part.type_embedding, config.type_map, options["trainable"]),
    }


def block_tree(block: SeAttenBlock | SeTTebdBlock, options: Mapping[str, Any], ntypes: int) -> Tree:
    """Return the entries of a block: embedding networks, environment matrix, means and spreads."""

    def tree(net: Network) -> Tree:
        common = embedding_tree(net, options["activation_function"], options["resnet_dt"])
        return network_trees("embedding_network", [net], common, ndim=0, ntypes=ntypes, hidden_only=True)

    out = {"embeddings": tree(block.embedding)}
    if block.pair_embedding is not None:
        out["embeddings_strip"] = tree(block.pair_embedding)
    return {**out, "env_mat": env_mat_tree(block), VARIABLES: statistics_tree(block)}


def check_angular_means(tree: Mapping[str, Any], name: str = "") -> None:
    """Refuse the statistics of a block of pairs of neighbors that would make energies depend on the orientation.

    Raises:
        ValueError: naming them; ``name`` is that of the block.
    """
    if np.any(np.asarray(tree[VARIABLES]["davg"])[..., 1:]):
        raise ValueError(
            f"{name}davg: means of angular columns other than 0, which make energies depend on orientation"
        )


def attention_tree(block: SeAttenBlock, options: Mapping[str, Any]) -> Tree:
    """Return the tree of the attention layers of a block."""
    shape = {
        "nnei": block.sel,
        "embed_dim": block.num_channels,
        "hidden_dim": options["attn"],
        "dotr": options["attn_dotr"],
        "do_mask": False,
        **chosen(options, ("scaling_factor", "normalize", "temperature")),
        "precision": precision_of(block.dtype),
    }
    norms = {"trainable_ln": options["trainable_ln"], "ln_eps": eps_of(options["ln_eps"])}

    def layer_tree_of(layer: AttentionLayer) -> Tree:
        return {
            **shape,
            **norms,
            "attention_layer": {
                **shape,
                "num_heads": 1,
                "bias": True,
                "smooth": block.smooth,
                "in_proj": layer_tree(layer.attention.in_proj, resnet=False),
                "out_proj": layer_tree(layer.attention.out_proj, resnet=False),
            },
            "attn_layer_norm": norm_tree(layer.norm),
        }

    return {
        "@class": "NeighborGatedAttention",
        "@version": 1,
        "layer_num": len(block.layers),
        **shape,
        **norms,
        "attention_layers": [layer_tree_of(layer) for layer in block.layers],
    }
