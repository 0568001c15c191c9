"""The tree of a sum of models with weights (``linear``), from and to trees of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepmd_ema.interop import dp
from deepmd_ema.interop.parts import chosen
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.families.linear_ener.section import LinearConfig, PairTableConfig


class LinearTree(dp.StandardTree):
    """Tree of a linear model."""

    kinds = ("linear", "linear_ener")

    def write(self, whole: Tree, model: Any, config: LinearConfig) -> Tree:
        """Return the tree of a model."""
        parts = []
        both = zip(model.descriptor.parts, model.fitting.parts, strict=True)
        for section, (descriptor, fitting) in zip(config.models, both, strict=True):
            if isinstance(section, PairTableConfig):
                table = dp.table_entries(descriptor.pairs, descriptor.sel)
                parts.append(dp.part_tree(whole, "pairtab", table))
            else:
                networks = dp.network_trees(
                    descriptor, fitting, config.standard(section)
                )
                parts.append(dp.part_tree(whole, "standard", networks))
        return {
            **whole,
            "@version": 3,
            "type": "linear_ener",
            "models": parts,
            "weights": config.weights,
        }

    def normalized(self, tree: Tree) -> Tree:
        """Return the tree with the energies of elements of its parts in those of the whole."""
        parts, weights = tree["models"], tree.get("weights", "mean")
        if isinstance(weights, str):
            factors = [1 / len(parts) if weights == "mean" else 1.0] * len(parts)
        else:
            factors = weights = [float(weight) for weight in weights]
        bias = tree[VARIABLES]["out_bias"]
        networks = []
        for part, weight in zip(parts, factors, strict=True):
            dp.refuse_own_exclusions(part)
            is_table = part["type"] == "pairtab"
            part_elements = list(part["type_map"])
            elements = list(tree["type_map"])
            if not is_table and part_elements != elements:
                raise ValueError(
                    f"a part has the elements {part_elements}, the model {elements}: not available "
                    "here"
                )
            if np.any(added := np.asarray(part[VARIABLES]["out_bias"])):
                bias = (
                    bias
                    + weight
                    * added[:, [part_elements.index(name) for name in elements]]
                )
            if is_table:
                table = {
                    "type": "pairtab",
                    "type_map": part_elements,
                    "tab_file": dp.table_rows(part),
                    "rcut": float(part["rcut"]),
                    "sel": int(part["sel"]),
                }
                networks.append(table)
            else:
                networks.append(chosen(part, tuple(dp.PARTS)))
        return {
            **tree,
            "models": networks,
            "weights": weights,
            VARIABLES: {**tree[VARIABLES], "out_bias": bias},
        }

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the sections of the parts and their weights."""
        scripts = script.get("models") or []
        scripts = [*scripts, *[{}] * (len(tree["models"]) - len(scripts))]
        both = zip(tree["models"], scripts, strict=True)
        parts = [
            part
            if part.get("type") == "pairtab"
            else dp.network_sections(part, part_script)
            for part, part_script in both
        ]
        return {"type": "linear_ener", "models": parts, "weights": tree["weights"]}
