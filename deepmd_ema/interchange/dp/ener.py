"""The tree of the fitting network ener."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import array, chosen, fill, fill_networks, layer_trees, precision_of

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.fitting.ener import EnergyFitting

OPTIONS = (
    "type", "neuron", "resnet_dt", "numb_fparam", "numb_aparam", "default_fparam", "rcond", "activation_function",
    "precision", "layer_name",
)  # fmt: skip
STATISTICS = ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std")


class EnerTree:
    """Tree of ener."""

    def write(self, fitting: EnergyFitting, config: ModelConfig) -> Tree:
        """Return the tree of a fitting network."""
        section, precision = config.fitting_net, precision_of(fitting.dtype)
        trained = section.trainable if isinstance(section.trainable, bool) else all(section.trainable)
        common = {"neuron": list(section.neuron), "activation_function": str(section.activation_function),
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
                "network_type": "fitting_network",
                "networks": [
                    {
                        "@class": "FittingNetwork",
                        "@version": 1,
                        "in_dim": fitting.dim_in + section.numb_fparam + section.numb_aparam,
                        "out_dim": 1,
                        **common,
                        "bias_out": True,
                        "layers": layer_trees(net, precision, hidden_only=False),
                    }
                    for net in fitting.networks
                ],
            },
            VARIABLES: {
                "bias_atom_e": array(fitting.bias_atom_e),
                "case_embd": None,
                **{name: array(getattr(fitting, name, None)) for name in STATISTICS},
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

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "spin": bool(tree.get("spin")),
            "case embeddings": bool(tree.get("dim_case_embd")),
            "aparam as mask": bool(tree.get("use_aparam_as_mask")),
            "tot_ener_zero": bool(tree.get("tot_ener_zero")),
            "one fitting net for all types": bool(tree.get("mixed_types")),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.fitting_net``."""
        trained = all(tree.get("trainable", [True]))
        return {**chosen(tree, OPTIONS), "atom_ener": tree.get("atom_ener") or [], "trainable": trained}

    def fill(self, fitting: EnergyFitting, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the fitting network."""
        fill_networks("nets", fitting.networks, tree["nets"]["networks"])
        fill("bias_atom_e", fitting.bias_atom_e, tree[VARIABLES]["bias_atom_e"])
        for name in STATISTICS:
            if hasattr(fitting, name):  # only where there are such parameters
                fill(name, getattr(fitting, name), tree[VARIABLES][name])
