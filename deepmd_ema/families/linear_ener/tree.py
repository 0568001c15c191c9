"""The tree of a model whose parts are added up with weights (``linear``), from and to trees of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepmd_ema.config.fields import plain
from deepmd_ema.families.linear_ener.layers import PairTableDescriptor
from deepmd_ema.families.linear_ener.module import LinearDescriptor, LinearFitting
from deepmd_ema.families.linear_ener.section import LinearConfig, PairTableConfig, Part
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.nested import (
    part_bias,
    part_tree,
    refuse_own_exclusions,
    rows_of_lines,
    table_entries,
    table_lines,
    table_rows,
)
from deepmd_ema.interchange.dp.standard import fill_networks, network_sections, network_trees, networks_not_in_pt
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.interface import Descriptor, Fitting


class LinearTree:
    """Tree of a linear model."""

    kinds = ("linear", "linear_ener")

    def write(self, whole: Tree, model: EnergyModel, config: LinearConfig) -> Tree:
        """Return the tree of a model."""
        parts = []
        for section, descriptor, fitting in _parts(model, config):
            if isinstance(section, PairTableConfig):
                assert isinstance(descriptor, PairTableDescriptor)
                parts.append(part_tree(whole, "pairtab", table_entries(descriptor.pairs.table, descriptor.sel)))
            else:
                networks = network_trees(descriptor, fitting, config.standard(section))
                parts.append(part_tree(whole, "standard", networks))
        return {**whole, "@version": 3, "type": "linear_ener", "models": parts, "weights": config.weights}

    def normalized(self, tree: Tree) -> Tree:
        """Return the tree with the energies of elements that parts add on their own in that of the whole.

        Raises:
            ValueError: if a part excludes types on its own, or is a network of other elements.
        """
        parts, weights = tree["models"], weights_of(tree)
        factors = weights if isinstance(weights, list) else [1 / len(parts) if weights == "mean" else 1.0] * len(parts)
        bias = np.array(tree[VARIABLES]["out_bias"], dtype=np.float64)
        for part, weight in zip(parts, factors, strict=True):
            refuse_own_exclusions(part)
            own, whole = list(part["type_map"]), list(tree["type_map"])
            if part["type"] != "pairtab" and own != whole:
                raise ValueError(f"a part has the elements {own}, the model {whole}: not available here")
            bias += weight * part_bias(part)[:, [own.index(name) for name in whole]]
        return {**tree, VARIABLES: {**tree[VARIABLES], "out_bias": bias}}

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the sections of the parts and their weights."""
        scripts = script.get("models") or []
        scripts = [*scripts, *[{}] * (len(tree["models"]) - len(scripts))]
        parts = [
            table_section(part) if part["type"] == "pairtab" else network_sections(part, one)
            for part, one in zip(tree["models"], scripts, strict=True)
        ]
        return {"type": "linear_ener", "models": parts, "weights": weights_of(tree)}

    def fill(self, model: EnergyModel, config: LinearConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the networks of the parts."""
        for (section, descriptor, fitting), part in zip(_parts(model, config), tree["models"], strict=True):
            if not isinstance(section, PairTableConfig):
                fill_networks(config.standard(section), descriptor, fitting, part)

    def parts(self, config: LinearConfig) -> Sequence[Part]:
        """Return the sections of the parts."""
        return config.models

    def deepmd_section(self, config: LinearConfig) -> Tree:
        """Return the section ``model`` as DeePMD-kit's backend pt reads it in a checkpoint."""
        section: Tree = plain(config, for_deepmd=True)
        for part, found in zip(config.models, section["models"], strict=True):
            if isinstance(part, PairTableConfig):
                found |= {"type_map": config.type_map, "tab_file": table_lines(part.rows_for(config.type_map))}
        return section

    def own_section(self, section: Mapping[str, Any]) -> Tree:
        """Return the section ``model`` of a checkpoint of DeePMD-kit with the rows of its tables."""
        parts = [
            {**part, "tab_file": rows_of_lines("tab_file", part["tab_file"])} if "tab_file" in part else part
            for part in section["models"]
        ]
        return {**section, "models": parts}

    def not_in_pt(self, config: LinearConfig) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty string."""
        networks = (part for part in config.models if not isinstance(part, PairTableConfig))
        return next(filter(None, map(networks_not_in_pt, networks)), "")


def _parts(model: EnergyModel, config: LinearConfig) -> Iterator[tuple[Part, Descriptor, Fitting]]:
    """Yield the section of each part, and what the model has for it."""
    assert isinstance(model.descriptor, LinearDescriptor)
    assert isinstance(model.fitting, LinearFitting)
    yield from zip(config.models, model.descriptor.descriptors, model.fitting.fittings, strict=True)


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
