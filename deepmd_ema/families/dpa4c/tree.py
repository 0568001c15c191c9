"""The tree of the descriptor dpa4c (DPA4C)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.dpa4.layers import Dense
from deepmd_ema.families.dpa4c.geometry import EXPONENT
from deepmd_ema.families.dpa4c.module import DPA4CDescriptor
from deepmd_ema.families.dpa4c.radial import PAIR_SCALE, GatedNetwork
from deepmd_ema.families.dpa4c.readout import InvariantReadout
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import Names, PartTree, array, chosen, precision_of

OPTIONS = (
    "rcut", "channels", "lmax", "basis_type", "n_radial", "radial_modes", "exclude_types", "trainable", "seed",
    "add_chg_spin_ebd", "default_chg_spin",
)  # fmt: skip


class DPA4CTree(PartTree):
    """Tree of dpa4c."""

    modules: ClassVar[Names] = {
        "pt_expt": ((r"^(radial_embedding|pair_film\.network)\.(\d+)\.matrix$", r"\1.layers.\2.w"),)
    }

    def write(self, part: DPA4CDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        options = plain(config.descriptor)
        common = {"precision": precision_of(part.dtype), "trainable": options["trainable"]}
        return {
            "@class": "Descriptor",
            "type": "dpa4c",
            "@version": 1,
            "ntypes": part.num_types,
            **chosen(options, OPTIONS),
            **common,
            "type_map": list(config.type_map),
            "use_spin": None,
            "spin": None,
            "spin_channels": None,
            "charge_spin_embedding": None,
            "type_embedding": {
                "@class": "SeZMTypeEmbedding",
                "@version": 1,
                "config": {
                    "ntypes": part.num_types,
                    "embed_dim": options["channels"],
                    **common,
                    "padding": True,
                    "seed": None,
                },
                VARIABLES: {"adam_type_embedding": array(part.type_embedding.adam_type_embedding)},
            },
            "radial_basis": {
                "@class": "RadialBasis",
                "@version": 1,
                "config": {
                    **chosen(options, ("rcut", "basis_type", "n_radial")),
                    "exponent": EXPONENT,
                    "apply_envelope": False,
                    "precision": common["precision"],
                },
                VARIABLES: {"adam_freqs": array(part.radial.adam_freqs)},
            },
            "radial_embedding": _gated_tree(part.radial.embedding, 1.0, common),
            "radial_mode_head": None if part.radial.mode_head is None else _dense_tree(part.radial.mode_head, common),
            "pair_film": {
                "@class": "OrderedPairFiLM",
                "@version": 1,
                **chosen(options, ("channels", "radial_modes")),
                "spin_channels": 0,
                **common,
                "network": _gated_tree(part.pair_film.network, PAIR_SCALE, common),
                VARIABLES: {},
            },
            "readout": _readout_tree(part.readout, {**chosen(options, ("channels", "lmax")), **common}),
            VARIABLES: {"mean": array(part.feature_mean), "stddev": array(part.feature_spread)},
        }

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "charge and spin as an input": bool(tree.get("add_chg_spin_ebd")),
            "spin": tree.get("use_spin") is not None,
            "a compressed descriptor": "compress" in tree,
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # without effect in a model that does not embed it
        return {**super().section(tree), "default_chg_spin": None}


def _readout_tree(readout: InvariantReadout, options: Tree) -> Tree:
    """Return the tree of the maps of moments before their products."""
    common, probes = chosen(options, ("precision", "trainable")), readout.probe_projections
    return {
        "@class": "InvariantReadout",
        "@version": 1,
        **options,
        "channel_alignment": [_dense_tree(one, common, resnet=True) for one in readout.channel_alignment],
        "probe_projections": [
            _dense_tree(cast("Dense", probes[str(k)]), common) if str(k) in probes else None
            for k in range(len(readout.ranks))
        ],
    }


def _gated_tree(network: GatedNetwork, scale: float, common: Tree) -> Tree:
    """Return the tree of a gated network whose outputs are multiplied by ``scale``."""
    first, last = (layer.matrix for layer in network.layers)
    return {
        "@class": "SwiGLUMLP",
        "@version": 1,
        "mlp_layers": [first.shape[0], *last.shape],
        "output_scale": scale,
        **common,
        VARIABLES: {"0.matrix": array(first), "1.matrix": array(last)},
    }


def _dense_tree(layer: Dense, common: Tree, resnet: bool = False) -> Tree:
    """Return the tree of a linear layer without bias."""
    return {
        "@class": "Layer",
        "@version": 2,
        "bias": False,
        "use_timestep": False,
        "activation_function": "none",
        "resnet": resnet,
        **common,
        VARIABLES: {"w": array(layer.matrix), "b": None, "idt": None},
    }
