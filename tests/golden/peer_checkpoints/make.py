"""Train tiny models with DeePMD-kit and keep their checkpoints, with what DeePMD-kit computes with them.

usage: python make.py DIR [NAME ...]    (DIR: a virtual environment with DeePMD-kit 3.2.0; with the python of dp-ema)

Without names all files are made again, else those of the names.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]

SE_E2_A = {"type": "se_e2_a", "sel": [20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 3,
           "seed": 1, "type_one_side": True}  # fmt: skip
SE_ATTEN = {"type": "se_atten", "sel": 40, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 3, "attn": 6,
            "attn_layer": 1, "tebd_dim": 4, "seed": 1}  # fmt: skip
# without type_one_side, which is declared as false there and taken for true
HYBRID = {"type": "hybrid", "list": [SE_E2_A, {"type": "se_e2_r", "sel": [20, 20], "rcut": 4.0, "rcut_smth": 1.0,
          "neuron": [4, 8], "seed": 2}]}  # fmt: skip
SE_E3 = {"type": "se_e3", "sel": [8, 8], "rcut": 3.0, "rcut_smth": 1.0, "neuron": [2, 4], "seed": 1}
LOSS = {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1}
ASK = """
import sys, numpy as np
from deepmd.infer import DeepPot
file, head, coord, out = sys.argv[1:]
data = np.load(coord)
potential = DeepPot(file, head=head or None) if head else DeepPot(file)
energy, force, virial = potential.eval(data["coord"].reshape(1, -1), data["box"].reshape(1, 9), data["types"])
np.savez(out, energy=energy, force=force, virial=virial)
"""


def fitting(seed):
    """Return a section ``fitting_net``."""
    return {"neuron": [6, 6], "seed": seed}


def training(**more):
    """Return the sections of a short run beside its models."""
    return {
        "learning_rate": {"type": "exp", "start_lr": 1e-2, "stop_lr": 1e-3, "decay_steps": 2},
        "training": {"numb_steps": 4, "disp_freq": 2, "save_freq": 4, "seed": 1, **more},
    }


def single(descriptor, **more):
    """Return an input of one model."""
    model = {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": fitting(1)}
    data = {"systems": ["../data"], "batch_size": 1}
    return {"model": model, "loss": LOSS, **training(training_data=data, **more)}


def several():
    """Return an input of two models that share a descriptor."""
    models = {
        name: {"type_map": "elements", "descriptor": "shared", "fitting_net": fitting(seed)}
        for name, seed in (("water", 1), ("ice", 2))
    }
    data = {name: {"training_data": {"systems": ["../data"], "batch_size": 1}} for name in models}
    return {
        "model": {"shared_dict": {"elements": ["O", "H"], "shared": SE_E2_A}, "model_dict": models},
        "loss_dict": dict.fromkeys(models, LOSS),
        **training(data_dict=data, model_prob=dict.fromkeys(models, 0.5)),
    }


# by name of the file that is kept: the input, the backend, the file of the run, and the models in it
RUNS = {
    "pt": (single(SE_E2_A, enable_ema=True, ema_decay=0.5), "pt", "model.ckpt-4.pt", [""]),
    "pt_ema": (single(SE_E2_A, enable_ema=True, ema_decay=0.5), "pt", "model_ema.ckpt-4.pt", [""]),
    "pt_expt": (single(SE_ATTEN), "pt-expt", "model.ckpt-4.pt", [""]),
    "pt_hybrid": (single(HYBRID), "pt", "model.ckpt-4.pt", [""]),
    "pt_se_e3": (single(SE_E3), "pt", "model.ckpt-4.pt", [""]),
    "pt_heads": (several(), "pt", "model.ckpt-4.pt", ["water", "ice"]),
}


def main(peer, *names):
    """Train, keep the files and what the peer computes."""
    from helpers import toy_frame, write_system

    found = dict(np.load(HERE / "predictions.npz")) if names else {}
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_system("data", frames=4, seed=1)
        coord, types, box = toy_frame(np.random.default_rng(0))
        np.savez("frame.npz", coord=coord, types=types, box=box)
        for name in names or RUNS:
            config, backend, file, heads = RUNS[name]
            folder = Path(name)
            folder.mkdir()
            (folder / "input.json").write_text(json.dumps(config))
            dp = [Path(peer) / "bin" / "dp", f"--{backend}", "train", "input.json", "--skip-neighbor-stat"]
            subprocess.run(dp, cwd=folder, check=True)
            shutil.copy(folder / file, HERE / f"{name}.pt")
            for head in heads:
                target = folder / file if backend == "pt" else folder / "model.pte"
                if backend != "pt":
                    freeze = [Path(peer) / "bin" / "dp", f"--{backend}", "freeze", "-c", folder / file, "-o", target]
                    subprocess.run(freeze, check=True)
                out = f"{name}_{head}.npz"
                ask = [Path(peer) / "bin" / "python", "-c", ASK, target, head, "frame.npz", out]
                subprocess.run(ask, check=True)
                with np.load(out) as answers:
                    found |= {f"{name}_{head}_{key}".replace("__", "_"): answers[key] for key in answers}
        np.savez(HERE / "predictions.npz", **{**found, "coord": coord, "types": types, "box": box})


if __name__ == "__main__":
    main(*sys.argv[1:])
