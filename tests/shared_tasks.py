"""Inputs of tasks that share parts of their models."""

import copy
import json

import pytest
from helpers import write_system

DPA = {
    "type": "se_atten",
    "sel": 12,
    "rcut": 3.5,
    "rcut_smth": 0.5,
    "neuron": [3, 6],
    "axis_neuron": 2,
    "attn_layer": 0,
    "tebd_dim": 3,
}
NET = {"neuron": [5], "dim_case_embd": 2}
# how two tasks share -> their descriptors and fitting networks
WAYS = {
    "all": (["dpa", "dpa"], ["net", "net"]),
    "the fitting network": ([DPA, DPA], ["net", "net"]),
    "the type embedding": (["dpa", "dpa:1"], [NET, NET]),
    "a part of a hybrid": (
        [{"type": "hybrid", "list": ["dpa", {**DPA, "rcut": 3.0}]}, "dpa"],
        [NET, NET],
    ),
    "nothing": ([DPA, DPA], [NET, NET]),
}


def input_of(way, **training):
    descriptors, nets = WAYS[way]
    named = {"elements": ["O", "H"], "dpa": DPA, "net": NET}
    models = {
        task: {"type_map": "elements", "descriptor": descriptor, "fitting_net": net}
        for task, descriptor, net in zip(("water", "ice"), descriptors, nets)
    }
    text = json.dumps(models)
    return copy.deepcopy(
        {
            "model": {
                "shared_dict": {k: v for k, v in named.items() if f'"{k}' in text},
                "model_dict": models,
            },
            "learning_rate": {"start_lr": 0.01, "stop_lr": 0.001},
            "loss_dict": {"ice": {"start_pref_v": 1, "limit_pref_v": 1}},
            "training": {
                "data_dict": {
                    task: {
                        "training_data": {"systems": [f"{task}1"], "batch_size": 2},
                        "validation_data": {"systems": [f"{task}2"]},
                    }
                    for task in models
                },
                "model_prob": {"water": 0.6, "ice": 0.4},
                "numb_steps": 8,
                "disp_freq": 2,
                "save_freq": 4,
                "seed": 3,
                "enable_ema": True,
                "ema_decay": 0.5,
                **training,
            },
        }
    )


def write_data(folder):
    for k, task in enumerate(("water", "ice")):
        for n in (1, 2):
            write_system(
                folder / f"{task}{n}", frames=4, natoms=5 + 2 * k, seed=10 * k + n
            )


@pytest.fixture
def desk(tmp_path, monkeypatch):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
