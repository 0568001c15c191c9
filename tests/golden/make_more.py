"""Parity numbers for options that make_golden.py does not have; run it with DeePMD-kit's python.

``python make_more.py FOLDER OUT NAME...``, where FOLDER holds make_golden.py.
"""

import sys

sys.path.insert(0, sys.argv[1])
import make_golden

fitting = make_golden.fitting()
three = make_golden.MODELS["se_e3_tebd"]["descriptor"]
strip = {"tebd_input_mode": "strip", "exclude_types": [[0, 1]], "resnet_dt": True}
parts = [  # of three cutoffs; without smoothness, neighbors beyond its cutoff count in the attention of a part
    {**make_golden.SE, "rcut": 3.5, "sel": [30, 60, 20]},
    {**make_golden.ATTEN, "rcut": 3.9, "sel": 60, "smooth_type_embedding": False},
    {**three, "rcut": 4.5, "sel": 120},
]
angles = {"type": "se_e3", "sel": [24, 30, 16], "rcut": 3.2, "rcut_smth": 1.0, "neuron": [4, 8, 16], "seed": 13}
angles |= {"resnet_dt": True, "exclude_types": [[1, 2]], "env_protection": 1e-2}
make_golden.MODELS = {
    "se_e3": {"descriptor": angles, "fitting_net": fitting},
    "se_e3_tebd_strip": {"descriptor": {**three, **strip}, "fitting_net": fitting, "pair_exclude_types": [[0, 2]]},
    "dpa1_electrons": {
        "descriptor": {**make_golden.ATTEN, "attn_layer": 0, "use_econf_tebd": True, "use_tebd_bias": True},
        "fitting_net": fitting,
    },
    "hybrid_cutoffs": {"descriptor": {"type": "hybrid", "list": parts}, "fitting_net": fitting},
}
make_golden.main(sys.argv[2], sys.argv[3:])
