"""The tree of the model dpa4, with the window of bridging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepmd_ema.config.schema.bridging import DEFAULT_INNER, DEFAULT_OUTER, method_name
from deepmd_ema.interop.dp import INSIDE, StandardTree, network_sections, network_trees
from deepmd_ema.interop.parts import chosen, node
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.energy import EnergyModel

_BRIDGING = ("bridging_method", "bridging_r_inner", "bridging_r_outer")
_FORCE_SPREAD = "dens_force_rmsd"  # belongs to another fitting network; 1 without it


class DPA4ModelTree(StandardTree):
    """Tree of a model dpa4: both networks are in an inner tree, ``atomic_model``."""

    kinds = (
        "SeZM",
        "sezm",
        "dpa4",
        "DPA4",
        "sezm_atomic",
        "SeZMProperty",
        "sezm_property",
        "dpa4_property",
    )

    def write(self, whole: Tree, model: EnergyModel, config: Any) -> Tree:
        """Return the tree of a model."""
        networks = network_trees(model.descriptor, model.fitting, config)
        networks["fitting"][
            "exclude_types"
        ] = []  # the model excludes them, not its network
        return {
            **node("Model", 1),
            "type": "SeZMProperty" if config.fitting_net.type == "property" else "SeZM",
            INSIDE: {
                **whole,
                "@version": 3,
                "type": "sezm_atomic",
                VARIABLES: {**whole[VARIABLES], _FORCE_SPREAD: np.ones(())},
                **networks,
                "dens_fitting": None,
                "active_mode": "ener",
            },
            "bridging_method": (config.bridging_method or "none").upper(),
            "bridging_r_inner": config.bridging_r_inner,
            "bridging_r_outer": config.bridging_r_outer,
            "lora": None,
        }

    def normalized(self, tree: Tree) -> Tree:
        """Return the tree without the inner one, with its entries.

        Raises:
            ValueError: if it has a fitting network of forces, or low-rank additions to weights.
        """
        inner = dict(tree.get(INSIDE, tree))
        if tree.get("lora") is not None:
            raise ValueError(
                "lora, low-rank additions to weights, is not available here"
            )
        if (
            inner.get("dens_fitting") is not None
            or inner.get("active_mode", "ener") != "ener"
        ):
            raise ValueError("dens, a fitting network of forces, is not available here")
        statistics = chosen(inner[VARIABLES], ("out_bias", "out_std"))
        return {
            **inner,
            **chosen(tree, _BRIDGING),
            "type": "dpa4",
            VARIABLES: statistics,
        }

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the sections of the parts and the options of bridging."""
        return {
            "type": "dpa4",
            **network_sections(tree, script),
            "bridging_method": method_name(str(tree.get("bridging_method", "none"))),
            "bridging_r_inner": float(tree.get("bridging_r_inner", DEFAULT_INNER)),
            "bridging_r_outer": float(tree.get("bridging_r_outer", DEFAULT_OUTER)),
        }
