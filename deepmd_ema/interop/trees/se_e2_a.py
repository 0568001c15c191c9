"""The tree of the descriptor se_e2_a."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.interop import parts
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.nn.layers import Network

SHAPE = (
    "rcut", "rcut_smth", "sel", "neuron", "axis_neuron", "resnet_dt", "set_davg_zero", "activation_function",
    "precision",
)  # fmt: skip


class SeE2ATree(parts.PartTree):
    """Tree of se_e2_a.

    Attributes:
        type: of the tree, as DeePMD-kit calls it.
    """

    type: ClassVar[str] = "se_e2_a"
    version: ClassVar[float] = 2
    modules: ClassVar[parts.Names] = {"pt": ((r"^", "sea."), *parts.STATISTICS), "pt_expt": ()}

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor."""
        nets, ndim = self._networks(part)
        return {
            "@class": "Descriptor", "type": self.type, "@version": 2, **parts.options_tree(config.descriptor),
            "sel": list(part.sel), "precision": parts.precision_of(part.dtype),
            "embeddings": parts.embeddings_tree(nets, plain(config.descriptor), ndim, len(config.type_map)),
            "env_mat": parts.env_mat_tree(part.rcut, part.rcut_smth, part.protection),
            VARIABLES: parts.statistics_tree(part), "type_map": list(config.type_map), "spin": None,
        }  # fmt: skip

    def _networks(self, part: ByTypeDescriptor) -> tuple[Sequence[Network], int]:
        """Return the networks, and the number of types that each depends on."""
        return part.embeddings, 1 if part.one_side else 2

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives; a default would make another model of it."""
        return {**super().section(tree), **{name: tree[name] for name in SHAPE if name in self._options}}
