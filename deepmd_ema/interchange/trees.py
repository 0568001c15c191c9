"""Models as the dictionaries that DeePMD-kit serializes them to, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from deepmd_ema.config.load import model_config_from_dict
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interchange.files import VARIABLES, Tree
from deepmd_ema.model.build import DESCRIPTORS, FITTINGS

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.descriptor.se_e2_a import SeE2ADescriptor
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.model.fitting.ener import EnergyFitting
    from deepmd_ema.model.nn.layers import Layer, Network

DESCRIPTOR_OPTIONS = (
    "type", "rcut", "rcut_smth", "sel", "neuron", "axis_neuron", "resnet_dt", "set_davg_zero", "activation_function",
    "precision", "exclude_types", "env_protection", "trainable", "type_one_side",
)  # fmt: skip
FITTING_OPTIONS = (
    "type", "neuron", "resnet_dt", "numb_fparam", "numb_aparam", "default_fparam", "rcond", "activation_function",
    "precision", "layer_name",
)  # fmt: skip
EMBEDDINGS = ("embedding_network", 2)
FITTING_NETS = ("fitting_network", 1)


def model_tree(model: EnergyModel, config: ModelConfig) -> Tree:
    """Return the serialized model; arrays are copies on the CPU."""
    return {
        "type_map": list(config.type_map),
        "atom_exclude_types": list(config.atom_exclude_types),
        "pair_exclude_types": [list(pair) for pair in config.pair_exclude_types],
        "rcond": config.fitting_net.rcond,
        "preset_out_bias": config.preset_out_bias,
        VARIABLES: {"out_bias": _array(model.out_bias), "out_std": _array(model.out_std)},
        "@class": "Model",
        "@version": 2,
        "type": "standard",
        "descriptor": _WRITERS[config.descriptor.type](model, config),
        "fitting": _fitting_tree(model, config),
    }


def _se_e2_a_tree(model: EnergyModel, config: ModelConfig) -> Tree:
    section, descriptor = config.descriptor, cast("SeE2ADescriptor", model.descriptor)
    assert not isinstance(section.sel, str), "sel must be resolved to numbers"
    precision = _precision(descriptor.dtype)
    return {
        "@class": "Descriptor",
        "type": "se_e2_a",
        "@version": 2,
        "rcut": section.rcut,
        "rcut_smth": section.rcut_smth,
        "sel": list(section.sel),
        "neuron": list(section.neuron),
        "axis_neuron": section.axis_neuron,
        "resnet_dt": section.resnet_dt,
        "set_davg_zero": section.set_davg_zero,
        "activation_function": section.activation_function,
        "precision": precision,
        "embeddings": {
            "@class": "NetworkCollection",
            "@version": 1,
            "ndim": 1 if section.type_one_side else 2,
            "ntypes": len(config.type_map),
            "network_type": EMBEDDINGS[0],
            "networks": [
                {
                    "@class": "EmbeddingNetwork",
                    "@version": EMBEDDINGS[1],
                    "in_dim": 1,
                    "neuron": list(section.neuron),
                    "activation_function": section.activation_function,
                    "resnet_dt": section.resnet_dt,
                    "bias": True,
                    "precision": precision,
                    "layers": _layer_trees(net, precision, hidden_only=True),
                }
                for net in descriptor.networks
            ],
        },
        "env_mat": {
            "rcut": section.rcut,
            "rcut_smth": section.rcut_smth,
            "protection": section.env_protection,
            "use_exp_switch": False,
        },
        "exclude_types": [list(pair) for pair in section.exclude_types],
        "env_protection": section.env_protection,
        VARIABLES: {"davg": _array(descriptor.mean), "dstd": _array(descriptor.stddev)},
        "type_map": list(config.type_map),
        "trainable": section.trainable,
        "type_one_side": section.type_one_side,
        "spin": None,
    }


def _fitting_tree(model: EnergyModel, config: ModelConfig) -> Tree:
    section, fitting = config.fitting_net, cast("EnergyFitting", model.fitting)
    precision = _precision(fitting.dtype)
    trained = section.trainable if isinstance(section.trainable, bool) else all(section.trainable)
    statistics = [f"{kind}_{what}" for kind in ("fparam", "aparam") for what in ("avg", "inv_std")]
    common = {"neuron": list(section.neuron), "activation_function": section.activation_function,
              "resnet_dt": section.resnet_dt, "precision": precision}  # fmt: skip
    return {
        "@class": "Fitting",
        "@version": 4,
        "var_name": "energy",
        "ntypes": len(config.type_map),
        "dim_descrpt": fitting.dim_in,
        **common,
        "numb_fparam": section.numb_fparam,
        "numb_aparam": section.numb_aparam,
        "dim_case_embd": section.dim_case_embd,
        "default_fparam": section.default_fparam,
        "rcond": section.rcond,
        "mixed_types": False,
        "exclude_types": list(config.atom_exclude_types),
        "nets": {
            "@class": "NetworkCollection",
            "@version": 1,
            "ndim": 1,
            "ntypes": len(config.type_map),
            "network_type": FITTING_NETS[0],
            "networks": [
                {
                    "@class": "FittingNetwork",
                    "@version": FITTING_NETS[1],
                    "in_dim": fitting.dim_in + section.numb_fparam + section.numb_aparam,
                    "out_dim": 1,
                    **common,
                    "bias_out": True,
                    "layers": _layer_trees(net, precision, hidden_only=False),
                }
                for net in fitting.networks
            ],
        },
        VARIABLES: {
            "bias_atom_e": _array(fitting.bias_atom_e),
            "case_embd": None,
            **{name: _array(getattr(fitting, name, None)) for name in statistics},
        },
        "type_map": list(config.type_map),
        "tot_ener_zero": False,
        "trainable": [trained] * (len(section.neuron) + 1),
        "layer_name": section.layer_name,
        "use_aparam_as_mask": False,
        "spin": None,
        "type": "ener",
        "dim_out": 1,
        "atom_ener": list(section.atom_ener),
    }


_WRITERS: dict[str, Callable[[EnergyModel, ModelConfig], Tree]] = {"se_e2_a": _se_e2_a_tree}


def _layer_trees(net: Network, precision: str, *, hidden_only: bool) -> list[Tree]:
    last = None if hidden_only else net.stack[-1]
    return [
        {
            "@class": "Layer",
            "@version": 2,
            "bias": True,
            "use_timestep": layer.idt is not None,
            "activation_function": layer.activation.name,
            "resnet": layer is not last,
            "precision": precision,
            "trainable": layer.weight.requires_grad,
            VARIABLES: {"w": _array(layer.weight), "b": _array(layer.bias), "idt": _array(layer.idt)},
        }
        for layer in net.stack
    ]


def check_known(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse by name what is not available here.

    Raises:
        CheckpointError: naming the descriptor, the fitting or the feature.
    """
    descriptor, fitting = tree.get("descriptor") or {}, tree.get("fitting") or {}
    kind = tree.get("type", "standard")
    problems = []
    if kind != "standard":
        problems.append(f"{path}: a model of type {kind!r}; only standard models are available here.")
    else:
        for part, found, known in (
            ("descriptor", descriptor.get("type"), DESCRIPTORS),
            ("fitting", fitting.get("type"), FITTINGS),
        ):
            if found not in known:
                problems.append(f"{path}: {part} {found!r} is not available here. Known: {', '.join(known)}.")
    unusual = {
        "descriptor version 3 (compressed)": descriptor.get("@version", 2) > 2,
        "spin": bool(descriptor.get("spin") or fitting.get("spin")),
        "an exponential switch": bool((descriptor.get("env_mat") or {}).get("use_exp_switch")),
        "case embeddings": bool(fitting.get("dim_case_embd")),
        "aparam as mask": bool(fitting.get("use_aparam_as_mask")),
        "tot_ener_zero": bool(fitting.get("tot_ener_zero")),
        "one fitting net for all types": bool(fitting.get("mixed_types")),
    }
    if not problems:
        problems += [f"{path}: uses {what}, which is not available here." for what, found in unusual.items() if found]
    if problems:
        raise CheckpointError(problems)


