"""The tree of the descriptor hybrid: a list of those of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.hybrid.module import HybridDescriptor
from deepmd_ema.families.hybrid.section import HybridConfig
from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.interchange.dp.networks import PartTree, tree_by_type, tree_of


class HybridTree(PartTree):
    """Tree of hybrid."""

    def write(self, part: HybridDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        both = zip(part.descriptors, part.section.list, strict=True)
        trees = [tree_by_type(DESCRIPTORS, s.type).write(one, replace(config, descriptor=s)) for one, s in both]
        return {"@class": "Descriptor", "type": "hybrid", "@version": 1, "list": trees}

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        out: dict[str, bool] = {}
        for one in tree["list"]:
            known = tree_of(DESCRIPTORS, one)
            if known is None or isinstance(known, HybridTree):
                features: Mapping[str, bool] = {f"descriptor {one.get('type')!r}": True}
            else:
                features = known.unavailable(one)
            out |= {f"{name} (in a hybrid)": used for name, used in features.items() if used}
        return out

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        known = [(one, tree_of(DESCRIPTORS, one)) for one in tree["list"]]
        return {"type": "hybrid", "list": [reader.section(one) for one, reader in known if reader is not None]}

    def name_of(self, place: str, section: HybridConfig, backend: str) -> str:
        """Return the name of the array at a place in the tree in checkpoints of a backend of DeePMD-kit."""
        _, number, inner = place.split(".", 2)
        part = section.list[int(number)]
        return f"descrpt_list.{number}.{tree_by_type(DESCRIPTORS, part.type).name_of(inner, part, backend)}"

    def not_in_pt(self, section: HybridConfig) -> str:
        """Return the feature of the parts that DeePMD-kit's backend pt lacks, or an empty string."""
        found = (tree_by_type(DESCRIPTORS, part.type).not_in_pt(part) for part in section.list)
        return next(filter(None, found), "")

    def fill(self, part: HybridDescriptor, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the descriptor."""
        for one, section, values in zip(part.descriptors, part.section.list, tree["list"], strict=True):
            tree_by_type(DESCRIPTORS, section.type).fill(one, replace(config, descriptor=section), values)
