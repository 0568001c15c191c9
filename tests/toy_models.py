"""Small models and batches for tests."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.config.fields import input_options, options
from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interop.dp import file_tree, fill_model, read_dp
from deepmd_ema.interop.tree_files import read_tree, write_tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.interpolation.interpolation import Interpolation

TYPES = ["O", "H", "Na"]
# small sections of the descriptors of dp-ema; those of other distributions have one in their record
_SE_ATTEN = {
    "sel": 60,
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8, 16],
    "axis_neuron": 4,
    "attn": 8,
    "tebd_dim": 4,
}
_SE_E2_A = {
    "sel": [20, 20, 20],
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8, 16],
    "axis_neuron": 4,
}
_SE_E3_TEBD = {
    "sel": 60,
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [2, 4, 8],
    "tebd_dim": 4,
}
REPINIT = {
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "nsel": 60,
    "neuron": [4, 8, 16],
    "axis_neuron": 4,
    "tebd_dim": 4,
    "use_three_body": True,
    "three_body_neuron": [2, 4],
    "three_body_sel": 30,
    "three_body_rcut": 3.0,
    "three_body_rcut_smth": 1.0,
}
REPFORMER = {
    "rcut": 3.2,
    "rcut_smth": 1.0,
    "nsel": 40,
    "nlayers": 3,
    "g1_dim": 8,
    "g2_dim": 6,
    "axis_neuron": 3,
    "attn1_hidden": 4,
    "attn1_nhead": 2,
    "attn2_hidden": 4,
    "attn2_nhead": 2,
    "update_h2": True,
    "attn2_has_gate": True,
    "update_style": "res_residual",
    "update_residual": 0.05,
}
FLOW = {
    "n_dim": 8,
    "e_dim": 6,
    "a_dim": 4,
    "nlayers": 3,
    "e_rcut": 4.0,
    "e_rcut_smth": 1.0,
    "e_sel": 60,
    "a_rcut": 3.0,
    "a_rcut_smth": 1.0,
    "a_sel": 30,
    "axis_neuron": 3,
    "smooth_edge_update": True,
    "update_residual": 1.0,
}
_EXAMPLES = {
    "dpa2": {
        "repinit": REPINIT,
        "repformer": REPFORMER,
        "add_tebd_to_repinit_out": True,
    },
    "dpa3": {"repflow": FLOW},
    "dpa4": {
        "rcut": 4.0,
        "channels": 8,
        "n_radial": 6,
        "edge_norm": False,
        "lmax": 2,
        "n_blocks": 2,
        "mixing_layers": 2,
        "message_node_so3": True,
        "ffn_neurons": 8,
        "ffn_so3_grid": True,
        "grid_branch": [0, 0, 1],
        "so3_readout": "mlp",
        "precision": "float64",
    },
    "dpa4c": {
        "rcut": 4.0,
        "channels": 8,
        "lmax": 3,
        "n_radial": 6,
        "radial_modes": 2,
        "precision": "float64",
    },
    # the second part has a shorter cutoff
    "hybrid": {
        "list": [
            {"type": "se_e2_a", **_SE_E2_A},
            {"type": "se_e3_tebd", **_SE_E3_TEBD, "rcut": 3.5},
        ]
    },
    "se_atten": {**_SE_ATTEN, "attn_layer": 2, "smooth_type_embedding": True},
    "se_atten_v2": {**_SE_ATTEN, "attn_layer": 1},
    "se_e2_a": _SE_E2_A,
    "se_e2_r": {
        "sel": [20, 20, 20],
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "neuron": [4, 8, 16],
    },
    "se_e3": {"sel": [20, 20, 20], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [2, 4, 8]},
    "se_e3_tebd": _SE_E3_TEBD,
}
SECTIONS = {
    name: {"type": name, **_EXAMPLES.get(name, family.example)}
    for name, family in DESCRIPTORS.items()
}


def _repulsion(last=2.4, step=0.02):
    """Return a table of screened repulsion that ends smoothly at ``last``, one column for each pair
    of TYPES.
    """
    pairs = np.array(
        [64.0, 8.0, 88.0, 1.0, 11.0, 121.0]
    )  # products of the nuclear charges
    r = 0.3 + step * np.arange(round((last - 0.3) / step) + 1)
    screened = np.exp(-r / 0.5) / r * np.clip(1 - r / last, 0, None) ** 3
    return np.column_stack([r, 3 * screened[:, None] * pairs]).tolist()


TABLE = {"use_srtab": _repulsion(), "sw_rmin": 0.7, "sw_rmax": 2.2, "smin_alpha": 0.15}
FLOAT64_NET = {"neuron": [12, 12], "precision": "float64"}
# what is computed in another way than the section of its type: the descriptor, its changes, those
# of the model
VARIANTS = {
    "se_atten_no_attention": ("se_atten", {"attn_layer": 0}, {}),
    "se_atten_strip": ("se_atten", {"tebd_input_mode": "strip"}, {}),
    "se_atten_strip_no_attention": (
        "se_atten",
        {"tebd_input_mode": "strip", "attn_layer": 0},
        {},
    ),
    "se_e3_tebd_strip": ("se_e3_tebd", {"tebd_input_mode": "strip"}, {}),
    "dpa2_strip_two_bodies": (
        "dpa2",
        {"tebd_input_mode": "strip", "use_three_body": False},
        {},
    ),
    "dpa3_dynamic": ("dpa3", {"use_dynamic_sel": True, "sel_reduce_factor": 3.5}, {}),
    "dpa3_exponential": (
        "dpa3",
        {"use_exp_switch": True, "e_rcut_smth": 3.3, "a_rcut_smth": 2.5},
        {},
    ),
    "dpa3_no_angles": ("dpa3", {"update_angle": False}, {}),
    "hybrid_by_type": (
        "hybrid",
        {
            "list": [
                SECTIONS["se_e2_a"],
                SECTIONS["se_e2_r"] | {"rcut": 3.5, "sel": [25, 20, 22]},
            ]
        },
        {},
    ),
    "hybrid_of_messages": (
        "hybrid",
        {"list": [SECTIONS["dpa3"], SECTIONS["se_e2_a"]]},
        {},
    ),
    "se_e2_a_interpolated": ("se_e2_a", {"interpolate": "always"}, {}),
    "se_e2_r_interpolated": (
        "se_e2_r",
        {"interpolate": "always", "type_one_side": False},
        {},
    ),
    "se_atten_interpolated": (
        "se_atten",
        {"interpolate": "always", "attn_layer": 0},
        {},
    ),
    "se_atten_interpolated_one_side": (
        "se_atten",
        {"interpolate": "always", "attn_layer": 0, "type_one_side": True},
        {},
    ),
    "se_atten_interpolated_strip": (
        "se_atten",
        {
            "interpolate": "always",
            "attn_layer": 0,
            "tebd_input_mode": "strip",
            "smooth_type_embedding": False,
        },
        {},
    ),
    "se_atten_v2_interpolated": (
        "se_atten_v2",
        {"interpolate": "always", "attn_layer": 0},
        {},
    ),
    "dpa2_interpolated": ("dpa2", {"interpolate": "always"}, {}),
    "dpa4c_interpolated": ("dpa4c", {"interpolate": "always"}, {}),
    "table_by_type": ("se_e2_a", {}, TABLE),
    "table_dpa3": ("dpa3", {}, TABLE),
    "dpa4_bridged": (
        "dpa4",
        {},
        {
            "bridging_method": "zbl",
            "bridging_r_inner": 0.9,
            "bridging_r_outer": 2.2,
            "fitting_net": FLOAT64_NET,
        },
    ),
}


def more_neighbors(section):
    """Return changes of a section of a descriptor that keep twice as many neighbors, for cells that
    are full.
    """

    def whole(part):
        return part | more_neighbors(part)

    def twice(sel):
        return [2 * n for n in sel] if isinstance(sel, list) else 2 * sel

    changes = dict.fromkeys(("sel", "nsel", "e_sel"), twice)
    changes |= dict.fromkeys(("repinit", "repformer", "repflow"), whole)
    changes["list"] = lambda parts: [whole(part) for part in parts]
    return {
        name: changes[name](value) for name, value in section.items() if name in changes
    }


def model_section(
    descriptor="se_e2_a", descriptor_changes=None, fitting_changes=None, **changes
):
    """Return the dict of a section ``model``; changes of options that this descriptor does not have
    are left out.

    ``descriptor`` is one of SECTIONS or of VARIANTS.
    """
    descriptor, own_changes, model_changes = VARIANTS.get(
        descriptor, (descriptor, {}, {})
    )
    kind = DESCRIPTORS[descriptor].section
    section = _changed(kind, SECTIONS[descriptor], own_changes)
    return {
        "type_map": TYPES,
        "descriptor": _changed(kind, section, descriptor_changes or {}),
        "fitting_net": {"neuron": [12, 12], **(fitting_changes or {})},
        **model_changes,
        **changes,
    }


def _kind_of(option, section):
    """Return the class of a section that the key ``type`` chooses."""
    name = section.get("type", option.default_type)
    kinds = option.sections if option.by_type else ()
    return next(
        (kind for kind in kinds if name in (kind.type, *getattr(kind, "aliases", ()))),
        option.sections[0],
    )


def _changed(kind, section, changes):
    """Return ``section`` of a ``kind`` with the changes of its options and of those of the sections
    in it.
    """
    keys = [key for option in input_options(kind) for key in option.keys]
    section = section | {name: value for name, value in changes.items() if name in keys}
    for o in (o for o in options(kind) if o.sections and o.name in section):
        parts = (
            [_changed(_kind_of(o, part), part, changes) for part in section[o.name]]
            if o.many
            else None
        )
        section = section | {
            o.name: parts
            or _changed(_kind_of(o, section[o.name]), section[o.name], changes)
        }
    return section


def toy_model(
    descriptor="se_e2_a",
    descriptor_changes=None,
    fitting_changes=None,
    seed=3,
    **changes,
):
    """Return (config, model) with statistics and biases that a wrong formula cannot hide behind."""
    config = model_config_from_dict(
        model_section(descriptor, descriptor_changes, fitting_changes, **changes)
    )
    model = build_model(config, seed).eval()
    for module in model.modules():  # which a training run chooses
        if isinstance(module, Interpolation) and module.choice == "always":
            module.use(128)
    disturb(model)
    return config, model


@torch.no_grad()
def disturb(model, seed=5):
    """Fill the buffers with numbers of the size that data give, and the parameters that begin with
    zeros.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(like):
        return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like)

    for parameter in model.parameters():
        if parameter.numel() and not parameter.any():
            parameter.copy_(
                (4 * draw(parameter) - 2)
                * parameter.shape[-2 if parameter.ndim > 1 else 0] ** -0.5
            )
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf in ("feature_mean", "feature_spread"):
            buffer.copy_((0.05 if leaf == "feature_mean" else 0.7) * (1 + draw(buffer)))
        elif leaf == "mean":
            if _mean_stays_zero(_owner(model.descriptor, buffer).section):
                continue
            buffer[..., 0] = 0.1 + 0.05 * draw(buffer[:, :1, 0])
        elif leaf == "stddev":
            buffer.copy_(0.15 + 0.1 * draw(buffer[:, :1, :1]))
        elif leaf == "out_bias":
            buffer.copy_(3 * draw(buffer) - 4)
        elif leaf in ("bias_atom_e", "fparam_avg", "aparam_avg"):
            buffer.copy_(draw(buffer))
        elif leaf in ("fparam_inv_std", "aparam_inv_std"):
            buffer.copy_(1 + draw(buffer))