def config_from_tree(tree: Mapping[str, Any]) -> ModelConfig:
    """Return the section ``model``: the shape from the model itself, the rest from the input that is kept with it."""
    model, script = tree["model"], tree.get("model_def_script") or {}
    descriptor, fitting = model["descriptor"], model["fitting"]
    kept = {name: script[name] for name in ("data_stat_nbatch", "data_stat_protect") if name in script}
    section = {
        **kept,
        "type_map": model["type_map"],
        "descriptor": {
            **_seed(script.get("descriptor")),
            **{name: descriptor[name] for name in DESCRIPTOR_OPTIONS if name in descriptor},
        },
        "fitting_net": {
            **_seed(script.get("fitting_net")),
            **{name: fitting[name] for name in FITTING_OPTIONS if name in fitting},
            "atom_ener": fitting.get("atom_ener") or [],
            "trainable": all(fitting.get("trainable", [True])),
        },
        "pair_exclude_types": model.get("pair_exclude_types") or [],
        "atom_exclude_types": model.get("atom_exclude_types") or [],
        "preset_out_bias": model.get("preset_out_bias"),
    }
    return model_config_from_dict(section, "model")


def _seed(section: Any) -> Tree:
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return {"seed": seed} if isinstance(seed, int) else {}


@torch.no_grad()
def fill(model: EnergyModel, tree: Mapping[str, Any]) -> None:
    """Write the arrays of a serialized model into the parameters and buffers of ours.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    descriptor, fitting = tree["descriptor"], tree["fitting"]
    ours = cast("SeE2ADescriptor", model.descriptor)
    _copy("out_bias", model.out_bias, tree[VARIABLES]["out_bias"])
    if tree[VARIABLES].get("out_std") is not None:
        _copy("out_std", model.out_std, tree[VARIABLES]["out_std"])
    _copy("davg", ours.mean, descriptor[VARIABLES]["davg"])
    _copy("dstd", ours.stddev, descriptor[VARIABLES]["dstd"])
    _fill_nets("embeddings", ours.networks, descriptor["embeddings"]["networks"])
    _fill_nets("nets", cast("EnergyFitting", model.fitting).networks, fitting["nets"]["networks"])
    for name in ("bias_atom_e", "fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std"):
        if hasattr(model.fitting, name):
            _copy(name, getattr(model.fitting, name), fitting[VARIABLES][name])


def _fill_nets(name: str, nets: list[Network], trees: list[Tree]) -> None:
    if len(nets) != len(trees):
        raise ValueError(f"{name}: {len(trees)} networks, expected {len(nets)}")
    for index, (net, tree) in enumerate(zip(nets, trees)):
        if len(net.stack) != len(tree["layers"]):
            raise ValueError(f"{name}[{index}]: {len(tree['layers'])} layers, expected {len(net.stack)}")
        for number, (layer, values) in enumerate(zip(net.stack, tree["layers"])):
            _fill_layer(f"{name}[{index}].layers[{number}]", layer, values[VARIABLES])


def _fill_layer(name: str, layer: Layer, values: Mapping[str, Any]) -> None:
    for ours, theirs in (("weight", "w"), ("bias", "b"), ("idt", "idt")):
        parameter, value = getattr(layer, ours), values.get(theirs)
        if (parameter is None) != (value is None):
            raise ValueError(f"{name}: {theirs} is {'given' if parameter is None else 'missing'}")
        if parameter is not None:
            _copy(f"{name}.{theirs}", parameter, value)


def _copy(name: str, target: torch.Tensor, value: Any) -> None:
    array = np.asarray(value)
    if array.shape != tuple(target.shape):
        raise ValueError(f"{name}: shape {array.shape}, expected {tuple(target.shape)}")
    target.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().numpy()


def _precision(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
