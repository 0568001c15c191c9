"""The tree of a model whose parts are added up with weights (``linear``), from and to trees of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.parts import part_bias, refuse_own_exclusions, table_rows

KINDS = ("linear", "linear_ener")


def linear_tree(whole: Tree, parts: Sequence[Tree], weights: str | list[float]) -> Tree:
    """Return the tree of a model of ``parts``, which are trees of ``parts.part_tree``.

    Args:
        whole: entries of any model: elements, exclusions, energies of the elements.
        parts: of each part its tree.
        weights: as in the section ``model``.
    """
    return {**whole, "@version": 3, "type": "linear_ener", "models": list(parts), "weights": weights}


def table_section(part: Mapping[str, Any]) -> Tree:
    """Return the section of a part that is a table."""
    return {
        "type": "pairtab",
        "type_map": list(part["type_map"]),
        "tab_file": table_rows(part),
        "rcut": float(part["rcut"]),
        "sel": int(part["sel"]),
    }


def weights_of(tree: Mapping[str, Any]) -> str | list[float]:
    """Return the weights of the parts as the section ``model`` has them."""
    weights = tree.get("weights", "mean")
    return weights if isinstance(weights, str) else [float(weight) for weight in weights]


def with_own_biases_of_parts(tree: Mapping[str, Any]) -> Tree:
    """Return the tree with the energies of elements that parts add on their own in that of the whole.

    Raises:
        ValueError: if a part excludes types on its own, or is a network of other elements.
    """
    parts, weights = tree["models"], weights_of(tree)
    factors = weights if isinstance(weights, list) else [1 / len(parts) if weights == "mean" else 1.0] * len(parts)
    bias = np.array(tree[VARIABLES]["out_bias"], dtype=np.float64)
    for part, weight in zip(parts, factors, strict=True):
        refuse_own_exclusions(part)
        own = list(part["type_map"])
        if part["type"] != "pairtab" and own != list(tree["type_map"]):
            raise ValueError(f"a part has the elements {own}, the model {list(tree['type_map'])}: not available here")
        bias += weight * part_bias(part)[:, [own.index(name) for name in tree["type_map"]]]
    return {**tree, VARIABLES: {**tree[VARIABLES], "out_bias": bias}}
