"""Write zbl and linear, .dp and .npz, with DeePMD-kit's python: make_tables.py FOLDER OUT; FOLDER holds make_golden.py.

``zbl`` is a network beside a table of pair energies, ``linear`` two networks and a table, added up with weights.
"""

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

OUT = sys.argv[2]


def table(step, rows, charges):
    """Write a table of screened repulsion that ends smoothly, and return its path."""
    r = 0.3 + step * np.arange(rows)
    screened = np.exp(-r / 0.8) / r * np.clip(1 - r / r[-1], 0, None) ** 3
    path = os.path.join(tempfile.mkdtemp(), "table.txt")
    np.savetxt(path, np.column_stack([r, *(q * screened for q in charges)]), fmt="%.12g")
    return path


def write(name, config):
    """Write a model with numbers in its buffers as after a fit, and what it says of the systems."""
    torch.manual_seed(0)
    model = get_model(copy.deepcopy(config)).to(torch.float64).eval()
    # parts of linear_ener have energies of the elements of their own, those of zbl have not
    unbiased = [b for key, b in model.named_buffers() if ".models." in key and key.endswith("out_bias")]
    make_golden.fill(model, torch.Generator().manual_seed(3))
    for bias in unbiased if name == "zbl" else ():
        bias.zero_()
    for key, mean in model.named_buffers():
        if key.endswith(".mean"):  # the same in all slots
            mean.copy_(mean[:, :1].clone().expand_as(mean))
    save_dp_model(f"{OUT}/{name}.dp", {"model": model.serialize(), "model_def_script": config, "backend": "PyTorch"})
    found = {}
    for label, (coord, types, box) in make_golden.systems(np.random.default_rng(7)).items():
        count = len(coord)
        kinds, cell = torch.tensor(np.repeat(types[None], count, 0)), None if box is None else torch.tensor(box)
        fparam = torch.arange(2.0 * count, dtype=torch.float64).reshape(-1, 2) * 0.1 if name == "linear" else None
        got = model(torch.tensor(coord), kinds, box=cell, fparam=fparam)
        shapes = {"energy": -1, "atom_energy": (count, -1), "force": coord.shape, "virial": (count, 9)}
        found |= {f"{label}_{key}": got[key].detach().numpy().reshape(shape) for key, shape in shapes.items()}
    np.savez(f"{OUT}/{name}.npz", **found)


EXCLUDED = {"pair_exclude_types": [[0, 2]], "atom_exclude_types": [2]}
FLOW = {**make_golden.FLOW, "e_rcut": 3.6, "e_rcut_smth": 2.4, "e_sel": 60, "nlayers": 2}
ATTEN = {**make_golden.ATTEN, "attn_layer": 1}
BLENDED = {
    "type_map": make_golden.TYPES,
    "descriptor": ATTEN,
    "fitting_net": make_golden.fitting(),
    "use_srtab": table(0.02, 136, (900, 110, 1200, 14, 150, 1700)),
    "sw_rmin": 0.6,
    "sw_rmax": 2.4,
    **EXCLUDED,
}
ADDED = {
    "type": "linear_ener",
    "type_map": make_golden.TYPES,
    "weights": [0.7, 0.4, 1.3],
    "models": [
        # features jump at its cutoff, which is not that of the list
        {
            "descriptor": {**ATTEN, "smooth_type_embedding": False, "rcut": 4.4},
            "fitting_net": make_golden.fitting(numb_fparam=2),
        },
        {
            "descriptor": {**make_golden.DPA3, "repflow": FLOW},
            "fitting_net": make_golden.fitting(activation_function="silut:10.0"),
        },
        {"type": "pairtab", "tab_file": table(0.05, 55, (9, 1.1, 12, 0.14, 1.5, 17)), "rcut": 5.0, "sel": [60, 50, 40]},
    ],
    **EXCLUDED,
}
write("zbl", BLENDED)
write("linear", ADDED)
