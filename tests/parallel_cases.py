"""Inputs of runs on ranks, and comparisons of what they write."""

import copy

import numpy as np
import torch
from helpers import (
    files_of_run,
    tiny_input,
    validated,
)
from toy_models import SECTIONS, TABLE
from training_runs import load

STAGES = (0, 1, 2, 3)
GLOBAL_BATCH = 6  # of 16 frames: the last batch has 4, which 3 ranks share as 2, 1, 1
STEPS = 20
BANK = [
    {"name": "slow", "decay": 0.95, "full_validation": True, "lcurve": True},
    {
        "name": "p05",
        "type": "power",
        "sigma_rel": 0.05,
        "snapshots": True,
        "snapshot_freq": 8,
        "full_validation": True,
    },
    {
        "name": "flat",
        "type": "swa",
        "start_step": 4,
        "update_every": 2,
        "device": "cpu",
    },
    {
        "name": "whole",
        "half_life": 24,
        "half_life_unit": "frames",
        "layout": "full_tensor",
        "full_validation": True,
    },
]
# all best files stay, so that a restart from the middle finds those of its time
WITH_BANK = validated(
    5,
    training__averaging=BANK,
    training__disp_avg=True,
    validating__max_best_ckpt=9,
    model__fitting_net__neuron=[
        7,
        7,
    ],  # 7 rows are distributed unevenly over 2 and over 3
)


VALIDATED = {
    "validating__full_validation": True,
    "validating__validation_freq": 3,
    "validating__full_val_start": 0,
}
LOSSES = {
    "frozen": {
        "model__descriptor__trainable": False,
        "loss__use_huber": True,
        "loss__huber_delta": 0.1,
    },
    "mae": {
        "loss__loss_func": "mae",
        "model__fitting_net__trainable": [True, False, True],
    },
    "atoms": {
        "loss__start_pref_ae": 1,
        "loss__limit_pref_ae": 1,
        "loss__start_pref_pf": 1,
        "loss__limit_pref_pf": 1,
    },
}
HESSIANS = {"loss__start_pref_h": 2, "loss__limit_pref_h": 1}
# messages, and a table of pair energies, whose buffers are neither sharded nor saved
MESSAGES = {
    "model__descriptor": SECTIONS["dpa3"] | {"seed": 1},
    **{f"model__{name}": value for name, value in TABLE.items()},
    "model__use_srtab": [
        [row[k] for k in (0, 1, 2, 4)] for row in TABLE["use_srtab"]
    ],  # the pairs of O and H
    "training__enable_ema": True,
    "training__save_freq": 3,
}


def config_of(
    systems, valid, stage, ranks, options, num_steps=STEPS, batch=GLOBAL_BATCH
):
    """Return an input whose steps have ``batch`` frames, whatever the number of ranks."""
    options = {"training__zero_stage": stage, **copy.deepcopy(options)}
    config = tiny_input(systems, [valid], num_steps=num_steps, **options)
    for section in ("training_data", "validation_data"):
        config["training"][section]["batch_size"] = batch // ranks
    return config


# of SOAP: where gradients are almost 0, rounding turns them, and updates are almost the same
BASES = ("left_basis", "right_basis")


def tensors_of(tree, path=""):
    """Yield every tensor and number of a checkpoint that rounding changes little, with its
    place.
    """
    if isinstance(tree, torch.Tensor):
        yield path, tree.double()
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key not in ("config", "run", *BASES):
                yield from tensors_of(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from tensors_of(value, f"{path}.{number}")
    elif isinstance(tree, (int, float)):
        yield path, torch.tensor(float(tree), dtype=torch.float64)


def assert_near(left, right, tolerance):
    """Two checkpoints have the same tensors and numbers, to ``tolerance`` of the largest of
    each.
    """
    left, right = dict(tensors_of(left)), dict(tensors_of(right))
    assert left.keys() == right.keys()
    for name, a in left.items():
        scale = max(1e-3, float(a.nan_to_num().abs().max()))
        assert a.shape == right[name].shape, name
        assert torch.allclose(
            a, right[name], rtol=0, atol=tolerance * scale, equal_nan=True
        ), name


def assert_same_run(left, right, tolerance=1e-9):
    """Two folders hold the same files, with the same numbers to rounding."""
    names = [files_of_run(folder) for folder in (left, right)]
    assert names[0] == names[1]
    for name in sorted(names[0]):
        if name.endswith(".pt"):
            assert_near(load(left / name), load(right / name), tolerance)
        elif name.endswith((".out", ".log")):
            rows = [(f / name).read_text().split() for f in (left, right)]
            assert len(rows[0]) == len(rows[1]), name
            for a, b in zip(*rows):
                assert a == b or np.isclose(
                    float(a), float(b), rtol=2e-3, atol=1e-6, equal_nan=True
                ), name
