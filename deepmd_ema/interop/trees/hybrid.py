"""The tree of the descriptor hybrid: a list of those of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop.parts import PartTree, tree_by_type, tree_of
from deepmd_ema.interop.tree_files import Tree
from deepmd_ema.model.families.hybrid.module import HybridDescriptor
from deepmd_ema.model.families.hybrid.section import HybridConfig


class HybridTree(PartTree):
    """Tree of hybrid."""

    def write(self, part: HybridDescriptor, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor."""
        trees = []
        for descriptor, section in zip(part.parts, part.section.list, strict=True):
            writer = tree_by_type(DESCRIPTORS, section.type)
            trees.append(writer.write(descriptor, replace(config, descriptor=section)))
        return {"@class": "Descriptor", "type": "hybrid", "@version": 1, "list": trees}

    def unavailable(self, tree: Mapping[str, Any]) -> Iterator[str]:
        """Yield features of the parts that are not available here."""
        for part in tree["list"]:
            reader = tree_of(DESCRIPTORS, part)
            features: Iterable[str] = [f"descriptor {part.get('type')!r}"]
            if reader is not None and not isinstance(reader, HybridTree):
                features = reader.unavailable(part)
            yield from (f"{feature} (in a hybrid)" for feature in features)

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        return {
            "type": "hybrid",
            "list": [reader.section(part) for part, reader in _readers(tree)],
        }

    def upgraded(self, tree: Tree) -> Tree:
        """Return the tree with those of its parts as they are written."""
        return {
            **tree,
            "list": [reader.upgraded(part) for part, reader in _readers(tree)],
        }

    def name_of(self, place: str, section: HybridConfig, backend: str) -> str:
        """Return the name of the array at a place in the tree in checkpoints of a backend."""
        number, inner = place.removeprefix("list.").split(".", 1)
        part = section.list[int(number)]
        name = tree_by_type(DESCRIPTORS, part.type).name_of(inner, part, backend)
        return f"descrpt_list.{number}.{name}"

    def not_in_pt(self, section: HybridConfig) -> str:
        """Return the feature of the parts that DeePMD-kit's backend pt lacks, or an empty text."""
        for part in section.list:
            if lacking := tree_by_type(DESCRIPTORS, part.type).not_in_pt(part):
                return lacking
        return ""


def _readers(tree: Mapping[str, Any]) -> Iterator[tuple[Tree, PartTree]]:
    for part in tree["list"]:
        if (reader := tree_of(DESCRIPTORS, part)) is not None:
            yield part, reader
