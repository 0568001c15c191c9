"""The trees of the descriptors se_e2_a and se_e2_r."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import PartTree, array, chosen, fill, fill_networks, network_trees, precision_of
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor

SHAPE = (
    "rcut", "rcut_smth", "sel", "neuron", "axis_neuron", "resnet_dt", "set_davg_zero", "activation_function",
    "precision",
)  # fmt: skip


class SeE2ATree(PartTree):
    """Tree of se_e2_a.

    Attributes:
        type: of the tree, as DeePMD-kit calls it.
    """

    type: ClassVar[str] = "se_e2_a"

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor."""
        options = plain(config.descriptor) | {"sel": list(part.sel), "precision": precision_of(part.dtype)}
        network = {
            "@class": "EmbeddingNetwork",
            "@version": 2,
            "in_dim": 1,
            **chosen(options, ("neuron", "activation_function", "resnet_dt")),
            "bias": True,
            "precision": options["precision"],
        }
        ndim, ntypes = 1 if options["type_one_side"] else 2, len(config.type_map)
        return {
            "@class": "Descriptor",
            "type": self.type,
            "@version": 2,
            **chosen(options, SHAPE),
            "embeddings": network_trees(
                "embedding_network", part.networks, network, ndim=ndim, ntypes=ntypes, hidden_only=True
            ),
            "env_mat": {
                **chosen(options, ("rcut", "rcut_smth")),
                "protection": options["env_protection"],
                "use_exp_switch": False,
            },
            **chosen(options, ("exclude_types", "env_protection")),
            VARIABLES: {"davg": array(part.mean), "dstd": array(part.stddev)},
            "type_map": list(config.type_map),
            **chosen(options, ("trainable", "type_one_side")),
            "spin": None,
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives; a default would make another model of it."""
        return {**super().section(tree), **{name: tree[name] for name in SHAPE if name in self._options}}

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "descriptor version 3 (compressed)": tree.get("@version", 2) > 2,
            "spin": bool(tree.get("spin")),
            "an exponential switch": bool((tree.get("env_mat") or {}).get("use_exp_switch")),
        }

    def fill(self, part: ByTypeDescriptor, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        fill("davg", part.mean, tree[VARIABLES]["davg"])
        fill("dstd", part.stddev, tree[VARIABLES]["dstd"])
        fill_networks("embeddings", part.networks, tree["embeddings"]["networks"])


class SeE2RTree(SeE2ATree):
    """Tree of se_e2_r, in which DeePMD-kit calls it se_r; but for the shape of the statistics it is that of se_e2_a."""

    type: ClassVar[str] = "se_r"
