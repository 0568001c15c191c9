"""The tree of the descriptor se_e2_a."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import (
    STATISTICS,
    Names,
    PartTree,
    chosen,
    embedding_tree,
    env_mat_tree,
    has_exp_switch,
    network_trees,
    precision_of,
    statistics_tree,
)
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.nn.layers import Network

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
    modules: ClassVar[Names] = {"pt": ((r"^", "sea."), *STATISTICS), "pt_expt": ()}

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor."""
        options = plain(config.descriptor) | {"sel": list(part.sel), "precision": precision_of(part.dtype)}
        nets = self._networks(part)
        common = embedding_tree(nets[0], options["activation_function"], options["resnet_dt"])
        ndim, ntypes = self._ndim(part), len(config.type_map)
        return {
            "@class": "Descriptor",
            "type": self.type,
            "@version": 2,
            **chosen(options, SHAPE),
            "embeddings": network_trees("embedding_network", nets, common, ndim, ntypes, hidden_only=True),
            "env_mat": env_mat_tree(part),
            **chosen(options, ("exclude_types", "env_protection")),
            VARIABLES: statistics_tree(part),
            "type_map": list(config.type_map),
            **chosen(options, ("trainable", "type_one_side")),
            "spin": None,
        }

    def _networks(self, part: ByTypeDescriptor) -> Sequence[Network]:
        return part.embeddings

    def _ndim(self, part: ByTypeDescriptor) -> int:
        """Return the number of types that a network depends on."""
        return 1 if part.one_side else 2

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives; a default would make another model of it."""
        return {**super().section(tree), **{name: tree[name] for name in SHAPE if name in self._options}}

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "descriptor version 3 (compressed)": tree.get("@version", 2) > 2,
            "spin": bool(tree.get("spin")),
            "an exponential switch": has_exp_switch(tree),
        }
