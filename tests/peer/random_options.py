"""Option sets of models at random, for fuzz.py: each option has its default, or one of a few values."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

TYPES = ["O", "H", "Na"]
MORE_TYPES = ["C", "Fe"]  # that no frame has
ACTIVATIONS = ["tanh", "relu", "relu6", "softplus", "sigmoid", "gelu", "gelu_tf", "silu", "silut:3.0", "silut", "none"]
FLAG = [False, True]
NEURONS = [[4, 8, 16], [6, 6, 12], [5, 9], [8], [6, 12, 12]]
PAIRS = [[[0, 1]], [[1, 1]], [[0, 0], [1, 2]], [[2, 2], [0, 2]], [[1, 0]]]
SHORT = 3.4  # angstrom
RADII = {"rcut": [SHORT, 3.0], "rcut_smth": [0.5, 1.0, 2.5, 0.0]}
Space = dict[str, list[Any]]

NETWORK: Space = {"activation_function": ACTIVATIONS, "resnet_dt": FLAG, "trainable": FLAG}
ENVIRONMENT: Space = {"exclude_types": PAIRS, "env_protection": [0.0, 1e-2, 1e-6]}
EMBEDDED: Space = {"concat_output_tebd": FLAG, "use_econf_tebd": FLAG, "use_tebd_bias": FLAG, "tebd_dim": [3, 8, 1]}
SE: Space = {**RADII, **NETWORK, **ENVIRONMENT, "neuron": NEURONS, "type_one_side": FLAG, "set_davg_zero": FLAG}
ATTENTION: Space = {
    **SE, **EMBEDDED, "axis_neuron": [2, 4], "attn": [4, 8], "attn_layer": [0, 1, 2, 3], "attn_dotr": FLAG,
    "attn_mask": [False], "trainable_ln": FLAG, "ln_eps": [None, 1e-3], "scaling_factor": [1.0, 2.5], "normalize": FLAG,
    "temperature": [0.7, 2.0], "lmax": [1],
}  # fmt: skip
SPACES: dict[str, Space] = {
    "se_e2_a": {**SE, "axis_neuron": [2, 4]},
    "se_e2_r": SE,
    "se_e3": {name: values for name, values in SE.items() if name != "type_one_side"},
    "se_atten": {**ATTENTION, "tebd_input_mode": ["concat", "strip"], "smooth_type_embedding": FLAG,
                 "stripped_type_embedding": [None, True]},
    "se_atten_v2": ATTENTION,
    "se_e3_tebd": {**{name: values for name, values in SE.items() if name != "type_one_side"}, **EMBEDDED,
                   "tebd_input_mode": ["concat", "strip"], "smooth": FLAG},
    "dpa2": {**ENVIRONMENT, "concat_output_tebd": FLAG, "use_econf_tebd": FLAG, "use_tebd_bias": FLAG, "smooth": FLAG,
             "trainable": FLAG, "add_tebd_to_repinit_out": FLAG},
    "dpa3": {**ENVIRONMENT, "concat_output_tebd": FLAG, "use_econf_tebd": FLAG, "use_tebd_bias": FLAG,
             "activation_function": ACTIVATIONS, "trainable": FLAG, "use_loc_mapping": FLAG},
}  # fmt: skip
ALWAYS = {"rcut": SHORT, "rcut_smth": 0.5, "neuron": [4, 8, 16]}
REPINIT: Space = {
    "rcut_smth": [0.5, 2.5], "neuron": NEURONS, "axis_neuron": [2, 4], "tebd_dim": [3, 8],
    "tebd_input_mode": ["concat", "strip"], "set_davg_zero": FLAG, "activation_function": ACTIVATIONS,
    "type_one_side": FLAG, "resnet_dt": FLAG, "use_three_body": FLAG, "three_body_neuron": [[2, 4, 8], [3, 3], [4]],
    "three_body_rcut": [2.6, 3.0], "three_body_rcut_smth": [0.5, 2.0],
}  # fmt: skip
REPFORMER: Space = {
    "nlayers": [1, 2, 3], "g1_dim": [6, 8, 12], "g2_dim": [4, 6], "axis_neuron": [2, 4], "direct_dist": FLAG,
    "update_g1_has_conv": FLAG, "update_g1_has_drrd": FLAG, "update_g1_has_grrg": FLAG, "update_g1_has_attn": FLAG,
    "update_g2_has_g1g1": FLAG, "update_g2_has_attn": FLAG, "use_sqrt_nnei": FLAG, "g1_out_conv": FLAG,
    "g1_out_mlp": FLAG, "update_h2": FLAG, "attn1_hidden": [3, 4], "attn1_nhead": [1, 2], "attn2_hidden": [3, 4],
    "attn2_nhead": [1, 2], "attn2_has_gate": FLAG, "activation_function": ACTIVATIONS,
    "update_style": ["res_avg", "res_incr", "res_residual"], "update_residual": [0.01, 0.3],
    "update_residual_init": ["norm", "const"], "set_davg_zero": FLAG, "trainable_ln": FLAG, "ln_eps": [None, 1e-3],
}  # fmt: skip
REPFLOW: Space = {
    "n_dim": [8, 12], "e_dim": [6, 8], "a_dim": [4, 8], "nlayers": [1, 2, 3], "e_rcut_smth": [0.5, 2.8],
    "a_rcut": [2.6, 3.0], "a_rcut_smth": [0.5, 2.2], "a_compress_rate": [0, 1, 2], "a_compress_e_rate": [1, 2],
    "a_compress_use_split": FLAG, "n_multi_edge_message": [1, 2], "axis_neuron": [2, 4],
    "fix_stat_std": [0.3, 0.5, 0.0], "skip_stat": FLAG, "update_angle": FLAG,
    "update_style": ["res_avg", "res_incr", "res_residual"], "update_residual": [0.01, 0.3],
    "update_residual_init": ["norm", "const"], "optim_update": FLAG, "smooth_edge_update": FLAG,
    "edge_init_use_dist": FLAG, "use_exp_switch": FLAG, "use_dynamic_sel": FLAG, "sel_reduce_factor": [10.0, 3.0],
    "sequential_update": FLAG,
}  # fmt: skip
FITTING: Space = {
    "neuron": [[10, 10], [8, 12, 12], [6]], "activation_function": ACTIVATIONS, "resnet_dt": FLAG,
    "trainable": [False, True, "list"], "numb_fparam": [0, 1, 2], "numb_aparam": [0, 0, 1, 2], "dim_case_embd": [0, 2],
    "default_fparam": [None, True], "atom_ener": [[], [-3.0, None, 1.5], [0.5, -1.0, 2.0]], "rcond": [None, 1e-3],
}  # fmt: skip
MODEL: Space = {
    "pair_exclude_types": PAIRS,
    "atom_exclude_types": [[2], [0], [0, 1]],
    "preset_out_bias": [{"energy": [-1.0, None, 2.0]}, {"energy": [None, [0.5], None]}],
    "data_stat_protect": [0.01, 0.1],
}
TABLE: Space = {"smin_alpha": [0.1], "sw_rmin": [0.6, 0.9], "sw_rmax": [1.8, 2.6]}
# other names of options and of values of ``type``
ALIASES = {
    "se_e2_a": {"axis_neuron": "n_axis_neuron"},
    "se_atten": {"axis_neuron": "n_axis_neuron", "smooth_type_embedding": "smooth_type_embdding"},
    "se_atten_v2": {"axis_neuron": "n_axis_neuron"},
    "dpa2": {"add_tebd_to_repinit_out": "repformer_add_type_ebd_to_seq"},
    "repflow": {"edge_init_use_dist": "edge_use_dist", "use_exp_switch": "use_env_envelope"},
    "fitting_net": {"neuron": "n_neuron"},
}
NAMES = {"se_e2_a": ["se_a"], "se_e2_r": ["se_r"], "se_e3": ["se_at", "se_a_3be", "se_t"], "se_atten": ["dpa1"]}
KINDS = (*SPACES, "hybrid", "zbl")
BY_TYPE = ("se_e2_a", "se_e2_r", "se_e3")
MIXED = ("se_atten", "se_atten_v2", "se_e3_tebd", "dpa2", "dpa3")


def draw_set(kind: str, rng: np.random.Generator, table: str) -> tuple[dict[str, Any], bool]:
    """Return a section ``model`` of that kind, and whether it may keep fewer neighbors than there are.

    Args:
        kind: one of ``KINDS``.
        rng: where the choices come from.
        table: file of pair energies, for ``zbl``.
    """
    more = [] if kind == "zbl" else MORE_TYPES[: rng.choice(3, p=[0.7, 0.15, 0.15])]  # a table has three
    model = {"type_map": [*TYPES, *more], **_picked(rng, MODEL, 0.25)}
    cut = bool(rng.random() < 0.25) and not ({"pair_exclude_types"} & set(model))
    if kind == "hybrid":
        parts = rng.choice([*SPACES], size=rng.integers(2, 4))
        model["descriptor"] = {"type": "hybrid", "list": [_part(str(name), rng, cut) for name in parts]}
    elif kind == "zbl":
        model["descriptor"] = _descriptor(str(rng.choice(MIXED)), rng, cut)
        model |= {"use_srtab": table, "sw_rmin": 0.7, "sw_rmax": 2.0, **_picked(rng, TABLE)}
    else:
        model["descriptor"] = _descriptor(kind, rng, cut)
    model["fitting_net"] = _fitting(rng)
    _lengthen(model, len(more))
    return _with_aliases(model, rng), cut


def _with_aliases(model: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a section ``model`` in which some options have their other names."""

    def renamed(section: dict[str, Any], kind: str) -> dict[str, Any]:
        names = {name: other for name, other in ALIASES.get(kind, {}).items() if rng.random() < 0.3}
        section = {names.get(name, name): value for name, value in section.items()}
        if kind in NAMES and rng.random() < 0.3:
            section["type"] = str(rng.choice(NAMES[kind]))
        if "repflow" in section:
            section["repflow"] = renamed(section["repflow"], "repflow")
        if "list" in section:
            section["list"] = [renamed(part, part["type"]) for part in section["list"]]
        return section

    descriptor = model["descriptor"]
    fitting = renamed(model["fitting_net"], "fitting_net")
    return {**model, "descriptor": renamed(descriptor, descriptor["type"]), "fitting_net": fitting}


