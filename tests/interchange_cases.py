"""Models whose files are written and read again."""

import torch

VARIANTS = {
    "plain": {},
    "one_side": {
        "descriptor_changes": {"type_one_side": True, "activation_function": "gelu"}
    },
    "timesteps": {
        "descriptor_changes": {"resnet_dt": True, "neuron": [2, 4, 4]},
        "fitting_changes": {"neuron": [6, 6, 12], "activation_function": "silu"},
    },
    "excluded": {
        "descriptor_changes": {"exclude_types": [[0, 1]], "env_protection": 0.05},
        "pair_exclude_types": [[0, 2]],
        "atom_exclude_types": [1],
    },
    "parameters": {
        "fitting_changes": {
            "numb_fparam": 2,
            "numb_aparam": 1,
            "default_fparam": [0.1, -0.2],
        }
    },
    "vacuum": {
        "descriptor_changes": {"set_davg_zero": True},
        "fitting_changes": {
            "atom_ener": [-1.5, None, -0.5],
            "numb_fparam": 1,
            "resnet_dt": False,
        },
    },
    "single": {
        "descriptor_changes": {"precision": "float32"},
        "fitting_changes": {"precision": "float32"},
    },
    "dpa2": {"descriptor": "dpa2", "descriptor_changes": {"ln_eps": 1e-3}},
    "dpa2_rough": {
        "descriptor": "dpa2",
        "descriptor_changes": {
            "ln_eps": 1e-5,
            "smooth": False,
            "direct_dist": True,
            "g1_out_conv": False,
            "update_style": "res_avg",
            "exclude_types": [[0, 1]],
        },
    },
    "mixed_precision": {"descriptor_changes": {"precision": "float32"}},
}


def same_bits(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name
