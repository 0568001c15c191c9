"""Inputs and data of two tasks."""

import copy

from helpers import tiny_input, validated, write_system

STEPS = 12
DATA = ("training_data", "validation_data")
COMMON = validated(
    4,
    training__ema_decay=0.8,
    training__save_freq=5,
    training__disp_freq=1,
    training__change_bias_after_training=True,
    training__averaging=[
        {"name": "slow", "decay": 0.9, "lcurve": True, "full_validation": True}
    ],
    num_steps=STEPS,
    validating__ema_full_validation=False,
)
OF_TASK = {
    "water": {},
    "salt": {
        "type_map": ("Na", "Cl", "O"),
        "model__descriptor__neuron": [4, 6],
        "model__fitting_net__neuron": [6],
        "loss__start_pref_v": 0,
        "loss__limit_pref_v": 0,
        "training__training_data__batch_size": 1,
    },
}


def write_data(folder):
    """Write two systems of each task, the second to validate on."""
    for k in (1, 2):
        write_system(folder / f"water{k}", frames=6, natoms=6, seed=k)
        write_system(
            folder / f"salt{k}",
            frames=5,
            natoms=9,
            elements=("Na", "Cl", "O"),
            seed=k + 5,
        )
    return folder


def input_of_two_tasks(data, **changes):
    """Return the input of two tasks: two elements and virials, and three elements without."""
    inputs = {
        name: tiny_input(
            [data / f"{name}1"], [data / f"{name}2"], **{**COMMON, **of_task, **changes}
        )
        for name, of_task in OF_TASK.items()
    }
    return joined(inputs)


def joined(inputs):
    """Return one input of several tasks from inputs of one by name; all else is as in the first."""
    whole = copy.deepcopy(next(iter(inputs.values())))
    data = {
        name: {key: each["training"][key] for key in DATA}
        for name, each in inputs.items()
    }
    rest = {key: value for key, value in whole["training"].items() if key not in DATA}
    del whole["loss"]
    return {
        **whole,
        "model": {"model_dict": {name: each["model"] for name, each in inputs.items()}},
        "loss_dict": {name: each["loss"] for name, each in inputs.items()},
        "training": {
            **rest,
            "data_dict": data,
            "model_prob": dict.fromkeys(inputs, 1.0),
        },
    }