def _owner(descriptor, buffer):
    """Return the part of a hybrid that has the buffer, or the descriptor itself."""
    return next(
        part
        for part in getattr(descriptor, "parts", [descriptor])
        if any(buffer is b for b in part.buffers())
    )


def _mean_stays_zero(section):
    """Whether ``set_davg_zero`` of a section, or of one in it, keeps the mean zero in training."""
    parts = [getattr(section, o.name) for o in options(type(section)) if o.sections]
    return getattr(section, "set_davg_zero", False) or any(map(_mean_stays_zero, parts))


def toy_atoms(seed=0, natoms=11, num_types=3, spread=3.2):
    """Return coord (N, 3) with atoms at least 0.9 angstrom apart and types (N,)."""
    rng = np.random.default_rng(seed)
    coord = np.empty((0, 3))
    while len(coord) < natoms:
        site = rng.uniform(0, spread, (1, 3))
        if not len(coord) or np.linalg.norm(coord - site, axis=1).min() > 0.9:
            coord = np.concatenate([coord, site])
    return coord, rng.permutation(np.arange(natoms) % num_types)


TRICLINIC = np.array([[4.4, 0.0, 0.0], [0.7, 4.6, 0.0], [-0.5, 0.9, 4.3]])


def batch_of(model, *atoms, **kwargs):
    """Return a batch of frames given as (coord, types, box or None)."""
    frames = [
        Frame(
            np.asarray(c, float),
            np.asarray(t, np.int64),
            b,
            source=("toy", k),
            **kwargs,
        )
        for k, (c, t, b) in enumerate(atoms)
    ]
    return collate(frames, model.layout)


