"""Parts of the trees of all descriptors and fittings: networks of dense layers, options and arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from deepmd_ema.config.fields import type_names
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.model.nn.layers import Layer, Network
from deepmd_ema.model.nn.norm import LayerNorm
from deepmd_ema.model.nn.type_embedding import TypeEmbedding
from deepmd_ema.registry import Registry

Names: TypeAlias = Mapping[str, tuple[tuple[str, str], ...]]

BACKENDS = ("pt", "pt_expt")  # of DeePMD-kit, whose checkpoints name the modules of a model
STATISTICS = ((r"\bdavg$", "mean"), (r"\bdstd$", "stddev"))  # for `PartTree.modules`
_MODULES: Names = {  # the same of the entries that any tree may have
    "pt": (
        (r"\bembeddings(_strip)?\.networks\.", r"filter_layers\1.networks."),
        (r"\bnets\.networks\.", "filter_layers.networks."),
        (r"\btype_embedding\.embedding\.", "type_embedding.embedding.embedding_net."),
        (r"\bw$", "matrix"),
        (r"\bb$", "bias"),
    ),
    "pt_expt": (
        (r"\.networks\.", "._module_networks."),
        (r"\btype_embedding\.embedding\.", "type_embedding.embedding_net."),
    ),
}


class PartTree:
    """Writer and reader of the tree of one kind of descriptor or fitting.

    What is read is what was written, bitwise.

    Args:
        section: class of its section in the config.

    Attributes:
        names: values of ``type`` of its trees.
        modules: names of its modules in checkpoints of DeePMD-kit, by backend, that are not those of the entries of
            its tree: patterns of places in the tree and replacements, applied in this order. None of a backend that
            does not have this type.
        defaults: numbers that older checkpoints do not have, by their names in the tree.
        has_second_names: whether checkpoints hold the arrays of networks twice, under a second name.
    """

    modules: ClassVar[Names] = {}
    defaults: ClassVar[Mapping[str, float]] = {}
    has_second_names: ClassVar[bool] = True

    def __init__(self, section: Any) -> None:
        self.names = type_names([section])
        self._options = ("type", *(field.name for field in fields(section)))

    def write(self, part: Any, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor or fitting; arrays are copies on the CPU."""
        raise NotImplementedError

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        raise NotImplementedError

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        return chosen(tree, self._options)

    def name_of(self, place: str, section: Any, backend: str) -> str:
        """Return the name of the array at a place in the tree in checkpoints of a backend of DeePMD-kit."""
        for pattern, name in (*self.modules[backend], *_MODULES[backend]):
            place = re.sub(pattern, name, place)
        return place

    def not_in_pt(self, section: Any) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty string."""
        return "" if "pt" in self.modules else f"the type {section.type}"

    def fill(self, part: Any, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the parameters and buffers of a part, each where ``write`` reads it.

        Args:
            part: on the CPU.
            config: the section ``model`` with the section of the part.
            tree: in the form of ``write``; one of an older version is brought into it first.

        Raises:
            ValueError: if a shape, an activation function or a number of networks or layers differs.
        """
        fill(self.write(part, config), tree)


_NO_ACTIVATION = {"none", "linear"}  # of the last layer, by version


def tree_by_type(kinds: Registry, name: str) -> PartTree:
    """Return the writer and reader of the trees of a registered type.

    Raises:
        CheckpointError: if the format does not have it.
    """
    family = kinds[name]
    if not family.tree:
        raise CheckpointError(
            f'model.descriptor.type = "{name}": cannot be written in the format of DeePMD-kit (.dp, .yaml), so it '
            f"cannot be frozen. Known: {', '.join(types_with_tree(kinds))}."
        )
    tree: PartTree = family.load("tree")(family.section)
    return tree


def tree_of(kinds: Registry, found: Mapping[str, Any]) -> PartTree | None:
    """Return the reader of a tree, by its ``type``, or None."""
    kind = found.get("type")
    names = (name for name in types_with_tree(kinds) if kind in type_names([kinds[name].section]))
    return next((tree_by_type(kinds, name) for name in names), None)


def types_with_tree(kinds: Registry) -> list[str]:
    """Return the registered types that can be written."""
    return [name for name, family in kinds.items() if family.tree]


def network_trees(kind: str, nets: Sequence[Network], common: Tree, ndim: int, ntypes: int, hidden_only: bool) -> Tree:
    """Return the tree of networks.

    Args:
        kind: ``network_type``.
        nets: the networks.
        common: entries of each network's tree before its layers.
        ndim: elements that a network depends on.
        ntypes: number of elements.
        hidden_only: whether all layers are hidden ones; else the last one is the linear output.
    """
    return {
        "@class": "NetworkCollection",
        "@version": 1,
        "ndim": ndim,
        "ntypes": ntypes,
        "network_type": kind,
        "networks": [
            {
                **common,
                "layers": [
                    # DeePMD-kit adds the input only where the widths allow it
                    layer_tree(layer, resnet=hidden_only or layer is not net.layers[-1])
                    for layer in net.layers
                ],
            }
            for net in nets
        ],
    }


def layer_tree(layer: Layer, resnet: bool) -> Tree:
    """Return the tree of a dense layer."""
    return {
        "@class": "Layer",
        "@version": 2,
        "bias": layer.bias is not None,
        "use_timestep": layer.idt is not None,
        "activation_function": layer.activation.name,
        "resnet": resnet,
        "precision": precision_of(layer.weight.dtype),
        "trainable": layer.weight.requires_grad,
        VARIABLES: {"w": array(layer.weight), "b": array(layer.bias), "idt": array(layer.idt)},
    }


