"""Write linear.dp and linear.npz with DeePMD-kit's python: make_linear.py FOLDER OUT; FOLDER holds make_golden.py."""

import copy
import os
import sys
import tempfile

import numpy as np
import torch
from deepmd.dpmodel.utils.serialization import save_dp_model
from deepmd.pt.model.model import get_model

sys.path.insert(0, sys.argv[1])
import make_golden

out = sys.argv[2]
r = 0.3 + 0.05 * np.arange(55)
screened = np.exp(-r / 0.8) / r * np.clip(1 - r / r[-1], 0, None) ** 3
path = os.path.join(tempfile.mkdtemp(), "table.txt")
np.savetxt(path, np.column_stack([r, *(q * screened for q in (9, 1.1, 12, 0.14, 1.5, 17))]), fmt="%.12g")
flow = {**make_golden.FLOW, "e_rcut": 3.6, "e_rcut_smth": 2.4, "e_sel": 60, "nlayers": 2}
config = {
    "type": "linear_ener",
    "type_map": make_golden.TYPES,
    "weights": [0.7, 0.4, 1.3],
    "models": [
        # features jump at its cutoff, which is not that of the list
        {
            "descriptor": {**make_golden.ATTEN, "attn_layer": 1, "smooth_type_embedding": False, "rcut": 4.4},
            "fitting_net": make_golden.fitting(numb_fparam=2),
        },
        {
            "descriptor": {**make_golden.DPA3, "repflow": flow},
            "fitting_net": make_golden.fitting(activation_function="silut:10.0"),
        },
        {"type": "pairtab", "tab_file": path, "rcut": 5.0, "sel": [60, 50, 40]},
    ],
    "pair_exclude_types": [[0, 2]],
    "atom_exclude_types": [2],
}
torch.manual_seed(0)
model = get_model(copy.deepcopy(config)).to(torch.float64).eval()
make_golden.fill(model, torch.Generator().manual_seed(3))  # parts with energies of the elements of their own
for name, mean in model.named_buffers():
    if name.endswith(".mean"):  # as after a fit: the same in all slots
        mean.copy_(mean[:, :1].clone().expand_as(mean))
save_dp_model(f"{out}/linear.dp", {"model": model.serialize(), "model_def_script": config, "backend": "PyTorch"})
found = {}
for label, (coord, types, box) in make_golden.systems(np.random.default_rng(7)).items():
    kinds = torch.tensor(np.repeat(types[None], len(coord), 0))
    fparam = torch.arange(2.0 * len(coord), dtype=torch.float64).reshape(-1, 2) * 0.1
    got = model(torch.tensor(coord), kinds, box=None if box is None else torch.tensor(box), fparam=fparam)
    for name in ("energy", "atom_energy", "force", "virial"):
        shape = {"energy": -1, "atom_energy": (len(coord), -1), "force": coord.shape, "virial": (len(coord), 9)}[name]
        found[f"{label}_{name}"] = got[name].detach().numpy().reshape(shape)
np.savez(f"{out}/linear.npz", **found)
