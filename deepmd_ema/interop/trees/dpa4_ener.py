"""The tree of the fitting network dpa4_ener."""

from __future__ import annotations

from typing import Any, ClassVar

from deepmd_ema.interop.parts import Names, array, node
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.interop.trees.ener import EnerTree


class DPA4EnerTree(EnerTree):
    """Tree of dpa4_ener."""

    networks: ClassVar[str] = "sezm_fitting_network"
    has_second_names = False
    modules: ClassVar[Names] = {
        "pt": (),
        "pt_expt": ((r"\.linear\.", "."), (r"\.matrix$", ".w"), (r"\.bias$", ".b")),
    }

    def _networks(self, part: Any, section: Any, common: Tree) -> tuple[Tree, list[Tree]]:
        """Return entries that depend on the type of the fitting network, and the trees of its networks."""
        widths, film = section.widths(part.num_inputs), {"case_film_embd": section.case_film_embd}
        shape = {
            **node("GLUFittingNet", 1), "in_dim": part.num_inputs, "out_dim": 1, **common, "neuron": widths,
            "bias_out": False, "descriptor_dim": part.dim_in, "dim_case_embd": section.dim_case_embd, **film,
        }  # fmt: skip
        states = [{name: array(tensor) for name, tensor in net.state_dict().items()} for net in part.nets]
        return {"type": "sezm_ener", "neuron": widths, **film}, [{**shape, VARIABLES: state} for state in states]
