"""The tree of a model whose parts are added up with weights (``linear``), from and to trees of its
parts.
"""

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
                parts.append(
                    dp.part_tree(
                        whole, "pairtab", dp.table_entries(descriptor.pairs, descriptor.sel)
                    )
                )
            else:
                networks = dp.network_trees(descriptor, fitting, config.standard(section))
                parts.append(dp.part_tree(whole, "standard", networks))
        return {
            **whole,
            "@version": 3,
            "type": "linear_ener",
            "models": parts,
            "weights": config.weights,
        }

    def normalized(self, tree: Tree) -> Tree:
        """Return the tree with the energies of elements that parts add on their own in that of the
        whole.
        """
        parts, weights = tree["models"], tree.get("weights", "mean")
        if isinstance(weights, str):
            factors = [1 / len(parts) if weights == "mean" else 1.0] * len(parts)
        else:
            factors = weights = [float(weight) for weight in weights]
        bias, networks = tree[VARIABLES]["out_bias"], []
        for part, weight in zip(parts, factors, strict=True):
            dp.refuse_own_exclusions(part)
            own, whole = list(part["type_map"]), list(tree["type_map"])
            if part["type"] != "pairtab" and own != whole:
                raise ValueError(
                    f"a part has the elements {own}, the model {whole}: not available here"
                )
            if np.any(added := np.asarray(part[VARIABLES]["out_bias"])):
                bias = bias + weight * added[:, [own.index(name) for name in whole]]
            networks.append(
                {
                    "type": "pairtab",
                    "type_map": own,
                    "tab_file": dp.table_rows(part),
                    "rcut": float(part["rcut"]),
                    "sel": int(part["sel"]),
                }
                if part["type"] == "pairtab"
                else chosen(part, tuple(dp.PARTS))
            )
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
            part if part.get("type") == "pairtab" else dp.network_sections(part, one)
            for part, one in both
        ]
        return {"type": "linear_ener", "models": parts, "weights": tree["weights"]}
