"""Write dpa4.json: energies, forces, virials and gradients of DPA-4 models of DeePMD-kit 3.2.0 with drawn options.

Run in its environment, which also needs vesin-torch: ``python make_dpa4.py``. Parameters follow from their names
(``drawn``), so that the file has none of them.
"""

import copy
import json
import zlib
from pathlib import Path

import numpy as np

EXAMPLE = {
    "rcut": 4.0, "channels": 8, "n_radial": 6, "edge_norm": False, "lmax": 2, "mmax": 1, "n_blocks": 2,
    "mixing_layers": 3, "message_node_so3": True, "ffn_so3_grid": True, "grid_branch": [0, 0, 1],
    "so3_readout": "mlp", "ffn_neurons": 6,
}  # fmt: skip
# name -> options of the descriptor beside those above, of the fitting network and of the model, version of the file
CASES = {
    "example": ({}, {}, {}, None),
    "version_1.0": ({}, {}, {}, 1.0),
    "defaults": (
        {"edge_norm": True, "lmax": 3, "n_blocks": 3, "mixing_layers": 4, "message_node_so3": False, "channels": 6,
         "ffn_so3_grid": False, "grid_branch": 0, "so3_readout": "none", "n_radial": 5, "ffn_neurons": 5}, {}, {}, None,
    ),
    "no_grids": (
        {"lmax": 1, "n_blocks": 1, "mixing_layers": 2, "radial_so2_mode": "none", "message_node_so3": False,
         "ffn_so3_grid": False, "grid_branch": 0, "so3_readout": "none", "s2_activation": [False, False]}, {}, {}, None,
    ),
    "streams": (
        {"n_focus": 2, "n_atten_head": 2, "atten_v_proj": True, "atten_o_proj": True, "mlp_bias": True,
         "edge_norm": True, "so2_norm": True, "layer_scale": True}, {}, {}, None,
    ),
    "one_attention_of_streams": (
        {"n_focus": 2, "focus_dim": 6, "n_atten_head": 3, "atten_f_mix": True, "radial_so2_rank": 2,
         "sandwich_norm": [True, False, True, True]}, {}, {}, None,
    ),
    "no_attention": (
        {"n_atten_head": 0, "radial_so2_mode": "degree", "basis_type": "gaussian", "exclude_types": [[0, 1]],
         "grid_mlp": [False, True, True], "grid_branch": 0, "node_wise_s2": True}, {}, {}, None,
    ),
    "directions": (
        {"lmax": 3, "mmax": 2, "radial_so2_rank": 0, "s2_activation": [True, True], "ffn_so3_grid": False,
         "message_node_so3": False, "message_node_s2": True, "so3_readout": "glu", "glu_activation": False,
         "mlp_bias": True, "readout_layers": 2}, {}, {}, None,
    ),
    "both_atoms": (
        {"mmax": 2, "kmax": 2, "node_wise_so3": True, "grid_branch": [2, 2, 2], "l_schedule": [2, 1],
         "extra_node_l": 1, "radial_mlp": [7, 0], "lebedev_quadrature": False, "s2_activation": [True, False]},
        {}, {}, None,
    ),
    "no_frames": (
        {"mixing_layers": 0, "radial_so2_mode": "none", "n_focus": 2, "use_env_seed": False, "grid_branch": 0,
         "activation_function": "tanh"}, {}, {}, None,
    ),
    "degree_6": ({"lmax": 6, "n_blocks": 1, "channels": 4}, {}, {}, None),
    "gates": (
        {"ffn_so3_grid": False, "s2_activation": [False, False], "glu_activation": False,
         "activation_function": "gelu", "so3_readout": "none", "n_atten_head": 2, "mmax": 0, "ffn_blocks": 2},
        {}, {}, None,
    ),
    "bridging": ({}, {}, {"bridging_method": "zbl", "bridging_r_inner": 2.0, "bridging_r_outer": 2.9}, None),
    "cases": ({}, {"dim_case_embd": 2, "case_film_embd": True, "neuron": [9, 0]}, {}, None),
}  # fmt: skip


def drawn(name, shape):
    """Return the numbers of a parameter, which follow from its name in DeePMD-kit; None leaves it as it is."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "adam_freqs" in name:
        return None
    values = rng.normal(size=shape)
    if "adam_scale" in name:
        return 1 + 0.3 * values
    if "strength_log" in name:
        return -0.5 + 0.2 * values
    return values * (0.7 / np.sqrt(shape[-2]) if len(shape) > 1 else 0.5)


def projections(named_gradients):
    """Return one number for each parameter in the order of names, a product with random numbers of its name."""
    found = []
    for name, gradient in sorted(named_gradients.items()):
        rng = np.random.default_rng(zlib.crc32(f"{name} gradient".encode()))
        found.append(float((np.asarray(gradient) * rng.normal(size=np.shape(gradient))).sum()))
    return found


def weights(num_atoms):
    """Return the numbers with which energy, forces (N, 3) and virial (9,) are added up to a loss."""
    rng = np.random.default_rng(3)
    return 0.7, rng.normal(size=(num_atoms, 3)), rng.normal(size=9)


def atoms():
    """Return coordinates, types and cell of 14 atoms of three elements."""
    rng = np.random.default_rng(7)
    box = np.array([[7.3, 0, 0], [0.4, 6.9, 0], [-0.3, 0.5, 7.6]])
    sites = np.array([(i, j, k) for i in range(3) for j in range(3) for k in range(2)][:14]) / np.array([3, 3, 2])
    coord = (sites + rng.normal(size=sites.shape) * 0.03) @ box
    return coord, rng.integers(0, 3, len(sites)), box


def options_of(case):
    """Return the options of the descriptor of a case."""
    return {**EXAMPLE, **CASES[case][0]}


def _record(case):
    import torch
    from deepmd.pt.model.model import get_model

    _, fitting, more, version = CASES[case]
    common = {"precision": "float64", "seed": 1}
    section = {
        "type": "dpa4",
        "type_map": ["O", "H", "C"],
        "descriptor": {"type": "dpa4", "sel": 256, "use_amp": False, **common, **options_of(case)},
        "fitting_net": {"type": "dpa4_ener", "neuron": [0], **common, **fitting},
        **more,
    }
    model = get_model(copy.deepcopy(section)).double().train()
    descriptor = model.atomic_model.descriptor
    descriptor.random_gamma = False
    if version is not None:
        descriptor.version_tensor.fill_(version)
        descriptor.version = version
    named = {name.removeprefix("atomic_model."): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            values = drawn(name, tuple(parameter.shape))
            if values is not None:
                parameter.copy_(torch.tensor(values))
    coord, types, box = atoms()
    given = torch.tensor(coord[None]).requires_grad_(True)
    found = model(given, torch.tensor(types[None]), box=torch.tensor(box.reshape(1, 9)))
    energy, force, virial = found["energy"].sum(), found["force"][0], found["virial"].reshape(9)
    of_energy, of_force, of_virial = weights(len(coord))
    loss = of_energy * energy + (force * torch.tensor(of_force)).sum() + (virial * torch.tensor(of_virial)).sum()
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    arrays = {
        name: np.zeros(p.shape) if g is None else g.numpy()
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }
    return {
        "energy": float(energy.detach()),
        "force": force.detach().tolist(),
        "virial": virial.detach().tolist(),
        "gradients": projections(arrays),
    }


if __name__ == "__main__":
    import torch

    torch.set_default_dtype(torch.float64)
    Path(__file__).with_name("dpa4.json").write_text(json.dumps({case: _record(case) for case in CASES}) + "\n")
