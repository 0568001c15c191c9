"""The tree of a model whose network is blended with a table of pair energies (``zbl``), from and to a standard one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.interchange.dp.files import VARIABLES, Tree

if TYPE_CHECKING:
    from deepmd_ema.config import ModelConfig
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.model.pair_table import PairTable

_PARTS = ("descriptor", "fitting")
_OF_PARTS = ("type_map", "rcond", "preset_out_bias", "@class", "@version")
_NETWORK, _TABLE = 0, 1


def with_table(tree: Tree, model: EnergyModel, config: ModelConfig) -> Tree:
    """Return the tree of ``model`` with its table around the standard ``tree`` of its network."""
    assert model.short_range is not None
    none: Tree = {"atom_exclude_types": [], "pair_exclude_types": []}
    num_types = len(config.type_map)
    no_bias = {"out_bias": np.zeros((1, num_types, 1)), "out_std": np.ones((1, num_types, 1))}
    part = {**{name: tree[name] for name in _OF_PARTS}, **none, VARIABLES: no_bias, "preset_out_bias": None}
    table = model.short_range.table
    pairs = {"type": "pairtab", "tab": _table_tree(table), "rcut": table.rcut, "sel": sum(model.layout.sel)}
    network: Tree = {"type": "standard", **{name: tree[name] for name in _PARTS}}
    network["fitting"] = {**tree["fitting"], "exclude_types": []}  # the model excludes them, not its network
    switch = model.short_range.switch
    return {
        **{name: value for name, value in tree.items() if name not in _PARTS},
        "type": "zbl",
        "models": [{**part, **network}, {**part, **pairs}],
        "weights": "mean",
        "sw_rmin": switch.inner,
        "sw_rmax": switch.outer,
        "smin_alpha": switch.alpha,
    }


def table_options(tree: Mapping[str, Any]) -> Tree:
    """Return the options of the section ``model`` that the tree of a model with a table gives; none of another one."""
    if tree.get("type") != "zbl":
        return {}
    rows = np.asarray(tree["models"][_TABLE]["tab"][VARIABLES]["vdata"]).tolist()
    return {"use_srtab": rows, **{name: float(tree[name]) for name in ("sw_rmin", "sw_rmax", "smin_alpha")}}


def without_table(tree: Tree) -> Tree:
    """Return the tree of a model as that of a standard one; its table is in ``table_options``.

    Raises:
        ValueError: if its parts have biases of their own, or a table is continued beyond its last energies.
    """
    if tree.get("type") != "zbl":
        return tree
    network, table = tree["models"]
    if any(np.any(np.asarray(part[VARIABLES]["out_bias"])) for part in (network, table)):
        raise ValueError("a part of the model has an out_bias of its own, which is not available here")
    if any(part.get(name) for part in (network, table) for name in ("atom_exclude_types", "pair_exclude_types")):
        raise ValueError("a part of the model excludes types on its own, which is not available here")
    rows = np.asarray(table["tab"][VARIABLES]["vdata"])
    if rows[-1, 0] + 1e-6 < float(table["rcut"]):
        raise ValueError("its table was extrapolated to 0, which is not available here")
    return {**tree, "type": "standard", **{name: network[name] for name in _PARTS}}


def _table_tree(table: PairTable) -> Tree:
    rows, num_types = table.rows, table.num_types
    num_intervals = len(rows) - 1
    return {
        "@class": "PairTab",
        "@version": 1,
        "rmin": table.first,
        "rmax": float(rows[-1, 0]),
        "hh": table.step,
        "ntypes": num_types,
        "rcut": table.rcut,
        "nspline": num_intervals,
        VARIABLES: {
            "vdata": rows,
            "tab_info": np.array([table.first, table.step, num_intervals, num_types], dtype=np.float64),
            "tab_data": table.coefficients().ravel(),
        },
    }