def _lengthen(model: dict[str, Any], more: int) -> None:
    """Give the lists of one entry per element entries of the elements that no frame has."""
    descriptors = [model["descriptor"], *model["descriptor"].get("list", [])]
    for options, name, one in (
        *((one, "sel", 5) for one in descriptors if one["type"] in BY_TYPE),
        (model["fitting_net"], "atom_ener", None),
        (model.get("preset_out_bias", {}), "energy", 3.0),
    ):
        if options.get(name):
            options[name] = [*options[name], *[one] * more]


def _picked(rng: np.random.Generator, space: Space, share: float = 0.5) -> dict[str, Any]:
    """Return a value of each option, or, more often, none: its default."""
    return {
        name: copy.deepcopy(values[rng.integers(len(values))]) for name, values in space.items() if rng.random() < share
    }


def _descriptor(kind: str, rng: np.random.Generator, cut: bool) -> dict[str, Any]:
    """Return a section of a descriptor."""
    options = {"type": kind, "precision": "float64", **_picked(rng, SPACES[kind])}
    if kind == "dpa2":
        return {**options, **_dpa2_parts(rng, cut)}
    if kind == "dpa3":
        return {**options, "repflow": _repflow(rng, cut)}
    options = {**ALWAYS, **options}
    if kind == "se_e2_r":
        options["type_one_side"] = True  # DeePMD-kit's torch backends have no other
    if kind in BY_TYPE:
        few = [[3, 4, 2], [5, 0, 3]][rng.integers(2) if kind == "se_e2_a" else 0]  # none of a type: only se_e2_a there
        return {**options, "sel": few if cut else [20, 30, 15]}
    sizes = [7, 60, [20, 30, 15]]
    return {**options, "sel": sizes[0] if cut else sizes[rng.integers(1, 3)]}


