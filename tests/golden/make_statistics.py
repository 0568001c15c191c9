"""Write statistics.npz: DeePMD-kit's statistics of tiny systems, every frame sampled.

python make_statistics.py DP   (DP: the dp command of DeePMD-kit 3.2.0)
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import write_system

OUT = Path(__file__).with_name("statistics.npz")
SYSTEMS = {
    "a": {"frames": 6, "natoms": 12, "seed": 1, "sets": 2},
    "b": {"frames": 5, "natoms": 7, "seed": 3, "pbc": False},
    "c": {"frames": 6, "natoms": 10, "seed": 5, "fparam": 2, "aparam": 1},
}
# name: systems, and changes of model, descriptor and fitting_net
CASES = {
    "plain": ("ab", {}, {}, {}),
    "excluded": ("ab", {"pair_exclude_types": [[1, 1]]}, {"exclude_types": [[0, 1]], "env_protection": 0.1}, {}),
    "no_oxygen": ("ab", {"atom_exclude_types": [0]}, {}, {}),
    "preset": ("ab", {"preset_out_bias": {"energy": [-3.3, None]}}, {"set_davg_zero": True}, {}),
    "parameters": ("c", {}, {}, {"numb_fparam": 2, "numb_aparam": 1}),
}


def section(model, descriptor, fitting):
    """Return the section ``model`` of a case."""
    return {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a", "sel": [20, 18], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [2, 4],
                       "axis_neuron": 2, "type_one_side": True, "seed": 1, **descriptor},
        "fitting_net": {"neuron": [4], "seed": 1, **fitting},
        "data_stat_nbatch": 100,
        **model,
    }  # fmt: skip


def main(dp):
    values = {}
    with tempfile.TemporaryDirectory() as work:
        for name, about in SYSTEMS.items():
            write_system(Path(work) / name, **about)
        for name, (systems, *changes) in CASES.items():
            config = {
                "model": section(*changes),
                "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-6},
                "loss": {"type": "ener"},
                "training": {"training_data": {"systems": list(systems), "batch_size": 1}, "numb_steps": 1, "seed": 1,
                             "stat_file": f"stat_{name}"},
            }  # fmt: skip
            (Path(work) / "input.json").write_text(json.dumps(config))
            subprocess.run([dp, "--pt", "train", "input.json", "--skip-neighbor-stat"], cwd=work, check=True)
            for file in sorted((Path(work) / f"stat_{name}" / "O H").rglob("*")):
                if file.is_file() and file.name != "observed_type":
                    with file.open("rb") as stream:
                        values[f"{name}/{file.name}"] = np.load(stream)
    np.savez(OUT, **values)
    print(OUT, os.path.getsize(OUT), "bytes")


if __name__ == "__main__":
    main(sys.argv[1])
