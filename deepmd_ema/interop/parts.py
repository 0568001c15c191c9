"""Trees of descriptors and fitting networks: tables of names, and how arrays are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from deepmd_ema.config.fields import options, plain, type_names
from deepmd_ema.config.registry import Registry
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.nn.layers import Layer, Network
from deepmd_ema.model.nn.norm import LayerNorm
from deepmd_ema.model.nn.type_embedding import TypeEmbedding

Names: TypeAlias = Mapping[str, tuple[tuple[str, str], ...]]

BACKENDS = (
    "pt",
    "pt_expt",
)  # backends of DeePMD-kit whose checkpoints name modules of a model
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
# entries of trees, at any level, by which a model has what is not available here
_FEATURES = {
    "spin": "spin",
    "use_spin": "spin",
    "add_chg_spin_ebd": "charge and spin as an input",
    "compress": "a compressed descriptor",
    "use_aparam_as_mask": "aparam as mask",
    "tot_ener_zero": "tot_ener_zero",
}
_LORA = re.compile(r"\b(A|B)_(by_l|m0|m)\b")  # names of low-rank additions to weights
_NO_ACTIVATION = {
    "none",
    "linear",
}  # names in files of several versions, for the last layer


class PartTree:
    """Writer and reader of the tree of one kind of descriptor or fitting.

    :meth:`write` is the table of names from which both directions follow: its arrays are the memory
    of parameters and buffers, and a tree that was read is copied into them (:func:`fill`). What is
    read is what was written, bitwise.

    Args:
        section: class of its section in the config.

    Attributes:
        names: values of ``type`` of its trees.
        version: the newest of its trees; what is newer is compressed.
        modules: names of its modules in checkpoints of DeePMD-kit, by backend, that are not those
            of the entries of its tree: patterns of places in the tree and replacements, applied in
            this order. None of a backend that does not have this type.
        defaults: numbers that older checkpoints do not have, by their names in the tree.
        has_second_names: whether checkpoints hold the arrays of networks twice, under a second
            name.
    """

    version: ClassVar[float] = np.inf
    modules: ClassVar[Names] = {}
    defaults: ClassVar[Mapping[str, float]] = {}
    has_second_names: ClassVar[bool] = True

    def __init__(self, section: Any) -> None:
        self.names = type_names(section)
        self._options = ("type", *(field.name for field in fields(section)))

    def write(self, part: Any, config: StandardConfig) -> Tree:
        """Return the tree of a descriptor or fitting network.

        Arrays are in the memory of the part if that is on the CPU.
        """
        raise NotImplementedError

    def unavailable(self, tree: Mapping[str, Any]) -> Iterator[str]:
        """Yield features of a tree that are not available here."""
        if (version := tree.get("@version", 1)) > self.version:
            yield f"descriptor version {version} (compressed)"
        yield from _features(tree)

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of its section that the tree gives."""
        return chosen(tree, self._options)

    def upgraded(self, tree: Tree) -> Tree:
        """Return a tree that was read in the form of :meth:`write`.

        Raises:
            ValueError: if it has numbers that are not available here.
        """
        return tree

    def name_of(self, place: str, section: Any, backend: str) -> str:
        """Return the name of the array at a place in the tree in checkpoints of a backend."""
        for pattern, name in (*self.modules[backend], *_MODULES[backend]):
            place = re.sub(pattern, name, place)
        return place

    def not_in_pt(self, section: Any) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty text."""
        return "" if "pt" in self.modules else f"the type {section.type}"


def tree_by_type(kinds: Registry, name: str) -> PartTree:
    """Return the writer and reader of the trees of a registered type.

    Raises:
        CheckpointError: if the format does not have it.
    """
    family = kinds[name]
    if not family.tree:
        raise CheckpointError(
            f'model.descriptor.type = "{name}": cannot be written in the format of DeePMD-kit '
            "(.dp, .yaml), so it "
            f"cannot be frozen. Known: {', '.join(types_with_tree(kinds))}."
        )
    tree: PartTree = family.load("tree")(family.section)
    return tree


def tree_of(kinds: Registry, tree: Mapping[str, Any]) -> PartTree | None:
    """Return the reader of a tree, by its ``type``, or None."""
    names = (
        name
        for name in types_with_tree(kinds)
        if tree.get("type") in type_names(kinds[name].section)
    )
    return next((tree_by_type(kinds, name) for name in names), None)


def types_with_tree(kinds: Registry) -> list[str]:
    """Return the registered types that can be written."""
    return [name for name, family in kinds.items() if family.tree]


# ---- entries of the tables of names


def node(kind: str, version: int) -> Tree:
    """Return the first entries of a part of a tree."""
    return {"@class": kind, "@version": version}


def collection_tree(
    kind: str, networks: Sequence[Tree], ndim: int, ntypes: int
) -> Tree:
    """Return the tree of networks of a ``network_type``; each depends on ``ndim`` elements."""
    return {
        **node("NetworkCollection", 1),
        "ndim": ndim,
        "ntypes": ntypes,
        "network_type": kind,
        "networks": list(networks),
    }


def embeddings_tree(
    nets: Sequence[Network], section: Mapping[str, Any], ndim: int, ntypes: int
) -> Tree:
    """Return the tree of embedding networks, which have no linear layer at the end."""
    networks = [
        embedding_tree(net, section["activation_function"], section["resnet_dt"])
        for net in nets
    ]
    return collection_tree("embedding_network", networks, ndim, ntypes)


def embedding_tree(net: Network, activation: str, timestep: bool) -> Tree:
    """Return the tree of an embedding network."""
    first = net.layers[0]
    return {
        **node("EmbeddingNetwork", 2),
        "in_dim": first.weight.shape[0],
        "neuron": [layer.weight.shape[1] for layer in net.layers],
        "activation_function": activation,
        "resnet_dt": timestep,
        "bias": first.bias is not None,
        "precision": precision_of(first.weight.dtype),
        # DeePMD-kit adds the input only where the widths allow it
        "layers": [layer_tree(layer, resnet=True) for layer in net.layers],
    }


def layer_tree(layer: Layer, resnet: bool = False) -> Tree:
    """Return the tree of a dense layer."""
    return {
        **node("Layer", 2),
        "bias": layer.bias is not None,
        "use_timestep": layer.idt is not None,
        "activation_function": layer.activation.name,
        "resnet": resnet,
        "precision": precision_of(layer.weight.dtype),
        "trainable": layer.weight.requires_grad,
        VARIABLES: {
            "w": array(layer.weight),
            "b": array(layer.bias),
            "idt": array(layer.idt),
        },
    }


def norm_tree(norm: LayerNorm) -> Tree:
    """Return the tree of a layer normalisation."""
    return {
        **node("LayerNorm", 1),
        "eps": norm.eps,
        "trainable": norm.weight.requires_grad,
        "precision": precision_of(norm.weight.dtype),
        VARIABLES: {"w": array(norm.weight), "b": array(norm.bias)},
    }


def type_embedding_tree(
    embedding: TypeEmbedding, type_map: Sequence[str], trainable: bool
) -> Tree:
    """Return the tree of a type embedding. Its row of zeros for virtual atoms is not stored."""
    entry = embedding_tree(embedding.net, "Linear", timestep=False)
    for layer in entry["layers"]:
        layer["activation_function"] = "Linear"
    return {
        **node("TypeEmbedNet", 2),
        "ntypes": len(type_map),
        **chosen(entry, ("neuron", "resnet_dt", "precision", "activation_function")),
        "trainable": trainable,
        "padding": True,
        "use_econf_tebd": embedding.electrons,
        "use_tebd_bias": entry["bias"],
        "type_map": list(type_map),
        "embedding": entry,
    }


def statistics_tree(module: Any) -> Tree:
    """Return the means and spreads by which a module normalises its environment matrix."""
    return {"davg": array(module.mean), "dstd": array(module.stddev)}


def env_mat_tree(rcut: float, rcut_smth: float, protection: float) -> Tree:
    """Return the tree of an environment matrix."""
    return {
        "rcut": rcut,
        "rcut_smth": rcut_smth,
        "protection": protection,
        "use_exp_switch": False,
    }


def options_tree(section: Any, *left_out: str) -> Tree:
    """Return the options of a section that DeePMD-kit has, without ``left_out``.

    Precision and seed are in other entries of a tree.
    """
    tree = tree_without_effect(section)
    tree |= {
        option.name: plain(getattr(section, option.name))
        for option in options(section.__class__)
        if not option.is_own
    }
    return {
        name: value
        for name, value in tree.items()
        if name not in ("precision", "seed", *left_out)
    }


def tree_without_effect(section: Any) -> Tree:
    """Return the options of DeePMD-kit that do nothing here, with its defaults."""
    return {
        name: default
        for name, (default, _) in getattr(section, "without_effect", {}).items()
    }


def parts_of(module: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the parts that a module has, by their names in a tree.

    Args:
        module: of a descriptor or fitting network.
        names: names in the module by the names in the tree.
    """
    for key, path in names.items():
        part = reduce(
            lambda owner, name: getattr(owner, name, None), path.split("."), module
        )
        if part is not None:
            yield key, part