def _part(kind: str, rng: np.random.Generator, cut: bool) -> dict[str, Any]:
    """Return a section of a part of a hybrid: DeePMD-kit fails where ``sel`` of one for all elements is a list."""
    options = _descriptor(kind, rng, cut)
    if kind in MIXED and isinstance(options.get("sel"), list):
        options["sel"] = sum(options["sel"])
    return options


def _dpa2_parts(rng: np.random.Generator, cut: bool) -> dict[str, Any]:
    first = {"rcut": SHORT, "rcut_smth": 0.5, "neuron": [4, 8, 16], "axis_neuron": 4, "nsel": 9 if cut else 60}
    first |= {"three_body_sel": 6 if cut else 40, "three_body_rcut": 3.0, **_picked(rng, REPINIT)}
    later = {"rcut": 2.8, "rcut_smth": 0.5, "nsel": 6 if cut else 40, "g1_dim": 8, "g2_dim": 6, "nlayers": 2,
             "attn1_hidden": 4, "attn2_hidden": 4, "update_residual": 0.1, **_picked(rng, REPFORMER)}  # fmt: skip
    if first["axis_neuron"] > first["neuron"][-1]:
        first["axis_neuron"] = 2
    return {"repinit": first, "repformer": later}


def _repflow(rng: np.random.Generator, cut: bool) -> dict[str, Any]:
    flow = {"n_dim": 8, "e_dim": 6, "a_dim": 4, "nlayers": 2, "e_rcut": SHORT, "e_rcut_smth": 0.5, "a_rcut": 2.8,
            "a_rcut_smth": 0.5, "e_sel": 9 if cut else 60, "a_sel": 6 if cut else 40,
            **_picked(rng, REPFLOW)}  # fmt: skip
    if flow.get("use_dynamic_sel"):
        flow["smooth_edge_update"] = True
    if flow.get("sequential_update"):
        flow |= {"update_style": "res_residual", "update_angle": True}
    if flow.get("use_exp_switch"):  # with a wide switch: a steep one is not small at the cutoff
        flow |= {"e_rcut_smth": 2.8, "a_rcut_smth": 2.2}
    return flow


def _fitting(rng: np.random.Generator) -> dict[str, Any]:
    options = {"neuron": [8, 8], "precision": "float64", **_picked(rng, FITTING, 0.4)}
    if options.get("trainable") == "list":
        options["trainable"] = [bool(rng.integers(2)) for _ in range(len(options["neuron"]) + 1)]
    if options.pop("default_fparam", None) and options.get("numb_fparam"):
        options["default_fparam"] = [0.3, -0.2][: options["numb_fparam"]]
    return options
