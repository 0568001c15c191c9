"""What the trees of all descriptors and fittings share: networks of dense layers, options and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from deepmd_ema.config import ModelConfig
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.model.nn.layers import Network


class PartTree:
    """How one kind of descriptor or fitting is written to a tree and read from it.

    What is read is what was written, bitwise.

    Args:
        section: class of its section in the config.
    """

    def __init__(self, section: Any) -> None:
        self._options = ("type", *(field.name for field in fields(section)))

    def write(self, part: Any, config: ModelConfig) -> Tree:
        """Return the tree of a descriptor or fitting; arrays are copies on the CPU."""
        raise NotImplementedError

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        raise NotImplementedError

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        return chosen(tree, self._options)

    def fill(self, part: Any, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into parameters and buffers.

        Raises:
            ValueError: if a shape or a number of networks or layers differs.
        """
        raise NotImplementedError


_NO_ACTIVATION = {None, "none", "linear"}  # of the last layer, by version


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
                    {
                        "@class": "Layer",
                        "@version": 2,
                        "bias": True,
                        "use_timestep": layer.idt is not None,
                        "activation_function": layer.activation.name,
                        # DeePMD-kit adds the input only where the widths allow it
                        "resnet": hidden_only or layer is not net.stack[-1],
                        "precision": common["precision"],
                        "trainable": layer.weight.requires_grad,
                        VARIABLES: {"w": array(layer.weight), "b": array(layer.bias), "idt": array(layer.idt)},
                    }
                    for layer in net.stack
                ],
            }
            for net in nets
        ],
    }


def fill_networks(name: str, nets: list[Network], trees: list[Tree]) -> None:
    """Write the layers of ``trees`` into networks; ``name`` is for messages.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    if len(nets) != len(trees):
        raise ValueError(f"{name}: {len(trees)} networks, expected {len(nets)}")
    for index, (net, tree) in enumerate(zip(nets, trees)):
        if len(net.stack) != len(tree["layers"]):
            raise ValueError(f"{name}[{index}]: {len(tree['layers'])} layers, expected {len(net.stack)}")
        for number, (layer, values) in enumerate(zip(net.stack, tree["layers"])):
            where, stored = f"{name}[{index}].layers[{number}]", values[VARIABLES]
            kind = values["activation_function"]
            if kind != layer.activation.name and {kind, layer.activation.name} - _NO_ACTIVATION:
                raise ValueError(f"{where}: activation_function {kind!r}, expected {layer.activation.name!r}")
            for parameter, theirs in ((layer.weight, "w"), (layer.bias, "b"), (layer.idt, "idt")):
                fill(f"{where}: {theirs}", parameter, stored.get(theirs))


def fill(name: str, target: torch.Tensor | None, value: Any) -> None:
    """Write an array into a parameter or buffer; both may be missing, but not one of them.

    Raises:
        ValueError: if one is missing, or the shapes differ.
    """
    if target is None or value is None:
        if target is not None or value is not None:
            raise ValueError(f"{name} is {'given' if target is None else 'missing'}")
        return
    found = np.asarray(value)
    if found.shape != tuple(target.shape):
        raise ValueError(f"{name}: shape {found.shape}, expected {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.ascontiguousarray(found)))


def array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """Return a copy on the CPU, or None."""
    return None if tensor is None else tensor.detach().cpu().numpy()


def precision_of(dtype: torch.dtype) -> str:
    """Return the name of a precision as trees have it: ``float64``."""
    return str(dtype).removeprefix("torch.")


def chosen(tree: Mapping[str, Any], names: Sequence[str]) -> Tree:
    """Return those entries of a tree that are options of a section."""
    return {name: tree[name] for name in names if name in tree}
