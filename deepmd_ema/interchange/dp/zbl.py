"""The tree of a model whose network is blended with a table of pair energies (``zbl``), from and to a standard one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.interchange.dp.nested import (
    NETWORKS,
    part_bias,
    part_tree,
    refuse_own_exclusions,
    table_entries,
    table_rows,
)

if TYPE_CHECKING:
    from deepmd_ema.model.energy import EnergyModel

_NETWORK, _TABLE = 0, 1


def with_table(tree: Tree, model: EnergyModel) -> Tree:
    """Return the tree of ``model`` with its table around the standard ``tree`` of its network."""
    assert model.short_range is not None
    switch = model.short_range.switch
    network = part_tree(tree, "standard", {name: tree[name] for name in NETWORKS})
    network["fitting"] = {**tree["fitting"], "exclude_types": []}  # the model excludes them, not its network
    pairs = part_tree(tree, "pairtab", table_entries(model.short_range.table, sum(model.layout.sel)))
    return {
        **{name: value for name, value in tree.items() if name not in NETWORKS},
        "type": "zbl",
        "models": [network, pairs],
        "weights": "mean",
        "sw_rmin": switch.inner,
        "sw_rmax": switch.outer,
        "smin_alpha": switch.alpha,
    }


def table_options(tree: Mapping[str, Any]) -> Tree:
    """Return the options of the section ``model`` that the tree of a model with a table gives; none of another one."""
    if tree.get("type") != "zbl":
        return {}
    switch = {name: float(tree[name]) for name in ("sw_rmin", "sw_rmax", "smin_alpha")}
    return {"use_srtab": table_rows(tree["models"][_TABLE]), **switch}


def without_table(tree: Tree) -> Tree:
    """Return the tree of a model as that of a standard one; its table is in ``table_options``.

    Raises:
        ValueError: if its parts have biases of their own, or a table is continued beyond its last energies.
    """
    if tree.get("type") != "zbl":
        return tree
    network, table = tree["models"]
    for part in (network, table):
        refuse_own_exclusions(part)
        if np.any(part_bias(part)):
            raise ValueError("a part of the model has an out_bias of its own, which is not available here")
    table_rows(table)
    return {**tree, "type": "standard", **{name: network[name] for name in NETWORKS}}
