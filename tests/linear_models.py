"""Models that are a sum of others."""

import numpy as np
from toy_models import SECTIONS, TYPES, disturb

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.model.build import build_model


def rows(last=4.8, step=0.05, num_types=3):
    """Return a table of attraction that ends smoothly at ``last``."""
    r = 0.3 + step * np.arange(round((last - 0.3) / step) + 1)
    shape = -np.exp(-r / 2) * np.clip(1 - r / last, 0, None) ** 3
    strengths = 1 + np.arange(num_types * (num_types + 1) // 2)
    return np.column_stack([r, shape[:, None] * strengths]).tolist()


FIT = {"neuron": [6, 6]}
# the table looks farther than the networks; the features of the second jump where a neighbor goes,
# so that it has to know its own cutoff
TABLE = {"type": "pairtab", "tab_file": rows(), "rcut": 4.8, "sel": [40, 40, 60]}
NETWORKS = [
    {"descriptor": SECTIONS["se_atten"] | {"attn_layer": 1}, "fitting_net": FIT},
    {
        "descriptor": SECTIONS["se_atten"]
        | {"attn_layer": 1, "smooth_type_embedding": False, "rcut": 3.1, "sel": 50},
        "fitting_net": FIT | {"precision": "float64"},
    },
]
WEIGHTS = [0.6, -0.3, 1.7]


def section(models=(*NETWORKS, TABLE), weights=WEIGHTS, **changes):
    return {
        "type": "linear_ener",
        "type_map": TYPES,
        "models": list(models),
        "weights": weights,
        **changes,
    }


def linear(*args, seed=3, **changes):
    """Return (config, model) with statistics and biases that a wrong formula cannot hide behind."""
    config = model_config_from_dict(section(*args, **changes))
    model = build_model(config, seed).eval()
    disturb(model)
    return config, model
