"""The trees of the fitting networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.interop import parts
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.families.ener.module import EnergyFitting

STATISTICS = ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std")


class EnerTree(parts.PartTree):
    """Tree of ener.

    Attributes:
        networks: ``network_type`` of its networks.
    """

    networks: ClassVar[str] = "fitting_network"
    modules: ClassVar[parts.Names] = dict.fromkeys(parts.BACKENDS, ())

    def write(self, part: EnergyFitting, config: StandardConfig) -> Tree:
        """Return the tree of a fitting network."""
        section: Any = config.fitting_net
        ntypes = len(config.type_map)
        options = plain(section) | {"precision": parts.precision_of(part.dtype)}
        common = parts.chosen(
            options, ("neuron", "activation_function", "resnet_dt", "precision")
        )
        trained = (
            section.trainable
            if isinstance(section.trainable, bool)
            else all(section.trainable)
        )
        more, networks = self._networks(part, section, common)
        return {
            **parts.node("Fitting", 4),
            "var_name": "energy",
            "ntypes": ntypes,
            "dim_descrpt": part.dim_in,
            **common,
            **parts.chosen(
                options,
                ("numb_fparam", "numb_aparam", "dim_case_embd", "default_fparam"),
            ),
            "rcond": options.get("rcond"),
            "mixed_types": part.mixed_types,
            "exclude_types": sorted(config.excluded_types),
            VARIABLES: {
                "bias_atom_e": parts.array(part.bias_atom_e),
                "case_embd": parts.array(part.case_embd),
                **{name: parts.array(getattr(part, name, None)) for name in STATISTICS},
            },
            "type_map": list(config.type_map),
            "tot_ener_zero": False,
            "layer_name": options.get("layer_name"),
            "use_aparam_as_mask": False,
            "spin": None,
            "dim_out": 1,
            "atom_ener": options.get("atom_ener"),
            "trainable": [trained] * (len(section.neuron) + 1),
            "nets": parts.collection_tree(
                self.networks, networks, 0 if part.mixed_types else 1, ntypes
            ),
            **more,
        }

    def _networks(
        self, part: Any, section: Any, common: Tree
    ) -> tuple[Tree, list[Tree]]:
        """Return entries of this type of fitting network, and the trees of its networks.

        Args:
            part: the fitting network.
            section: its section.
            common: entries of each network.
        """
        first = {
            "in_dim": part.num_inputs,
            "out_dim": part.num_out,
            **common,
            "bias_out": True,
        }
        networks = [
            {
                **parts.node("FittingNetwork", 1),
                **first,
                "layers": [
                    parts.layer_tree(layer, resnet=layer is not net.layers[-1])
                    for layer in net.layers
                ],
            }
            for net in part.nets
        ]
        return {"type": "ener"}, networks

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.fitting_net``."""
        # one entry for each layer; here all of them or none are trained
        trained = all(tree.get("trainable", [True]))
        return {
            **super().section(tree),
            "atom_ener": tree.get("atom_ener") or [],
            "trainable": trained,
        }


class DPA4EnerTree(EnerTree):
    """Tree of dpa4_ener."""

    networks: ClassVar[str] = "sezm_fitting_network"
    has_second_names = False
    modules: ClassVar[parts.Names] = {
        "pt": (),
        "pt_expt": ((r"\.linear\.", "."), (r"\.matrix$", ".w"), (r"\.bias$", ".b")),
    }

    def _networks(
        self, part: Any, section: Any, common: Tree
    ) -> tuple[Tree, list[Tree]]:
        """Return entries of this type of fitting network, and the trees of its networks."""
        widths = section.widths(part.num_inputs)
        film = {"case_film_embd": section.case_film_embd}
        shape = {
            **parts.node("GLUFittingNet", 1),
            "in_dim": part.num_inputs,
            "out_dim": 1,
            **common,
            "neuron": widths,
            "bias_out": False,
            "descriptor_dim": part.dim_in,
            "dim_case_embd": section.dim_case_embd,
            **film,
        }
        states = [
            {name: parts.array(tensor) for name, tensor in net.state_dict().items()}
            for net in part.nets
        ]
        return {"type": "sezm_ener", "neuron": widths, **film}, [
            {**shape, VARIABLES: state} for state in states
        ]


class QuantityTree(EnerTree):
    """Tree of dipole, polar, property and dos."""

    def write(self, part: Any, config: StandardConfig) -> Tree:
        """Return the tree of a fitting network."""
        section, tree = config.fitting_net, super().write(part, config)
        tree["neuron"] = [layer.weight.shape[1] for layer in part.nets[0].layers[:-1]]
        kind = section.type
        if kind in ("dos", "property"):
            more = {"type": kind, "dim_out": part.width}
            if kind == "property":
                more |= {
                    name: getattr(section, name)
                    for name in ("task_dim", "intensive", "distinguish_types")
                }
                more |= {"@version": 6, "var_name": section.property_name}
            return {**tree, "var_name": "dos", **more}
        more = {
            "type": kind,
            "var_name": kind,
            "embedding_width": part.dim_equivariants,
        }
        if kind == "dipole":
            more |= {"r_differentiable": True, "c_differentiable": True}
        else:
            more |= {
                "@version": 5,
                "fit_diag": section.fit_diag,
                "shift_diag": section.shift_diag,
            }
            scales = {
                "scale": parts.array(part.scale),
                "constant_matrix": np.zeros(len(config.type_map)),
            }
            more[VARIABLES] = {**tree[VARIABLES], **scales}
        return {
            name: value
            for name, value in tree.items()
            if name not in ("dim_out", "atom_ener")
        } | more

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.fitting_net``."""
        more = {"property_name": tree["var_name"], "numb_dos": tree.get("dim_out")}
        if "scale" in tree[VARIABLES]:
            more["scale"] = tree[VARIABLES]["scale"].ravel().tolist()
        options = {**super().section(tree), **more}
        # older ones have no such option
        options |= {"distinguish_types": tree.get("distinguish_types", False)}
        return parts.chosen(options, self._options)

    def name_of(self, place: str, section: Any, backend: str) -> str:
        """Return the name of the array in checkpoints, which have options in the section only."""
        return (
            ""
            if place in ("scale", "constant_matrix")
            else super().name_of(place, section, backend)
        )
