"""The tree of the descriptor se_e2_a."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import array, chosen, fill, fill_networks, layer_trees, precision_of

if TYPE_CHECKING:
    from deepmd_ema.config.schema.se_e2_a import SeE2AConfig
    from deepmd_ema.model.descriptor.se_e2_a import SeE2ADescriptor

OPTIONS = (
    "type", "rcut", "rcut_smth", "sel", "neuron", "axis_neuron", "resnet_dt", "set_davg_zero", "activation_function",
    "precision", "exclude_types", "env_protection", "trainable", "type_one_side",
)  # fmt: skip


class SeE2ATree:
    """Tree of se_e2_a."""

    def write(self, descriptor: SeE2ADescriptor, section: SeE2AConfig, type_map: Sequence[str]) -> Tree:
        """Return the tree of a descriptor."""
        precision = precision_of(descriptor.dtype)
        return {
            "@class": "Descriptor",
            "type": "se_e2_a",
            "@version": 2,
            "rcut": section.rcut,
            "rcut_smth": section.rcut_smth,
            "sel": list(descriptor.sel),
            "neuron": list(section.neuron),
            "axis_neuron": section.axis_neuron,
            "resnet_dt": section.resnet_dt,
            "set_davg_zero": section.set_davg_zero,
            "activation_function": str(section.activation_function),
            "precision": precision,
            "embeddings": {
                "@class": "NetworkCollection",
                "@version": 1,
                "ndim": 1 if section.type_one_side else 2,
                "ntypes": len(type_map),
                "network_type": "embedding_network",
                "networks": [
                    {
                        "@class": "EmbeddingNetwork",
                        "@version": 2,
                        "in_dim": 1,
                        "neuron": list(section.neuron),
                        "activation_function": str(section.activation_function),
                        "resnet_dt": section.resnet_dt,
                        "bias": True,
                        "precision": precision,
                        "layers": layer_trees(net, precision, hidden_only=True),
                    }
                    for net in descriptor.networks
                ],
            },
            "env_mat": {
                "rcut": section.rcut,
                "rcut_smth": section.rcut_smth,
                "protection": section.env_protection,
                "use_exp_switch": False,
            },
            "exclude_types": [list(pair) for pair in section.exclude_types],
            "env_protection": section.env_protection,
            VARIABLES: {"davg": array(descriptor.mean), "dstd": array(descriptor.stddev)},
            "type_map": list(type_map),
            "trainable": section.trainable,
            "type_one_side": section.type_one_side,
            "spin": None,
        }

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "descriptor version 3 (compressed)": tree.get("@version", 2) > 2,
            "spin": bool(tree.get("spin")),
            "an exponential switch": bool((tree.get("env_mat") or {}).get("use_exp_switch")),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.descriptor``."""
        return chosen(tree, OPTIONS)

    def fill(self, descriptor: SeE2ADescriptor, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        fill("davg", descriptor.mean, tree[VARIABLES]["davg"])
        fill("dstd", descriptor.stddev, tree[VARIABLES]["dstd"])
        fill_networks("embeddings", descriptor.networks, tree["embeddings"]["networks"])
