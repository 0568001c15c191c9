"""Write zbl.dp and zbl.npz with DeePMD-kit's python: python make_zbl.py FOLDER OUT; FOLDER holds make_golden.py."""

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
r = 0.3 + 0.02 * np.arange(136)
screened = np.exp(-r / 0.8) / r * np.clip(1 - r / r[-1], 0, None) ** 3
path = os.path.join(tempfile.mkdtemp(), "table.txt")
np.savetxt(path, np.column_stack([r, *(q * screened for q in (900, 110, 1200, 14, 150, 1700))]), fmt="%.12g")
config = {
    "type_map": make_golden.TYPES,
    "descriptor": {**make_golden.ATTEN, "attn_layer": 1},
    "fitting_net": make_golden.fitting(),
    "use_srtab": path,
    "sw_rmin": 0.6,
    "sw_rmax": 2.4,
    "pair_exclude_types": [[0, 2]],
    "atom_exclude_types": [2],
}
torch.manual_seed(0)
model = get_model(copy.deepcopy(config)).to(torch.float64).eval()
# as after a fit: the parts have no bias of their own, and the mean is the same in all slots
unbiased = [b for name, b in model.named_buffers() if ".models." in name and name.endswith("out_bias")]
make_golden.fill(model, torch.Generator().manual_seed(3))
for bias in unbiased:
    bias.zero_()
mean = model.atomic_model.models[0].descriptor.se_atten.mean
mean.copy_(mean[:, :1].clone().expand_as(mean))
save_dp_model(f"{out}/zbl.dp", {"model": model.serialize(), "model_def_script": config, "backend": "PyTorch"})
found = {}
for label, (coord, types, box) in make_golden.systems(np.random.default_rng(7)).items():
    kinds = torch.tensor(np.repeat(types[None], len(coord), 0))
    got = model(torch.tensor(coord), kinds, box=None if box is None else torch.tensor(box))
    for name in ("energy", "atom_energy", "force", "virial"):
        shape = {"energy": -1, "atom_energy": (len(coord), -1), "force": coord.shape, "virial": (len(coord), 9)}[name]
        found[f"{label}_{name}"] = got[name].detach().numpy().reshape(shape)
np.savez(f"{out}/zbl.npz", **found)
