"""The trees of the descriptors se_e2_a, se_e2_r and se_e3, whose networks are those of types."""

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
    "rcut",
    "rcut_smth",
    "sel",
    "neuron",
    "axis_neuron",
    "resnet_dt",
    "set_davg_zero",
    "activation_function",
    "precision",
)


class SeE2ATree(parts.PartTree):
    """Tree of se_e2_a.

    Attributes:
        type: of the tree, as DeePMD-kit calls it.
    """

    type: ClassVar[str] = "se_e2_a"
    version: ClassVar[float] = 2
    modules: ClassVar[parts.Names] = {
        "pt": ((r"^", "sea."), *parts.STATISTICS),
        "pt_expt": (),
    }

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor."""
        nets, ndim = self._networks(part)
        return {
            "@class": "Descriptor",
            "type": self.type,
            "@version": 2,
            **parts.options_tree(config.descriptor),
            "sel": list(part.sel),
            "precision": parts.precision_of(part.dtype),
            "embeddings": parts.embeddings_tree(
                nets, plain(config.descriptor), ndim, len(config.type_map)
            ),
            "env_mat": parts.env_mat_tree(part.rcut, part.rcut_smth, part.protection),
            VARIABLES: parts.statistics_tree(part),
            "type_map": list(config.type_map),
            "spin": None,
        }

    def _networks(self, part: ByTypeDescriptor) -> tuple[Sequence[Network], int]:
        """Return the networks, and the number of types that each depends on."""
        return part.embeddings, 1 if part.one_side else 2

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return all options that the tree gives; a default would make another model of it."""
        return {
            **super().section(tree),
            **{name: tree[name] for name in SHAPE if name in self._options},
        }


class SeE2RTree(SeE2ATree):
    """Tree of se_e2_r, which DeePMD-kit calls se_r in it.

    But for the shape of the statistics it is that of se_e2_a.
    """

    type: ClassVar[str] = "se_r"
    modules: ClassVar[parts.Names] = {"pt": parts.STATISTICS, "pt_expt": ()}

    def not_in_pt(self, section: Any) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty text."""
        return "" if section.type_one_side else "type_one_side = false of se_e2_r"


class SeE3Tree(SeE2ATree):
    """Tree of se_e3: a network for each pair (a, b) of types, at ``a + b * T``.

    DeePMD-kit uses those with a <= b.
    """

    type: ClassVar[str] = "se_e3"
    modules: ClassVar[parts.Names] = {
        "pt": ((r"^", "seat."), *parts.STATISTICS),
        "pt_expt": (),
    }

    def write(self, part: ByTypeDescriptor, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor.

        The networks that are not used are those of the pair in the other order.
        """
        tree = super().write(part, config)
        return {name: value for name, value in tree.items() if name != "spin"}

    def _networks(self, part: Any) -> tuple[Sequence[Network], int]:
        by_pair = dict(zip(part.pairs, part.embeddings, strict=True))
        types = range(part.num_types)
        # the used one of a pair is the later one, so that its arrays are those that `fill` leaves
        return [by_pair[min(a, b), max(a, b)] for b in types for a in types], 2
