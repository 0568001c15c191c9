"""Write energies, forces, virials and gradients of DeePMD-kit's DPA4C, and its calibration of features.

Run with DeePMD-kit's python: python make_dpa4c.py FOLDER, in which it writes dpa4c.json, and the models
dpa4c.dp and dpa4c.pt.
The weights are those of `weights` in this file, which tests import.
"""

import copy
import json
import sys
import zlib

import numpy as np

SMALL = {"rcut": 4.0, "channels": 8, "n_radial": 6}
CASES = {
    "small": SMALL,
    "modes": {**SMALL, "radial_modes": 3},
    "gaussian": {**SMALL, "basis_type": "gaussian", "n_radial": 5, "radial_modes": 1},
    "degree_3": {**SMALL, "lmax": 3},
    "degree_4": {**SMALL, "lmax": 4, "radial_modes": 2},
    "wide": {"rcut": 3.6, "channels": 32, "n_radial": 16},
    "wider": {"rcut": 3.1, "channels": 64, "n_radial": 4, "lmax": 3},
    "excluded": {**SMALL, "channels": 16, "lmax": 3, "exclude_types": [[0, 1], [2, 2]]},
    "far": {"rcut": 5.5, "channels": 16, "n_radial": 8, "lmax": 2, "radial_modes": 4},
}
FITTINGS = {
    "small": {"neuron": [6]},
    "degree_4": {"type": "ener", "neuron": [9, 9]},
    "modes": {"neuron": [9, 0]},
    "wide": {"activation_function": "tanh", "neuron": [24]},
}
FILE, CHECKPOINT = "degree_4", "small"  # of these, the models that are written
TYPE_MAP = ["O", "H", "C"]


def weights(name, shape):
    """Return the parameter of a name, float64, or None for one that is kept."""
    if name.endswith("adam_freqs"):
        return None
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    return drawn * 0.7 / np.sqrt(shape[-2]) if len(shape) > 1 else 0.5 * drawn


def direction(name, shape):
    """Return numbers that gradients are projected on."""
    return np.random.default_rng(zlib.crc32(f"{name} direction".encode())).normal(size=shape)


def frames(number=2):
    """Return positions (number, 14, 3), types (14,) and cells (number, 3, 3), each larger than the one before."""
    rng = np.random.default_rng(7)
    box = np.array([[7.3, 0, 0], [0.4, 6.9, 0], [-0.3, 0.5, 7.6]])
    grid = np.array([(i, j, k) for i in range(3) for j in range(3) for k in range(2)][:14]) / [3, 3, 2]
    boxes = np.array([(1 + 0.12 * k) * box for k in range(number)])
    coord = [(grid + rng.normal(size=grid.shape) * 0.03) @ box for box in boxes]
    return np.array(coord), rng.integers(0, 3, 14), boxes


def main(folder):
    """Write the numbers of all cases."""
    import torch
    from deepmd.dpmodel.utils.serialization import save_dp_model
    from deepmd.pt_expt.model import get_model

    torch.set_default_dtype(torch.float64)
    coord, kinds, box = frames()
    found = {}
    for case, options in CASES.items():
        section = {"type": "dpa4c", "precision": "float64", **options}
        fitting = {"type": "dpa4_ener", "precision": "float64", "neuron": [0], **FITTINGS.get(case, {})}
        params = {"type_map": TYPE_MAP, "descriptor": section, "fitting_net": fitting}
        model = get_model(copy.deepcopy(params))
        named = {name.removeprefix("atomic_model."): p for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in named.items():
                value = weights(name, tuple(parameter.shape))
                if value is not None:
                    parameter.copy_(torch.tensor(value))
            model.atomic_model.descriptor.type_embedding.adam_type_embedding[-1] = 0
        descriptor = model.atomic_model.descriptor
        types = np.array([kinds] * len(coord))
        descriptor.compute_input_stats([{"coord": coord, "atype": types, "box": box.reshape(len(coord), 9)}])
        model.train()
        at = torch.tensor(coord[:1]).requires_grad_(True)
        out = model(at, torch.tensor(types[:1]), box=torch.tensor(box[:1].reshape(1, 9)))
        energy, force, virial = out["energy"].sum(), out["force"][0], out["virial"].reshape(9)
        loss = 0.7 * energy
        loss = loss + (force * torch.tensor(direction("force", force.shape))).sum()
        loss = loss + (virial * torch.tensor(direction("virial", virial.shape))).sum()
        gradients = torch.autograd.grad(loss, list(named.values()))
        found[case] = {
            "energy": float(energy.detach()),
            "force": force.tolist(),
            "virial": virial.tolist(),
            "mean": descriptor.mean[-2 - descriptor.channels :][:2].tolist(),
            "stddev": descriptor.stddev.tolist(),
            "shapes": {name: list(p.shape) for name, p in named.items()},
            "gradients": {
                name: [float((g.numpy() * direction(name, g.shape)).sum()), float(g.abs().sum())]
                for name, g in zip(named, gradients)
            },
        }
        if case == CHECKPOINT:
            state = {f"model.Default.{name}": tensor for name, tensor in model.state_dict().items()}
            state["_extra_state"] = {"model_params": params, "train_infos": {"lr": 0.0, "step": 3}}
            torch.save({"model": state, "optimizer": None}, f"{folder}/dpa4c.pt")
        if case == FILE:
            save_dp_model(f"{folder}/dpa4c.dp", {"model": model.serialize(), "model_def_script": params})
    with open(f"{folder}/dpa4c.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
