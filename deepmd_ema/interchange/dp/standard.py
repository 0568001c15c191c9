"""Trees of models of one descriptor and one fitting network (``standard``; ``zbl`` with a table of pair energies)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import FITTINGS, MODELS, StandardConfig
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.interchange.dp.nested import (
    part_bias,
    part_tree,
    refuse_own_exclusions,
    rows_of_lines,
    table_entries,
    table_lines,
    table_rows,
)
from deepmd_ema.interchange.dp.networks import chosen, tree_by_type, tree_of, types_with_tree
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.interface import Descriptor, Fitting
from deepmd_ema.model.short_range import TabulatedShortRange
from deepmd_ema.registry import Registry

# entry of the tree of a standard model -> its types, and its name in the section ``model``
PARTS: Mapping[str, tuple[Registry, str]] = {
    "descriptor": (DESCRIPTORS, "descriptor"),
    "fitting": (FITTINGS, "fitting_net"),
}
_SWITCH = ("sw_rmin", "sw_rmax", "smin_alpha")


DEEPMD_SMIN_ALPHA = 0.1  # angstrom; DeePMD-kit's backend pt takes no other one from a section ``model``


class ModelTree(Protocol):
    """Writer and reader of the trees of one type of section ``model``.

    Attributes:
        kinds: values of ``type`` of its trees.
    """

    kinds: tuple[str, ...]

    def write(self, whole: Tree, model: EnergyModel, config: Any) -> Tree:
        """Return the tree of a model; ``whole`` has the entries of any type."""

    def normalized(self, tree: Tree) -> Tree:
        """Return a tree that was read in the form that the other methods read.

        Raises:
            ValueError: if it has what is not available here.
        """

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model`` that only this type has.

        Args:
            tree: the model.
            script: the section ``model`` of the input that is kept with it.
        """

    def fill(self, model: EnergyModel, config: Any, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into parameters and buffers of the parts.

        Raises:
            ValueError: if a shape or the number of networks or layers differs.
        """

    def parts(self, config: Any) -> Sequence[Any]:
        """Return the sections of the entries of ``models`` in a tree, as far as they are networks."""

    def deepmd_section(self, config: Any) -> Tree:
        """Return the section ``model`` as DeePMD-kit's backend pt reads it in a checkpoint.

        A table is in it as the lines of its file, which that backend reads like the file.
        """

    def own_section(self, section: Mapping[str, Any]) -> Tree:
        """Return the section ``model`` of a checkpoint of DeePMD-kit with the rows of its tables.

        Raises:
            ValueError: if it names a file of a table instead.
        """

    def not_in_pt(self, config: Any) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty string."""


class StandardTree:
    """Tree of a standard model; one with a table of pair energies is of type ``zbl`` there, with two parts."""

    kinds: tuple[str, ...] = ("standard", "zbl")

    def write(self, whole: Tree, model: EnergyModel, config: StandardConfig) -> Tree:
        """Return the tree of a model."""
        if config.bridging is not None:
            raise CheckpointError('no tree of DeePMD-kit has bridging_method in a model of type standard. Use "dpa4".')
        networks = network_trees(model.descriptor, model.fitting, config)
        if not isinstance(model.short_range, TabulatedShortRange):
            return {**whole, "type": "standard", **networks}
        networks["fitting"]["exclude_types"] = []  # the model excludes them, not its network
        table, switch = model.short_range.table, model.short_range.switch
        pairs = part_tree(whole, "pairtab", table_entries(table, sum(model.layout.sel)))
        return {
            **whole,
            "type": "zbl",
            "models": [part_tree(whole, "standard", networks), pairs],
            "weights": "mean",
            "sw_rmin": switch.inner,
            "sw_rmax": switch.outer,
            "smin_alpha": switch.alpha,
        }

    def normalized(self, tree: Tree) -> Tree:
        """Return the tree as that of the network alone, with the options of its table.

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
        options = {"use_srtab": table_rows(table), **{name: float(tree[name]) for name in _SWITCH}}
        return {**tree, "type": "standard", **{name: network[name] for name in PARTS}, **options}

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the sections of the parts and the options of the table."""
        return {**network_sections(tree, script), **chosen(tree, ("use_srtab", *_SWITCH))}

    def fill(self, model: EnergyModel, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into descriptor and fitting network."""
        fill_networks(config, model.descriptor, model.fitting, tree)

    def parts(self, config: StandardConfig) -> Sequence[StandardConfig]:
        """Return the section of the network, which is the first part of a model with a table."""
        return [config]

    def deepmd_section(self, config: StandardConfig) -> Tree:
        """Return the section ``model`` as DeePMD-kit's backend pt reads it in a checkpoint."""
        section: Tree = plain(config, for_deepmd=True)
        return section if config.use_srtab is None else {**section, "use_srtab": table_lines(config.use_srtab)}

    def own_section(self, section: Mapping[str, Any]) -> Tree:
        """Return the section ``model`` of a checkpoint of DeePMD-kit with the rows of its table."""
        table = section.get("use_srtab")
        return {**section, "use_srtab": rows_of_lines("use_srtab", table)} if table else dict(section)

    def not_in_pt(self, config: StandardConfig) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty string."""
        if config.use_srtab is not None and config.smin_alpha != DEEPMD_SMIN_ALPHA:
            return f"smin_alpha = {config.smin_alpha:g}: its own is {DEEPMD_SMIN_ALPHA:g} in a checkpoint"
        return networks_not_in_pt(config)


def model_trees() -> Iterator[ModelTree]:
    """Yield the trees of the registered types of models that can be written."""
    for family in MODELS.values():
        if family.tree:
            yield family.load("tree")()


def tree_of_model(config: ModelConfig) -> ModelTree:
    """Return the tree of the type of a section ``model``.

    Raises:
        CheckpointError: if the format does not have it.
    """
    if not MODELS[config.type].tree:
        raise CheckpointError(f'model.type = "{config.type}": cannot be written in the format of DeePMD-kit.')
    tree: ModelTree = MODELS[config.type].load("tree")()
    return tree


def networks_not_in_pt(config: Any) -> str:
    """Return the feature of the networks of a section that DeePMD-kit's backend pt lacks, or an empty string."""
    sections = [(kinds, getattr(config, name)) for kinds, name in PARTS.values()]
    return next(filter(None, (tree_by_type(kinds, one.type).not_in_pt(one) for kinds, one in sections)), "")


def network_trees(descriptor: Descriptor, fitting: Fitting, config: StandardConfig) -> Tree:
    """Return the trees of a descriptor and its fitting network.

    Raises:
        CheckpointError: if the format does not have this descriptor.
    """
    return {
        "descriptor": tree_by_type(DESCRIPTORS, config.descriptor.type).write(descriptor, config),
        "fitting": tree_by_type(FITTINGS, config.fitting_net.type).write(fitting, config),
    }


def network_sections(tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
    """Return the sections of a descriptor and its fitting network, with the seeds of those in ``script``."""
    sections: Tree = {}
    for part, (kinds, name) in PARTS.items():
        reader, section = tree_of(kinds, tree[part]), script.get(name)
        assert reader is not None, f"unchecked {part}"
        seed = section.get("seed") if isinstance(section, Mapping) else None
        sections[name] = {**({"seed": seed} if isinstance(seed, int) else {}), **reader.section(tree[part])}
    return sections


def fill_networks(config: StandardConfig, descriptor: Descriptor, fitting: Fitting, tree: Mapping[str, Any]) -> None:
    """Write the arrays of a tree into a descriptor and its fitting network.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    tree_by_type(DESCRIPTORS, config.descriptor.type).fill(descriptor, config, tree["descriptor"])
    tree_by_type(FITTINGS, config.fitting_net.type).fill(fitting, config, tree["fitting"])


def unavailable_networks(path: Path, tree: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return messages about parts that are of no type with a tree, and features of the others that are not here."""
    unknown: list[str] = []
    features: list[str] = []
    for part, (kinds, _) in PARTS.items():
        found = tree.get(part) or {}
        reader = tree_of(kinds, found)
        if reader is None:
            names = ", ".join(types_with_tree(kinds))
            unknown.append(f"{path}: {part} {found.get('type')!r} is not available here. Known: {names}.")
        else:
            features += [name for name, is_used in reader.unavailable(found).items() if is_used]
    return unknown, features
