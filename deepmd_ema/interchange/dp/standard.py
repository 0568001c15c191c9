"""The tree of a model of one descriptor and one fitting network (``standard``), and what trees of models share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import FITTINGS, MODELS, StandardConfig
from deepmd_ema.interchange.dp.files import Tree
from deepmd_ema.interchange.dp.networks import chosen, tree_by_type, tree_of, types_with_tree
from deepmd_ema.interchange.dp.zbl import table_options, with_table, without_table
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.interface import Descriptor, Fitting
from deepmd_ema.registry import Registry

_PARTS = (("descriptor", DESCRIPTORS), ("fitting", FITTINGS))


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


class StandardTree:
    """Tree of a standard model; one with a table of pair energies is of type ``zbl`` there."""

    kinds = ("standard", "zbl")

    def write(self, whole: Tree, model: EnergyModel, config: StandardConfig) -> Tree:
        """Return the tree of a model."""
        tree = {**whole, "type": "standard", **network_trees(model.descriptor, model.fitting, config)}
        return tree if model.short_range is None else with_table(tree, model)

    def normalized(self, tree: Tree) -> Tree:
        """Return the tree as that of the network alone, with the options of its table."""
        return {**without_table(tree), **table_options(tree)}

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the sections of the parts and the options of the table."""
        table = chosen(tree, ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax"))
        return {**network_sections(tree, script), **table}

    def fill(self, model: EnergyModel, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into descriptor and fitting network."""
        fill_networks(config, model.descriptor, model.fitting, tree)


def model_trees() -> Iterator[ModelTree]:
    """Yield the trees of the registered types of models."""
    for family in MODELS.values():
        yield family.load("tree")()


def tree_of_model(config: ModelConfig) -> ModelTree:
    """Return the tree of the type of a section ``model``."""
    tree: ModelTree = MODELS[config.type].load("tree")()
    return tree


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
    """Return the sections of a descriptor and its fitting network."""
    return {
        "descriptor": {**_seed(script.get("descriptor")), **_section(DESCRIPTORS, tree["descriptor"])},
        "fitting_net": {**_seed(script.get("fitting_net")), **_section(FITTINGS, tree["fitting"])},
    }


def fill_networks(config: StandardConfig, descriptor: Descriptor, fitting: Fitting, tree: Mapping[str, Any]) -> None:
    """Write the arrays of a tree into a descriptor and its fitting network.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    tree_by_type(DESCRIPTORS, config.descriptor.type).fill(descriptor, tree["descriptor"])
    tree_by_type(FITTINGS, config.fitting_net.type).fill(fitting, tree["fitting"])


def unknown_networks(path: Path, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about parts that are of no type with a tree."""
    for part, known in _PARTS:
        found = tree.get(part) or {}
        if tree_of(known, found) is None:
            names = ", ".join(types_with_tree(known))
            yield f"{path}: {part} {found.get('type')!r} is not available here. Known: {names}."


def unavailable_features(tree: Mapping[str, Any]) -> dict[str, bool]:
    """Return the features that a tree uses and that are not available here."""
    used: dict[str, bool] = {}
    for part, known in _PARTS:
        found = tree.get(part) or {}
        reader = tree_of(known, found)
        if reader is not None:
            used |= {name: True for name, is_used in reader.unavailable(found).items() if is_used}
    return used


def _section(known: Registry, found: Mapping[str, Any]) -> Tree:
    """Return the options that a tree gives."""
    reader = tree_of(known, found)
    return {} if reader is None else reader.section(found)


def _seed(section: Any) -> Tree:
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return {"seed": seed} if isinstance(seed, int) else {}
