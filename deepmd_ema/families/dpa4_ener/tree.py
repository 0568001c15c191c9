"""The tree of the fitting network dpa4_ener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from deepmd_ema.families.ener.tree import EnerTree
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import Names, array

if TYPE_CHECKING:
    from deepmd_ema.families.dpa4_ener.module import DPA4Fitting
    from deepmd_ema.families.dpa4_ener.section import DPA4EnerConfig


class DPA4EnerTree(EnerTree):
    """Tree of dpa4_ener."""

    has_second_names = False
    modules: ClassVar[Names] = {
        "pt": (),
        "pt_expt": ((r"\.linear\.", "."), (r"\.matrix$", ".w"), (r"\.bias$", ".b")),
    }

    def _entries(self, part: Any, section: Any, common: Tree, ntypes: int) -> Tree:
        """Return the entries of the tree of a fitting network that are not those of ``ener``."""
        fitting, options = cast("DPA4Fitting", part), cast("DPA4EnerConfig", section)
        widths = options.widths(fitting.num_inputs)
        shape = {
            "in_dim": fitting.num_inputs,
            "out_dim": 1,
            **common,
            "neuron": widths,
            "bias_out": False,
            "descriptor_dim": fitting.dim_in,
            "dim_case_embd": options.dim_case_embd,
            "case_film_embd": options.case_film_embd,
        }
        nets: Sequence[Any] = list(fitting.nets)
        networks = [
            {
                "@class": "GLUFittingNet",
                "@version": 1,
                **shape,
                VARIABLES: {name: array(tensor) for name, tensor in net.state_dict().items()},
            }
            for net in nets
        ]
        return {
            "type": "sezm_ener",
            "neuron": widths,
            "case_film_embd": options.case_film_embd,
            "trainable": [_is_trained(options)] * (len(widths) + 1),
            "nets": {
                "@class": "NetworkCollection",
                "@version": 1,
                "ndim": 0 if fitting.mixed_types else 1,
                "ntypes": ntypes,
                "network_type": "sezm_fitting_network",
                "networks": networks,
            },
        }


def _is_trained(section: DPA4EnerConfig) -> bool:
    return section.trainable if isinstance(section.trainable, bool) else all(section.trainable)