def residuals_tree(layer: Any, names: Mapping[str, str]) -> Tree:
    """Return the trained factors of the updates of a layer; ``names`` as for :func:`parts_of`."""
    factors = {
        key: [array(factor) for factor in update.factors]
        for key, update in parts_of(layer, names)
    }
    return {VARIABLES: {key: factors.get(key, []) for key in names}}


def array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """Return the numbers of a tensor, in its own memory where it is on the CPU, or None."""
    return None if tensor is None else tensor.detach().cpu().numpy()


def precision_of(dtype: torch.dtype) -> str:
    """Return the name of a precision as trees have it: ``float64``."""
    return str(dtype).removeprefix("torch.")


def chosen(tree: Mapping[str, Any], names: Sequence[str]) -> Tree:
    """Return those entries of a tree that are options of a section."""
    return {name: tree[name] for name in names if name in tree}


# ---- what was read


def fill(target: Any, source: Any, name: str = "") -> None:
    """Write the arrays of a tree that was read into the tree of a model.

    The tensors of the model change.

    Entries of ``target`` without arrays are not compared, but for activation functions and whether
    types are mixed.

    Args:
        target: the tree of a model on the CPU, or a part of it.
        source: the tree that was read; what it has beside the entries of ``target`` is left out.
        name: of the part, for messages.

    Raises:
        ValueError: if a shape, an activation function or a number of networks, layers or arrays
            differs, or if an array is there in one of the trees only.
    """
    if isinstance(target, list):
        source = [] if source is None else source
        if len(source) != len(target):
            is_tree = isinstance(target[0], Mapping)
            trees = "networks" if is_tree and "layers" in target[0] else "layers"
            kind = trees if is_tree else "arrays"
            raise ValueError(f"{name}: {len(source)} {kind}, expected {len(target)}")
        for index, entry in enumerate(target):
            fill(entry, source[index], f"{name}[{index}]")
    elif isinstance(target, Mapping):
        if target.get("@class") == "Layer":
            kind = str(source["activation_function"]).lower()  # None in old files
            expected = str(target["activation_function"]).lower()
            if kind != expected and {kind, expected} - _NO_ACTIVATION:
                raise ValueError(
                    f"{name}: activation_function {kind!r}, expected {expected!r}"
                )
        if "mixed_types" in target and target["mixed_types"] != bool(
            source.get("mixed_types")
        ):
            mixed = source.get("mixed_types")
            raise ValueError(
                f"mixed_types of the {name} is {mixed}, which its descriptor is not made for"
            )
        for key, value in target.items():
            if key == VARIABLES:
                for place, tensor in value.items():
                    array_name = f"{name}: {place}" if name else place
                    fill(tensor, source[VARIABLES].get(place), array_name)
            elif _has_arrays(value):
                inner = f"{name}.{key}" if name else key
                fill(value, source[key], name if key == "networks" else inner)
    elif target is None or source is None:
        if target is not None or source is not None:
            raise ValueError(f"{name} is {'given' if target is None else 'missing'}")
    elif target.dtype.kind == "f":  # places follow from the options
        values = np.asarray(source)
        if values.shape != target.shape:
            raise ValueError(f"{name}: shape {values.shape}, expected {target.shape}")
        np.copyto(target, values, casting="same_kind")


def refuse_angular_means(tree: Mapping[str, Any], name: str = "") -> None:
    """Refuse statistics of a block of pairs that would make energies depend on the orientation.

    Raises:
        ValueError: naming them; ``name`` is that of the block.
    """
    if np.any(np.asarray(tree[VARIABLES]["davg"])[..., 1:]):
        raise ValueError(
            f"{name}davg: means of angular columns other than 0, which make energies depend on "
            "orientation"
        )


def _has_arrays(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return VARIABLES in tree or any(map(_has_arrays, tree.values()))
    return isinstance(tree, list) and any(map(_has_arrays, tree))


def _features(tree: Any) -> Iterator[str]:
    """Yield features of a part of a tree that are not available here."""
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if key in _FEATURES and value:
            yield _FEATURES[key]
        elif key == "env_mat" and (value or {}).get("use_exp_switch"):
            yield "an exponential switch"
        elif key == VARIABLES:
            if any(map(_LORA.search, value)):
                yield "lora"
        else:
            for entry in value if isinstance(value, list) else [value]:
                yield from _features(entry)
