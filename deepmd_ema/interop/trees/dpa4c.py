"""The tree of the descriptor dpa4c (DPA4C)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop import parts
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.families.dpa4c.module import DPA4CDescriptor
from deepmd_ema.model.families.dpa4c.moments import EXPONENT, InvariantReadout
from deepmd_ema.model.families.dpa4c.radial import PAIR_SCALE, GatedNetwork


class DPA4CTree(parts.PartTree):
    """Tree of dpa4c."""

    modules: ClassVar[parts.Names] = {
        "pt_expt": (
            (
                r"^(radial_embedding|pair_film\.network)\.(\d+)\.matrix$",
                r"\1.layers.\2.w",
            ),
        )
    }

    def write(self, part: DPA4CDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        options = plain(config.descriptor)
        common = {
            "precision": parts.precision_of(part.dtype),
            "trainable": options["trainable"],
        }
        return {
            "@class": "Descriptor",
            "type": "dpa4c",
            "@version": 1,
            "ntypes": part.num_types,
            **parts.options_tree(config.descriptor, "use_amp"),
            "seed": options["seed"],
            **common,
            "type_map": list(config.type_map),
            "use_spin": None,
            "spin": None,
            "spin_channels": None,
            "charge_spin_embedding": None,
            "type_embedding": {
                **parts.node("SeZMTypeEmbedding", 1),
                "config": {
                    "ntypes": part.num_types,
                    "embed_dim": options["channels"],
                    **common,
                    "padding": True,
                    "seed": None,
                },
                VARIABLES: {
                    "adam_type_embedding": parts.array(
                        part.type_embedding.adam_type_embedding
                    )
                },
            },
            "radial_basis": {
                **parts.node("RadialBasis", 1),
                "config": {
                    **parts.chosen(options, ("rcut", "basis_type", "n_radial")),
                    "exponent": EXPONENT,
                    "apply_envelope": False,
                    "precision": common["precision"],
                },
                VARIABLES: {"adam_freqs": parts.array(part.radial.adam_freqs)},
            },
            "radial_embedding": _gated_tree(part.radial.embedding, 1.0, common),
            "radial_mode_head": _dense_tree(part.radial.mode_head, common),
            "pair_film": {
                **parts.node("OrderedPairFiLM", 1),
                **parts.chosen(options, ("channels", "radial_modes")),
                "spin_channels": 0,
                **common,
                "network": _gated_tree(part.pair_film.network, PAIR_SCALE, common),
                VARIABLES: {},
            },
            "readout": _readout_tree(
                part.readout, {**parts.chosen(options, ("channels", "lmax")), **common}
            ),
            VARIABLES: {
                "mean": parts.array(part.feature_mean),
                "stddev": parts.array(part.feature_spread),
            },
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        # without effect in a model that does not embed it
        return {**super().section(tree), "default_chg_spin": None}


def _readout_tree(readout: InvariantReadout, options: Tree) -> Tree:
    """Return the tree of the maps of moments before their products."""
    common = parts.chosen(options, ("precision", "trainable"))
    probes = dict(readout.probe_projections.items())
    return {
        **parts.node("InvariantReadout", 1),
        **options,
        "channel_alignment": [
            _dense_tree(layer, common, resnet=True)
            for layer in readout.channel_alignment
        ],
        "probe_projections": [
            _dense_tree(probes.get(str(k)), common) for k in range(len(readout.ranks))
        ],
    }


def _gated_tree(network: GatedNetwork, scale: float, common: Tree) -> Tree:
    """Return the tree of a gated network whose outputs are multiplied by ``scale``."""
    first, last = (layer.matrix for layer in network.layers)
    return {
        **parts.node("SwiGLUMLP", 1),
        "mlp_layers": [first.shape[0], *last.shape],
        "output_scale": scale,
        **common,
        VARIABLES: {"0.matrix": parts.array(first), "1.matrix": parts.array(last)},
    }


def _dense_tree(layer: Any, common: Tree, resnet: bool = False) -> Tree | None:
    """Return the tree of a linear layer without bias, or None if there is none."""
    if layer is None:
        return None
    return {
        **parts.node("Layer", 2),
        "bias": False,
        "use_timestep": False,
        "activation_function": "none",
        "resnet": resnet,
        **common,
        VARIABLES: {"w": parts.array(layer.matrix), "b": None, "idt": None},
    }
