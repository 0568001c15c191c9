"""Write models dpa4 of DeePMD-kit with random weights, and its energies, forces and virials with them.

Run with DeePMD-kit's python: python make.py FOLDER
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
from deepmd.dpmodel.utils.serialization import save_dp_model
from deepmd.pt.model.model import get_model
from deepmd.pt.train.wrapper import ModelWrapper

SMALL = {
    "type": "dpa4", "sel": 256, "rcut": 4.0, "channels": 4, "n_radial": 4, "lmax": 2, "n_blocks": 2, "mixing_layers": 2,
    "ffn_neurons": 4, "precision": "float64", "random_gamma": False, "seed": 1,
}  # fmt: skip
EXAMPLE = {
    "edge_norm": False, "message_node_so3": True, "ffn_so3_grid": True, "grid_branch": [0, 0, 1], "so3_readout": "mlp",
}  # fmt: skip
BRIDGING = {"bridging_method": "zbl", "bridging_r_inner": 1.6, "bridging_r_outer": 2.6}
MODELS = {
    "defaults": ({}, {}, {}),
    "bridged": (EXAMPLE, {}, BRIDGING),
    "many": (
        {"so2_norm": True, "layer_scale": True, "mlp_bias": True, "sandwich_norm": [True] * 4, "n_focus": 2, "mmax": 2,
         "n_atten_head": 2, "atten_v_proj": True, "atten_o_proj": True, "extra_node_l": 1, "basis_type": "gaussian"},
        {"dim_case_embd": 2, "case_film_embd": True, "neuron": [6, 0]},
        {"atom_exclude_types": [2]},
    ),
}  # fmt: skip


def model_of(descriptor, fitting, more, seed):
    params = {
        "type": "dpa4",
        "type_map": ["O", "H", "Na"],
        "descriptor": {**SMALL, **descriptor},
        "fitting_net": {"type": "dpa4_ener", "neuron": [6], "precision": "float64", "seed": 1, **fitting},
        **more,
    }
    model = get_model(copy.deepcopy(params)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        model.atomic_model.out_bias.copy_(torch.tensor([-3.0, -1.0, 0.5], dtype=torch.float64).view(1, 3, 1))
    return params, model.eval()


def main(folder):
    torch.set_default_dtype(torch.float64)
    rng, numbers = np.random.default_rng(3), {}
    for seed, (name, options) in enumerate(MODELS.items()):
        params, model = model_of(*options, seed)
        box = np.array([[5.3, 0, 0], [0.4, 4.9, 0], [-0.3, 0.5, 5.6]])
        sites = np.array([(i, j, k) for i in range(2) for j in range(2) for k in range(2)]) / 2
        coord, types = (sites + 0.04 * rng.normal(size=sites.shape)) @ box, rng.integers(0, 3, len(sites))
        found = model(torch.tensor(coord[None]), torch.tensor(types[None]), box=torch.tensor(box).reshape(1, 9))
        expected = {
            "coord": coord.tolist(),
            "types": types.tolist(),
            "box": box.tolist(),
            "energy": found["energy"].item(),
            "force": found["force"][0].tolist(),
            "virial": found["virial"].flatten().tolist(),
        }
        state = ModelWrapper(model, model_params=params).state_dict()
        state["_extra_state"] = {"model_params": params, "train_infos": {"lr": 0.0, "step": 3}}
        torch.save({"model": state, "optimizer": None}, folder / f"{name}.pt")
        numbers[f"{name}.pt"] = expected
        if name == "bridged":
            tree = {
                "software": "deepmd-kit",
                "version": "3.2.0",
                "model": model.serialize(),
                "model_def_script": params,
            }
            save_dp_model(str(folder / f"{name}.dp"), tree)
            numbers[f"{name}.dp"] = expected
    (folder / "numbers.json").write_text(json.dumps(numbers))


main(Path(sys.argv[1]))