def embedding_tree(net: Network, activation: str, timestep: bool) -> Tree:
    """Return the entries of an embedding network before its layers; the network has no linear layer at the end."""
    first = net.layers[0]
    return {
        "@class": "EmbeddingNetwork",
        "@version": 2,
        "in_dim": first.weight.shape[0],
        "neuron": [layer.weight.shape[1] for layer in net.layers],
        "activation_function": activation,
        "resnet_dt": timestep,
        "bias": first.bias is not None,
        "precision": precision_of(first.weight.dtype),
    }


def norm_tree(norm: LayerNorm) -> Tree:
    """Return the tree of a layer normalisation."""
    return {
        "@class": "LayerNorm",
        "@version": 1,
        "eps": norm.eps,
        "trainable": norm.weight.requires_grad,
        "precision": precision_of(norm.weight.dtype),
        VARIABLES: {"w": array(norm.weight), "b": array(norm.bias)},
    }


def type_embedding_tree(embedding: TypeEmbedding, type_map: Sequence[str], trainable: bool) -> Tree:
    """Return the tree of a type embedding. Its row of zeros for virtual atoms is not stored."""
    net = embedding.net
    entry = embedding_tree(net, "Linear", timestep=False)
    layers = [{**layer_tree(layer, resnet=True), "activation_function": "Linear"} for layer in net.layers]
    return {
        "@class": "TypeEmbedNet",
        "@version": 2,
        "ntypes": len(type_map),
        **chosen(entry, ("neuron", "resnet_dt", "precision", "activation_function")),
        "trainable": trainable,
        "padding": True,
        "use_econf_tebd": embedding.electrons,
        "use_tebd_bias": entry["bias"],
        "type_map": list(type_map),
        "embedding": {**entry, "layers": layers},
    }


def statistics_tree(module: Any) -> Tree:
    """Return the arrays of the means and spreads by which a module normalises its environment matrix."""
    return {"davg": array(module.mean), "dstd": array(module.stddev)}


def env_mat_tree(block: Any) -> Tree:
    """Return the tree of the environment matrix of a module that has one."""
    return {
        "rcut": block.rcut,
        "rcut_smth": block.rcut_smth,
        "protection": block.protection,
        "use_exp_switch": False,
    }


def has_exp_switch(tree: Mapping[str, Any]) -> bool:
    """Whether the environment matrix of a tree has an exponential switch."""
    return bool((tree.get("env_mat") or {}).get("use_exp_switch"))


def fill(own: Any, given: Any, name: str = "") -> None:
    """Write the arrays of a tree that was read into those of a tree that was written: the tensors of its model change.

    Entries of ``own`` without arrays are not compared, but for the activation functions of dense layers.

    Args:
        own: the tree of a model on the CPU, or a part of it.
        given: the tree that was read; what it has beside the entries of ``own`` is left out.
        name: of the part, for messages.

    Raises:
        ValueError: if a shape, an activation function or a number of networks, layers or arrays differs, or if an array
            is there in one of the trees only.
    """
    if isinstance(own, list):
        given = [] if given is None else given
        if len(given) != len(own):
            kind = "arrays" if not isinstance(own[0], Mapping) else "networks" if "layers" in own[0] else "layers"
            raise ValueError(f"{name}: {len(given)} {kind}, expected {len(own)}")
        for index, one in enumerate(own):
            fill(one, given[index], f"{name}[{index}]")
    elif isinstance(own, Mapping):
        if own.get("@class") == "Layer":
            _check_activation(own, given, name)
        for key, value in own.items():
            if key == VARIABLES:
                for place, target in value.items():
                    fill(target, given[VARIABLES].get(place), f"{name}: {place}" if name else place)
            elif _has_arrays(value):
                fill(value, given[key], name if key == "networks" else f"{name}.{key}" if name else key)
    else:
        _fill_array(own, given, name)


def _check_activation(own: Any, given: Any, name: str) -> None:
    kind, expected = (str(tree["activation_function"]).lower() for tree in (given, own))  # None in old files
    if kind != expected and {kind, expected} - _NO_ACTIVATION:
        raise ValueError(f"{name}: activation_function {kind!r}, expected {expected!r}")


def _fill_array(own: np.ndarray | None, given: Any, name: str) -> None:
    if own is None or given is None:
        if own is not None or given is not None:
            raise ValueError(f"{name} is {'given' if own is None else 'missing'}")
        return
    found = np.asarray(given)
    if found.shape != own.shape:
        raise ValueError(f"{name}: shape {found.shape}, expected {own.shape}")
    np.copyto(own, found, casting="same_kind")


def _has_arrays(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return VARIABLES in tree or any(map(_has_arrays, tree.values()))
    return isinstance(tree, list) and any(map(_has_arrays, tree))


def parts_of(module: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the parts that a module has, by their names in a tree; ``names`` are their names in the module by these."""
    for key, path in names.items():
        part = reduce(lambda owner, name: getattr(owner, name, None), path.split("."), module)
        if part is not None:
            yield key, part


def array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """Return the numbers of a tensor, in its own memory where it is on the CPU, or None."""
    return None if tensor is None else tensor.detach().cpu().numpy()


def precision_of(dtype: torch.dtype) -> str:
    """Return the name of a precision as trees have it: ``float64``."""
    return str(dtype).removeprefix("torch.")


def chosen(tree: Mapping[str, Any], names: Sequence[str]) -> Tree:
    """Return those entries of a tree that are options of a section."""
    return {name: tree[name] for name in names if name in tree}