def evaluate(model, *atoms, **kwargs):
    """Return the outputs as numpy arrays, per-atom ones in the order of the files."""
    batch = batch_of(model, *atoms, **kwargs)
    out = model(batch)
    return {
        name: (batch.in_file_order(value) if LABELS[name].per_atom else value)
        .detach()
        .numpy()
        for name, value in out.items()
        if name in LABELS
    }


def assert_parameter_gradients(model, loss, chosen=slice(None)):
    """The gradients of ``loss()`` by the ``chosen`` parameters are those of differences along
    random directions.
    """
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    loss().backward()
    for name, parameter in list(model.named_parameters())[chosen]:
        assert parameter.grad is not None, name
        direction = torch.randn(
            parameter.shape, generator=generator, dtype=parameter.dtype
        )
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                ends.append(float(loss()))
                parameter.sub_(direction, alpha=step)
        expected = (ends[0] - ends[1]) / 2e-5
        assert abs(expected - float((parameter.grad * direction).sum())) < 1e-6 * max(
            1.0, abs(expected)
        ), name


def write_dp(path, model, config, **facts):
    """Write a ``.dp`` or ``.yaml`` file of a model; ``facts`` are those of ``file_tree``."""
    write_tree(Path(path), file_tree(model, config, **facts))


def model_from_tree(config, tree):
    """Return the model of a section ``model`` with the arrays of a tree."""
    model = build_model(config)
    fill_model(model, config, tree)
    return model


def assert_tree_refused(folder, config, model, change, phrase):
    """A ``.dp`` file of a model is not read after ``change`` of its tree, with a message that has
    ``phrase``.
    """
    write_dp(folder / "a.dp", model, config)
    tree = read_tree(folder / "a.dp")
    change(tree["model"])
    write_tree(folder / "b.dp", tree)
    with pytest.raises(CheckpointError, match=phrase):
        read_dp(folder / "b.dp")
