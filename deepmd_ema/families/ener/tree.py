"""The tree of the fitting network ener."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.ener.module import EnergyFitting
from deepmd_ema.families.ener.section import EnerFittingConfig
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import BACKENDS, Names, PartTree, array, chosen, network_trees, precision_of

STATISTICS = ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std")


class EnerTree(PartTree):
    """Tree of ener."""

    modules: ClassVar[Names] = dict.fromkeys(BACKENDS, ())

    def write(self, part: EnergyFitting, config: StandardConfig) -> Tree:
        """Return the tree of a fitting network."""
        section = cast("EnerFittingConfig", config.fitting_net)
        ntypes = len(config.type_map)
        options = plain(section) | {"precision": precision_of(part.dtype)}
        common = chosen(options, ("neuron", "activation_function", "resnet_dt", "precision"))
        return {
            "@class": "Fitting",
            "@version": 4,
            "var_name": "energy",
            "ntypes": ntypes,
            "dim_descrpt": part.dim_in,
            **common,
            **chosen(options, ("numb_fparam", "numb_aparam", "dim_case_embd", "default_fparam", "rcond")),
            "mixed_types": part.mixed_types,
            "exclude_types": list(config.atom_exclude_types),
            VARIABLES: {
                "bias_atom_e": array(part.bias_atom_e),
                "case_embd": array(part.case_embd),
                **{name: array(getattr(part, name, None)) for name in STATISTICS},
            },
            "type_map": list(config.type_map),
            "tot_ener_zero": False,
            "layer_name": options["layer_name"],
            "use_aparam_as_mask": False,
            "spin": None,
            "dim_out": 1,
            "atom_ener": options["atom_ener"],
            **self._entries(part, section, common, ntypes),
        }

    def _entries(self, part: Any, section: Any, common: Tree, ntypes: int) -> Tree:
        """Return the type of the tree, its networks, and what else depends on these.

        Args:
            part: the fitting network.
            section: its section.
            common: entries of each network.
            ntypes: number of elements.
        """
        network = {
            "@class": "FittingNetwork",
            "@version": 1,
            "in_dim": part.nets[0].layers[0].weight.shape[0],
            "out_dim": 1,
            **common,
            "bias_out": True,
        }
        trained = section.trainable if isinstance(section.trainable, bool) else all(section.trainable)
        ndim = 0 if part.mixed_types else 1
        return {
            "type": "ener",
            "trainable": [trained] * (len(section.neuron) + 1),
            "nets": network_trees("fitting_network", part.nets, network, ndim, ntypes, hidden_only=False),
        }

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""
        return {
            "spin": bool(tree.get("spin")),
            "aparam as mask": bool(tree.get("use_aparam_as_mask")),
            "tot_ener_zero": bool(tree.get("tot_ener_zero")),
        }

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.fitting_net``."""
        trained = all(tree.get("trainable", [True]))  # one for each layer; here all of them or none are trained
        return {**super().section(tree), "atom_ener": tree.get("atom_ener") or [], "trainable": trained}

    def fill(self, part: EnergyFitting, config: StandardConfig, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into the fitting network."""
        if bool(tree.get("mixed_types")) != part.mixed_types:
            raise ValueError(
                f"mixed_types of the fitting is {tree.get('mixed_types')}, which its descriptor is not made for"
            )
        super().fill(part, config, tree)
