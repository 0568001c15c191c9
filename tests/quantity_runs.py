"""Inputs and labelled data of quantities beside the energy."""

import numpy as np
from helpers import tiny_input, write_system
from two_tasks import joined

STEPS = 12
COMMON = {
    "training__enable_ema": True,
    "training__ema_decay": 0.8,
    "training__save_freq": 4,
    "training__max_ckpt_keep": 0,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 4,
    "validating__full_val_start": 0,
    "validating__max_best_ckpt": 9,
    "model__fitting_net__neuron": [7, 7],
}
TENSOR = {"loss": {"type": "tensor", "pref": 1.0, "pref_atomic": 0.5}}
GAP = {"type": "property", "property_name": "gap", "task_dim": 2, "intensive": True}
# the options of a run, the metrics of val.log, first the one by which weights are ranked, and
# columns of lcurve.out
RUNS = {
    "dipole": (
        {"model__fitting_net__type": "dipole", **TENSOR},
        "DW",
        {"rmse_global_dipole", "rmse_local_dipole"},
    ),
    "polar": (
        {"model__fitting_net__type": "polar", **TENSOR},
        "AB",
        {"rmse_global_polar", "rmse_local_polar"},
    ),
    "property": (
        {
            "model__fitting_net": GAP,
            "loss": {"type": "property", "metric": ["mae", "rmse"]},
        },
        "P",
        {"mae", "rmse"},
    ),
    "dos": (
        {
            "model__fitting_net": {"type": "dos", "numb_dos": 4},
            "loss": {"type": "dos", "start_pref_cdf": 1},
        },
        "NM",
        {"rmse_global_cdf", "rmse_local_dos"},
    ),
}
OF_TASK = {"energy": {}, "dipole": RUNS["dipole"][0]}


def write_labelled(path, seed):
    """Write frames with every label, made of the forces: vectors that are larger for hydrogen, and
    products of them.
    """
    frames, natoms = 6, 8
    folder = write_system(path, frames=frames, natoms=natoms, seed=seed) / "set.000"
    atomic = (
        0.3
        * np.load(folder / "force.npy").reshape(frames, natoms, 3)
        * (1 + np.arange(natoms)[:, None] % 2)
    )
    tensor = np.einsum("fna,fnb->fnab", atomic, atomic).reshape(frames, natoms, 9)
    wide = np.concatenate([atomic**2, atomic[..., :1]], 2)
    for name, values in {
        "dipole": atomic,
        "polarizability": tensor,
        "dos": wide,
        "gap": wide[..., :2],
    }.items():
        np.save(folder / f"{name}.npy", values.sum(1))
        np.save(folder / f"atomic_{name}.npy", values.reshape(frames, -1))
    return path


def with_energies(data, **changes):
    """Return an input of two tasks, energies and dipoles, that share their descriptor."""
    common = {
        **COMMON,
        "validating__max_best_ckpt": 1,
        "validating__validation_metric": "W:MAE",
        **changes,
    }
    inputs = {
        task: tiny_input(*data, num_steps=STEPS, **common, **more)
        for task, more in OF_TASK.items()
    }
    values = joined(inputs)
    parts = values["model"]["model_dict"]
    values["model"]["shared_dict"] = {
        "elements": ["O", "H"],
        "near": parts["energy"]["descriptor"],
    }
    for part in parts.values():
        part |= {"type_map": "elements", "descriptor": "near"}
    return values
