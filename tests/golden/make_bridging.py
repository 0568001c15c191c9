"""Write numbers of zone bridging from DeePMD-kit: distances as a network sees them, weights, gates, pair energies.

Run with DeePMD-kit's python: python make_bridging.py bridging.json
"""

import json
import sys

import torch
from deepmd.pt.model.descriptor.sezm_nn.edge_cache import compute_edge_src_gate
from deepmd.pt.model.descriptor.sezm_nn.radial import BridgingSwitch, InnerClamp
from deepmd.pt.model.model.sezm_model import InnerPotential

INNER, OUTER = 0.5, 0.8
TYPE_MAP = ["O", "H", "Na", "Au"]


def main(path):
    torch.set_default_dtype(torch.float64)
    clamp, switch = InnerClamp(INNER, OUTER), BridgingSwitch(INNER, OUTER)
    distance = torch.linspace(0.05, 1.1, 43)
    leaf = distance.clone().requires_grad_()
    slope = torch.autograd.grad(clamp(leaf).sum(), leaf)[0]
    # edges (source, length): atom 0 has a frozen neighbor, atom 1 two in the window, atom 2 none
    source = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    length = clamp(torch.tensor([0.4, 0.7, 1.5, 0.6, 0.75, 2.0, 0.9, 3.0]))
    gate = compute_edge_src_gate(edge_len=length[:, None], src=source, n_nodes=3, bridging_switch=switch)
    potential = InnerPotential(TYPE_MAP, "ZBL")
    energies = {}
    for i, one in enumerate(TYPE_MAP):
        for j, other in enumerate(TYPE_MAP):
            far = torch.tensor([[0.1, 0, 0], [0.4, 0.3, 0], [0, 1.2, 0], [0, 0, 6.0]])
            vector = far.clone().requires_grad_()
            edges, kinds = torch.tensor([[1] * 4, [0] * 4]), torch.tensor([i, j])
            parts = [
                potential(vector[k : k + 1], edges[:, k : k + 1], kinds, torch.ones(1, dtype=torch.bool), 2).sum()
                for k in range(4)
            ]
            grad = torch.autograd.grad(sum(parts), vector)[0]
            along = (grad * far).sum(1) / far.norm(dim=1)
            energies[f"{one}-{other}"] = {
                "distance": far.norm(dim=1).tolist(),
                "half energy": [part.item() for part in parts],
                "half slope": along.tolist(),
            }
    with open(path, "w") as file:
        json.dump(
            {
                "inner": INNER,
                "outer": OUTER,
                "distance": distance.tolist(),
                "clamped": clamp(distance).tolist(),
                "slope": slope.tolist(),
                "switch": switch(distance).tolist(),
                "gate": {"source": source.tolist(), "length": length.tolist(), "value": gate[:, 0].tolist()},
                "pairs": energies,
            },
            file,
            indent=1,
        )


main(sys.argv[1])
