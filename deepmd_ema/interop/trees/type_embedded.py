"""The trees of the descriptors se_atten (DPA-1), se_atten_v2 and se_e3_tebd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop import parts
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.descriptor.type_embedded import OneBlockDescriptor
from deepmd_ema.model.families.se_atten.module import DPA1Descriptor, SeAttenBlock
from deepmd_ema.model.families.se_e3_tebd.module import SeE3TebdDescriptor, SeTTebdBlock
from deepmd_ema.model.nn.norm import eps_of


class SeAttenTree(parts.PartTree):
    """Tree of se_atten, in which DeePMD-kit calls it dpa1, and of se_atten_v2."""

    version: ClassVar[float] = 2
    modules = dict.fromkeys(
        parts.BACKENDS,
        (
            (r"^attention_layers\.", "dpa1_attention."),
            (r"^(?!type_embedding\.)", "se_atten."),
            *parts.STATISTICS,
        ),
    )

    def write(self, part: DPA1Descriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        section, options = config.descriptor, plain(config.descriptor)
        return {
            "@version": 2,
            "type": "dpa1" if section.type == "se_atten" else section.type,
            "ln_eps": eps_of(options["ln_eps"]),
            **one_block_tree(
                part, config, "sel", "lmax", "ln_eps", "stripped_type_embedding"
            ),
            "attention_layers": attention_tree(part.block, options),
            "spin": None,
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # files of version 1 do not say that the type embedding has a bias
        return {"use_tebd_bias": True, **super().section(tree)}


class SeE3TebdTree(parts.PartTree):
    """Tree of se_e3_tebd."""

    version: ClassVar[float] = 1
    modules = dict.fromkeys(
        parts.BACKENDS, ((r"^(?!type_embedding\.)", "se_ttebd."), *parts.STATISTICS)
    )

    def write(self, part: SeE3TebdDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        return {
            "type": "se_e3_tebd",
            "@version": 1,
            **one_block_tree(part, config, "sel", "use_tebd_bias"),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # this option is only in the tree of the type embedding
        return {
            **super().section(tree),
            "use_tebd_bias": bool(tree["type_embedding"].get("use_tebd_bias", True)),
        }

    def upgraded(self, tree: Tree) -> Tree:
        """Return the tree if its statistics are those of a block of pairs of neighbors."""
        parts.refuse_angular_means(tree)
        return tree


def one_block_tree(
    part: OneBlockDescriptor, config: StandardConfig, *left_out: str
) -> Tree:
    """Return the entries of a descriptor of one block, without the options ``left_out``."""
    options, ntypes = plain(config.descriptor), len(config.type_map)
    return {
        "@class": "Descriptor",
        **parts.options_tree(config.descriptor, *left_out),
        "sel": [part.sel],
        "ntypes": ntypes,
        "type_map": list(config.type_map),
        "precision": parts.precision_of(part.dtype),
        **block_tree(part.block, options, ntypes),
        "type_embedding": parts.type_embedding_tree(
            part.type_embedding, config.type_map, options["trainable"]
        ),
    }


def block_tree(
    block: SeAttenBlock | SeTTebdBlock, options: Mapping[str, Any], ntypes: int
) -> Tree:
    """Return the entries of a block: embedding networks, environment matrix, means and spreads."""
    nets = {"embeddings": block.embedding, "embeddings_strip": block.pair_embedding}
    return {
        **{
            name: parts.embeddings_tree([net], options, 0, ntypes)
            for name, net in nets.items()
            if net is not None
        },
        "env_mat": parts.env_mat_tree(block.rcut, block.rcut_smth, block.protection),
        VARIABLES: parts.statistics_tree(block),
    }


def attention_tree(block: SeAttenBlock, options: Mapping[str, Any]) -> Tree:
    """Return the tree of the attention layers of a block."""
    shape = {
        "nnei": block.sel,
        "embed_dim": block.num_channels,
        "hidden_dim": options["attn"],
        "dotr": options["attn_dotr"],
        "do_mask": False,
        **parts.chosen(options, ("scaling_factor", "normalize", "temperature")),
        "precision": parts.precision_of(block.dtype),
    }
    norms = {
        "trainable_ln": options["trainable_ln"],
        "ln_eps": eps_of(options["ln_eps"]),
    }

    layers = [
        {
            **shape,
            **norms,
            "attention_layer": {
                **shape,
                "num_heads": 1,
                "bias": True,
                "smooth": block.smooth,
                "in_proj": parts.layer_tree(layer.attention.in_proj),
                "out_proj": parts.layer_tree(layer.attention.out_proj),
            },
            "attn_layer_norm": parts.norm_tree(layer.norm),
        }
        for layer in block.layers
    ]
    return {
        **parts.node("NeighborGatedAttention", 1),
        "layer_num": len(layers),
        **shape,
        **norms,
        "attention_layers": layers,
    }
